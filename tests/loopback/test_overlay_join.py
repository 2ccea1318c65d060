"""Forming a world: finding the root, who is missed, what is refused, who failed."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import socket
import time

import pytest
from overlay_jobs import free_port, until

from commkit import errors, overlay

pytestmark = pytest.mark.timeout(300)  # the first test may have to build the sanitized agent


def ordinary(me, pause=0.0):
    """The whole life of a rank; its identity."""
    time.sleep(pause)
    world = me.join()
    assert world.all_gather(b"%d" % me.rank, timeout=20) == [
        b"%d" % rank for rank in range(me.world_size)
    ]
    world.connected("world", range(me.world_size))
    assert world.leave(10)
    return world.identity


def tries(me, timeout, at_once=True):
    """(class, text, seconds) of the join's error, and the notices before it."""
    if not at_once:
        me.meet()
    started = time.monotonic()
    try:
        me.join(timeout)
    except errors.CommkitError as error:
        return type(error).__name__, str(error), time.monotonic() - started, me.notices
    return "joined", "", time.monotonic() - started, me.notices


def one_line(text):
    assert text and "\n" not in text
    return text


# --- Shapes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "degree"),
    [([1], ""), ([4], ""), ([4] * 4, ""), ([1, 3, 4], ""), ([1] * 12, "1"), ([1] * 12, "2")],
)
def test_a_world_forms_whatever_its_shape(checked_jobs, hosts, degree):
    with checked_jobs(hosts, env={"COMMKIT_TREE_DEGREE": degree}) as job:
        job.start_all(ordinary)
        identities = job.values()
    assert len({one.epoch for one in identities}) == 1
    assert {one.hosts for one in identities} == {len(hosts)}
    assert [one.local_world_size for one in identities] == [n for n in hosts for _ in range(n)]
    assert [one.local_rank for one in identities] == [r for n in hosts for r in range(n)]
    assert sorted({one.host_index for one in identities}) == list(range(len(hosts)))
    assert len({one.agent_pid for one in identities}) == len(hosts)
    assert len({one.store_token for one in identities}) == sum(hosts)


def test_ranks_may_come_in_any_order(jobs):
    with jobs([1, 2, 3, 2], env={"COMMKIT_TREE_DEGREE": "1"}) as job:
        pauses = random.Random(7)
        for rank in range(job.world):
            job.start(rank, ordinary, pauses.random())
        job.values()


@pytest.mark.parametrize("hosts", [[2], [1, 2], [2, 1]])
def test_rank_0_may_be_the_last_to_come(jobs, hosts):
    with jobs(hosts) as job:
        for rank in range(1, job.world):
            job.start(rank, ordinary)
        job.start(0, ordinary, 1.0)
        job.values()


def test_rank_0_may_be_anywhere_on_its_host(jobs):
    with jobs([2, 2]) as job:
        for rank, host in enumerate([1, 0, 0, 1]):
            job.start(rank, ordinary, host=host)
        identities = job.values()
    assert [one.local_rank for one in identities] == [0, 0, 1, 1]


# --- Finding the root ------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["localhost", "127.0.1.1", "::1", "[::1]"])
def test_the_root_is_found_by_name_and_in_both_families(jobs, address):
    with jobs([1, 1], env={"MASTER_ADDR": address}) as job:
        job.start_all(ordinary)
        job.values()


