"""`commkit topo probe` on a fabric whose paths are known: hops, hash, collisions, better ports."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from ranks import environment

from commkit.errors import UsageError
from commkit.topology import faults, netns
from commkit.topology.ecmp import TCP, UDP
from commkit.topology.lab import Lab
from commkit.topology.probe import probe, source_address, spreading, stages

pytestmark = [
    pytest.mark.fabric,
    pytest.mark.usefixtures("needs_lab"),
    pytest.mark.timeout(120),
]

PROBE = [sys.executable, "-m", "commkit", "topo", "probe"]


@pytest.fixture(scope="module")
def lab():
    with Lab(2, 4, 2) as made:
        yield made


def run(lab, host, *arguments, code=0):
    process = lab.popen(
        host,
        [*PROBE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    out, errors = process.communicate(timeout=50)
    assert process.returncode == code, errors
    return out if code in (0, 1) and not errors else errors


@pytest.mark.parametrize("protocol", [TCP, UDP])
@pytest.mark.parametrize("ipv6", [False, True], ids=["ipv4", "ipv6"])
def test_hops_are_the_leaf_then_the_spines_then_the_other_leaf_then_the_host(lab, protocol, ipv6):
    a, b = lab.hosts[0], lab.hosts[3]
    options = {"protocol": protocol, "ipv6": ipv6}
    flows = [lab.flow(a, b, 30000 + i, 9, **options) for i in range(12)]
    shape = lab.shape
    with netns.thread_inside(lab.namespace(a)):
        assert source_address(flows[0].destination) == flows[0].source
        one, two = stages(flows)
        three, four = (probe(flows[:6], ttl, tries=1) for ttl in (3, 4))
        near = probe([lab.flow(a, lab.hosts[1], 30000, 9, **options)], 2)
    assert spreading([one, two]) == 2 and spreading([one]) is None
    assert {x.by for x in one} == {shape.gateway(a, 0)[ipv6]}
    assert [lab.spine_of(x.by) for x in two] == [lab.path(flow) for flow in flows]
    assert [x.by for x in three] == [
        shape.leaf_addresses(1, 0, lab.path(flow))[ipv6] for flow in flows[:6]
    ]
    assert {x.how for x in [*three]} == {"hop"}
    # A host limits how often it says that a UDP port is closed.
    assert {x.how for x in four} <= {"arrived", "silent"} and four[0].how == "arrived"
    assert [(x.how, x.by) for x in near] == [("arrived", near[0].flow.destination)]


def test_probes_into_nothing_say_what_became_of_them(lab):
    a, b = lab.hosts[0], lab.hosts[2]
    flow = lab.flow(a, b, 30000, 9, protocol=UDP)
    faults.drop(lab, "leaf0", "down0", match="udp dport 9")
    with netns.thread_inside(lab.namespace(a)):
        assert [x.how for x in probe([flow], 2, seconds=0.1)] == ["silent"]
        faults.heal(lab, "leaf0")
        assert [x.how for x in probe([flow], 2)] == ["hop"]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
            holder.bind((a.address, 30000))
            assert [x.how for x in probe([flow], 2)] == ["busy"]
        with pytest.raises(UsageError, match="10.0.0.10: no address of this host"):
            probe([lab.flow(b, a, 30000, 9)], 2)


def test_routers_that_answer_rarely_are_asked_again(lab):
    a, b = lab.hosts[0], lab.hosts[2]
    flows = [lab.flow(a, b, 31000 + i, 9, protocol=UDP) for i in range(20)]
    faults.drop(lab, "leaf0", "down0", 0.5, match="udp dport 9")
    try:
        with netns.thread_inside(lab.namespace(a)):
            once = probe(flows, 2, seconds=0.1, tries=1)
            often = probe(flows, 2, seconds=0.1, tries=30)
    finally:
        faults.heal(lab, "leaf0")
    assert "silent" in {x.how for x in once}
    assert [lab.spine_of(x.by) for x in often] == [lab.path(flow) for flow in flows]


@pytest.mark.parametrize("ipv6", [False, True], ids=["ipv4", "ipv6"])
def test_the_command_finds_the_hash_the_collisions_and_ports_without_them(lab, ipv6):
    a, b = lab.hosts[1], lab.hosts[2]
    # Four flows of one uplink.
    candidates = (
        lab.flow(a, b, port, 7000, protocol=UDP, ipv6=ipv6) for port in range(40000, 41000)
    )
    flows = [flow for flow in candidates if lab.path(flow) == 2][:4]
    to = flows[0].destination
    planned = [f"--flow={flow.source_port},{to},7000" for flow in flows]
    out = run(lab, a, to, "--seeds", "1-9", *planned, "--json", "--check", code=1)
    told = json.loads(out)
    assert told["ttl"] == 2
    (leaf,) = told["leaves"]
    assert leaf["hash"] == "Linux, seed 1, policy 3" and leaf["why"] == ""
    assert sorted(map(lab.spine_of, leaf["uplinks"])) == [0, 1, 2, 3]
    assert sum(leaf["flows"]) == 64 + 4
    (plan,) = told["planned"]
    assert (plan["fullest"], plan["even"], plan["unknown"]) == (4, 1, 0)
    assert {lab.spine_of(row["uplink"]) for row in plan["flows"]} == {2}
    better = [f"--flow={row['port']},{to},7000" for row in plan["flows"]]
    out = run(lab, a, to, *better, "--check")
    assert "hash: unknown (none of " in out
    assert "fullest uplink: 1 planned flows, 1 if spread evenly" in out
    moved = [
        lab.path(lab.flow(a, b, row["port"], 7000, protocol=UDP, ipv6=ipv6))
        for row in plan["flows"]
    ]
    assert sorted(moved) == [0, 1, 2, 3]


def test_the_probe_needs_no_privilege(lab):
    a, _, c, _ = lab.hosts
    bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    show = ["grep", "CapEff", "/proc/self/status"]
    for protocol in ("udp", "tcp"):
        words = f"{' '.join(show)} && exec {' '.join(PROBE)} {c.address} --protocol {protocol}"
        process = lab.popen(
            a, [*bare, "sh", "-c", words], stdout=subprocess.PIPE, text=True, env=environment()
        )
        out, _ = process.communicate(timeout=50)
        assert process.returncode == 0
        assert out.split("\n")[0].split() == ["CapEff:", "0" * 16]
        assert "4 uplinks, 64 flows measured" in out


def test_flows_of_two_hosts_under_one_leaf_are_planned_together(lab, tmp_path):
    a, b, c, _ = lab.hosts
    file = tmp_path / "a.json"
    run(lab, a, c.address, "--output", str(file), "--ports", "16")
    one, two = (
        next(p for p in range(40000, 41000) if lab.path(lab.flow(h, c, p, 1, protocol=UDP)) == 3)
        for h in (a, b)
    )
    add = ["--add", str(file), "--ports", "16", "--seeds", "1"]
    planned = [f"--flow={a.address},{one},{c.address},1", f"--flow={two},{c.address},1"]
    out = run(lab, b, c.address, *add, *planned, "--json", "--check", code=1)
    both = json.loads(out)
    (leaf,), (plan,) = both["leaves"], both["planned"]
    assert sum(leaf["flows"]) == 32 + 1
    assert (plan["fullest"], plan["even"]) == (2, 1)
    better = {row["source"]: row["port"] for row in plan["flows"]}
    assert set(better) == {a.address, b.address}
    paths = [lab.path(lab.flow(h, c, better[h.address], 1, protocol=UDP)) for h in (a, b)]
    assert 3 in paths and len(set(paths)) == 2
    line = run(lab, b, c.address, "--ports", "16", planned[0], code=2)
    assert "--flow from 10.0.0.2: expected a source that was probed here" in line
    file.write_text("{}")
    line = run(lab, b, c.address, "--add", str(file), code=2)
    assert "a.json: expected measurements" in line and line.count("\n") == 1


def test_after_a_link_is_down_the_hash_is_over_those_that_are_left(lab):
    a, _, c, _ = lab.hosts
    lab.set_link(1, 0, up=False)
    try:
        told = json.loads(run(lab, a, c.address, "--seeds", "1", "--json"))
    finally:
        lab.set_link(1, 0, up=True)
    (leaf,) = told["leaves"]
    assert sorted(map(lab.spine_of, leaf["uplinks"])) == [1, 2, 3]
    assert leaf["hash"] == "Linux, seed 1, policy 3"


def test_one_way_only_is_said_and_so_is_no_answer(lab):
    a, b, c, _ = lab.hosts
    out = run(lab, a, b.address, "--ports", "3", "--timeout", "0.1")
    assert "every flow takes the same way" in out
    faults.drop(lab, "leaf0", "down0", match="udp dport 4791")
    try:
        line = run(lab, a, c.address, "--timeout", "0.05", code=1)
    finally:
        faults.heal(lab, "leaf0")
    assert "no router answered probes to 10.0.0.10" in line and line.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "expected the address of another host"),
        (("gpu-1",), "'gpu-1': expected an IPv4 or IPv6 address"),
        (("10.0.0.1", "--ports", "0"), "--ports 0"),
        (("10.0.0.1", "--ports", "60000"), "expected ports up to 65535"),
        (("10.0.0.1", "--seeds", "0-4"), "--seeds '0-4'"),
        (("10.0.0.1", "--flow", "1,2"), "--flow 1,2: expected [SOURCE,]SOURCE PORT,ADDRESS,PORT"),
        (("10.0.0.1", "--add", "/no/file"), "/no/file: No such file"),
        (("10.0.0.1", "--timeout", "0"), "--timeout 0"),
        (("10.0.0.1", "--source", "::1"), "expected both IPv4 or both IPv6"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, words):
    done = subprocess.run(
        [*PROBE, *arguments], capture_output=True, text=True, env=environment(), timeout=30
    )
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1
