"""NCCL's tuner table: what is read, what is refused and where, which row decides and why."""

from __future__ import annotations

import random

import pytest
from click.testing import CliRunner

from commkit import tuner
from commkit.cli import tune
from commkit.errors import UsageError
from commkit.tuner import Call, Row

TABLE = """\
# for 8 GPUs a node
commkit-tuner-table 1
allreduce 0..64K nodes=2 -> tree ll channels=2   # small
allreduce 0..1M nodes=2..8 -> tree ll128
allreduce 512K.. per_node=8 -> ring simple channels=16 chunk=1M
broadcast 1G.. ranks=16.. registered=yes -> default channels=4
"""


@pytest.fixture
def write(tmp_path):
    def written(text):
        path = tmp_path / "table"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return written


def test_rows_are_read_as_they_are_written(write):
    rows = tuner.read(write(TABLE)).rows
    assert rows == (
        Row("allreduce", (0, 65536), "tree", "ll", 2, nodes=(2, 3), line=3),
        Row("allreduce", (0, 1 << 20), "tree", "ll128", nodes=(2, 8), line=4),
        Row("allreduce", (1 << 19, None), "ring", "simple", 16, 1 << 20, per_node=(8, 9), line=5),
        Row("broadcast", (1 << 30, None), channels=4, ranks=(16, None), registered=True, line=6),
    )


def test_no_channels_and_none_given_are_the_same(write):
    given = tuner.read(write("commkit-tuner-table 1\nallreduce 0.. -> ring simple channels=0\n"))
    assert given.rows == (Row("allreduce", (0, None), "ring", "simple", line=2),)


def test_what_is_written_is_read_back_equal(write):
    first = tuner.read(write(TABLE))
    text = tuner.text(first.rows, "of a sweep\n\non one day")
    second = tuner.read(write(text))
    assert [row.text() for row in second.rows] == [row.text() for row in first.rows]
    # Comments and lines do not count, what is chosen does.
    assert second.fingerprint == first.fingerprint
    changed = tuner.read(write(text.replace("channels=16", "channels=8")))
    assert changed.fingerprint != first.fingerprint
    assert text.isascii() and "\r" not in text and text.startswith("# of a sweep\n#\n")


@pytest.mark.parametrize(
    ("line", "column", "why"),
    [
        ("alltoall 0.. -> ring simple", 1, "collective 'alltoall', expected one of broadcast,"),
        ("AllReduce 0.. -> ring simple", 1, "collective 'AllReduce'"),
        ("collective_type,min_bytes,max_bytes,algorithm", 1, "collective 'collective_type,min"),
        ("allreduce", 10, "no sizes after the collective"),
        ("allreduce 64K..1K -> ring simple", 11, "sizes 64K..1K is empty"),
        ("allreduce 8..8 -> ring simple", 11, "is empty"),
        ("allreduce 64KB.. -> ring simple", 11, "sizes '64KB', expected bytes such as"),
        ("allreduce -1.. -> ring simple", 11, "sizes '-1'"),
        ("allreduce 0...5 -> ring simple", 14, "sizes '.5'"),
        ("allreduce 99999999999999999999.. -> ring simple", 11, "is too large"),
        ("allreduce 99999999T.. -> ring simple", 11, "is too large"),
        ("allreduce 0.. nodes=0 -> ring simple", 21, "nodes of 0, expected 1 or more"),
        ("allreduce 0.. nodes=2 nodes=3 -> ring simple", 23, "nodes is given twice"),
        ("allreduce 0.. nodes=2K -> ring simple", 21, "nodes '2K', expected a number"),
        ("allreduce 0.. node=2 -> ring simple", 15, "'node=2', expected nodes=, ranks="),
        ("allreduce 0.. registered=1 -> ring simple", 26, "registered '1', expected yes or no"),
        ("allreduce 0.. ring simple", 15, "'ring', expected nodes="),
        ("allreduce 0..", 14, "no -> with what the row chooses"),
        ("allreduce 0.. ->", 17, "nothing after ->"),
        ("allreduce 0.. -> ring", 22, "an algorithm without a protocol"),
        ("allreduce 0.. -> ring Simple", 23, "protocol 'Simple', expected one of ll, ll128"),
        ("allreduce 0.. -> nvlstree simple", 18, "algorithm 'nvlstree', expected one of tree"),
        ("allreduce 0.. -> ring simple 4", 30, "'4', expected channels=, chunk="),
        ("allreduce 0.. -> default channels=0", 1, "the row chooses nothing"),
        ("allreduce 0.. -> ring simple channels=65", 39, "channels 65"),
        ("allreduce 0.. -> ring simple channels=-1", 39, "channels '-1', expected a number"),
        ("allreduce 0.. -> ring simple chunk=2G", 36, "chunk 2G, expected 1 to 1G"),
        ("allreduce 0.. -> default", 1, "the row chooses nothing"),
        ("allreduce 0.. -> default chunk=4K", 26, "a chunk needs an algorithm"),
        ("commkit-tuner-table 1", 1, "collective 'commkit-tuner-table'"),
    ],
)
def test_a_bad_row_is_refused_where_it_is_bad(write, line, column, why):
    path = write(f"commkit-tuner-table 1\n\n{line}\nallreduce 0.. -> ring simple\n")
    with pytest.raises(tuner.TableError) as caught:
        tuner.read(path)
    assert str(caught.value).startswith(f"{path}:3:{column}: ")
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        (b"", ":1:1", "ends without the line 'commkit-tuner-table 1'"),
        (b"allreduce 0.. -> ring simple\n", ":1:1", "expected the line 'commkit-tuner-table 1'"),
        (b"commkit-tuner-table 2\n", ":1:1", "expected the line 'commkit-tuner-table 1'"),
        (b"\xef\xbb\xbfcommkit-tuner-table 1\n", ":1:1", "byte order mark"),
        (b"commkit-tuner-table 1\r\n", ":1:22", "carriage return"),
        (b"commkit-tuner-table 1\nallreduce\0 0..\n", ":2:10", "not a text file"),
        (b"\xff\xfe\x00\x01", ":1:3", "not a text file"),
    ],
    ids=["empty", "unversioned", "other version", "mark", "return", "zero", "binary"],
)
def test_a_file_that_is_no_table_is_refused(write, text, where, why):
    with pytest.raises(tuner.TableError, match=why) as caught:
        tuner.read(write(text))
    assert f"table{where}: " in str(caught.value)


