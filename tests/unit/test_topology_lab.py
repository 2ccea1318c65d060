"""Where no lab can be made, one line says why."""

from __future__ import annotations

import pytest

from commkit.errors import LaunchError, UsageError
from commkit.topology import netns
from commkit.topology.lab import Lab


def test_without_root_the_error_says_so(monkeypatch):
    monkeypatch.setattr(netns.os, "geteuid", lambda: 1000)
    with pytest.raises(LaunchError, match="no lab can be made here: network namespaces need root"):
        Lab().up()


def test_without_iproute2_the_error_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(netns.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="the command ip is missing"):
        Lab().up()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"leaves": 3, "hosts_per_leaf": (1, 2)}, "2 sizes for 3 leaves"),
        ({"seed": 0}, "seed 0"),
        ({"seed": (1 << 32) - 1}, "seed"),
        ({"uplink_mbit": -1}, "uplink_mbit=-1"),
    ],
)
def test_a_wrong_option_is_named(options, words):
    with pytest.raises(UsageError, match=words):
        Lab(**options)
