"""Hash models: test vectors of the hashes, symmetry, linearity, fitting, RoCE source ports."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commkit.errors import UsageError
from commkit.topology.ecmp import (
    ALGORITHMS,
    TCP,
    UDP,
    Chip,
    FiveTuple,
    Linux,
    Probed,
    chips,
    fit,
    flow_label,
    jhash_2words,
    linear_shifts,
    roce_flow,
    roce_source_port,
    rxe_source_port,
    siphash24,
)


def flow(number, source_port=40000):
    return FiveTuple(f"10.0.{number % 8}.{number % 250}", "10.1.2.3", UDP, source_port, 4791)


def random_flows(count, seed=0):
    draw = random.Random(seed)
    return [flow(draw.randrange(1000), draw.randrange(1 << 16)) for _ in range(count)]


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, 0x726FDB47DD0E0E31),
        (1, 0x74F839C593DC67FD),
        (7, 0xAB0200F58B01D137),
        (8, 0x93F5F5799A932462),
        (15, 0xA129CA6149BE45E5),
    ],
)
def test_siphash_gives_its_authors_vectors(length, expected):
    """Key 00..0f, message 00, 01, ...: the table of the reference implementation."""
    key = bytes(range(16))
    k0, k1 = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    assert siphash24(bytes(range(length)), k0, k1) == expected


def test_crcs_give_the_catalogue_check_values():
    check = b"123456789"
    assert ALGORITHMS["crc"](check, 0) == 0xBB3D  # CRC-16/ARC
    assert ALGORITHMS["crc_ccitt"](check, 0) == 0x31C3  # CRC-16/XMODEM
    assert ALGORITHMS["crc_ccitt"](check, 0xFFFF) == 0x29B1
    whole = 0xCBF43926  # CRC-32
    assert ALGORITHMS["crc_32lo"](check, 0) == whole & 0xFFFF
    assert ALGORITHMS["crc_32hi"](check, 0) == whole >> 16


@pytest.mark.parametrize("policy", [1, 3])
@given(
    ports=st.tuples(st.integers(0, 65535), st.integers(0, 65535)),
    six=st.booleans(),
    seed=st.integers(1, (1 << 32) - 1),
)
def test_linux_hashes_both_directions_alike(policy, ports, six, seed):
    a, b = ("fd00::1", "fd00:1::2") if six else ("10.0.0.1", "192.168.7.9")
    there = FiveTuple(a, b, TCP, *ports)
    back = FiveTuple(b, a, TCP, *reversed(ports))
    model = Linux(seed, (1, 1, 1), policy)
    assert model.hash(there) == model.hash(back) < 1 << 31


@pytest.mark.parametrize(
    ("policy", "path"), [(1, [3, 0, 1, 2, 1, 0, 3, 2]), (3, [0, 2, 3, 0, 1, 2, 2, 1])]
)
def test_linux_paths_stay_those_of_the_kernel(policy, path):
    """Values of Linux 6.18, which tests/fabric/test_ecmp_kernel.py asks anew."""
    model = Linux(7, (1,) * 4, policy)
    found = [model.path(FiveTuple("10.1.0.2", "10.2.0.2", TCP, 50000 + i, 7000)) for i in range(8)]
    assert found == path


def test_linux_follows_weights():
    model = Linux(3, (3, 1))
    paths = [model.path(f) for f in random_flows(2000)]
    assert 0.2 < paths.count(1) / len(paths) < 0.3


def test_jhash_is_no_constant():
    assert len({jhash_2words(i, 0, 0) for i in range(1000)}) == 1000


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("offset", [0, 5])
def test_chips_move_by_an_exclusive_or_of_the_port_change(algorithm, offset):
    model = Chip(algorithm, 8, seed=0x1234, offset=offset)
    for change in (1, 0x24, 0x8001):
        assert len({model.shift(f, change) for f in random_flows(50)}) == 1


def test_linux_is_not_linear():
    model = Linux(9, (1,) * 8)
    shifts = {
        model.path(f) ^ model.path(f.with_source_port(f.source_port ^ 1)) for f in random_flows(50)
    }
    assert len(shifts) > 1


def test_a_chip_of_three_paths_has_no_shifts():
    with pytest.raises(UsageError, match="powers of two"):
        Chip("crc", 3).shift(flow(1), 1)


@pytest.mark.parametrize(
    "truth", [Chip("crc", 8, offset=3), Chip("crc_32hi", 8), Linux(5, (1,) * 8)]
)
def test_the_hash_is_found_among_candidates_whatever_the_numbering(truth):
    names = [5, 2, 7, 0, 1, 3, 6, 4]
    measured = {f: names[truth.path(f)] for f in random_flows(200)}
    candidates = [*chips(8), *(Linux(seed, (1,) * 8) for seed in (4, 5, 6))]
    found = fit(measured, candidates)
    assert truth in found and len(found) < len(candidates) / 4
    # Whatever else fits says the same of flows that were not measured.
    for model in found:
        numbering = {model.path(f): path for f, path in measured.items()}
        assert all(numbering[model.path(f)] == names[truth.path(f)] for f in random_flows(99, 1))


def test_a_random_switch_is_unknown():
    draw = random.Random(2)
    assert fit({f: draw.randrange(8) for f in random_flows(100)}, chips(8)) == []


def test_measured_paths_extend_along_a_linear_hash():
    truth = Chip("crc_ccitt", 8)
    measured = {}
    for number in range(6):
        for port in (40000, 40000 ^ 1, 40000 ^ 6):
            f = flow(number, port)
            measured[f] = truth.path(f)
    shifts = linear_shifts(measured)
    assert set(shifts) == {1, 6, 7}
    model = Probed({f: p for f, p in measured.items() if f.source_port == 40000}, shifts)
    other = flow(3, 40000 ^ 7)
    assert model.path(other) == truth.path(other)
    assert model.path(flow(3, 1234)) is None


def test_measurements_that_contradict_make_no_shifts():
    truth = Linux(5, (1,) * 8)
    flows = [flow(n, port) for n in range(20) for port in (40000, 40001)]
    assert linear_shifts({f: truth.path(f) for f in flows}) == {}


def test_roce_ports_follow_from_queue_pair_numbers():
    # 0x11 * 0x22 = 0x242: below 14 bits nothing folds.
    assert roce_source_port(0x11, 0x22) == 0xC000 | 0x242
    # Both directions send by the same port, and a flow label wins.
    assert roce_source_port(0x1234, 0xABCD) == roce_source_port(0xABCD, 0x1234)
    assert roce_source_port(1, 1, label=0x4000) == 0xC001
    assert flow_label(0xFFFFFF, 0xFFFFFF) < 1 << 20
    assert all(0xC000 <= rxe_source_port(n) <= 0xFFFF for n in range(16, 4000, 7))
    assert roce_flow("10.0.0.1", "10.0.0.2", 0x11, 0x22).destination_port == 4791


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("10.0.0.1", "fd00::1", TCP, 1, 2), "expected both IPv4 or both IPv6"),
        (("host", "10.0.0.1", TCP, 1, 2), "'host': expected an IPv4 or IPv6 address"),
        (("10.0.0.1", "10.0.0.2", TCP, 1, 65536), "destination port 65536"),
        (("10.0.0.1", "10.0.0.2", 256, 1, 2), "protocol 256"),
    ],
)
def test_a_wrong_five_tuple_is_named(arguments, expected):
    with pytest.raises(UsageError, match=expected):
        FiveTuple(*arguments)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Linux(0, (1,)), "hash seed 0"),
        (lambda: Linux(1, (1,), policy=2), "hash policy 2"),
        (lambda: Linux(1, ()), "weights"),
        (lambda: Chip("md5", 4), "'md5': expected crc"),
        (lambda: Chip("crc", 4, offset=16), "offset 16"),
    ],
)
def test_a_wrong_model_is_named(make, expected):
    with pytest.raises(UsageError, match=expected):
        make()
