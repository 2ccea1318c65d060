"""COMMKIT_* variables: accepted values, defaults, and the line that a wrong value gets."""

from __future__ import annotations

import dataclasses
import re

import pytest

from commkit.errors import LaunchError
from commkit.settings import VARIABLES, Settings, load

GOOD = {
    "COMMKIT_DISABLE": ("1", True),
    "COMMKIT_DEBUG": ("1", True),
    "COMMKIT_LAUNCHER": ("openmpi", "openmpi"),
    "COMMKIT_JOB_ID": ("run-7/a", "run-7/a"),
    "COMMKIT_HOST_ID": ("h1", "h1"),
    "COMMKIT_IFNAME": ("^=docker0,lo", "^=docker0,lo"),
    "COMMKIT_PORT": ("29500", 29500),
    "COMMKIT_PORT_RANGE": ("20000-20010", (20000, 20010)),
    "COMMKIT_ONE_PORT": ("31000", 31000),
    "COMMKIT_SECRET": ("eight or more", "eight or more"),
    "COMMKIT_STORE": ("wire", "wire"),
    "COMMKIT_GROUPS": ("split", "split"),
    "COMMKIT_BIND": ("off", "off"),
    "COMMKIT_LOG_DIR": ("/var/log/x", "/var/log/x"),
    "COMMKIT_REPORT": ("/var/log/x.json", "/var/log/x.json"),
    "COMMKIT_TOPOLOGY": ("/etc/perm.json", "/etc/perm.json"),
    "COMMKIT_HOST_NAME": ("gpu-01.rack_2", "gpu-01.rack_2"),
    "COMMKIT_PLACED": ("3:12:29500", "3:12:29500"),
    "COMMKIT_TUNER_TABLE": ("/etc/tuner", "/etc/tuner"),
    "COMMKIT_TREE_DEGREE": ("16", 16),
    "COMMKIT_HEARTBEAT": ("2.5", 2.5),
}
WRONG = [
    ("COMMKIT_DISABLE", "yes"),
    ("COMMKIT_DEBUG", "2"),
    ("COMMKIT_LAUNCHER", "Slurm"),
    ("COMMKIT_JOB_ID", "two words"),
    ("COMMKIT_JOB_ID", "x" * 129),
    ("COMMKIT_HOST_ID", "h\u00f6st"),
    ("COMMKIT_HOST_ID", "x" * 65),
    ("COMMKIT_IFNAME", "eth0,"),
    ("COMMKIT_IFNAME", "=^eth0"),
    ("COMMKIT_PORT", "0"),
    ("COMMKIT_PORT", "65536"),
    ("COMMKIT_PORT", "-1"),
    ("COMMKIT_ONE_PORT", "65536"),
    ("COMMKIT_PORT_RANGE", "20010-20000"),
    ("COMMKIT_PORT_RANGE", "20000"),
    ("COMMKIT_PORT_RANGE", "0-10"),
    ("COMMKIT_STORE", "tcp"),
    ("COMMKIT_GROUPS", "splits"),
    ("COMMKIT_BIND", "on"),
    ("COMMKIT_HOST_NAME", "two words"),
    ("COMMKIT_HOST_NAME", "x" * 254),
    ("COMMKIT_PLACED", "3"),
    ("COMMKIT_TREE_DEGREE", "0"),
    ("COMMKIT_TREE_DEGREE", "4097"),
    ("COMMKIT_HEARTBEAT", "0.4"),
    ("COMMKIT_HEARTBEAT", "601"),
    ("COMMKIT_HEARTBEAT", "1e1"),
]


def _field(name):
    return name.removeprefix("COMMKIT_").lower()


def test_every_field_has_a_variable_and_every_variable_a_field():
    assert [_field(name) for name in VARIABLES] == [f.name for f in dataclasses.fields(Settings)]


def test_every_variable_says_what_it_accepts():
    for accepted, default, meaning in VARIABLES.values():
        assert accepted and default and meaning


@pytest.mark.parametrize("name", VARIABLES)
def test_a_good_value_is_read(name):
    text, value = GOOD[name]
    assert load({name: text}) == dataclasses.replace(load({}), **{_field(name): value})


@pytest.mark.parametrize("name", VARIABLES)
def test_an_empty_value_counts_as_unset(name):
    assert load({name: ""}) == load({})


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_named_with_what_was_expected(name, value):
    with pytest.raises(LaunchError) as caught:
        load({name: value})
    expected = f"{name}={value!r}: expected {VARIABLES[name][0]}; correct or unset it"
    assert str(caught.value) == expected


def test_a_secret_is_never_printed():
    with pytest.raises(LaunchError) as caught:
        load({"COMMKIT_SECRET": "short"})
    assert "short" not in str(caught.value)
    assert re.match(r"COMMKIT_SECRET='\*\*\*': expected 8 to 1024", str(caught.value))


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("COMMKIT_PORT", "23456")
    assert load().port == 23456
