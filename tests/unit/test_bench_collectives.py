"""Rows of collectives: sizes and bandwidth as nccl-tests has them, and who receives what."""

from __future__ import annotations

import itertools

import pytest
import torch

from commkit.errors import UsageError
from commkit.measure import verify
from commkit.measure.collectives import (
    COLLECTIVES,
    REDUCED,
    collective_named,
    crossing_bytes,
    uneven,
)
from commkit.measure.engine import Job, operation
from commkit.measure.numbers import NUMBERS
from commkit.measure.patterns import pattern_for
from commkit.measure.statistics import algbw

WORLDS = (1, 2, 3, 4, 5, 8)
MOVING = [row for row in COLLECTIVES.values() if row.moves]


def test_bus_bandwidth_is_that_of_nccl_tests_for_the_times_it_recorded():
    # S, t and n of its doc/PERFORMANCE.md's formulas, values computed by its *GetBw functions.
    base = algbw(1 << 30, 0.005)
    assert base == pytest.approx(214.748, abs=1e-3)
    factors = {name: row.busbw_factor(8) for name, row in COLLECTIVES.items()}
    found = {name: base * factor for name, factor in factors.items()}
    assert found["all_reduce"] == pytest.approx(375.81, abs=1e-3)
    for name in ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"):
        assert found[name] == pytest.approx(187.905, abs=1e-3)
    for name in ("broadcast", "reduce", "sendrecv"):
        assert found[name] == pytest.approx(214.748, abs=1e-3)


@pytest.mark.parametrize("row", MOVING, ids=lambda row: row.name)
def test_one_rank_has_no_bus_bandwidth(row):
    assert row.busbw_factor(1) == 0


@pytest.mark.parametrize(
    ("name", "size", "number", "n", "part", "total"),
    [
        ("reduce_scatter", 1000, "float", 3, 80, 960),
        ("all_gather", 1048576, "bfloat16", 6, 87376, 1048512),
        ("reduce_scatter", 1000, "f8e4m3", 3, 320, 960),
        ("all_reduce", 1000, "float", 3, 250, 1000),
        ("all_to_all", 8, "float", 8, 0, 0),
        ("all_gather", 5 << 32, "int8", 4, 5 << 30, 5 << 32),
        ("broadcast", 7 << 30, "double", 3, 7 << 27, 7 << 30),
    ],
)
def test_a_part_is_rounded_down_to_16_bytes_as_in_nccl_tests(name, size, number, n, part, total):
    element = NUMBERS[number].size
    shape = COLLECTIVES[name].shape(size, element, n)
    assert (shape.part, shape.total * element) == (part, total)


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("part", [0, 1, 2, 7, 64])
def test_uneven_parts_give_and_take_the_same_total(n, part):
    table = [uneven(rank, n, part) for rank in range(n)]
    assert {sum(row) for row in table} == {sum(column) for column in zip(*table, strict=True)}
    assert sum(table[0]) == n * part
    assert min(itertools.chain(*table)) >= 0
    if n > 2 and part > 1:
        assert len({*itertools.chain(*table)}) > 1


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("name", ["sendrecv", "sendrecv_pairs", "sendrecv_bisection"])
def test_who_sends_to_a_rank_is_whom_it_receives_from(name, n):
    partners = [COLLECTIVES[name].partner(rank, n) for rank in range(n)]
    for rank, partner in enumerate(partners):
        if partner is not None:
            to, source = partner
            assert partners[to][1] == rank
            assert partners[source][0] == rank
    idle = partners.count(None)
    assert idle == (n == 1 if name == "sendrecv" else n % 2)


class Alone:
    """What `operation` asks of a back end."""

    def __init__(self, rank, n):
        self.rank, self.world_size = rank, n


def deliver(ops, row, redop):
    """Does by hand what the row's segments say, from what the ranks sent."""
    sent = [op.send.clone() for op in ops]
    for op in ops:
        for piece in row.segments(op.rank, op.world_size, op.shape, op.root):
            where = slice(piece.start, piece.start + piece.length)
            of = slice(piece.offset, piece.offset + piece.length)
            if piece.source == REDUCED:
                combine = {"sum": sum, "max": lambda values: torch.stack(list(values)).amax(0)}
                op.receive[where] = combine[redop](buffer[of] for buffer in sent)
            else:
                op.receive[where] = sent[piece.source][of]


