"""Four hosts on one Ethernet: ranks meet across them, and agents listen where they may."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.fabric


def test_unequal_hosts_join_gather_and_share_keys(fabric, ranks):
    gpu = fabric.hosts(4)
    placement = dict(zip(gpu, (4, 3, 2, 4), strict=True))
    agents = ranks(placement, master="10.77.0.1", COMMKIT_PORT_RANGE="31000-31009").meet()
    assert agents["gpu-1"]["open_ports"] == [29500]
    # By the root's own ranks there would be three hosts: the fourth may have to take children.
    listening = [agent for agent in agents.values() if agent["open_ports"]]
    assert len(listening) <= 2
    for agent in listening[1:]:
        (port,) = agent["open_ports"]
        assert port == int(agent["port"]) and 31000 <= port <= 31009
    # Every host has contacted the root once; the three are its children, and nobody else came.
    assert (agents["gpu-1"]["accepted_total"], agents["gpu-1"]["children"]) == ("3", "3")
    assert {agent["strangers"] for agent in agents.values()} == {"0"}


def test_a_chain_of_hosts_is_connected_by_the_addresses_that_agents_gave(fabric, ranks):
    gpu = fabric.hosts(4)
    agents = ranks(
        dict.fromkeys(gpu, 2), master="10.77.0.1", COMMKIT_TREE_DEGREE="1", COMMKIT_PORT="31000"
    ).meet()
    assert sorted(agent["children"] for agent in agents.values()) == ["0", "1", "1", "1"]
    assert agents["gpu-1"]["open_ports"] == [31000]


def test_a_secret_is_proven_between_hosts_and_another_one_is_named(fabric, ranks):
    gpu = fabric.hosts(2)
    secret = "correct horse"
    job = ranks(dict.fromkeys(gpu, 1), master="10.77.0.1", seconds=3, COMMKIT_SECRET=secret)
    job.start(gpu[0]).start(gpu[1], COMMKIT_SECRET="battery staple")
    outcomes = job.outcomes()
    assert [outcome.error for outcome in outcomes] == ["JoinTimeout", "JoinTimeout"]
    assert "missing: rank 1" in outcomes[0].text
    assert "COMMKIT_SECRET" in outcomes[1].text
    assert secret not in job.logs() and "battery" not in job.logs()
    ranks(dict.fromkeys(gpu, 1), master="10.77.0.1", COMMKIT_SECRET=secret).meet()
