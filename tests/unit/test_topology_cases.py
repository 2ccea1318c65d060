"""Reported descriptions of fabrics that other tools misread (tests/cases/file-format.json)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commkit.errors import NoTopology, TopologyError
from commkit.topology import read, read_text
from commkit.topology.inside import nearest_nics, ways
from commkit.topology.readers import nccl_xml, nvidia_smi
from commkit.topology.readers.source import Source

CASES = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).resolve().parent.parent / "cases" / "file-format.json").read_text()
    )
}


def data(name):
    return CASES[name]["input"]["data"]


def value(name):
    return CASES[name]["expected"]["value"]


def below(fabric):
    """Switch -> names of the switches or hosts below it."""
    names = [switch.name for switch in fabric.switches]
    found = {
        name: [fabric.hosts[i].name for i in hosts]
        for name, hosts in zip(names, fabric.attached, strict=True)
    }
    for link in fabric.links:
        found[names[link.b]].append(names[link.a])
    return found


def test_every_case_has_a_test():
    mine = Path(__file__).read_text()
    missing = [name for name in CASES if f"def test_{name.lower().replace('-', '_')}_" not in mine]
    assert not missing


def test_topo_01_everything_legal_at_once():
    fabric = read_text(data("TOPO-01"))
    assert below(fabric) == value("TOPO-01")
    speeds = {switch.name: switch.link_speed for switch in fabric.switches}
    assert speeds == {"leaf1": 400, "leaf2": None, "spine": None}


def test_topo_02_a_comment_goes_before_a_continuation():
    fabric = read_text(data("TOPO-02"))
    assert below(fabric) == value("TOPO-02")
    assert fabric.switches[0].link_speed == 100


def test_topo_04_a_switch_name_is_no_host_list():
    with pytest.raises(
        TopologyError, match=r"topology.conf:2:\d+: unknown child s0 of top: .*s\[0-1\]"
    ):
        read_text(data("TOPO-04"), "topology.conf")


@pytest.mark.parametrize(
    ("row", "line", "message"),
    [
        (0, 2, "duplicate switch a: it was defined on line 1"),
        (1, 1, "unknown child b of t"),
        (2, 1, "switch t is its own child"),
        (3, 1, "not a tree (cycle a,b)"),
        (4, 1, "switch a has both nodes and switches"),
        (5, 1, "name too long: .*at most 64"),
        (6, None, "no switches and no blocks are configured"),
        (7, 1, "unknown key Node: expected Nodes, Switches, LinkSpeed"),
    ],
)
def test_topo_05_each_structural_error_is_one_line_that_says_where(row, line, message):
    assert len(data("TOPO-05")) == 8
    kind = NoTopology if line is None else TopologyError
    where = "t.conf: " if line is None else rf"t.conf:{line}:\d+: "
    with pytest.raises(kind, match=where + ".*" + message.replace("(", r"\(").replace(")", r"\)")):
        read_text(data("TOPO-05")[row], "t.conf")


def test_topo_07_unconnected_roots_stay_unconnected():
    fabric = read_text(data("TOPO-07"))
    assert [fabric.switches[i].name for i in fabric.roots] == value("TOPO-07")["roots"]
    n1, n9, n17 = (fabric.host_index[name] for name in ("n1", "n9", "n17"))
    assert [fabric.switches[i].name for i in fabric.meeting(n1, n9)] == ["fabA"]
    assert fabric.meeting(n1, n17) == ()
    assert fabric.distance(n1, n17) is None
    assert len(set(fabric.components())) == 3


def test_topo_08_hosts_without_a_place_are_listed_and_come_last():
    fabric = read_text(data("TOPO-08")["file"])
    assert any("no-topology" in note for note in fabric.notes)
    job = fabric.select(data("TOPO-08")["job_nodes"])
    assert [job.hosts[i].name for i in job.unplaced] == ["w13", "w99"]
    assert "2 of 4 hosts have no place in the topology: w13, w99" in job.notes
    assert [job.hosts[i].name for i in job.order()] == ["w11", "w21", "w13", "w99"]
    assert job.distance(1, 3) is None


def test_topo_10_consecutive_blocks_form_the_larger_unit():
    fabric = read_text(data("TOPO-10"))
    blocks = [switch.name for switch in fabric.switches if switch.layer == 0]
    expected = value("TOPO-10")
    assert (len(blocks), len(fabric.hosts)) == (expected["blocks"], expected["nodes"])
    assert list(fabric.block_sizes) == expected["block_sizes"]
    assert below(fabric)["b[1-4]"] == ["b1", "b2", "b3", "b4"]
    with pytest.raises(TopologyError, match="96: expected 32 times a power of two"):
        read_text(data("TOPO-10").replace("32,128", "32,96"))


def test_topo_11_the_default_topology_is_read_and_the_others_are_named(tmp_path):
    expected = value("TOPO-11")
    file = tmp_path / "topology.yaml"
    file.write_text(data("TOPO-11"))
    fabric = read(str(file))
    found = below(fabric)
    assert found["root"] == expected["root"]
    assert found["leaf2"] == expected["leaf2"]
    note = f"topology {expected['default']} was read"
    assert note in fabric.notes[0]
    for name in set(expected["names"]) - {expected["default"]}:
        assert name in fabric.notes[0]
    assert read(str(file), choose="t_blk").block_sizes == (2, 4)
    with pytest.raises(NoTopology, match="t_flat is flat"):
        read(str(file), choose="t_flat")
    with pytest.raises(TopologyError, match="kind 'ring' is not supported"):
        read(str(file), choose="t_ring")
    with pytest.raises(TopologyError, match="no topology 'x': expected one of t_flat, t_tree"):
        read(str(file), choose="x")
    file.write_text(data("TOPO-11").replace("cluster_default: True", "cluster_default: False"))
    with pytest.raises(TopologyError, match="choose one of t_flat, t_tree, t_blk, t_ring"):
        read(str(file))


def test_topo_11_the_yaml_goes_before_a_conf_beside_it(tmp_path):
    (tmp_path / "topology.yaml").write_text(data("TOPO-11"))
    (tmp_path / "topology.conf").write_text("SwitchName=s Nodes=x1\n")
    chosen = read(str(tmp_path))
    assert "node01" in chosen.host_index
    assert "topology.yaml was read" in chosen.notes[0]
    asked = read(str(tmp_path / "topology.conf"))
    assert "x1" in asked.host_index
    assert "Slurm ignores it" in asked.notes[0]


@pytest.mark.parametrize("row", range(3))
def test_topo_13_a_skeleton_says_that_it_places_nobody(row):
    with pytest.raises(NoTopology, match="no placement information") as caught:
        read_text(data("TOPO-13")[row], "topology.conf")
    assert caught.value.exit_code == 6


def test_xml_01_devices_are_known_by_their_class_alone():
    (host,) = read_text(data("XML-01"), "p4d.xml").hosts
    assert [device.busid for device in host.devices] == value("XML-01")["gpus"]
    assert [nic.busid for nic in host.nics] == value("XML-01")["nics"]
    assert ways(host)["GPU0", host.nics[0].name] == value("XML-01")["path(gpu,nic)"]
    assert host.devices[0].cpus == "0-23,48-71"


def test_xml_03_a_big_host_is_read_and_noted():
    text = "<system>"
    for rank in range(8):
        text += f'<cpu numaid="{rank}" arch="arm64">'
        for switch in range(2):
            text += f'<pci busid="ffff:{rank:02x}:{switch:02x}.0" class="0x060400">'
            for i in range(2):
                text += (
                    f'<pci busid="0000:{rank:02x}:{switch * 2 + i:02x}.0" class="0x030200"><gpu>'
                )
                text += '<nvlink target="0000:f0:00.0" count="1" tclass="0x068000"/>' * 18
                text += "</gpu></pci>"
            for i in range(8):
                bus = f"0001:{rank:02x}:{switch * 8 + i:02x}.0"
                text += f'<pci busid="{bus}" class="0x020700"/>'
            text += "</pci>"
        text += "</cpu>"
    fabric = read_text(text + "</system>")
    (host,) = fabric.hosts
    assert (len(host.devices), len(host.nics)) == (32, 128)
    assert ways(host)["GPU0", "GPU31"] == "NV18"
    assert ["holds 256" in note for note in fabric.notes] == [True]


def test_xml_04_missing_attributes_are_unknown_and_noted():
    fabric = read_text(data("XML-04"))
    (note,) = fabric.notes
    assert "<cpu numaid=1> has no arch: NCCL stops there" in note
    text = data("XML-04").replace(
        '<cpu numaid="1"/>',
        '<cpu><pci busid="0:1:0.0"/><pci busid="0000:07:00.0" class="0x030200"/></cpu>',
    )
    (host,) = read_text(text).hosts
    assert (host.devices[0].numa, host.devices[0].cpus) == (None, None)


def test_xml_06_a_file_of_another_machine_is_told_by_its_bus_ids():
    ids, visible = data("XML-06")["xml_busids"], data("XML-06")["visible_busids"]
    inner = "".join(f'<pci busid="{id}" class="0x030200"><gpu/></pci>' for id in ids)
    fabric = read_text(f'<system><cpu numaid="0" arch="arm64">{inner}</cpu></system>')
    wrong = nccl_xml.missing_devices(fabric, visible)
    assert wrong.startswith(
        "no GPU of this file exists here (0000:4d:00.0, 0000:4f:00.0 not found)"
    )
    assert "keep <cpu> and <pci>, drop <gpu> and <nic>" in wrong
    assert nccl_xml.missing_devices(fabric, [f"0000{id.upper()}" for id in ids]) is None
    assert nccl_xml.missing_devices(fabric, ids[:1]).startswith("1 of 2 GPU")


@pytest.mark.parametrize("codes", [True, False], ids=["with-escapes", "without"])
def test_smi_01_the_heading_may_be_underlined(codes):
    text = data("SMI-01")
    if not codes:
        text = text.replace("\x1b[4m", "").replace("\x1b[0m", "")
    expected = value("SMI-01")
    matrix = nvidia_smi.parse(Source("x", text))
    assert len(matrix.gpus) == expected["gpus"]
    assert matrix.nics == expected["nics"]
    assert matrix.links["GPU0", "GPU1"] == expected["link(GPU0,GPU1)"]
    assert matrix.cpus == expected["cpu_affinity"]
    assert {gpu: list(numa) for gpu, numa in matrix.numa.items()} == expected["numa"]
    assert matrix.gpu_numa["GPU0"] is expected["gpu_numa_id"]["GPU0"]
    assert nearest_nics(read_text(text).hosts[0]) == expected["best_nic"]


def test_smi_03_older_drivers_name_adapters_in_the_heading():
    expected = value("SMI-03")
    matrix = nvidia_smi.parse(Source("x", data("SMI-03")))
    assert list(matrix.nics.values()) == expected["nics"]
    assert matrix.cpus["GPU0"] == expected["cpu_affinity"]["GPU0"]
    assert nearest_nics(read_text(data("SMI-03")).hosts[0]) == expected["best_nic"]


def smi_04():
    """8 GPUs; NIC0-31 are functions NODE to GPU4-7, NIC32-39 one per GPU at its host bridge."""
    gpus, nics = [f"GPU{i}" for i in range(8)], [f"NIC{i}" for i in range(40)]

    def cell(a, b):
        if a == b:
            return "X"
        if a[0] == b[0] == "G":
            return "SYS"
        if a[0] == b[0] == "N":
            return "PIX" if int(a[3:]) < 32 and int(b[3:]) < 32 else "NODE"
        gpu, nic = (int(x[3:]) for x in sorted((a, b)))
        if nic >= 32:
            return "PHB" if nic - 32 == gpu else "SYS"
        return "NODE" if gpu >= 4 else "SYS"

    rows = ["        " + "  ".join(gpus + nics) + "  CPU Affinity   NUMA Affinity"]
    for n, name in enumerate(gpus + nics):
        cells = [cell(name, other) for other in gpus + nics]
        tail = ["0-31", "0"] if name in gpus else []
        rows.append((" " * (n % 3 + 1)).join([name, *cells, *tail]))
    return "\n".join(rows) + "\n\nLegend:\n\n  X = Self\n"


def test_smi_04_text_pasted_with_blanks_is_read_and_ties_are_spread():
    (host,) = read_text(smi_04()).hosts
    assert (len(host.devices), len(host.nics)) == (8, 40)
    assert nearest_nics(host) == {f"GPU{i}": f"NIC{32 + i}" for i in range(8)}
    functions = [f"NIC{i}" for i in range(32)]
    chosen = nearest_nics(host, active=functions)
    assert len(set(chosen.values())) == 8
    assert set(chosen.values()) <= set(functions)
    assert "does not tell NICs for the job from storage" in read_text(smi_04()).notes[0]


def test_ib_01_a_host_on_two_leaves_is_two_rails():
    expected = value("IB-01")
    fabric = read_text(data("IB-01"))
    found = below(fabric)
    assert sorted(found) == expected["switches"]
    assert found["spine-01"] == expected["spine-01"]
    assert [host.name for host in fabric.hosts] == expected["hosts"]
    on = {
        switch.name: [
            f"{host.name}/{nic.name}"
            for host in fabric.hosts
            for nic in host.nics
            if nic.switch == fabric.switch_index[switch.name]
        ]
        for switch in fabric.switches
    }
    assert on["leaf-101"] == expected["leaf-101"]
    assert on["leaf-102"] == expected["leaf-102"]
    assert fabric.rails == (0, 1)
    assert {nic.gbps for host in fabric.hosts for nic in host.nics} == {200.0}


def test_ib_02_hosts_without_switches_are_all_equally_near():
    fabric = read_text(data("IB-02"))
    assert [host.name for host in fabric.hosts] == ["gpu-a1", "gpu-a2"]
    assert fabric.levels() == ()
    assert "no switches in this file" in fabric.notes[0]
    job = fabric.select(["gpu-a2", "gpu-z9"])
    assert job.order() == (0, 1)
    assert "gpu-z9" in job.notes[-1]
