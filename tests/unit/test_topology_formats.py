"""Every format of tests/recorded/topology: found by its content, read, and written again."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from commkit.errors import CommkitError, NoTopology, TopologyError, UsageError
from commkit.topology import read, read_text
from commkit.topology.readers import FORMATS
from commkit.topology.readers.detect import detect
from commkit.topology.readers.own import read_json, read_toml, write_json, write_toml
from commkit.topology.readers.source import Source
from commkit.topology.writers import write

RECORDED = Path(__file__).resolve().parent.parent / "recorded" / "topology"
FILES = {
    "topology.conf": "slurm-conf",
    "topology-block.conf": "slurm-conf",
    "topology.yaml": "slurm-yaml",
    "topograph.json": "topograph",
    "k8s-nodes.json": "k8s",
    "kueue.yaml": "k8s",
    "hypernodes.yaml": "k8s",
    "ibnetdiscover.out": "ibnetdiscover",
    "iblinkinfo.out": "iblinkinfo",
    "iblinkinfo-l.out": "iblinkinfo",
    "ec2.json": "ec2",
    "gcp.json": "gcp",
    "netq.json": "netq",
    "lldp.json": "lldp",
    "lldp-json0.json": "lldp",
    "hgx.nccl.xml": "nccl-xml",
    "hgx.topo-m.txt": "nvidia-smi",
}


def recorded(name):
    return read(str(RECORDED / name))


def chain(fabric, host):
    """Names of the switches above a host of a tree, nearest first."""
    (nic,) = fabric.hosts[fabric.host_index[host]].nics
    found = [nic.switch]
    while above := [link.b for link in fabric.links if link.a == found[-1]]:
        found += above[:1]
    return [fabric.switches[i].name for i in found]


def test_every_format_has_a_recorded_file():
    assert set(FILES.values()) | {"toml", "json"} == set(FORMATS)


@pytest.mark.parametrize(("name", "format"), FILES.items())
def test_a_format_is_known_by_its_content(name, format):
    assert detect(Source("x", (RECORDED / name).read_text())) == format


@pytest.mark.parametrize("name", FILES)
def test_windows_line_ends_change_nothing(name):
    text = (RECORDED / name).read_text()
    assert read_text(text.replace("\n", "\r\n"), name) == read_text(text, name)


@pytest.mark.parametrize("name", FILES)
def test_a_fabric_survives_the_way_through_our_own_formats(name):
    fabric = recorded(name)
    assert read_toml(Source("x", write_toml(fabric))) == fabric
    assert read_json(Source("x", write_json(fabric))) == fabric
    assert read_text(write(fabric, "toml")) == fabric
    assert read_text(write(fabric, "json")) == fabric


@pytest.mark.parametrize("name", [n for n in FILES if not n.startswith("hgx")])
def test_what_slurm_gets_joins_the_same_hosts(name):
    fabric = recorded(name)
    there = read_text(write(fabric, "slurm"), "t.conf")
    assert {host.name for host in there.hosts} == {host.name for host in fabric.hosts}
    assert len(there.unplaced) == len(fabric.unplaced)
    of = {host.name: i for i, host in enumerate(there.hosts)}
    ours = range(len(fabric.hosts))
    for a in ours:
        for b in ours:
            here = fabric.distance(a, b)
            beyond = there.distance(of[fabric.hosts[a].name], of[fabric.hosts[b].name])
            if here is None or not fabric.joined:
                assert beyond == here
            else:
                assert beyond is not None


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_off_anywhere_gives_a_fabric_or_one_line_of_error(name):
    text = (RECORDED / name).read_text()
    step = max(len(text) // 40, 1)
    for end in range(0, len(text), step):
        try:
            read_text(text[:end], name)
        except CommkitError as error:
            assert str(error).startswith(name)
            assert "\n" not in str(error)


def places(value, path=()):
    """The path of every value in a JSON document."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def put(value, path, new):
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = put(value[path[0]], path[1:], new)
    return changed


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
def test_a_value_of_another_kind_anywhere_gives_a_fabric_or_one_line_of_error(name):
    data, _ = json.JSONDecoder().raw_decode((RECORDED / name).read_text())
    everywhere = list(places(data))
    step = max(len(everywhere) // 20, 1)
    for path in [*everywhere[:20], *everywhere[20::step]]:
        for new in (None, 5, "x", [5], {"a": 5}):
            try:
                read_text(json.dumps(put(data, path, new)), name, format=FILES[name])
            except CommkitError as error:
                assert str(error).startswith(name)
                assert "\n" not in str(error)


def test_the_outputs_of_three_infiniband_tools_are_the_same_fabric():
    fabrics = [recorded(n) for n in ("ibnetdiscover.out", "iblinkinfo.out", "iblinkinfo-l.out")]
    shapes = []
    for fabric in fabrics:
        names = [switch.name for switch in fabric.switches]
        links = {(names[k.a], names[k.b], k.count, k.gbps) for k in fabric.links}
        hosts = {
            (host.name, nic.name, nic.rail, nic.gbps, names[nic.switch])
            for host in fabric.hosts
            for nic in host.nics
        }
        shapes.append((sorted((s.layer, s.name) for s in fabric.switches), links, hosts))
    assert shapes[0] == shapes[1] == shapes[2]
    layers, links, hosts = shapes[0]
    assert layers == [
        (0, "leaf-1-r1"), (0, "leaf-1-r2"), (0, "leaf-2-r1"), (0, "leaf-2-r2"),
        (1, "spine-1"), (1, "spine-2"),
    ]  # fmt: skip
    assert len(links) == 8
    assert ("leaf-2-r1", "spine-1", 2, 10.0) in links
    assert ("gpu-07", "mlx5_1", 1, 10.0, "leaf-2-r2") in hosts
    assert len(hosts) == 16


def test_iblinkinfo_without_lids_says_what_to_take_instead():
    with pytest.raises(TopologyError, match="no-lids.out:2:1: LID 0: .* iblinkinfo -l"):
        recorded("iblinkinfo-no-lids.out")


def test_adapters_that_do_not_say_their_host_are_left_out():
    text = """
Switch 41 "S-a1" # "MF0;leaf-1:MQM8700/U1" enhanced port 0 lid 12 lmc 0
[1] "H-1"[1](1) # "gpu-1 mlx5_0" lid 1 4xHDR
[2] "H-2"[1](2) # "MT4129 ConnectX7   Mellanox Technologies" lid 2 4xHDR
[3] "H-3"[1](3) # "localhost mlx5_0" lid 3 4xHDR
[4] "H-4"[1](4) # "ubuntu mlx5_0" lid 4 4xHDR
[5] "H-5"[1](5) # "ubuntu mlx5_0" lid 5 4xHDR
[65] "H-6"[1](6) # "Mellanox Technologies Aggregation Node" lid 6 4xHDR
"""
    fabric = read_text(text)
    assert [host.name for host in fabric.hosts] == ["gpu-1"]
    assert fabric.notes == (
        "2 adapters do not say their host and were left out",
        "several adapters have the same description and were left out: ubuntu mlx5_0",
    )


def test_a_management_host_on_a_spine_makes_it_no_leaf():
    text = ""
    for leaf in (1, 2):
        text += f'Switch 41 "S-{leaf}" # "MF0;leaf-{leaf}:M/U1" enhanced port 0 lid {leaf} lmc 0\n'
        for i in range(4):
            text += f'[{i + 1}] "H-{leaf}{i}"[1](1) # "gpu-{leaf}{i} mlx5_0" lid 9 4xNDR\n'
        text += f'[40] "S-9"[{leaf}] # "MF0;spine:M/U1" lid 7 4xNDR\n\n'
    text += 'Switch 41 "S-9" # "MF0;spine:M/U1" enhanced port 0 lid 7 lmc 0\n'
    text += '[30] "H-ufm"[1](1) # "ufm-1 mlx5_0" lid 9 4xNDR\n'
    layers = {switch.name: switch.layer for switch in read_text(text).switches}
    assert layers == {"leaf-1": 0, "leaf-2": 0, "spine": 1}


def test_switches_of_one_name_are_told_apart_by_their_guids():
    text = """
Switch 41 "S-1" # "MF0;leaf:M/U1" enhanced port 0 lid 1 lmc 0
[1] "H-1"[1](1) # "gpu-1 mlx5_0" lid 9 4xNDR
Switch 41 "S-2" # "MF0;leaf:M/U1" enhanced port 0 lid 2 lmc 0
[1] "H-2"[1](2) # "gpu-2 mlx5_0" lid 8 4xNDR
"""
    assert [switch.name for switch in read_text(text).switches] == ["leaf-S-1", "leaf-S-2"]


def test_two_ports_of_one_adapter_may_be_on_two_switches():
    text = """
Switch 41 "S-1" # "MF0;a:M/U1" enhanced port 0 lid 1 lmc 0
[1] "H-1"[1](1) # "gpu-1 mlx5_0" lid 9 4xNDR
Switch 41 "S-2" # "MF0;b:M/U1" enhanced port 0 lid 2 lmc 0
[1] "H-1"[2](2) # "gpu-1 mlx5_0" lid 8 4xNDR
"""
    (host,) = read_text(text).hosts
    assert [(nic.name, nic.port, nic.switch) for nic in host.nics] == [
        ("mlx5_0", 1, 0),
        ("mlx5_0", 2, 1),
    ]


def test_ec2_names_the_nearest_switch_last_whether_there_are_three_or_four():
    fabric = recorded("ec2.json")
    assert chain(fabric, "i-0a1b2c3d4e5f60000") == [
        "nn-000000000000000c0", "nn-000000000000000b0", "nn-0000000000000000a"
    ]  # fmt: skip
    assert len(chain(fabric, "i-0a1b2c3d4e5f70000")) == 4
    # A capacity block is an NVLink domain in an UltraServer only.
    domains = {host.name: host.domain for host in fabric.hosts}
    assert domains["i-0a1b2c3d4e5f60000"] is None
    assert domains["i-0a1b2c3d4e5f70001"] == "cb-0123456789abcdef0"


def test_gcp_reads_either_form_and_a_host_is_a_place_where_it_holds_several():
    fabric = recorded("gcp.json")
    assert chain(fabric, "a3-3") == ["s1", "b1", "c1"]
    assert chain(fabric, "c2-0") == ["h7", "s7", "b7"]
    assert [fabric.hosts[i].name for i in fabric.unplaced] == ["n2-0"]
    assert fabric.hosts[0].id == "7000000000000000000"
    assert set(fabric.components()) == {0, -1}


def test_labels_of_topograph_are_tiers_and_the_clique_is_the_nvlink_domain():
    fabric = recorded("k8s-nodes.json")
    assert chain(fabric, "gpu-31") == ["leaf-3", "spine-1", "core"]
    assert fabric.domains() == (0, 0, 0, 0, 1, 1, 1, 1, -1)
    assert [fabric.hosts[i].name for i in fabric.unplaced] == ["cpu-1"]


def test_aws_layers_count_from_the_top():
    nodes = [
        {
            "kind": "Node",
            "metadata": {
                "name": f"n{i}",
                "labels": {
                    f"topology.k8s.aws/network-node-layer-{k}": f"nn-{k}" for k in (1, 2, 3)
                },
            },
        }
        for i in range(2)
    ]
    fabric = read_text(json.dumps({"kind": "List", "items": nodes}))
    assert chain(fabric, "n1") == ["nn-3", "nn-2", "nn-1"]


def test_racks_of_one_name_in_two_blocks_are_two_racks():
    fabric = recorded("kueue.yaml")
    assert chain(fabric, "node-211") == ["b2/r1", "b2"]
    assert [level.groups for level in fabric.levels()] == [4, 2]


def test_one_of_several_kueue_topologies_is_chosen_by_name():
    text = (RECORDED / "kueue.yaml").read_text()
    other = text.partition("---")[0].replace("name: default", "name: flat")
    other = other.replace("  - nodeLabel: cloud.provider.com/topology-rack\n", "")
    with pytest.raises(TopologyError, match="choose one of flat, default"):
        read_text(other + "---\n" + text)
    assert read_text(other + "---\n" + text, choose="flat").depth == 1
    assert read_text(other + "---\n" + text, choose="default").depth == 2
    with pytest.raises(TopologyError, match="no Topology 'x': expected one of: default"):
        read_text(text, choose="x")


def test_hypernodes_choose_members_by_name_pattern_and_label():
    fabric = recorded("hypernodes.yaml")
    assert chain(fabric, "node-3") == ["s1", "s4", "s6"]
    assert chain(fabric, "node-5") == ["s2", "s6"]
    assert [fabric.hosts[i].name for i in fabric.unplaced] == ["node-6"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Match: {name: s4}", "Match: {name: s9}", "HyperNode s9 of s6 is not in this file"),
        ("Match: {name: s4}", "Match: {name: s6}", "HyperNode s6 is its own member"),
        ("metadata: {name: s1}", "metadata: {name: s0}", "duplicate HyperNode s0"),
        ("^node-[23]$", "node-[23", "pattern 'node-\\[23': unterminated character set"),
        (
            "exactMatch: {name: node-0}",
            "anyMatch: {}",
            "expected exactly one of exactMatch, regexMatch",
        ),
        ("tier: 2", "tier: two", '"two": expected tier to be a whole number'),
    ],
)
def test_a_wrong_hypernode_is_an_error_with_its_line(old, new, message):
    text = (RECORDED / "hypernodes.yaml").read_text()
    assert old in text
    with pytest.raises(TopologyError, match=rf"h.yaml:\d+:\d+: {message}") as caught:
        read_text(text.replace(old, new), "h.yaml")
    line = int(str(caught.value).split(":")[1])
    wrong = text.replace(old, new).splitlines()
    assert new.split("\n")[0] in "\n".join(wrong[line - 1 : line + 3])