def by_file(me, path):
    world = me.join(
        init_method=f"file://{path}", rank=me.rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    world.barrier(timeout=20)
    assert world.leave(10)


@pytest.mark.parametrize("old", ["", "commkit1 port=9 machine=x addr=127.0.0.1\n", "garbage\0"])
def test_a_file_is_a_meeting_place_whatever_an_earlier_job_left_in_it(jobs, tmp_path, old):
    path = tmp_path / "root"
    if old:
        path.write_text(old)
    with jobs([1, 2]) as job:
        job.start_all(by_file, str(path))
        job.values()
    assert not path.exists(), "the root takes its file away"


def test_commkit_port_moves_the_root(jobs):
    port = free_port()
    with jobs([1, 1], env={"COMMKIT_PORT": str(port)}) as job:
        job.start_all(ordinary)
        job.values()
        assert f"listening on port {port}," in job.log_text()


def test_commkit_port_range_holds_every_other_agent(jobs):
    with jobs([1, 1, 1], env={"COMMKIT_PORT_RANGE": "21040-21079"}) as job:
        job.start_all(ordinary)
        job.values()
        ports = sorted(map(int, re.findall(r"listening on port (\d+)", job.log_text())))
        assert int(job.env["MASTER_PORT"]) in ports
        assert sum(21040 <= port <= 21079 for port in ports) == 2


def test_a_full_port_range_is_named_with_its_owner(jobs):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        env = {"COMMKIT_PORT_RANGE": f"{port}-{port}", "COMMKIT_TREE_DEGREE": "1"}
        with jobs([1, 1, 1], env=env) as job:
            for rank in range(3):
                job.start(rank, tries, 20)
            values = job.values()
    for kind, text, seconds, _ in values:
        assert kind == "JoinError" and seconds < 15
        assert str(port) in one_line(text) and f"pid {os.getpid()}" in text
        assert "COMMKIT_PORT_RANGE" in text


def test_a_host_without_children_needs_no_port(jobs):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with jobs([1, 1], env={"COMMKIT_PORT_RANGE": f"{port}-{port}"}) as job:
            for rank in range(2):
                job.start(rank, tries, 20)
            assert [kind for kind, *_ in job.values()] == ["joined", "joined"]


def test_a_taken_root_port_is_named_with_its_owner(jobs):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with jobs([2, 1], env={"MASTER_PORT": str(port)}) as job:
            for rank in range(2):
                job.start(rank, tries, 20)
            for kind, text, seconds, _ in job.values():
                assert kind == "JoinError" and seconds < 15
                assert f"port {port}" in one_line(text) and f"pid {os.getpid()}" in text
                assert "MASTER_PORT" in text and "in use" in text


def several_ports(me, ports):
    spec = me.spec()
    root = type(spec.root)("endpoint", spec.root.host, tuple(ports))
    spec = type(spec)(**{f: getattr(spec, f) for f in spec.__dataclass_fields__} | {"root": root})
    world = overlay.join(spec, 20)
    world.barrier(timeout=20)
    return world.leave(10)


@pytest.mark.parametrize("speaks", [False, True])
def test_every_rank_goes_on_to_the_next_port_where_the_first_is_taken(jobs, speaks):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        ports = [taken.getsockname()[1], free_port(), free_port()]
        with jobs([1, 1, 1]) as job:
            for rank in (1, 2, 0):
                job.start(rank, several_ports, ports)
            if speaks:
                taken.settimeout(20)
                stranger, _ = taken.accept()
                stranger.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                stranger.close()
            assert job.values() == [True, True, True]


def test_a_root_name_that_does_not_resolve_fails_in_seconds(jobs):
    with jobs([1, 1], env={"MASTER_ADDR": "no-such-host.invalid"}, deadline=40.0) as job:
        job.start(1, tries, 35)
        kind, text, seconds, _ = job.values()[0]
    assert kind == "JoinError" and seconds < 30
    assert "no-such-host.invalid" in one_line(text) and "MASTER_ADDR" in text


def test_a_name_is_patiently_retried_where_the_launcher_says_so(jobs):
    env = {"MASTER_ADDR": "no-such-host.invalid", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    with jobs([1, 1], env=env) as job:
        job.start(1, tries, 12)
        kind, text, _, _ = job.values()[0]
    assert kind == "JoinTimeout" and "no-such-host.invalid" in one_line(text)


# --- Who is missing --------------------------------------------------------------------------


@pytest.mark.parametrize("degree", ["1", "8"])
def test_missing_ranks_are_named_to_every_rank_at_the_deadline(checked_jobs, degree):
    with checked_jobs([2, 2, 2, 2, 4], env={"COMMKIT_TREE_DEGREE": degree}) as job:
        missing = (3, 8, 9, 10, 11)
        for rank in range(job.world):
            if rank not in missing:
                job.start(rank, tries, 2.5)
        values = job.values()
    for kind, text, _, _ in values:
        assert kind == "JoinTimeout", text
        assert "7 of 12 ranks joined" in one_line(text)
        assert "missing: ranks 3,8-11" in text
        assert "0-2,4-7" in text or ("0-1 on host-0" in text and "2 on host-1" in text)
    assert len({text for _, text, _, _ in values}) == 1
    progress = [text for _, _, _, notices in values for kind, text in notices if kind == "progress"]
    assert any("missing: ranks 3,8-11" in text for text in progress)


def test_the_shortest_deadline_of_a_rank_deep_in_the_tree_ends_the_join_for_all(jobs):
    with jobs([1] * 6, env={"COMMKIT_TREE_DEGREE": "1"}) as job:
        for rank in range(5):
            job.start(rank, tries, 1.5 if rank == 4 else 20)
        for kind, text, seconds, _ in job.values():
            assert kind == "JoinTimeout" and "missing: rank 5" in one_line(text)
            assert seconds < 15


def test_ranks_of_an_incomplete_host_are_counted_at_the_deadline(jobs):
    with jobs([2, 4], env={"LOCAL_WORLD_SIZE": "4"}) as job:
        job.start(0, tries, 20, env={"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
        job.start(1, tries, 20, env={"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
        for rank in (2, 3, 5):
            job.start(rank, tries, 0.8, env={"LOCAL_RANK": str(rank - 2)})
        for kind, text, _, _ in job.values():
            assert kind == "JoinTimeout" and "missing: rank 4" in one_line(text)
            assert "host-1 has 3 of its 4" in text


def test_ranks_without_a_root_say_where_they_looked(jobs):
    with jobs([1, 2]) as job:
        job.start(1, tries, 1.5)
        job.start(2, tries, 1.5)
        for kind, text, _, _ in job.values():
            assert kind == "JoinTimeout"
            assert f"127.0.0.1:{job.env['MASTER_PORT']}" in one_line(text)
            assert "ranks 1-2" in text and "host-1" in text


# --- Who failed ------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", ["1", "8"])
def test_a_rank_killed_while_joining_is_told_to_every_rank(checked_jobs, degree):
    with checked_jobs([1, 2, 1, 1], env={"COMMKIT_TREE_DEGREE": degree}) as job:
        for rank in range(4):
            job.start(rank, tries, 30)
        until(lambda: job.log_text().count(", parent ") == 2)
        time.sleep(0.3)  # the agent has read rank 2's request
        job.kill(2)
        victim = job.ranks[2].pid
        values = job.values(0, 1, 3)
    for kind, text, seconds, _ in values:
        assert kind == "JoinError" and seconds < 20
        for part in ("rank 2", f"pid {victim}", "host-1", "signal 9", "while joining"):
            assert part in one_line(text)


def test_a_rank_claimed_twice_on_one_host_names_both(jobs):
    with jobs([2, 2]) as job:
        for rank in range(3):
            job.start(rank, tries, 30)
        job.start(2, tries, 30, label="twin")
        pids = [job.ranks[key].pid for key in (2, "twin")]
        for kind, text, seconds, _ in job.values():
            assert kind == "JoinError" and seconds < 20
            assert "rank 2" in one_line(text) and "host-1" in text
            assert all(f"pid {pid}" in text for pid in pids)


def test_a_rank_claimed_on_two_hosts_names_both(jobs):
    """Both nodes were started with node rank 0."""
    with jobs([2, 2]) as job:
        for rank in range(2):
            job.start(rank, tries, 30)
        until(lambda: "root of a world" in job.log_text())
        time.sleep(0.3)  # both have come
        # Rank 1's twin first: a second rank 0 would be a second root.
        job.start(1, tries, 30, host=1, label="twin")
        for kind, text, seconds, _ in job.values():
            assert kind == "JoinError" and seconds < 20
            assert "rank 1" in one_line(text) and "ranks 2-3" in text
            for key, host in ((1, "host-0"), ("twin", "host-1")):
                assert f"pid {job.ranks[key].pid} on host {host}" in text


def test_two_hosts_that_both_claim_rank_0_fail_long_before_the_deadline(checked_jobs):
    with checked_jobs([2, 2]) as job:
        for rank in range(2):
            job.start(rank, tries, 30)
            job.start(rank, tries, 30, host=1, label=f"twin of {rank}")
        for kind, text, seconds, _ in job.values():
            assert kind == "JoinError" and seconds < 20
            # Which of the ranks that both claim arrives first is chance.
            assert re.search(r"rank [01] is claimed by pid", one_line(text))


@pytest.mark.parametrize("host", [0, 1])
def test_unequal_world_sizes_name_both(jobs, host):
    with jobs([2, 2]) as job:
        job.start(0, tries, 30)
        until(lambda: "root of a world" in job.log_text())
        job.start(1, tries, 30, host=host, env={"WORLD_SIZE": "6"})
        for kind, text, seconds, _ in job.values():
            assert kind == "JoinError" and seconds < 20
            assert "6" in one_line(text) and "4" in text and f"host-{host}" in text


@pytest.mark.parametrize("victim", [0, 1])
def test_an_agent_killed_while_joining_is_told_to_every_rank(checked_jobs, victim):
    with checked_jobs([1, 1, 2], env={"COMMKIT_TREE_DEGREE": "1"}) as job:
        for rank in range(3):
            job.start(rank, tries, 30)
        until(lambda: job.log_text().count(", parent ") == 2)
        time.sleep(0.3)  # a rank whose agent ends in its first moments starts another one
        os.kill(job.agent_of(victim), signal.SIGKILL)
        for rank, (kind, text, seconds, _) in enumerate(job.values()):
            assert seconds < 20
            if rank == victim:
                assert kind == "OverlayError" and str(job.directory) in one_line(text)
            else:
                assert kind == "JoinError" and "host-" in one_line(text)


def interrupted(me):
    me.say()
    started = time.monotonic()
    try:
        me.join(30)
    except KeyboardInterrupt:
        return time.monotonic() - started
    return -1


def test_an_interrupt_ends_a_join_at_once_and_the_others_hear(jobs):
    with jobs([1, 2]) as job:
        job.start(0, tries, 30)
        job.start(1, interrupted)
        job.expect(1)
        until(lambda: ", parent 0" in job.log_text())
        time.sleep(0.3)  # past the start of the join, into its wait
        job.kill(1, signal.SIGINT)
        assert 0 <= job.values(1)[0] < 20
        kind, text, seconds, _ = job.values(0)[0]
        assert kind == "JoinError" and "rank 1" in one_line(text) and seconds < 20


def tries_again(me):
    try:
        me.join(0.7)
    except errors.JoinTimeout as error:
        first = str(error)
        me.meet()
        # The error, and with it the first try, is still alive here.
        world = me.join(10)
    assert world.leave(10)
    return first


def test_a_join_may_be_tried_again_inside_the_handler_of_its_error(jobs):
    with jobs([1, 2]) as job:
        job.start(0, tries_again)
        job.start(1, tries_again)
        job.expect(0, 1)
        job.start(2, ordinary_in_silence)
        job.tell(0, 1)
        assert all("missing: rank 2" in text for text in job.values(0, 1))
        job.values(2)


def ordinary_in_silence(me):
    return me.join(10).leave(10)


# --- The agent program -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "missing"), ("#!/bin/sh\nexit 127\n", "127"), ("#!/no/such/interpreter\n", "cannot")],
)
def test_an_agent_that_cannot_run_is_named_in_seconds(jobs, tmp_path, content, said):
    program = tmp_path / "broken-agent"
    if content is not None:
        program.write_text(content)
        program.chmod(0o755)
    with jobs([1]) as job:
        job.start(0, tries, 20, agent=str(program))
        kind, text, seconds, _ = job.values()[0]
    assert kind == "OverlayError" and seconds < 15
    assert str(program) in one_line(text) and said in text


def test_a_log_directory_that_cannot_be_written_is_said_and_does_not_stop_the_job(jobs):
    with jobs([1, 1], env={"COMMKIT_LOG_DIR": "/proc/no/such/place"}) as job:
        job.start_all(reports_notices)
        for notices in job.values():
            assert any("/proc/no/such/place" in text for _, text in notices)


def reports_notices(me):
    world = me.join()
    world.barrier(timeout=20)
    world.leave(10)
    return me.notices


# --- Local ranks -----------------------------------------------------------------------------


def local(me):
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("commkit").addHandler(handler)
    world = overlay.join(me.spec(), 20)  # with the notices that users get
    one = world.identity
    world.barrier(timeout=20)
    assert world.leave(10)
    return (one.local_rank, one.local_world_size), warned


@pytest.mark.parametrize(
    ("placed", "env", "expected"),
    [
        # No launcher says it: 2 ranks on one host, 4 on the other, interleaved.
        ([0, 0, 1, 1, 1, 1], [{}] * 6, [(0, 2), (1, 2), (0, 4), (1, 4), (2, 4), (3, 4)]),
        ([0, 1, 0, 1], [{}] * 4, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        # Given in another order than that of the ranks, and consistent: kept.
        (
            [0, 0],
            [{"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, {"LOCAL_RANK": "0"}],
            [(1, 2), (0, 2)],
        ),
    ],
)
def test_local_ranks_are_found_by_exchange(jobs, placed, env, expected):
    with jobs([len(placed)]) as job:
        for rank, (host, given) in enumerate(zip(placed, env, strict=True)):
            job.start(rank, local, host=host, env=given)
        assert [value for value, _ in job.values()] == expected


def test_a_wrong_local_size_is_corrected_on_every_rank_and_said(jobs):
    """MPICH once gave every rank a local size of 1, with local ranks of 0 and 1."""
    with jobs([4]) as job:
        for rank, host in enumerate([0, 1, 0, 1]):
            given = {"LOCAL_RANK": str(rank // 2), "LOCAL_WORLD_SIZE": "4"}
            job.start(rank, local, host=host, env=given)
        values = job.values()
    assert [value for value, _ in values] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert all(any("local" in text.lower() for text in warned) for _, warned in values)


def test_ranks_of_one_host_never_share_a_local_rank(jobs):
    with jobs([2]) as job:
        job.start(0, local, env={"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
        job.start(1, local, env={"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
        assert sorted(value for value, _ in job.values()) == [(0, 2), (1, 2)]
