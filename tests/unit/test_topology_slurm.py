"""Slurm's topology.conf and topology.yaml, beside what Slurm's own parser takes from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commkit.errors import CommkitError, TopologyError
from commkit.topology import read_text
from commkit.topology.readers import slurm_lexer
from commkit.topology.readers.source import Source

RECORDED = json.loads(
    (Path(__file__).resolve().parent.parent / "recorded/topology/slurm-lexer.json").read_text()
)["texts"]
KEYS = ("nodes", "switches", "linkspeed")


def lex(text):
    """[name, Nodes, Switches, LinkSpeed] of each line, or None for what is no such line."""
    source = Source("t", text)
    found = []
    try:
        for line in slurm_lexer.lines(text):
            head, *rest = slurm_lexer.pairs(line, source) or [None]
            if head is None or head.key != "switchname":
                return None
            if not {pair.key for pair in rest} <= set(KEYS):
                return None
            last = {pair.key: pair.value for pair in rest}
            found.append([head.value, *(last.get(key) for key in KEYS)])
    except TopologyError:
        return None
    return found


def test_the_record_holds_what_slurm_takes_and_what_it_refuses():
    assert sum(entry["accepted"] for entry in RECORDED) > 100
    assert sum(not entry["accepted"] for entry in RECORDED) > 50


def test_lines_come_apart_as_in_slurms_own_parser():
    wrong = [
        entry["text"]
        for entry in RECORDED
        if lex(entry["text"]) != (entry["lines"] if entry["accepted"] else None)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("SwitchName=a Nodes=n1\nSwitchName=b junk\n", "2:14", "'junk': expected Key=value"),
        ("# c\nSwitchName=a \\\n  Nodes=n[1-\n", "3:9", "host list 'n[1-'"),
        ("SwitchName=a Nodes=n1 \\\n Nods=n2\n", "2:2", "unknown key Nods"),
        ("Nodes=n1 SwitchName=a\n", "1:1", "unknown key Nodes: expected a line to begin with"),
        ("SwitchName=a SwitchName=b\n", "1:14", "unknown key SwitchName"),
        ('SwitchName="" Nodes=n\n', "1:13", "an empty name"),
        ("SwitchName=a LinkSpeed=fast\n", "1:24", "LinkSpeed=fast: expected a whole number"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2\n", "2:1", "not both"),
        ("BlockName=a Nodes=n1\nBlockName=a Nodes=n2\n", "2:11", "duplicate block a"),
        ("BlockName=a Nodes=n1\nBlockSizes=8,x\n", "2:12", "expected numbers"),
        ("BlockName=a Nodes=n1\nBlockSizes=8,4\n", "2:12", "4: expected 8 times a power of two"),
        ("BlockName=a Nodes=n1\nBlockSizes=0\n", "2:12", "0: expected sizes above 0"),
        ("Include nowhere.conf\n", "1:1", "Include nowhere.conf"),
        (
            "SwitchName=t Switches=a\nSwitchName=a Switches=b\nSwitchName=b Switches=c\n"
            "SwitchName=c Switches=a\n",
            "2:23",
            "not a tree (cycle a,b,c)",
        ),
    ],
)
def test_an_error_says_file_line_and_column(text, where, message):
    with pytest.raises(TopologyError) as caught:
        read_text(text, "t.conf")
    assert str(caught.value).startswith(f"t.conf:{where}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "where", "message"),
    [
        ("tree: {switches: [{switch: a, nodes: 'n[1-'}]}", "2:40", "host list 'n[1-'"),
        ("tree: {switches: [{switch: a, node: n1}]}", "2:39", "unknown key node"),
        ("tree: {switches: [{nodes: n1}]}", "2:21", "expected the switch's name to be a name"),
        ("tree: {switches: [{switch: a, nodes: n1, children: b}]}", "2:21", "both nodes and child"),
        ("tree: {switches: a}", "2:20", '"a": expected switches to be a list'),
        ("block: {block_sizes: [4, x], blocks: []}", "2:28", '"x": expected a block size'),
        ("block: {block_sizes: [4, 6], blocks: []}", "2:24", "6: expected 4 times a power of two"),
        ("tree: {}\n  block: {}", "1:3", "tree, block: expected exactly one of"),
        ("cluster_default: true", "1:3", "none: expected exactly one of"),
        ("tree: [", "3:1", "not YAML"),
    ],
)
def test_an_error_in_yaml_says_line_and_column(body, where, message):
    with pytest.raises(TopologyError) as caught:
        read_text(f"- topology: t\n  {body}\n", "t.yaml")
    assert str(caught.value).startswith(f"t.yaml:{where}: "), caught.value
    assert message in str(caught.value)


def test_names_that_yaml_would_read_as_numbers_stay_names():
    fabric = read_text("- topology: 1\n  tree: {switches: [{switch: 0123, nodes: 'no,1e3,007'}]}\n")
    assert [host.name for host in fabric.hosts] == ["no", "1e3", "007"]
    assert fabric.switches[0].name == "0123"


def test_an_included_file_is_read_and_named_in_its_errors(tmp_path):
    (tmp_path / "inner.conf").write_text("SwitchName=b Nodes=n2\n")
    outer = f"SwitchName=a Nodes=n1\ninclude {tmp_path}/inner.conf\n"
    assert [host.name for host in read_text(outer).hosts] == ["n1", "n2"]
    (tmp_path / "inner.conf").write_text("\nSwitchName=b Nods=n2\n")
    with pytest.raises(TopologyError, match=r"inner.conf:2:14: unknown key Nods"):
        read_text(outer)
    (tmp_path / "inner.conf").write_text("include inner.conf\n")
    with pytest.raises(TopologyError, match="the file includes itself"):
        read_text(outer)


def test_a_node_on_several_leaves_stays_on_them_and_is_noted():
    fabric = read_text("SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[2-3]\n")
    assert fabric.distance(0, 2) == 0
    assert fabric.notes == ("1 nodes are on several leaves: n2",)


def test_a_block_smaller_than_the_base_size_is_noted_since_slurm_refuses_it():
    fabric = read_text("BlockName=a Nodes=n[1-4]\nBlockName=b Nodes=n5\nBlockSizes=4\n")
    assert "block b has 1 nodes, fewer than the base block size 4" in fabric.notes[0]


def test_a_block_that_is_left_over_forms_no_unit_of_its_own():
    text = "".join(f"BlockName=b{i} Nodes=n{i}\n" for i in range(1, 6)) + "BlockSizes=1,2,4\n"
    fabric = read_text(text)
    assert [s.name for s in fabric.switches if s.layer] == ["b[1-2]", "b[3-4]", "b[1-4]"]
    assert [level.groups for level in fabric.levels()] == [5, 3, 2]
    assert fabric.components() == (0,) * 5


@settings(max_examples=100, deadline=None)
@given(st.text('SwitchName=abNodes=n[1-2],\\# "\n\tLinkSpeed', max_size=60))
def test_any_text_gives_a_fabric_or_one_line_of_error(text):
    for start in ("", "SwitchName=x ", "BlockName=x Nodes=n1 "):
        try:
            read_text(start + text, "t.conf", format="slurm-conf")
        except CommkitError as error:
            assert str(error).startswith("t.conf")
            assert "\n" not in str(error)