def test_hypernodes_in_a_circle_are_refused():
    text = (RECORDED / "hypernodes.yaml").read_text()
    with pytest.raises(TopologyError, match=r"h.yaml:1:1: not a tree .cycle through s4"):
        read_text(text.replace("^s[01]$", "^s[016]$"), "h.yaml")


def test_netq_counts_cables_and_keeps_interfaces():
    fabric = recorded("netq.json")
    assert [(k.a, k.b, k.count) for k in fabric.links] == [(0, 2, 4), (1, 2, 2)]
    assert [nic.name for nic in fabric.hosts[3].nics] == ["ens1f0np0", "ens2f0np0"]


def test_lldp_interfaces_are_nics_and_neighbours_are_leaves():
    fabric = recorded("lldp.json")
    assert [(n.name, fabric.switches[n.switch].name, n.rail) for n in fabric.hosts[1].nics] == [
        ("rdma0", "leaf-1", 0),
        ("rdma1", "leaf-2", 1),
    ]
    single = recorded("lldp-json0.json")
    assert [host.name for host in single.hosts] == ["lldp-json0"]
    assert {s.name for s in single.switches} == {"leaf-1", "leaf-2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"instances": [\n {"network_layers": []}]}', r"x:2:2: null: expected the instance's id"),
        (
            '{"Instances": [{"InstanceId": "i",\n "NetworkNodes": "nn"}]}',
            r'x:2:18: "nn": expected Net',
        ),
        ('[{"links": [],\n "nodes": 7}]', r"x:2:11: 7: expected nodes to be a list"),
        ('{"lldp": {"interface":\n 5}}', r"x:2:2: 5: expected interface to be a list"),
        (
            '{"kind": "List", "items": [\n{"kind": "Node", "metadata": 1}]}',
            r"x:2:30: 1: expected meta",
        ),
        ('{"kind": "List", "items": [{"kind": "Node"\n', r"x: no known topology format"),
        ('{"instances": [1,]}', r"x: no known topology format"),
        ("hello", r"x: no known topology format; expected one of toml, json"),
        ("<system>\n <cpu>\n</system>", r"x:3:3: not XML: mismatched tag"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><system/>', r"x:1:\d+: a document type declaration"),
        ("<topology/>", r"x:1:1: <topology>: expected <system>"),
        (
            "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tFAST\t X \n",
            r"x:3:6: 'FAST' between GPU1 and GPU0",
        ),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV18\n", r"x:1:1: no row for GPU1"),
        ("\tGPU0\tGPU1\nGPU0\t X\n", r"x:2:1: GPU0 has 1 cells: expected 2"),
        (
            'Switch 4 "S-1" # "a" x\nnonsense\n',
            r"x:2:1: 'nonsense': expected a line of ibnetdiscover",
        ),
    ],
)
def test_a_wrong_value_is_an_error_with_line_and_column(text, message):
    with pytest.raises(TopologyError, match=message) as caught:
        read_text(text, "x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        '{"instances": []}',
        '{"Instances": []}',
        '[{"links": [], "nodes": []}]',
        '{"lldp": {}}',
        '{"kind": "List", "items": []}',
        '{"kind": "List", "items": [{"kind": "Node", "metadata": {"name": "n"}}]}',
        "<system/>",
        "vendid=0x2c9\ncaguid=0x1\n",
        "",
    ],
)
def test_a_file_that_places_nobody_says_so(text):
    with pytest.raises(NoTopology, match=r"^x: no placement information: "):
        read_text(text, "x")


def test_a_format_may_be_named_and_must_exist():
    with pytest.raises(UsageError, match="format 'slurm': expected one of toml, json, slurm-conf"):
        read_text("", format="slurm")
    with pytest.raises(TopologyError, match="not JSON"):
        read_text("hello", format="ec2")
    with pytest.raises(UsageError, match="a file of format ec2 has one topology"):
        read_text('{"Instances": []}', choose="x")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match="nowhere: No such file or directory"):
        read(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="a directory without topology.yaml and topology.conf"):
        read(str(tmp_path))
    (tmp_path / "x").write_bytes(b"SwitchName=\xff\n")
    with pytest.raises(TopologyError, match="x: byte 11 is not UTF-8"):
        read(str(tmp_path / "x"))


def test_a_missing_library_is_named_with_its_pip_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(UsageError, match="needs PyYAML: pip install 'PyYAML'"):
        read_text("- topology: a\n")