def operations(row, n, inside, size=64 * 40, root=0, redop="sum"):
    number = NUMBERS["float"]
    job = Job(row, number, redop, size, 1, 0, 1, root=root)
    found = []
    for rank in range(n):
        main, other = torch.zeros(size // 4), torch.zeros(size // 4)
        found.append(operation(Alone(rank, n), job, (main, other), inside))
    return found


def prepared(row, n, inside, root=0, redop="sum"):
    number = NUMBERS["float"]
    pattern = pattern_for(number, redop, n) if row.reduces else None
    ops = operations(row, n, inside, root=root, redop=redop)
    for op in ops:
        verify.prepare(op, number, pattern, 3)
    return ops, number, pattern


@pytest.mark.parametrize("inside", [False, True], ids=["out-of-place", "in-place"])
@pytest.mark.parametrize("row", MOVING, ids=lambda row: row.name)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_delivered_data_are_right_and_each_wrong_element_is_found_where_it_is(row, n, inside):
    root = n - 1 if row.rooted else 0
    ops, number, pattern = prepared(row, n, inside, root)
    for op in ops:
        found = verify.check_received(op, number, pattern, 3)
        pieces = list(row.segments(op.rank, n, op.shape, root))
        own = {op.rank} if inside else set()
        strange = [p for p in pieces if p.length and p.source not in own]
        assert (found.wrong > 0) == bool(strange), "what was not delivered is wrong"
    deliver(ops, row, "sum")
    for op in ops:
        assert verify.check_received(op, number, pattern, 3).wrong == 0
        for piece in row.segments(op.rank, n, op.shape, root):
            at = piece.start + piece.length - 1
            before = float(op.receive[at])
            op.receive[at] = before + 1
            found = verify.check_received(op, number, pattern, 3)
            assert (found.wrong, found.index) == (1, at)
            assert (found.got, found.expected) == (before + 1, before)
            op.receive[at] = before


@pytest.mark.parametrize("row", MOVING, ids=lambda row: row.name)
def test_every_element_that_is_received_is_covered_once(row):
    for n in WORLDS:
        for op in operations(row, n, False):
            covered = torch.zeros(op.shape.receive)
            for piece in row.segments(op.rank, n, op.shape, 0):
                covered[piece.start : piece.start + piece.length] += 1
            everything = not (row.rooted and op.rank and row.name in ("reduce", "gather"))
            idle = row.name.startswith("sendrecv") and op.partner is None
            assert covered.unique().tolist() == ([1.0] if everything and not idle else [0.0])


def test_data_of_another_rank_are_wrong():
    ops, number, pattern = prepared(COLLECTIVES["all_gather"], 3, False)
    deliver(ops, COLLECTIVES["all_gather"], "sum")
    receive, part = ops[1].receive, ops[1].shape.part
    receive[:part] = receive[part : 2 * part].clone()
    assert verify.check_received(ops[1], number, pattern, 3).wrong > part // 2


@pytest.mark.parametrize("number", list(NUMBERS.values()), ids=list(NUMBERS))
def test_what_is_copied_is_exact_in_every_type(number):
    buffer = torch.zeros(500, dtype=getattr(torch, number.torch_name))
    verify.fill_own(buffer, number, 5, 2)
    assert verify.compare_own(buffer, number, 5, 2, 0).wrong == 0
    assert verify.compare_own(buffer[100:], number, 5, 2, 100).wrong == 0
    assert verify.compare_own(buffer, number, 4, 2, 0).wrong > 250
    assert float(buffer.to(torch.float64).min()) >= 1


def test_bytes_between_hosts_of_an_all_to_all_on_two_hosts_of_eight():
    hosts = ("a",) * 8 + ("b",) * 8
    row = COLLECTIVES["all_to_all"]
    assert crossing_bytes(row, 3, hosts, 1 << 30) == 536870912
    assert crossing_bytes(row, 3, hosts, 1 << 30) / 0.257 / 1e9 == pytest.approx(2.09, abs=0.01)


def test_bytes_between_hosts_where_the_algorithm_decides_are_not_guessed():
    hosts = ("a", "a", "b", "b")
    assert crossing_bytes(COLLECTIVES["all_reduce"], 0, hosts, 1024) is None
    assert crossing_bytes(COLLECTIVES["sendrecv"], 0, hosts, 1024) == 0
    assert crossing_bytes(COLLECTIVES["sendrecv"], 1, hosts, 1024) == 1024
    assert crossing_bytes(COLLECTIVES["sendrecv_bisection"], 0, hosts, 1024) == 1024
    # Distance 1 gets 1.5 parts, 2 gets 0.5, 3 gets 1: from rank 0 the other host is 2 and 3 away.
    assert crossing_bytes(COLLECTIVES["all_to_all_v"], 0, hosts, 1024) == 1024 * 1.5 / 4


def test_other_tools_names_are_understood_and_unknown_ones_refused():
    assert collective_named("alltoall") is COLLECTIVES["all_to_all"]
    with pytest.raises(UsageError, match="collective 'allredoce': expected one of all_reduce, "):
        collective_named("allredoce")
