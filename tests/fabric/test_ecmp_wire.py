"""The model of Linux's multipath hash says where packets really go: a probe dies at the spine."""

from __future__ import annotations

import random

import pytest

from commkit.topology import netns
from commkit.topology.ecmp import TCP, UDP, Linux
from commkit.topology.lab import Lab
from commkit.topology.probe import probe

pytestmark = [
    pytest.mark.fabric,
    pytest.mark.usefixtures("needs_lab"),
    pytest.mark.timeout(120),
]

FLOWS = 160


def drawn(lab, count, ipv6, seed):
    """Random five-tuples between hosts of different leaves, by source host."""
    draw = random.Random(seed)
    found = {host: [] for host in lab.hosts}
    for _ in range(count):
        a, b = draw.sample(lab.hosts, 2)
        while a.group == b.group:
            a, b = draw.sample(lab.hosts, 2)
        ports = draw.randrange(1024, 1 << 16), draw.randrange(1, 1 << 16)
        rail = draw.randrange(lab.shape.rails)
        kind = draw.choice((TCP, UDP))
        found[a].append(lab.flow(a, b, *ports, protocol=kind, rail=rail, ipv6=ipv6))
    return found


def on_the_wire(lab, by_host):
    """Flow -> the spine that a probe has died at."""
    found = {}
    for host, flows in by_host.items():
        with netns.thread_inside(lab.namespace(host)):
            answers = probe(flows, 2)
        for answer in answers:
            if answer.how != "busy":
                assert answer.how == "hop", answer
                found[answer.flow] = lab.spine_of(answer.by)
    return found


@pytest.mark.parametrize("ipv6", [False, True], ids=["ipv4", "ipv6"])
def test_every_five_tuple_takes_the_spine_of_the_model(ipv6):
    with Lab(3, 5, 2, rails=2, seed=77) as lab:
        told = on_the_wire(lab, drawn(lab, FLOWS, ipv6, 1))
        assert len(told) >= 128
        assert set(told.values()) == set(range(5))
        assert told == {flow: lab.path(flow) for flow in told}
        # The same packets under another leaf's seed would go elsewhere.
        other = Linux(78, (1,) * 5)
        assert told != {flow: other.path(flow) for flow in told}
        lab.set_link(0, 3, up=False, rail=0)
        lab.set_link(2, 1, up=False, rail=0)
        after = on_the_wire(lab, drawn(lab, FLOWS, ipv6, 1))
        assert after == {flow: lab.path(flow) for flow in after}
        assert {f for f in told if f in after and told[f] != after[f]}
        lab.set_link(0, 3, up=True, rail=0)
        lab.set_link(2, 1, up=True, rail=0)
        again = on_the_wire(lab, drawn(lab, FLOWS, ipv6, 1))
        assert {f: s for f, s in again.items() if f in told} == {
            f: s for f, s in told.items() if f in again
        }