def test_a_directory_and_a_missing_file_are_named(tmp_path):
    with pytest.raises(tuner.TableError, match="Is a directory"):
        tuner.read(tmp_path)
    with pytest.raises(tuner.TableError, match=r"nowhere: No such file"):
        tuner.read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (Call("allreduce", 1024, 16, 2), 3),
        (Call("allreduce", 65535, 16, 2), 3),
        (Call("allreduce", 65536, 16, 2), 4),
        (Call("allreduce", 1024, 24, 3), 4),
        (Call("allreduce", 600 << 10, 16, 2), 4),
        (Call("allreduce", 1 << 20, 16, 2), 5),
        (Call("allreduce", 1 << 40, 64, 8), 5),
        (Call("allreduce", 1 << 20, 17, 2), None),  # nodes of unequal size
        (Call("allreduce", 1024, 8, 1), None),
        (Call("broadcast", 4 << 30, 16, 2, registered=True), 6),
        (Call("broadcast", 4 << 30, 16, 2), None),
        (Call("allgather", 1024, 16, 2), None),
    ],
)
def test_the_first_row_that_fits_decides(write, call, line):
    table = tuner.read(write(TABLE))
    found = tuner.decides(table, call)
    assert (found and found.line) == line
    # The reasons given to people agree with what the plugin does.
    assert next((row for row in table.rows if not tuner.why_not(row, call)), None) == found


def test_any_table_is_looked_up_as_if_row_by_row(write):
    draw = random.Random(7)

    def bounds(most):
        first = draw.randrange(1, most)
        return draw.choice([tuner.ANY, (first, first + 1), (first, None), (first, first + most)])

    rows = [
        Row(
            draw.choice(tuner.COLLECTIVES),
            bounds(40),
            *draw.choice([("ring", "simple"), ("tree", "ll")]),
            nodes=bounds(4),
            ranks=bounds(20),
            per_node=bounds(8),
            registered=draw.choice([None, True, False]),
        )
        for _ in range(300)
    ]
    table = tuner.read(write(tuner.text(rows)))
    for _ in range(300):
        nodes = draw.randrange(1, 5)
        call = Call(
            draw.choice(tuner.COLLECTIVES),
            draw.randrange(90),
            nodes * draw.randrange(1, 9),
            nodes,
            draw.random() < 0.5,
        )
        expected = next((row for row in table.rows if not tuner.why_not(row, call)), None)
        assert tuner.decides(table, call) == expected


def test_a_row_that_can_never_apply_is_pointed_out(write):
    path = write(TABLE + "allreduce 4K..8K nodes=2 ranks=16 -> ring ll\n")
    assert tuner.read(path).rows[-1].shadowed_by == 3
    done = CliRunner().invoke(tune.command, ["check", str(path)])
    assert f"{path}:7: never used: line 3 applies wherever it does\n" in done.output
    assert "5 rows, fingerprint " in done.output


def test_explain_says_which_row_and_why_not_the_others(write):
    path = write(TABLE)
    words = "explain TABLE --collective allreduce --size 600K --ranks 16 --nodes 2".split()
    done = CliRunner().invoke(tune.command, [str(path) if w == "TABLE" else w for w in words])
    assert done.exit_code == 0
    assert f"{path}:4: allreduce 0..1M nodes=2..8 -> tree ll128\n" in done.output
    assert "  not line 3: is for 0..64K bytes\n" in done.output
    assert "  not line 5: comes after line 4, which applies\n" in done.output
    assert "line 6" not in done.output


def test_calls_that_cannot_be_are_refused(write):
    table = tuner.read(write(TABLE))
    for call in (
        Call("alltoall", 1, 2, 1),
        Call("allreduce", 1, 1, 2),
        Call("allreduce", -1, 2, 1),
    ):
        with pytest.raises(UsageError):
            tuner.decides(table, call)
    for words in ("", "8Q", "1.5M", "-4", "8KM"):
        with pytest.raises(UsageError, match="expected bytes such as"):
            tuner.size(words)


def test_a_table_that_changes_under_explain_is_noticed(write):
    table = tuner.read(write(TABLE))
    write(
        "commkit-tuner-table 1\n"
        + "broadcast 0.. -> default channels=1\n" * 9
        + "allreduce 0.. -> ring simple\n"
    )
    with pytest.raises(tuner.TableError, match="has changed since"):
        tuner.decides(table, Call("allreduce", 1, 2, 1))
