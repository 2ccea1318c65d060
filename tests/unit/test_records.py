"""Records: one line each, read back as written, refused with file, line and field."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from commkit import records
from commkit.errors import UsageError
from commkit.records import Measurement, WrongElement


def measurement(**changes):
    values = {
        "collective": "all_reduce",
        "dtype": "float",
        "redop": "sum",
        "root": -1,
        "in_place": True,
        "bytes": 1024,
        "count": 256,
        "world_size": 4,
        "hosts": 1,
        "backend": "gloo",
        "device": "cpu",
        "start": "commkit",
        "iterations": 3,
        "warmup_iterations": 1,
        "clock": "monotonic",
        "times_us": (10.0, 12.5, 11.25),
        "time_us": 11.25,
        "min_us": 10.0,
        "mean_us": 11.25,
        "p95_us": 12.5,
        "p99_us": 12.5,
        "max_us": 12.5,
        "cv": 0.0907,
        "slowest_rank": 2,
        "slowest_rank_time_us": 11.0,
        "algbw_gbps": 0.091,
        "busbw_gbps": 0.1365,
        "wrong": 0,
        "first_wrong": None,
        "run": "a1b2",
        "timestamp": 1.7e9,
        "versions": {"torch": "2.13.0"},
        "environment": {"NCCL_ALGO": "Ring"},
    }
    return Measurement(**{**values, **changes})


@pytest.mark.parametrize(
    "record",
    [
        measurement(),
        measurement(busbw_gbps=None, world_size=1, wrong=None),
        measurement(wrong=2, first_wrong=WrongElement(1, 77, 3.0, 4.0)),
        measurement(wrong=1, first_wrong=WrongElement(0, 0, "nan", 4.0)),
        measurement(rank_times_us=(1.0, 2.5), precision=0.01, group="dp", groups=2, skew=0.5),
        measurement(environment={}, versions={"torch": "2.13.0+cpu \u00fc\n"}),
    ],
)
def test_a_record_is_read_back_as_it_was_written(tmp_path, record):
    path = tmp_path / "records.jsonl"
    writer = records.Writer(str(path))
    writer.write(record)
    writer.write(record)
    writer.close()
    assert path.read_text().count("\n") == 2
    assert list(records.read(path)) == [record, record]


def test_a_record_is_on_disk_when_write_returns(tmp_path):
    path = tmp_path / "records.jsonl"
    writer = records.Writer(str(path))
    writer.write(measurement())
    assert len(list(records.read(path))) == 1
    writer.close()


def test_records_are_appended_to_those_of_earlier_runs(tmp_path):
    path = tmp_path / "records.jsonl"
    for run in ("one", "two"):
        writer = records.Writer(str(path))
        writer.write(measurement(run=run))
        writer.close()
    assert [record.run for record in records.read(path)] == ["one", "two"]


def test_a_dash_writes_to_standard_output(capsys):
    writer = records.Writer("-")
    writer.write(measurement())
    writer.close()
    assert records.from_line(capsys.readouterr().out) == measurement()


def test_two_writers_of_one_file_are_detected(tmp_path):
    path = tmp_path / "records.jsonl"
    writer = records.Writer(str(path))
    with pytest.raises(UsageError, match=rf"--json {path}: another process is writing"):
        records.Writer(str(path))
    writer.close()
    records.Writer(str(path)).close()


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(UsageError, match="--json .*/no/file: No such file or directory"):
        records.Writer(str(tmp_path / "no" / "file"))
    with pytest.raises(UsageError, match="missing: No such file"):
        list(records.read(tmp_path / "missing"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_json_lacks_are_not_written(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        records.to_line(measurement(cv=value))


def line(**changes):
    values = json.loads(records.to_line(measurement()))
    values.update(changes)
    return json.dumps({name: value for name, value in values.items() if value != "REMOVE"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not JSON at column [12]"),
        ("[1]", "expected a JSON object, got list"),
        (line(bytes="REMOVE"), "field 'bytes' is missing"),
        (line(colour=1), "unknown field 'colour'"),
        (line(bytes=1.5), "field 'bytes' is 1.5: expected an integer"),
        (line(bytes=True), "field 'bytes' is True: expected an integer"),
        (line(in_place=1), "field 'in_place' is 1: expected true or false"),
        (line(time_us="3"), "field 'time_us' is '3': expected a number"),
        (line(time_us=math.nan), "field 'time_us' is nan: expected a number"),
        (line(times_us=[1, None]), "field 'times_us' is .*: expected a list of numbers"),
        (line(versions={"torch": 2}), "field 'versions' is .*: expected an object of text"),
        (line(schema=99, new=1), "field 'schema' is 99: this commkit reads 1 to 2"),
        (line(first_wrong={"rank": 1}), "first_wrong: field 'index' is missing"),
        (line(first_wrong=3), "field 'first_wrong' is 3: expected an object or null"),
    ],
)
def test_a_wrong_line_is_named_with_file_line_and_field(tmp_path, text, expected):
    path = tmp_path / "records.jsonl"
    path.write_text(f"{line()}\n\n{text}\n")
    with pytest.raises(UsageError, match=rf"records.jsonl:3: .*{expected}"):
        list(records.read(path))


def test_a_record_of_the_first_schema_is_read_with_what_its_silence_means():
    old = json.loads(records.to_line(measurement()))
    for item in dataclasses.fields(Measurement):
        if item.default is not dataclasses.MISSING:
            del old[item.name]
    found = records.from_line(json.dumps({**old, "schema": 1}))
    assert (found.schema, found.mode, found.group, found.groups) == (1, "blocking", "", 1)
    assert (found.rank_times_us, found.source, found.precision) == ((), -1, None)


def test_records_before_a_wrong_line_are_delivered(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(line().encode() + b"\n\xff\xfe\n")
    reader = records.read(path)
    assert next(reader) == measurement()
    with pytest.raises(UsageError, match=r"records.jsonl:2: not UTF-8"):
        next(reader)


def test_every_field_has_a_check():
    for item in (*dataclasses.fields(Measurement), *dataclasses.fields(WrongElement)):
        assert str(item.type) in records._CHECKS


def test_the_environment_is_kept_by_allow_list_and_without_secrets():
    kept = records.kept_environment(
        {
            "NCCL_ALGO": "Ring",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "COMMKIT_SECRET": "hunter22",
            "NCCL_PLUGIN_TOKEN": "t",
            "UCX_AUTH": "t",
            "FI_API_KEY": "k",
            "UCX_APIKEY": "k",
            "FI_SSHKEY": "k",
            "NCCL_IB_PKEY": "3",
            "AWS_SECRET_ACCESS_KEY": "k",
            "HOME": "/root",
            "UCX_PROXY": "http://user:hunter22@proxy:80/x",
            "FI_PROXY": "http://user:hunter/@22@proxy:80",
        }
    )
    assert kept == {
        "FI_PROXY": "http://***@proxy:80",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_ALGO": "Ring",
        "NCCL_IB_PKEY": "3",
        "OMP_NUM_THREADS": "1",
        "UCX_PROXY": "http://***@proxy:80/x",
    }


def test_the_document_has_every_field_in_order_with_its_type(repository):
    text = (repository / "docs" / "records.md").read_text()
    table = text.partition("<!-- fields -->")[2].partition("<!-- /fields -->")[0]
    rows = [row.split(" | ")[:2] for row in table.splitlines() if row.startswith("| `")]
    documented = [(name.strip("| `"), kind) for name, kind in rows]
    words = {
        "str": "text",
        "bool": "true or false",
        "int": "integer",
        "float": "number",
        "tuple[float, ...]": "list of numbers",
        "dict[str, str]": "object of text",
        "WrongElement": "object",
        "None": "null",
    }
    assert documented == [
        (item.name, " or ".join(words[part] for part in str(item.type).split(" | ")))
        for item in dataclasses.fields(Measurement)
    ]
    assert f"This commkit writes {records.SCHEMA} and reads" in text
