"""Labs carry packets as they say, break as they are told, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import environment

from commkit.errors import LaunchError, UsageError
from commkit.topology import faults, netns, read_text
from commkit.topology.lab import Lab
from commkit.topology.writers import write

pytestmark = [
    pytest.mark.fabric,
    pytest.mark.usefixtures("needs_lab"),
    pytest.mark.timeout(120),
]

PORT = 7000
LAB = [sys.executable, "-m", "commkit", "topo", "lab"]


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    mine = f"commkit-lab-{os.getpid()}-"
    assert netns.names(mine) == []


def bound(lab, host, address, port=PORT, kind=socket.SOCK_DGRAM):
    with netns.thread_inside(lab.namespace(host)):
        made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
    made.bind((address, port))
    made.settimeout(5)
    return made


def passed(lab, a, b, count=1, size=8, rail=0, ipv6=False, seconds=0.3, first_port=20000):
    """How many datagrams of `count`, each of a port of its own, get from a to b."""
    to = (b.addresses6 if ipv6 else b.addresses4)[rail]
    by = (a.addresses6 if ipv6 else a.addresses4)[rail]
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(bound(lab, b, to))
        for i in range(count):
            sender = stack.enter_context(bound(lab, a, by, first_port + i))
            with contextlib.suppress(OSError):
                sender.sendto(bytes(size), (to, PORT))
        sink.settimeout(seconds)
        got = 0
        with contextlib.suppress(TimeoutError):
            while got < count:
                assert len(sink.recv(65536)) == size
                got += 1
        return got


def test_hosts_reach_one_another_on_every_rail_and_by_name():
    with Lab(spines=3, hosts_per_leaf=(2, 1, 1), rails=2) as lab:
        a, b, c, d = lab.hosts
        assert [host.group for host in lab.hosts] == [0, 0, 1, 2]
        for other in (b, c, d):
            for rail in (0, 1):
                for ipv6 in (False, True):
                    assert passed(lab, a, other, rail=rail, ipv6=ipv6) == 1
        before = lab.uplink_bytes()
        assert passed(lab, a, d, rail=1, size=1000, count=20) == 20
        sent = {key: up - before[key][0] for key, (up, _) in lab.uplink_bytes().items()}
        assert sum(n for (g, rail, _), n in sent.items() if (g, rail) == (0, 1)) >= 20_000
        assert sum(n for (_, rail, _), n in sent.items() if rail == 0) < 1000
        name = lab.popen(c, ["sh", "-c", "hostname; getent hosts h3"], stdout=subprocess.PIPE)
        assert name.communicate()[0].decode().split() == ["h2", d.address, "h3"]
        fabric = lab.fabric()
        assert read_text(write(fabric, "toml")) == fabric
        assert [fabric.distance(0, i) for i in (1, 2, 3)] == [0, 1, 1]


def test_rails_with_spines_of_their_own_do_not_meet():
    with Lab(2, 2, 1, rails=2, rail_only=True, ipv6=False) as lab:
        a, b = lab.hosts
        assert passed(lab, a, b, rail=0) == passed(lab, a, b, rail=1) == 1
        with pytest.raises(LaunchError, match="Network is unreachable|No route"):
            netns.call(lab.namespace("leaf0-rail0"), "ip", "route", "get", "192.0.2.1")
        assert {"spine0-rail0", "spine0-rail1"} <= set(lab.shape.nodes)


def test_a_link_that_is_down_is_avoided_once_routes_have_converged():
    with Lab(3, 2, 1) as lab:
        a, b, c = lab.hosts
        flows = [lab.flow(c, a, 20000 + i, PORT, protocol=17) for i in range(40)]
        lost = [lab.path(flow) for flow in flows].count(1)
        assert 5 < lost < 35
        lab.set_link(0, 1, up=False, converge=False)
        # Leaf 2 does not know: what it gives to spine 1 is lost, and nothing else is.
        assert passed(lab, c, a, count=40) == 40 - lost
        lab.converge()
        for source, target in ((c, a), (a, c)):
            for ipv6 in (False, True):
                assert passed(lab, source, target, count=40, ipv6=ipv6) == 40
        before = lab.uplink_bytes()
        assert passed(lab, c, b, count=40) == 40
        after = lab.uplink_bytes()
        # Between two other leaves both spines are used as before.
        assert all(after[2, 0, s][0] > before[2, 0, s][0] for s in (0, 1))
        lab.set_link(0, 0, up=False)
        assert passed(lab, c, a) == 0
        with pytest.raises(UsageError, match="no spine with cables to both"):
            lab.path(flows[0])
        lab.set_link(0, 0, up=True)
        lab.set_link(0, 1, up=True)
        for ipv6 in (False, True):
            assert passed(lab, a, c, count=40, ipv6=ipv6) == 40
            assert passed(lab, c, a, count=40, ipv6=ipv6) == 40
        with pytest.raises(UsageError, match="spine 2: expected 0 to 1"):
            lab.set_link(0, 2, up=False)


def test_packets_are_lost_by_chance_and_by_what_they_are():
    with Lab(2, 1, 1) as lab:
        a, b = lab.hosts
        faults.drop(lab, "spine0", "down0r0", 0.5)
        got = passed(lab, a, b, count=200)
        assert 50 < got < 150
        assert faults.dropped(lab, "spine0") >= 200 - got
        faults.heal(lab, "spine0")
        faults.drop(lab, "spine0", "down0r0", match="udp sport 20007")
        assert passed(lab, a, b, count=20) == 19
        faults.heal(lab, "spine0")
        assert passed(lab, a, b, count=20) == 20
        with pytest.raises(UsageError, match="loss of 0"):
            faults.drop(lab, "spine0", "down0r0", 0)
        with pytest.raises(LaunchError, match="nft"):
            faults.drop(lab, "spine0", "down0r0", match="no such words")


def test_a_small_mtu_in_the_middle_swallows_what_is_larger():
    with Lab(2, 1, 1) as lab:
        a, b = lab.hosts
        faults.set_mtu(lab, "spine0", "down1r0", 9000)
        faults.set_mtu(lab, "leaf1", "up0", 1000)
        assert passed(lab, a, b, size=900) == 1
        assert passed(lab, a, b, size=1200) == 0
        faults.set_mtu(lab, "leaf1", "up0", 1500)
        assert passed(lab, a, b, size=1200) == 1


def test_a_frozen_host_answers_as_a_kernel_only_and_a_dead_one_not_at_all():
    with Lab(2, 1, 1) as lab:
        a, b = lab.hosts
        process = lab.popen(b, ["sleep", "100"])
        while lab.pids(b) != [process.pid] or b"sleep" not in command(process.pid):
            time.sleep(0.01)
        assert faults.freeze(lab, b) == [process.pid]
        while state(process.pid) != "T":
            time.sleep(0.01)
        assert passed(lab, a, b) == 1
        assert faults.thaw(lab, b) == [process.pid]
        assert state(process.pid) in "SR"
        faults.power_off(lab, b)
        assert process.wait(5) == -signal.SIGKILL
        assert passed(lab, a, b) == 0
        faults.set_nic(lab, b, up=True)
        for ipv6 in (False, True):
            assert passed(lab, a, b, ipv6=ipv6) == 1


def command(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_shaped_ports_hold_a_flow_to_their_rate():
    with Lab(2, 1, 1, uplink_mbit=8) as lab:
        a, b = lab.hosts
        sink = bound(lab, b, b.address)
        sender = bound(lab, a, a.address)
        with sink, sender:
            start = time.monotonic()
            for _ in range(4000):
                sender.sendto(bytes(1000), (b.address, PORT))
            took = time.monotonic() - start
            sink.settimeout(0.5)
            got = 0
            with contextlib.suppress(TimeoutError):
                while True:
                    sink.recv(2048)
                    got += 1
        # 1000 a second, and what the queue holds: 40 ms and a bucket.
        assert 10 < got < 100 + 1100 * took, f"{got} in {took:.3f} s"
        faults.set_rate(lab, "leaf0", "up0", 1000)
        assert passed(lab, a, b, count=200) == 200


# --- What stays ------------------------------------------------------------------------------

OWNER = """
import sys, time
from commkit.topology.lab import Lab
lab = Lab(2, 2, 1).up()
lab.popen(lab.hosts[1], ["sleep", "1000"])
while not lab.pids():
    time.sleep(0.01)
