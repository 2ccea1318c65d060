"""What `import commkit` offers is frozen here: a name is added or removed on purpose."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import commkit
from commkit import errors

PUBLIC = """
    CommkitError DigestMismatch JoinError JoinTimeout LaunchError LayoutError LayoutTypeError
    NoTopology OverlayError OverlayTimeout RankDied TopologyError UsageError WrongData
    __version__ destroy_process_group device_mesh get_group get_groups init_process_group
    new_group new_groups patch running_topology split_group start_report
""".split()


def test_public_names_are_exactly_these():
    assert sorted(commkit.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(commkit))


def test_every_error_is_public():
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined <= set(commkit.__all__)


def test_names_of_the_api_are_the_api_s_own():
    api = importlib.import_module("commkit.api")
    assert commkit.init_process_group is api.init_process_group
    assert commkit.destroy_process_group is api.destroy_process_group


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = commkit.no_such_name


def test_import_does_not_import_torch():
    script = "import sys, commkit; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
