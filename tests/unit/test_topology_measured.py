"""Measured paths become leaves, a hash or "unknown", and ports that spread planned flows."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commkit.errors import UsageError
from commkit.topology.ecmp import TCP, UDP, Chip, FiveTuple, Linux
from commkit.topology.measured import Candidates, from_json, leaves_of, merged, plan, to_json

UPLINKS = ["172.16.0.2", "172.16.0.6", "172.16.0.10", "172.16.0.14"]


def measure(model, uplinks=UPLINKS, sources=("10.0.0.2",), count=64, to="10.1.0.2"):
    """What probes of a leaf with this hash would tell; uplinks are numbered in another order."""
    order = list(reversed(uplinks))
    # Scattered: low bits alone do not tell a CRC's uplinks apart.
    ports = [49152 + 79 * i % 16384 for i in range(count)]
    flows = [FiveTuple(source, to, UDP, port, 4791) for source in sources for port in ports]
    return {flow: order[model.path(flow)] for flow in flows}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Linux(7, (1,) * 4), "Linux, seed 7, policy 3"),
        (Linux(9, (1,) * 4, 1), "Linux, seed 9, policy 1"),
        (Chip("crc", 4), "chip, crc, seed 0, offset 0"),
        # The seed of a linear hash only renumbers uplinks.
        (Chip("crc_32hi", 4, 0xFFFFFFFF, 5), "chip, crc_32hi, seed 0, offset 5"),
    ],
)
def test_a_hash_among_the_candidates_is_found_and_tells_other_flows(model, name):
    answers = measure(model)
    (leaf,) = leaves_of(answers, Candidates((7, 8, 9)))
    assert leaf.name == name
    assert leaf.uplinks == tuple(UPLINKS)
    assert leaf.sources == {"10.0.0.2"}
    elsewhere = measure(model, to="10.3.0.9", sources=("10.0.0.6", "10.0.0.2"))
    assert {f: leaf.uplinks[leaf.known.path(f)] for f in elsewhere} == elsewhere


def test_a_hash_that_is_none_of_them_is_unknown_and_only_what_was_measured_is_told():
    answers = measure(Linux(12345, (1,) * 4))
    (leaf,) = leaves_of(answers, Candidates((7, 8, 9)))
    assert leaf.name == "unknown" and "explains 64 flows" in leaf.why
    assert {f: leaf.uplinks[leaf.known.path(f)] for f in answers} == answers
    assert leaf.known.path(FiveTuple("10.0.0.2", "10.1.0.2", UDP, 1, 4791)) is None


class Backwards:
    """A CRC over the fields in an order that nobody has told us."""

    def path(self, flow):
        ends = flow.destination, flow.source, flow.protocol
        return Chip("crc", 4).path(FiveTuple(*ends, flow.destination_port, flow.source_port))


def test_where_one_of_four_uplinks_is_silent_nothing_is_said_of_it():
    all_four = measure(Backwards(), count=256)
    answers = {flow: by for flow, by in all_four.items() if by != UPLINKS[3]}
    (leaf,) = leaves_of(answers)
    assert leaf.uplinks == tuple(UPLINKS[:3])
    assert {leaf.known.path(flow) for flow in all_four} == {None, 0, 1, 2}


def test_an_unknown_linear_hash_extends_to_ports_that_nobody_measured():
    hidden = Backwards()
    sources = tuple(f"10.0.0.{2 + 4 * i}" for i in range(4))
    answers = measure(hidden, sources=sources)
    (leaf,) = leaves_of(answers)
    assert leaf.name == "unknown" and "linear" in leaf.why
    asked = measure(hidden, sources=sources, count=4, to="10.9.0.2")
    some = dict(list(asked.items())[:1])
    (leaf,) = leaves_of({**answers, **some})
    told = {f: leaf.known.path(f) for f in asked if f.source == sources[0]}
    assert {f: leaf.uplinks[path] for f, path in told.items()} == {f: asked[f] for f in told}


def test_over_a_number_of_uplinks_that_is_no_power_of_two_seeds_are_told_apart():
    answers = measure(Chip("crc", 7, 77, 2), [f"172.16.0.{2 + 4 * i}" for i in range(7)])
    (leaf,) = leaves_of(answers, Candidates((76, 77)))
    assert leaf.name == "chip, crc, seed 77, offset 2"
    (leaf,) = leaves_of(answers, Candidates((76,)))
    assert leaf.name == "unknown" and "linear" not in leaf.why


def test_too_few_flows_fit_nothing():
    (leaf,) = leaves_of(measure(Chip("xor", 4), count=5))
    assert leaf.name == "unknown" and "probe more ports" in leaf.why


def test_hosts_that_see_the_same_uplinks_are_under_one_leaf():
    a = measure(Linux(1, (1,) * 4), sources=("10.0.0.2",))
    b = measure(Linux(1, (1,) * 4), sources=("10.0.0.6",))
    other = [f"172.16.1.{2 + 4 * i}" for i in range(4)]
    c = measure(Linux(2, (1,) * 4), other, sources=("10.0.4.2",))
    first, second = leaves_of(merged([c, b, a]), Candidates((1, 2)))
    assert (first.uplinks, second.uplinks) == (tuple(UPLINKS), tuple(other))
    assert set(first.paths) == set(a) | set(b)
    assert [leaf.name for leaf in (first, second)] == [
        "Linux, seed 1, policy 3",
        "Linux, seed 2, policy 3",
    ]


@given(
    st.integers(1, 9),
    st.integers(1, 30),
    st.booleans(),
    st.integers(0, 2**32),
)
@settings(max_examples=30, deadline=None)
def test_chosen_ports_put_planned_flows_evenly_on_uplinks_and_move_as_few_as_can_be(
    uplinks, count, known, seed
):
    draw = random.Random(seed)
    model = Linux(5, (1,) * uplinks)
    some = [f"172.16.0.{2 + 4 * i}" for i in range(uplinks)]
    (leaf,) = leaves_of(measure(model, some, count=250), Candidates((5,) if known else ()))
    ports = draw.sample(sorted({flow.source_port for flow in leaf.paths}), count)
    flows = [FiveTuple("10.0.0.2", "10.1.0.2", UDP, port, 4791) for port in ports]
    planned = plan(leaf, flows)
    assert planned.even == -(-count // len(leaf.uplinks))
    assert sum(map(len, planned.flows)) == count and not planned.unknown
    if not planned.collides:
        assert not planned.ports
        return
    assert set(planned.ports) == set(flows)
    moved = [flow.with_source_port(planned.ports[flow]) for flow in flows]
    assert len(set(moved)) == count
    after = [leaf.known.path(flow) for flow in moved]
    assert max(after.count(uplink) for uplink in set(after)) == planned.even
    excess = sum(max(0, len(row) - planned.even) for row in planned.flows)
    changed = sum(a != b for a, b in zip(flows, moved, strict=True))
    # Whoever is above the even share has to go; rounding may ask for one more of each uplink.
    assert excess <= changed <= excess + len(leaf.uplinks)


def test_planned_flows_of_unknown_ways_are_counted_apart():
    (leaf,) = leaves_of(measure(Linux(12345, (1,) * 4)))
    far = FiveTuple("10.0.0.2", "10.1.0.2", TCP, 50000, 1)
    planned = plan(leaf, [far, next(iter(leaf.paths))])
    assert planned.unknown == (far,)
    assert planned.even == 1 and not planned.collides


def test_measurements_come_back_from_their_file():
    answers = measure(Linux(3, (1,) * 4))
    assert from_json(json.dumps(to_json(answers)), "a.json") == answers


ROW = {
    "source": "10.0.0.2",
    "destination": "10.0.0.6",
    "protocol": 17,
    "source_port": 1,
    "destination_port": 2,
    "by": "10.0.0.1",
}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "m.json:1:2: not JSON"),
        ("[]", "commkit-paths/1"),
        ('{"format": "commkit-paths/1", "paths": 3}', "paths: expected a list"),
        ([3], "paths\\[0\\]: expected the keys"),
        ([ROW, {**ROW, "by": "here"}], "paths\\[1\\]: 'here' does not appear"),
        ([{**ROW, "source_port": "1"}], "source_port: '1': expected a number"),
        ([{**ROW, "source_port": 70000}], "70000: expected 0 to 65535"),
        ([{**ROW, "source": "::1"}], "both IPv4 or both IPv6"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_entry(text, words):
    if isinstance(text, list):
        text = json.dumps({"format": "commkit-paths/1", "paths": text})
    with pytest.raises(UsageError, match=words):
        from_json(text, "m.json")
