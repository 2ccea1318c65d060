"""Damaged, absurd and malicious descriptions of fabrics: one line that says where, and soon."""

from __future__ import annotations

import gzip
import io
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from commkit import placing
from commkit.errors import CommkitError, NoTopology, TopologyError, UsageError
from commkit.topology import draw, read, read_text
from commkit.topology.emit import read_permutation
from commkit.topology.readers.source import printable
from commkit.topology.writers import WRITERS, write

RECORDED = Path(__file__).resolve().parent.parent / "recorded" / "topology"

TOML = """format = "commkit-topology/1"
[[switches]]
name = "a"
[[switches]]
name = "s"
layer = 1
[[links]]
lower = "a"
upper = "s"
gbps = 400
[[hosts]]
names = "n[1-2]"
nics = [{name = "m0", switch = "a", gbps = 400}]
"""

#: What small mistakes and other tools' files put into a description.
JUNK = (
    "\0 \ufeff \u2028 \x85 \x1b[31m -1 1e999 NaN inf 99999999999999999999 [0-9] [ ] { } \" ' \\ "
    "null true [] {} = : , # <!-- <a> &lt; \u0663 \u00e9 - *a &a !!x n[1-99999]"
).split(" ")


def mutated(text, draw_):
    """`text` with one to six changes: characters cut, doubled, words replaced, lines moved."""
    for _ in range(draw_.choice([1, 1, 1, 2, 3, 6])):
        kind, at = draw_.randrange(6), draw_.randrange(len(text) + 1)
        end = min(len(text), at + draw_.choice([1, 1, 2, 5, 20, 100]))
        lines = text.split("\n")
        words = list(re.finditer(r"\w+", text))
        if kind == 0:
            text = text[:at] + text[end:]
        elif kind == 1:
            text = text[:at] + draw_.choice(JUNK) + text[at:]
        elif kind == 2:
            text = text[:at] + text[at:end] * draw_.choice([2, 3, 50]) + text[end:]
        elif kind == 3 and words:
            word = draw_.choice(words)
            other = draw_.choice([*JUNK, draw_.choice(words)[0]])
            text = text[: word.start()] + other + text[word.end() :]
        elif kind == 4:
            lines.insert(draw_.randrange(len(lines)), draw_.choice(lines))
            text = "\n".join(lines)
        else:
            del lines[draw_.randrange(len(lines))]
            text = "\n".join(lines)
    return text


def texts():
    for path in sorted(RECORDED.iterdir()):
        if path.suffix != ".md" and path.stat().st_size < 20_000:
            yield pytest.param(path.read_text(), id=path.name)


def one_line(error):
    return "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 800


@pytest.mark.parametrize("text", list(texts()))
def test_a_damaged_file_is_read_or_refused_in_one_line_that_names_it(text):
    draw_ = random.Random(1)
    for _ in range(60):
        changed = mutated(text, draw_)
        try:
            fabric = read_text(changed, "FILE")
        except (TopologyError, NoTopology) as error:
            assert str(error).startswith("FILE:") and one_line(error), (changed, error)
            continue
        except UsageError as error:
            assert one_line(error), (changed, error)
            continue
        screen = io.StringIO()
        Console(file=screen, width=200).print(draw.tree(fabric))
        assert "\x1b" not in screen.getvalue()
        for to in WRITERS:
            try:
                written = write(fabric, to)
            except CommkitError as error:
                assert to == "slurm", (changed, error)
                continue
            again = read_text(written)
            assert to == "slurm" or again == fabric, changed


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("f.toml", TOML.replace("layer = 1", "layer = 1000000000"), "expected 64 layers at most"),
        ("f.toml", TOML.replace("gbps = 400\n", "gbps = nan\n"), r"gbps is nan: expected a number"),
        ("f.toml", TOML.replace("gbps = 400\n", f"gbps = 1{'0' * 400}\n"), "gbps is inf"),
        ("f.toml", TOML.replace("layer = 1", f"layer = {'9' * 5000}"), "thousands of digits"),
        ("f.json", f'{{"instances": [], "x": {"9" * 5000}}}', "thousands of digits"),
        (
            "f.json",
            '{"format": "commkit-topology/1", "hosts": [{"names": ["\\ud800"]}]}',
            r"f\.json:1:\d+: .*half a character",
        ),
        (
            "f.conf",
            "".join(f"SwitchName=s{i} Switches=s{i + 1}\n" for i in range(999))
            + "SwitchName=s999 Nodes=n1\n",
            r"f\.conf: switch 's0' is in layer 999",
        ),
        (
            "f.conf",
            "".join(f"SwitchName=s{i} Switches=s{(i + 1) % 999}\n" for i in range(999)),
            r"not a tree \(cycle s0,s1,s2,s3,s4,s5,s6,s7,\.\.\.\)",
        ),
        ("f.conf", f"SwitchName=a Nodes={'h1x,' * 5000}[\n", r"host list 'h1x,.{,300}'\[': exp"),
        ("f.conf", "SwitchName=\x1b[2Ja Nodes=n1\n" * 2, r"duplicate switch \\x1b\[2Ja"),
        ("f.yaml", "- topology: &a [*a]\n", "recursive"),
    ],
)  # fmt: skip
def test_what_no_fabric_can_be_is_refused_with_its_file(name, text, message):
    with pytest.raises(TopologyError, match=message) as caught:
        read_text(text, name)
    assert str(caught.value).startswith(f"{name}:") and one_line(caught.value)


