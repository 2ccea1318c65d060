"""One port for every agent: a restart takes it over, two that need it at a time are told so."""

from __future__ import annotations

import pytest
from overlay_jobs import Job, free_port, until
from test_overlay_strangers import listening, tries, waits

from commkit.errors import LaunchError
from commkit.launch import resolve
from commkit.settings import load

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def one_port():
    port = free_port()
    return {"COMMKIT_ONE_PORT": str(port), "MASTER_PORT": str(port)}


def another(rank_server, tmp_path_factory, hosts, env):
    return Job(rank_server, tmp_path_factory.mktemp("another"), hosts, env=env)


def test_the_next_job_waits_until_the_last_one_s_agent_has_let_the_port_go(
    jobs, rank_server, tmp_path_factory, one_port
):
    with jobs([1, 1], env=one_port) as first:
        first.start(0, tries, 1)
        assert first.values(0)[0][0] == "JoinTimeout"
        # Its agent stays for three seconds, for those who come too late.
        assert first.agents()
        with another(rank_server, tmp_path_factory, [1, 1], one_port) as second:
            second.start(0, waits)
            listening(second)
            # The other host shares this network namespace: it listens elsewhere.
            port = one_port["COMMKIT_ONE_PORT"]
            second.start(1, waits, env={"COMMKIT_ONE_PORT": "", "COMMKIT_PORT": port})
            second.values()


def test_a_second_job_is_told_who_holds_the_port(jobs, rank_server, tmp_path_factory, one_port):
    with jobs([1, 1], env=one_port) as first:
        first.start(0, waits)
        listening(first)
        holder = f"pid {first.agent_of(0)} (commkit-agent)"
        with another(rank_server, tmp_path_factory, [1, 1], one_port) as second:
            second.start(0, tries, 30)
            [(kind, said, _)] = second.values()
            assert kind == "JoinError"
            assert f"port {one_port['COMMKIT_ONE_PORT']}: " in said
            assert f"held by {holder}" in said
        # A job that keeps to one host needs no port.
        with another(rank_server, tmp_path_factory, [2], one_port) as alone:
            alone.start_all(waits)
            alone.values()
        first.kill(0)
        first.outcomes()


def test_hosts_that_share_a_network_namespace_are_told_that_they_cannot_share_the_port(
    jobs, one_port
):
    with jobs([1, 1, 1], env={**one_port, "COMMKIT_TREE_DEGREE": "1"}) as job:
        job.start(0, tries, 40)
        listening(job)
        root = job.agent_of(0)
        job.start(1, tries, 40)
        until(lambda: "agent 1, parent 0" in job.log_text(1))
        job.start(2, tries, 40)
        for kind, said, seconds in job.values():
            assert kind == "JoinError" and seconds < 35
            assert "host host-1 cannot listen: COMMKIT_ONE_PORT or COMMKIT_PORT_RANGE" in said
            assert "leaves one port" in said
            assert f"held by pid {root} (commkit-agent)" in said
            assert "share a network namespace need a range" in said


def listeners(port):
    count = 0
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as table:
            for line in list(table)[1:]:
                fields = line.split()
                count += fields[3] == "0A" and fields[1].endswith(f":{port:04X}")
    return count


def test_an_agent_that_becomes_the_root_of_a_big_world_has_a_listener_for_every_2048_hosts(
    jobs, one_port
):
    """Rank 1 comes first, and its agent is not the root yet: it does not listen."""
    big = {**one_port, "WORLD_SIZE": "8192", "LOCAL_WORLD_SIZE": "2"}
    port = int(one_port["COMMKIT_ONE_PORT"])
    with jobs([2], env=big) as job:
        job.start(1, tries, 4)
        until(job.agents)
        assert listeners(port) == 0
        job.start(0, tries, 3)
        until(lambda: "root of a world of 8192" in job.log_text())
        until(lambda: listeners(port) == 3, what="one listener for 2,048 hosts")
        assert [kind for kind, _, _ in job.values()] == ["JoinTimeout"] * 2


def test_one_port_is_the_port_of_all():
    settings = load({"COMMKIT_ONE_PORT": "31000"})
    assert (settings.root_port, settings.agent_ports) == (31000, (31000, 31000))
    spec = resolve(
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "COMMKIT_ONE_PORT": "31000"}
    )
    assert spec.root.ports == (31000,)
    assert spec.origins["root_port"] == "COMMKIT_ONE_PORT=31000"


@pytest.mark.parametrize("other", ["COMMKIT_PORT", "COMMKIT_PORT_RANGE"])
def test_one_port_beside_another_setting_of_ports_is_refused(other):
    value = {"COMMKIT_PORT": "31000", "COMMKIT_PORT_RANGE": "31000-31000"}[other]
    with pytest.raises(LaunchError, match=f"COMMKIT_ONE_PORT=31000 and {other}={value} are both"):
        load({"COMMKIT_ONE_PORT": "31000", other: value})


@pytest.mark.parametrize("name", ["COMMKIT_PORT", "COMMKIT_ONE_PORT"])
def test_the_port_of_torchrun_s_store_is_refused_for_agents(name):
    torchrun = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "r",
        name: "29500",
    }
    with pytest.raises(LaunchError, match=f"{name}=29500 is MASTER_PORT, on which torchrun's"):
        resolve(torchrun)
