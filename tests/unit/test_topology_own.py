"""commkit's own TOML and JSON: everything survives the way there and back; errors say where."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commkit.errors import TopologyError, UsageError
from commkit.topology import read_text
from commkit.topology.fabric import Device, Fabric, Host, Link, Nic, Switch, leaf_spine
from commkit.topology.readers.own import read_json, read_toml, write_json, write_toml
from commkit.topology.readers.source import Source

EXAMPLE = """\
format = "commkit-topology/1"

[[switches]]
name = "leaf1"
layer = 0

[[switches]]
name = "spine1"
layer = 1

[[links]]
lower = "leaf1"
upper = "spine1"
count = 4
gbps = 400

[[hosts]]
names = "gpu-[01-04]"
nics = [
  { name = "mlx5_0", switch = "leaf1", rail = 0, gbps = 400 },
]
devices = [{ name = "GPU0" }, { name = "GPU1" }]
"""


def test_an_example_written_by_hand_is_read():
    fabric = read_text(EXAMPLE)
    nic = Nic("mlx5_0", 0, rail=0, gbps=400)
    host = Host("gpu-01", (nic,), (Device("GPU0"), Device("GPU1")))
    assert fabric.hosts == tuple(dataclasses.replace(host, name=f"gpu-0{i}") for i in range(1, 5))
    assert fabric.links == (Link(0, 1, 4, 400),)


def test_the_largest_fabric_is_a_small_file():
    fabric = leaf_spine(64, 196, 32, rails=8, leaves_per_pod=28, cores=16, nic_gbps=400)
    text = write_toml(fabric)
    assert len(text) < 300_000
    assert read_toml(Source("x", text)) == fabric


@pytest.mark.parametrize(
    ("old", "new", "where", "message"),
    [
        ("layer = 1", 'layer = "one"', "9:1", "layer = 'one': expected a whole number"),
        ("layer = 1", "layer = true", "9:1", "layer = True: expected a whole number"),
        ('name = "spine1"\n', "", "7:1", "no name: expected a name for each switch"),
        ('"gpu-[01-04]"', '"a,a"', "1:1", "host 'a' occurs twice"),
        ('upper = "spine1"', 'upper = "x"', "13:1", "switch 'x': expected the name of a switch"),
        ('upper = "spine1"', "upper = 1", "13:1", "upper = 1: expected a host list or a list"),
        ("count = 4", "count = 0", "1:1", "link leaf1 - spine1: count is 0"),
        ("count = 4", "counts = 4", "14:1", "unknown key counts: expected lower, upper, count"),
        ("gpu-[01-04]", "gpu-[01-", "18:1", "host list 'gpu-[01-'"),
        ('switch = "leaf1"', 'switch = "x"', "20:22", "switch 'x': expected the name"),
        ("rail = 0", 'rail = "0"', "20:40", "rail = '0': expected a whole number"),
        ("gbps = 400 },", "gpbs = 400 },", "20:50", "unknown key gpbs"),
        ("commkit-topology/1", "commkit-topology/9", "1:1", "'commkit-topology/9': expected"),
        ('"gpu-[01-04]"', '"g[1-2]"\nid = "i"', "19:1", "id 'i' for 2 hosts"),
        ("devices = [", "devices = {", "22:12", "not TOML: Invalid initial character"),
    ],
)
def test_an_error_says_line_and_column(old, new, where, message):
    assert old in EXAMPLE
    with pytest.raises(TopologyError) as caught:
        read_text(EXAMPLE.replace(old, new), "t.toml")
    assert str(caught.value).startswith(f"t.toml:{where}"), caught.value
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"format": "commkit-topology/1", "hosts": [\n {"names": 5}]}',
            "x:2:12: names = 5: expected",
        ),
        ('{"format": "commkit-topology/1",\n "nodes": []}', "x:2:11: unknown key nodes"),
        ('{"format": "commkit-topology/1",\n "joined": 1}', "x:2:12: joined = 1: expected true"),
        ('{"format": "commkit-topology/1",\n "hosts": {}}', "x:2:11: hosts = {}: expected a list"),
        (
            '{"format": "commkit-topology/1", "hosts": [{"names": "a",\n "paths": [["a", "b"]]}]}',
            "x:2:12: .*expected .from, to, how",
        ),
    ],
)
def test_an_error_in_json_says_line_and_column(text, message):
    with pytest.raises(TopologyError, match=message):
        read_text(text, "x")


def test_python_without_tomllib_asks_for_tomli(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(UsageError, match="needs tomli: pip install 'tomli'"):
        read_text(EXAMPLE)


# Whatever a tool may have called something: quotes, escapes, commas, emoji, DEL.
names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8) | st.from_regex(
    r"[a-z-]{1,4}[0-9]{0,3}", fullmatch=True
)
speeds = st.none() | st.floats(0.1, 1e4) | st.integers(1, 800)
counts = st.none() | st.integers(0, 8)
texts = st.none() | names
devices = st.none() | st.lists(
    st.builds(Device, names, texts, counts, texts, texts), max_size=2
).map(tuple)


@st.composite
def fabrics(draw):
    switches = draw(
        st.lists(
            st.builds(Switch, names, st.integers(0, 3), texts, texts, counts),
            max_size=5,
            unique_by=lambda switch: switch.name,
        )
    )
    count = len(switches)
    where = st.none() | st.integers(0, count - 1) if count else st.none()
    nics = st.builds(Nic, texts, where, counts, counts, speeds, texts, counts)
    hosts = draw(
        st.lists(
            st.builds(
                Host,
                names,
                st.lists(nics, max_size=3).map(tuple),
                devices,
                texts,
                texts,
                st.lists(st.tuples(names, names, names), max_size=2).map(tuple),
            ),
            max_size=6,
            unique_by=lambda host: host.name,
        )
    )
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    links = (
        draw(
            st.lists(
                st.builds(
                    lambda pair, n, speed: Link(*pair, n, speed),
                    st.sampled_from(pairs),
                    st.none() | st.integers(1, 64),
                    speeds,
                ),
                max_size=6,
            )
        )
        if pairs
        else []
    )
    notes = draw(st.lists(names, max_size=2))
    sizes = draw(st.lists(st.integers(1, 99), max_size=2))
    return Fabric(
        tuple(hosts), tuple(switches), tuple(links), tuple(sizes), tuple(notes), draw(st.booleans())
    )


@settings(max_examples=80, deadline=None)
@given(fabrics())
def test_every_fabric_survives_the_way_through_toml_and_json(fabric):
    assert read_toml(Source("x", write_toml(fabric))) == fabric
    assert read_json(Source("x", write_json(fabric))) == fabric


@settings(max_examples=50, deadline=None)
@given(fabrics(), st.randoms(use_true_random=False))
def test_renaming_everything_changes_no_distance(fabric, random):
    renamed = dataclasses.replace(
        fabric,
        hosts=tuple(
            dataclasses.replace(host, name=f"h{i}", id=None) for i, host in enumerate(fabric.hosts)
        ),
        switches=tuple(
            dataclasses.replace(switch, name=f"s{i}") for i, switch in enumerate(fabric.switches)
        ),
    )
    assert renamed.levels() == fabric.levels()
    assert renamed.order() == fabric.order()


def test_the_example_of_the_documentation_is_read_and_comes_back_equal(repository):
    text = (repository / "docs" / "topology.md").read_text()
    fabric = read_text(text.partition("```toml\n")[2].partition("```")[0], "topology.toml")
    assert [host.name for host in fabric.hosts] == [*(f"gpu-00{i}" for i in range(1, 5)), "login1"]
    assert fabric.rails == (0, 1)
    assert fabric.levels()[0].uplink_gbps == (3200,)
    assert [fabric.hosts[i].name for i in fabric.unplaced] == ["login1"]
    assert read_toml(Source("x", write_toml(fabric))) == fabric