def test_a_few_lines_of_yaml_that_stand_for_gigabytes_are_not_printed():
    lines = ['- topology: &a ["x", "x", "x", "x", "x", "x", "x", "x", "x"]']
    for i in range(9):
        lines.append(f"- topology: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]")
    lines[0] = "- topology: {x: *j}"
    text = "\n".join([*lines[1:], lines[0]]).replace("*a", "x")
    with pytest.raises(TopologyError, match="a list: expected the topology's name"):
        read_text(text, "f.yaml")


def test_a_product_of_links_that_no_memory_holds_is_refused():
    names = "".join(f'[[switches]]\nname = "a{i}"\n' for i in range(1100))
    names += "".join(f'[[switches]]\nname = "b{i}"\nlayer = 1\n' for i in range(1100))
    text = 'format = "commkit-topology/1"\n' + names
    text += '[[links]]\nlower = "a[0-1099]"\nupper = "b[0-1099]"\n'
    with pytest.raises(TopologyError, match=r"more than 1,048,576 links"):
        read_text(text, "f.toml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(TOML.encode()), "is not UTF-8: expected text"),
        ("SwitchName=a Nodes=n1\n".encode("utf-16"), "byte 0 is not UTF-8: expected text"),
        ("SwitchName=\xe4 Nodes=n1\n".encode("latin-1"), "byte 11 is not UTF-8: expected text"),
        (b"Include /dev/zero\n", r":1:1: Include /dev/zero: .*268435456 bytes at most"),
        (b"Include .\n", r":1:1: Include \.: .*Is a directory"),
    ],
)
def test_what_is_no_text_or_has_no_end_is_refused(tmp_path, content, message):
    file = tmp_path / "f.conf"
    file.write_bytes(content)
    with pytest.raises((TopologyError, UsageError), match=message) as caught:
        read(str(file))
    assert str(caught.value).startswith(str(file)) and one_line(caught.value)


def test_an_empty_file_says_nothing_about_places(tmp_path):
    for name in ("f.toml", "f.conf", "f.yaml", "f"):
        (tmp_path / name).write_text("")
        with pytest.raises(NoTopology, match="no placement information"):
            read(str(tmp_path / name))


def test_names_cannot_move_the_cursor_of_a_terminal():
    fabric = read_text("SwitchName=\x1b[2Ja Nodes=n\x1bc1\n")
    screen = io.StringIO()
    Console(file=screen, width=100).print(draw.tree(fabric))
    assert "\x1b" not in screen.getvalue() and "\\x1b[2Ja" in screen.getvalue()
    assert printable("n\u202e1 \u00e9") == "n\\u202e1 \u00e9"


