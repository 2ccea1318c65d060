"""Workers that a framework handed out across host borders, and local ranks on other rails."""

from __future__ import annotations

import json
from pathlib import Path

from commkit.topology.fabric import Device, Host, Nic
from commkit.topology.workers import (
    by_host,
    crossing,
    differing,
    rail_mismatches,
    rails_of,
)

CASES = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).resolve().parent.parent / "cases" / "placement.json").read_text()
    )
}


def test_place_02_workers_come_host_by_host_in_order_of_their_gpus():
    case = CASES["PLACE-02"]
    workers = [(host, gpu) for host, gpu in case["input"]["data"]["workers"]]
    assert crossing(workers, case["input"]["data"]["tp"]) == (2, 2)
    ordered = [workers[w] for w in by_host(workers)]
    assert [list(worker) for worker in ordered] == case["expected"]["value"]["order"]
    assert crossing(ordered, case["input"]["data"]["tp"]) == (0, 2)


def test_place_05_a_host_whose_local_ranks_use_other_rails_is_listed():
    data = CASES["PLACE-05"]["input"]["data"]
    rails = {name: [v for k, v in row.items() if k[0] == "G"] for name, row in data.items()}
    assert rail_mismatches(rails) == []  # here it is the way between NICs that differs
    assert differing({name: row["crossNic"] for name, row in data.items()}, "crossNic") == [
        "host host2: crossNic is 1, on most hosts 0"
    ]
    found = rail_mismatches({**rails, "host3": ["A", "C", "B", "D"]})
    assert [(m.host, m.local_rank, m.rail, m.expected) for m in found] == [
        ("host3", 1, "C", "B"),
        ("host3", 2, "B", "C"),
    ]
    assert str(found[0]).startswith("host host3: local rank 1 uses rail C, most hosts use rail B")


def test_hosts_with_fewer_local_ranks_are_compared_as_far_as_they_go():
    found = rail_mismatches({"a": [0, 1], "b": [0], "c": [1, 1]})
    assert [(m.host, m.local_rank) for m in found] == [("c", 0)]
    assert rail_mismatches({}) == [] and differing({}, "x") == []


def test_an_accelerator_is_on_the_rail_of_the_nic_nearest_to_it():
    devices = (Device("GPU0"), Device("GPU1"))
    nics = (Nic("m0", rail=0), Nic("m1", rail=1))
    straight = (("GPU0", "m0", "PIX"), ("GPU0", "m1", "SYS"), ("GPU1", "m0", "SYS"),
                ("GPU1", "m1", "PIX"))  # fmt: skip
    crossed = tuple((a, b, {"PIX": "SYS", "SYS": "PIX"}[how]) for a, b, how in straight)
    hosts = [Host(f"n{i}", nics, devices, paths=straight) for i in range(2)]
    hosts.append(Host("n2", nics, devices, paths=crossed))
    rails = {host.name: rails_of(host) for host in hosts}
    assert rails == {"n0": [0, 1], "n1": [0, 1], "n2": [1, 0]}
    assert [str(m).partition(":")[0] for m in rail_mismatches(rails)] == ["host n2"] * 2
    assert rails_of(Host("n3", (Nic("m0"),), devices, paths=straight)) == []
