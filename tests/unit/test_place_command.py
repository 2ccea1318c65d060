"""`commkit place` as a user runs it: report, files, JSON, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CONF = """\
SwitchName=s0 Nodes=n[1-8]
SwitchName=s1 Nodes=n[9-12]
SwitchName=s2 Nodes=n[13-16]
SwitchName=top Switches=s[0-2]
"""
HOSTS = "n[1,9,2,10,3,13,4-8,11,12,14-16]"
WORK = ("--traffic", "dp=all_reduce:10G", "--traffic", "pp=send_recv:1G")


@pytest.fixture
def place(tmp_path):
    """place(ARGUMENTS...): (exit code, standard output, standard error)."""
    topology = tmp_path / "topology.conf"
    topology.write_text(CONF)

    def run(*arguments, hosts=HOSTS, layout="tp=8,dp=8,pp=2"):
        command = [sys.executable, "-m", "commkit", "place", "--topology", str(topology)]
        done = subprocess.run(
            [*command, "--hosts", hosts, "--layout", layout, *arguments],
            capture_output=True,
            text=True,
            timeout=50,
            cwd=tmp_path,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_the_report_shows_orders_bound_and_ranks(place):
    code, output, errors = place(*WORK, "--advice", "roce")
    assert (code, errors) == (0, "")
    for word in ("plan", "launcher", "Slurm", "names", "random", "bound", "ranks 0-7: n"):
        assert word in output
    assert "measure: NCCL_IB_QPS_PER_CONNECTION=1" in output
    assert "digest " in output


def test_json_has_the_order_and_what_it_costs(place):
    code, output, _ = place(*WORK, "--json")
    report = json.loads(output)
    assert code == 0 and sorted(report["hosts"]) == sorted(f"n{i}" for i in range(1, 17))
    assert report["gaps"] == [1.0]
    assert report["score"]["crossing"][0] < report["baselines"]["launcher"]["crossing"][0]
    assert set(report["baselines"]) == {"launcher", "Slurm", "names", "random"}
    # Hosts of one switch hold ranks in a row.
    assert {int(host[1:]) <= 8 for host in report["hosts"][:8]} == {
        report["hosts"][0] in {f"n{i}" for i in range(1, 9)}
    }


def test_what_is_emitted_is_the_order_of_the_report(place, tmp_path):
    _, output, _ = place(*WORK, "--json")
    hosts = json.loads(output)["hosts"]
    code, text, errors = place(*WORK, "--emit", "slurm")
    assert (code, errors) == (0, "")
    assert text.split() == [host for host in hosts for _ in range(8)]
    code, shown, _ = place(*WORK, "--emit", "hostfile", "--output", "hostfile")
    assert code == 0 and "digest" in shown
    assert (tmp_path / "hostfile").read_text().split() == [f"{host}:8" for host in hosts]


def test_a_lost_host_is_replaced(place):
    code, output, _ = place(
        *WORK, "--lost", "n3", "--spare", "n16", hosts="n[1-8,9-15]", layout="tp=8,dp=15"
    )
    assert code == 0, output
    assert "surviving hosts that move: none" in output
    assert "ranks 16-23: n16 instead of n3" in output


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("--traffic", "dp=sum:1G"), 2, "collective 'sum': expected one of all_reduce"),
        (("--traffic", "dp=all_reduce:1G", "--model", "layers=1"), 2, "expected one of them"),
        (("--output", "x"), 2, "say with --emit"),
        (("--format", "papyrus"), 2, "papyrus"),
        (("--ranks-per-host", "3"), 2, ""),
    ],
)
def test_a_wrong_argument_is_one_line(place, arguments, code, expected):
    found, output, errors = place(*arguments)
    assert (found, output) == (code, "")
    assert errors.startswith("commkit: ") and errors.count("\n") == 1 and expected in errors


def test_hosts_that_the_topology_does_not_place_are_code_6(place):
    code, _, errors = place(hosts="x[1-16]")
    assert code == 6 and "no host of the job has a place in the topology" in errors


def test_metis_that_is_not_installed_is_said(place):
    try:
        import pymetis  # noqa: F401
    except ImportError:
        code, _, errors = place(*WORK, "--metis")
        assert code == 2 and "pip install pymetis" in errors
    else:
        assert place(*WORK, "--metis")[0] == 0
