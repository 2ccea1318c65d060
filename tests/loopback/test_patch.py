"""`patch.install` reaches every binding of init_process_group, and `uninstall` undoes it."""

from __future__ import annotations

import os
import sys
import types

import pytest
import torch.distributed as dist
import torch_jobs

import commkit
from commkit import api, patch


@pytest.fixture(autouse=True)
def _undo():
    yield
    patch.uninstall()


def test_every_binding_is_replaced_and_put_back(monkeypatch):
    original = dist.init_process_group
    user = types.ModuleType("a_script_that_came_first")
    user.init_process_group = original
    other = types.ModuleType("another_library")
    other.init_process_group = mine = lambda: None
    monkeypatch.setitem(sys.modules, user.__name__, user)
    monkeypatch.setitem(sys.modules, other.__name__, other)
    modules = [dist, dist.distributed_c10d, dist.device_mesh, user]

    for _ in range(2):
        patch.install()
        assert all(module.init_process_group is api.init_process_group for module in modules)
    assert other.init_process_group is mine

    for _ in range(2):
        patch.uninstall()
        assert all(module.init_process_group is original for module in modules)
    assert api._torch_init is original


def test_installing_adds_nothing_to_the_import_machinery_once_torch_is_there():
    before = list(sys.meta_path)
    patch.install()
    assert sys.meta_path == before


def _mesh_first():
    patch.install()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    through = api.world() is not None
    dist.destroy_process_group()
    return mesh.size(), through, api.world()


def test_a_mesh_that_starts_the_default_group_itself_goes_through_the_tree(tmp_path):
    assert torch_jobs.run(_mesh_first, 2, log_dir=tmp_path) == [(2, True, None)] * 2


def _forks():
    commkit.init_process_group("gloo")
    child = os.fork()
    if child == 0:
        # As a DataLoader's worker: it inherits torch's state but is no rank.
        os._exit(0 if api.world() is None else 7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.barrier()
    failures = api.world().failures()
    commkit.destroy_process_group()
    return status, failures


def test_a_forked_child_is_no_rank_and_its_end_no_loss(tmp_path):
    assert torch_jobs.run(_forks, 2, log_dir=tmp_path) == [(0, [])] * 2
