"""Verification data: exact in any order, and no wrong element passes."""

from __future__ import annotations

import random

import pytest
import torch

from commkit.measure import verify
from commkit.measure.numbers import NUMBERS, REDOPS
from commkit.measure.patterns import pattern_for

WORLDS = (1, 2, 3, 4, 7, 8, 16, 33, 64, 130, 256, 300, 1024, 12288)
COUNT = 300


def cases(worlds):
    return [
        pytest.param(number, redop, world, id=f"{name}-{redop}-{world}")
        for name, number in NUMBERS.items()
        for redop in REDOPS
        for world in worlds
    ]


@pytest.mark.parametrize(("number", "redop", "world"), cases(WORLDS))
def test_every_partial_result_is_representable(number, redop, world):
    pattern = pattern_for(number, redop, world)
    if pattern is None:
        # Only where 1/world is smaller than the type's smallest number.
        assert redop == "avg"
        assert number.floating
        assert world > 2**number.smallest
        return
    assert pattern.scales >= 2
    assert len(pattern.weights) == world
    for scale in (1, pattern.scales):
        values = [pattern.value(slot, scale) for slot in range(world)]
        assert min(values) >= 0
        if redop == "prod":
            # The odd part is at most 3, the power of two within the type's range.
            total = sum(value.bit_length() - 1 for value in values)
            assert total <= number.exponent + 1
        elif redop in ("min", "max"):
            assert max(values) <= number.exact
        else:
            # Values are not negative, so every partial sum lies between 0 and the total.
            assert sum(values) <= number.exact


@pytest.mark.parametrize("number", list(NUMBERS.values()), ids=list(NUMBERS))
def test_the_table_of_types_is_what_torch_has(number):
    dtype = getattr(torch, number.torch_name)
    assert torch.empty(0, dtype=dtype).element_size() == number.size
    for value in (number.exact, 3 * 2**number.exponent):
        held = torch.tensor(float(value), dtype=torch.float64).to(dtype)
        assert held.to(torch.float64) == value
    if number.exact < 2**24:
        beyond = torch.tensor(float(number.exact + 1), dtype=torch.float64).to(dtype)
        assert beyond.to(torch.float64) != number.exact + 1
    if number.floating:
        finfo = torch.finfo(dtype)
        assert number.roundoff == finfo.eps / 2
        assert 2.0**-number.smallest == finfo.smallest_normal * finfo.eps


def reduced(number, redop, world, seed, order, fills=None):
    """What a library delivers that combines in `order`, rounding to the type at each step."""
    dtype = getattr(torch, number.torch_name)
    pattern = pattern_for(number, redop, world)
    inputs = []
    for rank in fills or range(world):
        buffer = torch.zeros(COUNT, dtype=dtype)
        verify.fill(buffer, pattern, rank, seed)
        inputs.append(buffer.to(torch.float64))
    if redop == "avg" and number.floating:
        # As NCCL does it: each contribution times 1/n, both rounded to the type.
        share = torch.tensor(1 / world, dtype=torch.float64).to(dtype).to(torch.float64)
        inputs = [(buffer * share).to(dtype).to(torch.float64) for buffer in inputs]
    combine = {"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(redop, torch.add)
    total = inputs[order[0]]
    for index in order[1:]:
        total = combine(total, inputs[index]).to(dtype).to(torch.float64)
    if redop == "avg" and not number.floating:
        total = torch.div(total, world, rounding_mode="trunc")
    return total.to(dtype), pattern


@pytest.mark.parametrize(("number", "redop", "world"), cases((1, 2, 3, 8, 33)))
def test_any_order_of_the_ranks_gives_the_expected_result(number, redop, world):
    order = list(range(world))
    random.Random(f"{number.name}{redop}{world}").shuffle(order)
    for seed in (0, 5):
        result, pattern = reduced(number, redop, world, seed, order)
        check = verify.compare(result, pattern, seed)
        assert check.wrong == 0, check


@pytest.mark.parametrize(("number", "redop", "world"), cases((2, 8)))
def test_a_single_flipped_bit_is_one_wrong_element(number, redop, world):
    result, pattern = reduced(number, redop, world, 1, list(range(world)))
    bits = result.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[number.size])
    for bit in range(number.size * 8):
        mask = torch.tensor(1, dtype=torch.int64) << bit
        at = 7 * bit % COUNT
        before = bits[at].clone()
        if before == 0 and bit == number.size * 8 - 1 and number.floating:
            continue  # -0 equals 0
        bits[at] = (before.to(torch.int64) ^ mask).to(bits.dtype)
        check = verify.compare(result, pattern, 1)
        assert (check.wrong, check.index) == (1, at)
        bits[at] = before
    assert verify.compare(result, pattern, 1).wrong == 0


@pytest.mark.parametrize(("number", "redop", "world"), cases((3, 8, 33)))
def test_a_rank_taken_twice_instead_of_another_is_seen(number, redop, world):
    taken = [*range(world - 1), 0]
    result, pattern = reduced(number, redop, world, 2, list(range(world)), fills=taken)
    assert verify.compare(result, pattern, 2).wrong > 0


@pytest.mark.parametrize("redop", REDOPS)
def test_the_result_of_the_pass_before_is_wrong(redop):
    result, pattern = reduced(NUMBERS["float"], redop, 4, 0, range(4))
    assert verify.compare(result, pattern, 0).wrong == 0
    assert verify.compare(result, pattern, 1).wrong > COUNT // 2


def test_elements_that_moved_are_wrong():
    result, pattern = reduced(NUMBERS["half"], "sum", 4, 0, range(4))
    assert verify.compare(result.roll(1), pattern, 0).wrong > COUNT // 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_what_is_no_number_is_wrong_and_reported(value):
    result, pattern = reduced(NUMBERS["bfloat16"], "sum", 4, 0, range(4))
    expected = float(result[10])
    result[10] = value
    check = verify.compare(result, pattern, 0)
    assert (check.wrong, check.index, check.expected) == (1, 10, expected)
    assert check.got == value or value != value


def test_pieces_fit_together(monkeypatch):
    whole, pattern = reduced(NUMBERS["int32"], "sum", 3, 4, range(3))
    monkeypatch.setattr(verify, "CHUNK", 64)
    pieces, _ = reduced(NUMBERS["int32"], "sum", 3, 4, range(3))
    assert torch.equal(whole, pieces)
    pieces[200] += 1
    assert (verify.compare(pieces, pattern, 4).wrong, verify.compare(pieces, pattern, 4).index) == (
        1,
        200,
    )


def test_filled_data_are_what_the_pattern_defines():
    for redop in REDOPS:
        pattern = pattern_for(NUMBERS["double"], redop, 5)
        buffers = []
        for rank in range(5):
            buffers.append(torch.zeros(50, dtype=torch.float64))
            verify.fill(buffers[-1], pattern, rank, 9)
        allowed = {
            tuple(float(pattern.value((first + rank) % 5, scale)) for rank in range(5))
            for first in range(5)
            for scale in range(1, pattern.scales + 1)
        }
        assert {tuple(column) for column in torch.stack(buffers).T.tolist()} <= allowed
