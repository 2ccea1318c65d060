"""`commkit groups`, run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from commkit import cost, layout, plan


@pytest.fixture
def groups_command(repository):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "commkit", "groups", *arguments],
            cwd=repository,
            env={**os.environ, "PYTHONPATH": str(repository)},
            capture_output=True,
            text=True,
            timeout=50,
        )

    return run


def test_the_tables_show_families_waves_and_the_names_of_a_rank(groups_command):
    done = groups_command("tp=2,pp=2", "--world", "8", "--rank", "3", "--families", "tp,dp,embd")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == "8 ranks; mesh pp=2 x dp=2 x tp=2".split()
    assert ["tp", "4", "2", "1", "2x1", "from", "4x2"] in lines
    for wave, (family, ranks) in enumerate((("tp", (2, 3)), ("dp", (1, 3)), ("embd", (3, 7)))):
        (line,) = (row for row in lines if row[:2] == [family, str(wave)])
        assert line[-1] == plan.group_name(family, ranks, 0)
    assert "estimate" not in done.stdout


def test_json_has_the_documented_keys(groups_command, repository):
    done = groups_command("tp=2,ep=2,pp=2", "--world", "16", "--json", "--dry-run")
    report = json.loads(done.stdout)
    made = layout.parse("tp=2,ep=2,pp=2", 16)
    assert report["digest"] == made.digest().hex()
    assert report["mesh"] == {"shape": [2, 4, 2], "names": ["pp", "dp", "tp"]}
    assert report["expert_mesh"]["names"] == ["pp", "edp", "ep", "etp"]
    assert [family["name"] for family in report["families"]] == [*made.families]
    assert [group["family"] for group in report["groups"]] == [*made.families]
    assert report["estimate"]["communicators"] == [5, 5]
    document = (repository / "docs" / "groups.md").read_text()
    keys = {*report, *report["families"][0], *report["groups"][0], *report["estimate"]}
    keys |= {*report["estimate"]["commkit"]}
    for key in keys:
        assert f"`{key}`" in document, key


def test_the_documents_output_is_what_the_command_prints(groups_command, repository):
    document = (repository / "docs" / "groups.md").read_text()
    block = document.partition("```console\n$ commkit groups ")[2].partition("```")[0]
    command, _, output = block.partition("\n")
    printed = groups_command(*command.split()).stdout
    assert [line.rstrip() for line in printed.splitlines()] == output.splitlines()
    assert len(output.splitlines()) > 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tp=3", "--world", "8"), "a world of 8 is not divisible by tp = 3"),
        (("tp=2,pp=3,dp=1", "--world", "8"), "tp*pp*dp = 2*3*1 = 6, but the world size is 8"),
        (("tp=2", "--world", "8", "--rank", "8"), "rank 8 is outside a world of 8"),
        (("tp=2", "--world", "0"), "world size 0: expected an integer of at least 1"),
        (("tp=2", "--world", "8", "--dry-run", "--ranks-per-host", "0"), "0 ranks per host"),
        (("tp=8", "--world", "8000000", "--dry-run"), "8,000,000 ranks are too many to count"),
        (("tp=2", "--world", "eight"), "'eight' is not a valid integer"),
        (("tp=2",), "Missing option '--world'"),
        (("tp=2", "--world", "8", "--families", "zp"), "no dimension 'zp' in this layout"),
        (("tp=2", "--world", "8", "--order", "tp-tp"), "tp is there more than once"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(groups_command, arguments, message):
    done = groups_command(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("commkit: ")
    assert message in line


def test_the_command_imports_neither_torch_nor_the_native_module(repository):
    script = (
        "import sys; from commkit.cli import main;"
        "main(['groups', 'tp=2', '--world', '8', '--dry-run'], standalone_mode=False);"
        "assert not {'torch', 'commkit._C', 'socket'} & {*sys.modules}, sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# --- The estimate --------------------------------------------------------------------------------


def test_communicators_are_counted_for_the_ranks_with_fewest_and_most():
    made = layout.parse("tp=2,dp=2,pp=4", 16, families="tp,dp,pp,embd,pos_embd,cp")
    found = cost.estimate(made, ranks_per_host=4)
    assert found.communicators == (4, 6)
    assert found.single == 2
    assert found.groups == sum(family.count for family in made.families.values())


def test_torchs_store_gets_a_set_and_for_each_other_rank_a_wait_and_a_read():
    found = cost.estimate(layout.parse("tp=4,dp=2", 8, families="tp"))
    assert found.torch.messages == 2 * (1 + 4 * 3)
    assert found.barrier.messages - found.torch.messages == 2 * (2 * 3 * 8)
    one = cost.estimate(layout.parse("dp=1024", 1024))
    assert one.torch.messages == 8 + 4 * 1023  # an id for each 128 ranks


def test_groups_within_a_host_cost_the_tree_nothing_but_the_digest():
    made = layout.parse("tp=8", 2048, families="tp")
    agents = cost.Agents(256)
    for first in range(256):
        agents.exchange([(first, 8)], 60)
    assert set(agents.messages) == {0}
    assert not agents.links
    assert cost.estimate(made).commkit.connections <= 2 * 8 + agents.degree + 1


def test_a_request_takes_at_most_three_hops_and_arrives():
    for hosts in (1, 2, 5, 40, 300):
        agents = cost.Agents(hosts)
        for start in range(hosts):
            for end in range(0, hosts, 7):
                way = list(agents.way(start, end))
                assert len(way) <= (3 if hosts <= 40 else 4)
                assert (way[-1][1] if way else start) == end


def test_the_busiest_agent_has_far_less_to_do_than_torchs_store():
    text = "tp=8,pp=8"
    found = [cost.estimate(layout.parse(text, world)) for world in (2048, 12_288)]
    for each in found:
        assert each.commkit.connections * 10 < each.torch.connections
        assert each.commkit.messages * 3 < each.torch.messages
        assert each.commkit.messages * 500 < each.barrier.messages


def test_an_id_costs_a_host_one_request_and_not_one_a_rank():
    agents = cost.Agents(5)
    agents.exchange([(0, 8), (3, 8)], 60)
    alone = cost.Agents(5)
    alone.exchange([(0, 8), (3, 1)], 60)
    assert agents.messages == alone.messages == [2, 0, 0, 2, 0]
    assert agents.local[3] == 8 * alone.local[3]
