"""Layouts have the groups of the real Megatron-core and of torch's own DeviceMesh."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SEED = int.from_bytes(os.urandom(4), "big")

needs_megatron = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("megatron", "einops")),
    reason="needs megatron-core and einops",
)


def compare(program, *arguments):
    path = [str(HERE.parents[1]), *filter(None, (os.environ.get("PYTHONPATH"),))]
    done = subprocess.run(
        [sys.executable, HERE / program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["different"] == [], f"arguments {arguments}"
    return result


@needs_megatron
@pytest.mark.timeout(300)
def test_every_shape_of_up_to_64_ranks_has_the_groups_of_megatrons_generator():
    result = compare("megatron_groups.py", "generator", str(SEED))
    assert result["compared"] > 40_000
    assert result["orders"] == 120


@needs_megatron
@pytest.mark.timeout(300)
def test_the_megatron_set_is_what_initialize_model_parallel_creates_in_its_order():
    result = compare("megatron_groups.py", "state", str(SEED))
    assert result["compared"] >= 150
    assert result["with_instances"] >= 10
    assert result["refused"] >= 10


@pytest.mark.timeout(300)
def test_every_mesh_of_up_to_64_ranks_has_the_groups_of_torchs_device_mesh():
    result = compare("mesh_groups.py")
    assert result["shapes"] > 2_500
    assert result["compared"] > 15_000
