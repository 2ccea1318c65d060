"""What `commkit topo` shows, draws and writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from rich.console import Console

from commkit import cli
from commkit.errors import UsageError
from commkit.topology import read, read_text
from commkit.topology.draw import summary, tree
from commkit.topology.fabric import Fabric, Host, Nic, Switch, leaf_spine
from commkit.topology.picture import layout, save
from commkit.topology.readers import FORMATS
from commkit.topology.writers import slurm_conf

RECORDED = Path(__file__).resolve().parent.parent / "recorded" / "topology"


def lines(fabric, **options):
    console = Console(width=200, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    console.print(tree(fabric, **options))
    console.file.close()
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.fixture
def topo():
    def run(*arguments):
        result = CliRunner().invoke(cli.main, ["topo", *map(str, arguments)], prog_name="commkit")
        return result.exit_code, result.stdout, result.stderr

    return run


def test_a_tree_shows_groups_of_leaves_with_their_uplinks():
    fabric = leaf_spine(
        2, leaves=2, spines=2, rails=2, uplinks=2, uplink_gbps=400, host_name="gpu-{0:02d}"
    )
    assert lines(fabric) == [
        "4 hosts, 2 rails; switches by layer: 4 leaf, 2 spine",
        "└── spine[0-1]  4 hosts",
        "    ├── leaf0-rail[0-1]  2 hosts, 8 uplinks, 3,200 Gbit/s up",
        "    │   └── gpu-[00-01]",
        "    └── leaf1-rail[0-1]  2 hosts, 8 uplinks, 3,200 Gbit/s up",
        "        └── gpu-[02-03]",
    ]


def test_many_branches_are_counted_beyond_the_limit():
    shown = lines(leaf_spine(1, leaves=30), limit=3)
    assert sum("leaf" in line for line in shown[1:]) == 3
    assert shown[-1].endswith("... 27 more")


def test_separate_fabrics_lost_hosts_and_notes_are_shown():
    fabric = Fabric(
        (Host("a", (Nic(switch=0),)), Host("b", (Nic(switch=1),)), Host("[bold]c")),
        (Switch("s1"), Switch("s2")),
        notes=("something odd",),
    )
    assert summary(fabric) == "3 hosts; switches by layer: 2; 2 separate fabrics"
    assert lines(fabric)[-2:] == ["├── no known place: [bold]c", "└── note: something odd"]


def test_a_host_known_from_within_is_shown_with_its_nearest_nics():
    shown = lines(read(str(RECORDED / "hgx.nccl.xml")))
    assert any("GPU3  0000:42:00.0  NUMA 1  → mlx5_3 (PIX)" in line for line in shown)
    assert any("mlx5_3  0000:43:00.0  400 Gbit/s  NUMA 1" in line for line in shown)


def test_spines_become_one_switch_for_slurm_and_mixed_switches_two():
    fabric = leaf_spine(2, leaves=2, spines=4, rails=8, host_name="n{0}")
    assert slurm_conf(fabric).splitlines() == [
        "SwitchName=leaf0-rail0+7 Nodes=n[0-1]",
        "SwitchName=leaf1-rail0+7 Nodes=n[2-3]",
        "SwitchName=spine0+3 Switches=leaf0-rail0+7,leaf1-rail0+7",
    ]
    mixed = Fabric(
        (Host("a", (Nic(switch=0),)), Host("b", (Nic(switch=1),)), Host("c")),
        (Switch("odd name", 0), Switch("top", 1)),
        leaf_spine(1, leaves=1).links,
    )
    text = slurm_conf(mixed)
    assert "SwitchName=top-hosts Nodes=b" in text
    assert "SwitchName=top Switches=odd_name,top-hosts" in text
    assert text.endswith("SwitchName=no-topology Nodes=c\n")
    assert read_text(text).distance(0, 1) == 1


def test_blocks_stay_blocks_for_slurm():
    fabric = read(str(RECORDED / "topology-block.conf"))
    text = slurm_conf(fabric)
    assert text.splitlines()[0] == "BlockName=rack01 Nodes=gb-[0101-0118]"
    assert text.splitlines()[-1] == "BlockSizes=16,32,64"
    assert read_text(text) == fabric


def test_places_that_no_switch_joins_get_a_root_for_slurm():
    text = slurm_conf(read(str(RECORDED / "kueue.yaml")))
    assert "SwitchName=all Switches=b[1-2]" in text.splitlines()


def test_a_picture_has_a_row_for_hosts_and_for_each_layer():
    rows, cables = layout(leaf_spine(2, leaves=3, spines=2))
    assert [len(row) for row in rows] == [6, 3, 2]
    assert len(cables) == 6 + 3 * 2
    rows, cables = layout(leaf_spine(64, 12, 4, rails=8, leaves_per_pod=4, cores=2))
    assert len(rows[0]) == 12
    assert rows[0][0][2] == "64 hosts"


@pytest.mark.parametrize("name", ["ibnetdiscover.out", "topology.conf", "hgx.topo-m.txt"])
def test_pictures_are_files_of_their_kind_and_always_the_same(tmp_path, name):
    fabric = read(str(RECORDED / name))
    for number in range(2):
        save(fabric, str(tmp_path / f"{number}.svg"), "svg")
    first, second = ((tmp_path / f"{number}.svg").read_bytes() for number in range(2))
    assert first == second
    assert ElementTree.fromstring(first).tag == "{http://www.w3.org/2000/svg}svg"
    save(fabric, str(tmp_path / "x.png"), "png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="No such file or directory"):
        save(fabric, str(tmp_path / "nowhere" / "x.png"), "png")


def test_without_matplotlib_a_picture_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="pip install matplotlib, or commkit.draw."):
        save(leaf_spine(1), str(tmp_path / "x.svg"), "svg")


def test_show_prints_a_tree_and_draws(tmp_path):
    command = [sys.executable, "-m", "commkit", "topo", "show", RECORDED / "topology.conf"]
    done = subprocess.run(
        [*command, "--svg", tmp_path / "x.svg", "--png", tmp_path / "x.png"],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("68 hosts; switches by layer: 5, 2, 1; 2 separate fabrics\n")
    assert (tmp_path / "x.svg").stat().st_size > 1000
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_help_names_every_format(topo):
    code, out, _ = topo("show", "--help")
    assert code == 0
    for name in FORMATS:
        assert f"{name}:" in " ".join(out.split())


def test_show_limits_itself_to_the_hosts_of_a_job(topo):
    code, out, _ = topo("show", RECORDED / "topology.conf", "--hosts", "gpu-[1101-1102],nowhere")
    assert code == 0
    assert "1 of 3 hosts have no place in the topology: nowhere" in out


def test_show_here_shows_this_host_and_compares_a_file_with_it(topo):
    code, out, _ = topo("show", "--here")
    assert code == 0
    assert os.uname().nodename in out
    code, out, _ = topo("show", RECORDED / "hgx.nccl.xml", "--here")
    assert code == 0
    assert out.splitlines()[-1].startswith("no GPU of this file exists here")
    code, out, _ = topo("show", RECORDED / "topology.conf", "--here")
    assert out.splitlines()[-1] == "no bus ids in this file: nothing to compare with this host"


def test_convert_writes_what_can_be_read_again(topo, tmp_path):
    for to, start in (("toml", "format = "), ("slurm", "SwitchName="), ("json", "{")):
        code, out, _ = topo("convert", RECORDED / "netq.json", "--to", to)
        assert code == 0
        assert out.startswith(start)
        assert len(read_text(out).hosts) == 4
    target = tmp_path / "x.json"
    code, out, _ = topo("convert", RECORDED / "netq.json", "--to", "json", "-o", target)
    assert (code, out) == (0, "")
    assert json.loads(target.read_text())["format"] == "commkit-topology/1"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show"], 2, "expected a FILE, --here for this host or --running"),
        (["show", "/nowhere"], 2, "/nowhere: No such file"),
        (["show", RECORDED / "slurm-lexer.json"], 2, "no known topology format"),
        (["show", RECORDED / "ec2.json", "--format", "x"], 2, "format 'x': expected one of toml"),
        (["show", "/dev/null"], 6, "no placement information"),
        (["convert", RECORDED / "hgx.nccl.xml", "--to", "slurm"], 6, "no switch has a host"),
        (["convert", RECORDED / "ec2.json", "--to", "dot"], 2, "'dot' is not one of"),
        (["show", RECORDED / "topology.yaml", "--name", "x"], 2, "no topology 'x'"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(topo, arguments, code, message):
    returned, out, error = topo(*arguments)
    assert (returned, out) == (code, "")
    assert error.startswith("commkit: ")
    assert message in error
    assert error.count("\n") == 1
