"""Names: /etc/hosts as distributions and pods write it, a late name, and no DNS without need."""

from __future__ import annotations

import subprocess
import sys

import pytest
from nameserver import Nameserver

pytestmark = pytest.mark.fabric


@pytest.fixture
def nameserver(fabric):
    with Nameserver(fabric, "10.77.0.254") as server:
        yield server


def test_a_host_name_that_means_127_0_1_1_is_given_to_nobody(fabric, ranks):
    gpu = fabric.hosts(3)
    for i, host in enumerate(gpu, 1):
        host.set_hosts(f"127.0.1.1 gpu-{i}", *(f"10.77.0.{n} gpu-{n}-data" for n in (1, 2, 3)))
    job = ranks(dict.fromkeys(gpu, 2), master="gpu-1-data", COMMKIT_TREE_DEGREE="1")
    for name, agent in job.meet().items():
        # The end of the chain listens nowhere, so it gives none.
        assert agent["addresses"] in (["10.77.0." + name[-1]], [] if name != "gpu-1" else None)


def test_master_addr_as_a_name_that_is_loopback_where_rank_0_is(fabric, ranks):
    """Debian's hosts file on the root's host, the real address on the others."""
    gpu = fabric.hosts(3)
    gpu[0].set_hosts("127.0.1.1 gpu-1")
    ranks(dict.fromkeys(gpu, 2), master="gpu-1").meet()


def test_a_master_addr_that_is_loopback_everywhere_is_named_at_the_deadline(fabric, ranks):
    gpu = fabric.hosts(2)
    job = ranks(dict.fromkeys(gpu, 2), master="127.0.0.1", seconds=2).start()
    outcomes = job.outcomes()
    assert [outcome.error for outcome in outcomes] == ["JoinTimeout"] * 4
    assert "missing: ranks 2-3" in outcomes[0].text
    for outcome in outcomes[2:]:
        assert "ranks 2-3 on host gpu-2" in outcome.text
        assert "127.0.0.1:29500" in outcome.text


def test_a_name_that_never_appears_is_given_up_long_before_the_deadline(fabric, ranks):
    """Without a reason for patience; the deadline here is longer than the test may take."""
    gpu = fabric.hosts(2)
    # The agent still tries to tell the root that its ranks will not come.
    fabric.grace_seconds = 20.0
    job = ranks(dict.fromkeys(gpu, 1), master="no-such-host.invalid", seconds=300)
    (second,) = job.start(gpu[1]).outcomes()
    assert second.error == "JoinError"
    assert "no-such-host.invalid" in second.text and "gpu-2" in second.text


def test_a_name_that_the_dns_learns_late_is_waited_for_on_kubernetes(fabric, ranks, nameserver):
    gpu = fabric.hosts(2)
    job = ranks(dict.fromkeys(gpu, 2), master="gpu-1.headless", KUBERNETES_SERVICE_HOST="10.96.0.1")
    job.start()
    # Rank 0 does not need the name; the others have been told twice that it does not exist.
    job.wait_for_log("root of a world of 4 ranks")
    nameserver.wait_for("gpu-1.headless", times=4)
    nameserver.names["gpu-1.headless"] = "10.77.0.1"
    assert [value["hosts"] for value in job.values()] == [2] * 4


@pytest.mark.parametrize("names", [(), ("gpu-1", "gpu-2", "gpu-3")], ids=["numbers", "hosts-file"])
def test_nobody_asks_the_dns_for_what_is_known_without_it(fabric, ranks, nameserver, names):
    gpu = fabric.hosts(3)
    if not names:
        for host in gpu:
            host.set_hosts()  # not even its own name
    ranks(dict.fromkeys(gpu, 2), master=names[0] if names else "10.77.0.1").meet()
    # The silence was not that of a broken cable: a look-up does come here.
    look_up = "import socket; socket.getaddrinfo('seen.example', 1)"
    fabric.popen(gpu[1].command(sys.executable, "-c", look_up), stderr=subprocess.DEVNULL)
    nameserver.wait_for("seen.example", times=1)
    assert set(nameserver.asked) == {"seen.example"}
