"""Placement and path assignment on real packets: what the plans predict is what ports count."""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import flows as bulk
import pytest
from ranks import environment

from commkit import placing
from commkit.topology import lab_job, netns
from commkit.topology.lab import Lab
from commkit.topology.paths import assign, choose_ports, fullest, least_fullest, reassign
from commkit.topology.probe import probe

pytestmark = [
    pytest.mark.fabric,
    pytest.mark.usefixtures("needs_lab"),
    pytest.mark.timeout(180),
]

MBIT = 10
PORT = 7000


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert netns.names(f"commkit-lab-{os.getpid()}-") == []


def leaves_of(lab, flows):
    return [(lab.place_of(f.source)[0].group, lab.place_of(f.destination)[0].group) for f in flows]


def models_of(lab, flows):
    return [lab.model(lab.place_of(f.source)[0], lab.place_of(f.destination)[0]) for f in flows]


def with_ports(flows, ports):
    return [flow.with_source_port(port) for flow, port in zip(flows, ports, strict=True)]


def on_the_wire(lab, flows):
    """The spines that probes of these flows die at."""
    found = {}
    for host in lab.hosts:
        mine = [flow for flow in flows if flow.source == host.address]
        with netns.thread_inside(lab.namespace(host)):
            found |= {a.flow: lab.spine_of(a.by) for a in probe(mine, 2)}
    return [found[flow] for flow in flows]


def to_next_leaf(lab, port=0):
    """A flow of every host to its like under the next leaf."""
    size = lab.shape.sizes[0]
    hosts = lab.hosts
    return [lab.flow(h, hosts[(h.index + size) % len(hosts)], port, PORT) for h in hosts]


def test_hashed_flows_collide_and_chosen_ports_give_each_flow_an_uplink():
    with Lab(4, 4, 4, host_mbit=MBIT, uplink_mbit=MBIT, ipv6=False) as lab:
        slowest = {"hashed": [], "chosen": []}
        most = {"hashed": [], "chosen": []}
        for trial in range(3):
            draw = random.Random(trial)
            flows = to_next_leaf(lab)
            pairs = leaves_of(lab, flows)
            hashed = with_ports(flows, draw.sample(range(20000, 40000), len(flows)))
            first = 49152 + 4000 * trial
            ports = choose_ports(
                flows, assign(pairs, 4), models_of(lab, flows), range(first, first + 4000)
            )
            for name, some in (("hashed", hashed), ("chosen", with_ports(flows, ports))):
                most[name].append(fullest(pairs, on_the_wire(lab, some)))
                slowest[name].append(min(bulk.run(lab, some, seconds=1.2, settle=0.4)))
        assert least_fullest(pairs, 4) == 1
        assert set(most["chosen"]) == {1}
        assert min(most["hashed"]) > 1
        gain = statistics.median(slowest["chosen"]) / statistics.median(slowest["hashed"])
        assert gain > 1.5, (gain, slowest, most)


def test_a_link_down_moves_the_flows_that_the_model_says_and_a_new_plan_is_even_again():
    spines = 4
    with Lab(4, spines, 3, ipv6=False) as lab:
        flows = to_next_leaf(lab)
        pairs = leaves_of(lab, flows)
        flows = with_ports(flows, choose_ports(flows, assign(pairs, spines), models_of(lab, flows)))
        before = on_the_wire(lab, flows)
        assert before == [lab.path(flow) for flow in flows]
        assert fullest(pairs, before) == least_fullest(pairs, spines) == 1
        lost = next(s for (a, _), s in zip(pairs, before, strict=True) if a == 0)
        lab.set_link(0, lost, up=False)
        predicted = [lab.path(flow) for flow in flows]
        after = on_the_wire(lab, flows)
        assert after == predicted
        for (a, b), was, now in zip(pairs, before, after, strict=True):
            if 0 not in (a, b):
                assert now == was
            elif was == lost:
                assert now != lost
        down = [(0, lost)]
        wanted = reassign(pairs, spines, down)
        planned = with_ports(flows, choose_ports(flows, wanted, models_of(lab, flows)))
        again = on_the_wire(lab, planned)
        assert again == wanted
        # Leaf 0 has three links for three flows each way: even is still one flow a link.
        assert fullest(pairs, again) == 1
        # So say the ports that carry the bytes.
        counted = lab.uplink_bytes()
        bulk.run(lab, planned, seconds=0.3, settle=0.1)
        sent = {key: up - counted[key][0] for key, (up, _) in lab.uplink_bytes().items()}
        busy = {key for key, amount in sent.items() if amount > max(sent.values()) / 20}
        assert busy >= {(a, 0, s) for (a, _), s in zip(pairs, again, strict=True)}
        assert sent[0, 0, lost] == 0


# --- torch over commkit.init_process_group ---------------------------------------------------

HOSTS, LEAVES, SIZE, ROUNDS = 8, 4, 8 << 20, 3


def wish(names):
    work = {"dp": placing.Work("all_reduce", float(SIZE))}
    return placing.Wish(tuple(names), f"dp={len(names)}", 1, work=work)


def sent_up(lab, orders, tmp_path):
    """Of a job with one rank a host, for each order of hosts: bytes over all uplinks."""
    job = {"size": SIZE, "rounds": ROUNDS, "orders": []}
    for order in orders:
        ranks = lab_job.variables(lab_job.hosts_named(lab, order), 1)
        job["orders"].append([[lab.namespace(host), own] for host, own in ranks])
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("lab_ranks.py"), json.dumps(job)],
        env=environment(COMMKIT_LOG_DIR=str(tmp_path)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = []
    with process:
        for _ in orders:
            assert process.stdout.readline() == "ready\n"
            before = lab.uplink_bytes()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
            after = lab.uplink_bytes()
            found.append(sum(after[key][0] - before[key][0] for key in after))
        process.communicate()
    assert process.returncode == 0
    return found


def test_gloo_by_plan_sends_half_over_uplinks_and_as_many_bytes_as_predicted(tmp_path):
    with Lab(LEAVES, 2, HOSTS // LEAVES) as lab:
        interleaved = [f"h{i}" for i in (0, 2, 4, 6, 1, 3, 5, 7)]
        placed = placing.placed(wish(interleaved), lab.fabric())
        groups = [lab.hosts[int(name[1:])].group for name in placed.hosts]
        # Each leaf is entered once as the ring goes round.
        assert sum(a != b for a, b in itertools.pairwise([*groups, groups[0]])) == LEAVES
        predicted = [score.crossing[0] * ROUNDS for score in (placed.plan.score, placed.plan.given)]
        counted = sent_up(lab, [placed.hosts, interleaved], tmp_path)
        told = f"counted {counted}, predicted {predicted}"
        assert counted[0] <= 0.55 * counted[1], told
        for count, expected in zip(counted, predicted, strict=True):
            assert 0.9 <= count / expected <= 1.1, told