sys.stdout.write(lab.prefix + "\\n")
sys.stdout.flush()
time.sleep(1000)
"""


def owner():
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=environment()
    )
    prefix = process.stdout.readline().strip()
    assert len(netns.names(prefix)) == 6
    return process, prefix


def test_what_a_killed_owner_leaves_is_swept_with_its_processes_and_a_living_one_s_stays():
    killed, prefix = owner()
    living, other = owner()
    try:
        killed.kill()
        killed.wait()
        left = netns.names(prefix)
        (sleeping,) = netns.pids(left)
        assert len(left) == 6
        # Same pid, another start: the lab of a process whose pid has been given away.
        recycled = f"commkit-lab-{living.pid}-1-0-leaf0"
        netns.batch("ip", [f"netns add {recycled}"])
        swept = subprocess.run(
            [*LAB, "--sweep"], capture_output=True, text=True, env=environment(), check=True
        )
        assert sorted(swept.stdout.split()[1::2]) == sorted([*left, recycled])
        assert netns.names(prefix) == [] and not netns.pids(left)
        assert not Path(f"/proc/{sleeping}").exists() or state(sleeping) == "Z"
        assert len(netns.names(other)) == 6 and len(netns.pids(netns.names(other))) == 1
        again = Lab(2, 1, 1)
        with again:
            assert len(netns.names(other)) == 6
    finally:
        for process in (killed, living):
            process.kill()
            process.wait()
            process.stdout.close()
        netns.sweep()
    assert netns.names(other) == []


def test_an_error_inside_and_a_forked_child_leave_what_they_should():
    with pytest.raises(ZeroDivisionError), Lab(2, 1, 1) as lab:
        prefix = lab.prefix
        pid = os.fork()
        if pid == 0:
            lab.down()
            os._exit(0)
        os.waitpid(pid, 0)
        assert len(netns.names(prefix)) == 5
        lab.popen(lab.hosts[0], ["sh", "-c", "trap '' TERM; sleep 100"])
        _ = 1 / 0
    assert netns.names(prefix) == []


def test_names_of_a_lab_that_is_down_are_refused():
    lab = Lab(2, 1, 1)
    with pytest.raises(UsageError, match="leaf0: the lab is not up"):
        lab.namespace("leaf0")
    with lab, pytest.raises(UsageError, match="up already"):
        lab.up()


# --- commkit topo lab ------------------------------------------------------------------------


def topo_lab(*arguments, **options):
    return subprocess.run(
        [*LAB, *arguments], capture_output=True, text=True, env=environment(), **options
    )


def test_the_command_runs_on_every_host_in_rank_order_and_reports_bytes(tmp_path):
    toml, report = tmp_path / "fabric.toml", tmp_path / "report.json"
    say = "echo $RANK $LOCAL_RANK $(hostname) $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR"
    where = ["--hosts", "h[3,0]", "--ranks-per-host", "2"]
    files = ["--topology", str(toml), "--report", str(report)]
    done = topo_lab("--spines", "1", *where, *files, "--", "sh", "-c", say)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 0 h3 4 2 10.0.0.14",
        "1 1 h3 4 2 10.0.0.14",
        "2 0 h0 4 2 10.0.0.14",
        "3 1 h0 4 2 10.0.0.14",
    ]
    assert [host.name for host in read_text(toml.read_text()).hosts] == ["h0", "h1", "h2", "h3"]
    told = json.loads(report.read_text())
    assert told["status"] == 0
    assert [(row["leaf"], row["spine"]) for row in told["uplinks"]] == [
        ("leaf0", "spine0"),
        ("leaf1", "spine0"),
    ]
    assert "bytes up" in done.stderr


def test_the_first_rank_that_fails_ends_the_others_and_gives_the_status():
    fail = "test $RANK = 1 && exit 7; sleep 100"
    done = topo_lab("sh", "-c", fail, timeout=60)
    assert done.returncode == 7
    assert done.stderr.splitlines()[-1] == "commkit: rank 1 on h1 ended with status 7"
    assert topo_lab("--", "sh", "-c", "kill -9 $$", timeout=60).returncode == 137


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job_and_removes_the_lab(number):
    process = subprocess.Popen(
        [*LAB, "--", "sh", "-c", "echo ready; exec sleep 100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    for _ in range(4):
        assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number], errors
    assert netns.names(f"commkit-lab-{process.pid}-") == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "expected a command behind --"),
        (("--spine", "3", "--", "true"), "No such option"),
        (("--sweep", "--", "true"), "--sweep runs no command"),
        (("--hosts", "h[0,9]", "--", "true"), "host 'h9': expected hosts of the lab, h0 to h3"),
        (("--hosts", "h[0,0]", "--", "true"), "every host once"),
        (("--spines", "0", "--", "true"), "expected 1 or more of each"),
        (("--uplink-mbit", "0", "--", "true"), "uplink_mbit=0"),
        (("--topology", "/no/such/file", "--", "true"), "--topology /no/such/file: No such file"),
    ],
)
def test_a_wrong_argument_is_one_line_and_no_lab(arguments, words):
    done = topo_lab(*arguments)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1