def test_names_of_a_picture_are_no_formulas_and_move_no_cursor(tmp_path):
    from commkit.topology import picture

    fabric = read_text(TOML.replace('"a"', '"$\\\\frac$"').replace('"s"', '"s\\u001b$_$"'))
    picture.save(fabric, str(tmp_path / "f.svg"), "svg")
    assert (tmp_path / "f.svg").stat().st_size > 0


def test_a_topology_conf_is_not_written_where_it_could_not_be_read_again():
    with pytest.raises(NoTopology, match="no switch has a host"):
        write(read_text(TOML.replace(', switch = "a"', "")), "slurm")
    odd = TOML.replace('names = "n[1-2]"', 'names = ["n#1"]')
    with pytest.raises(UsageError, match="name 'n#1': a topology.conf holds no"):
        write(read_text(odd), "slurm")
    blocks = read_text("- topology: t\n  block: {blocks: [{block: my block, nodes: n1}]}\n")
    assert len(read_text(write(blocks, "slurm")).hosts) == 1


PLACE = {"hosts": ("n1", "n2"), "layout": "dp=4", "ranks_per_host": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks_per_host": 0}, "--ranks-per-host 0: expected 1 to"),
        ({"queue_pairs": 0}, "--queue-pairs 0: expected 1 to 128"),
        ({"queue_pairs": 10**9}, "--queue-pairs 1000000000: expected 1 to 128"),
        ({"uplinks": 0}, "--uplinks 0: expected 1 to"),
        ({"uplink_gbps": float("nan")}, "--uplink-gbps nan: expected 0.001 to"),
        ({"nic_gbps": float("inf")}, "--nic-gbps inf: expected 0.001 to"),
        ({"nic_gbps": 0.0}, "--nic-gbps 0.0: expected 0.001 to"),
        ({"hosts": ("n1", "n1")}, "host 'n1' is named twice"),
    ],
)
def test_numbers_that_nothing_can_be_computed_with_are_refused(change, message):
    wish = placing.Wish(**{**PLACE, **change})
    with pytest.raises(UsageError, match=message):
        placing.placed(wish, read_text(TOML))


@pytest.mark.parametrize("size", ["1e-320", "1e999", "1e308T", "0.5", "1e31"])
def test_sizes_that_are_no_sizes_are_refused(size):
    wish = placing.Wish(**PLACE, work=placing.parse_work([f"dp=all_reduce:{size}"]))
    with pytest.raises(UsageError, match=r"family dp: .* bytes: expected 0, or 1 to 1e\+30"):
        placing.placed(wish, read_text(TOML))


@pytest.mark.parametrize("value", ["nan", "inf", "1.5"])
def test_a_number_of_layers_is_a_whole_number(value):
    with pytest.raises(UsageError, match=f"--model 'layers={value}': expected a whole number"):
        placing.parse_model(f"parameters=1e9,layers={value},hidden=64,sequence=64")


def test_a_file_of_hosts_in_another_encoding_is_named(tmp_path):
    (tmp_path / "hosts").write_bytes(b"n\xe41\n")
    with pytest.raises(CommkitError, match=r"^--hosts @.*/hosts: byte 1 is not UTF-8"):
        placing.host_names(f"@{tmp_path}/hosts")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('"ranks_per_host": 1000000000000, "hosts": ["a"], "rank": [0]', "once, 1000000000000 for"),
        ('"ranks_per_host": 1, "hosts": ["a", "a"], "rank": [1, 0]', "'a' occurs twice"),
        ('"ranks_per_host": 1, "hosts": ["a"], "rank": [false]', "expected a list of ranks"),
        ('"ranks_per_host": 1, "hosts": ' + "[" * 100_000, "not JSON"),
    ],
)
def test_a_placement_that_is_none_is_refused(body, message):
    text = f'{{"format": "commkit-placement", "version": 1, {body}}}'
    with pytest.raises(UsageError, match=message) as caught:
        read_permutation(text, "perm.json")
    assert str(caught.value).startswith("perm.json: ") and len(str(caught.value)) < 300


def test_an_error_of_the_command_is_one_line_that_moves_no_cursor(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "commkit", "topo", "show", "no\x1b[2J\nsuch"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 2 and done.stderr.startswith("commkit: no\\x1b[2J such: No such file")
