"""Wrong arguments and environments are one clear line before anything is joined."""

from __future__ import annotations

import datetime
import inspect

import pytest
import torch
import torch.distributed as dist

import commkit
from commkit import api


def test_the_signature_begins_with_torch_s():
    ours = inspect.signature(commkit.init_process_group).parameters
    theirs = inspect.signature(dist.init_process_group).parameters
    common = [name for name in theirs if name in ours]
    assert list(ours)[: len(common)] == common
    assert {name: ours[name].default for name in common} == {
        name: theirs[name].default for name in common
    }
    # What only some versions of torch have besides is passed through by name.
    assert set(theirs) - set(common) <= set(api._TORCH_PARAMETERS)
    assert ours["rest"].kind is inspect.Parameter.VAR_KEYWORD


def test_an_unknown_argument_is_python_s_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'backnd'"):
        commkit.init_process_group(backnd="gloo")


def test_a_topology_that_cannot_be_used_is_refused_before_anybody_is_waited_for():
    with pytest.raises(commkit.UsageError, match=r"^topology=x\.toml: No such file"):
        commkit.init_process_group("gloo", topology="x.toml")
    with pytest.raises(commkit.UsageError, match=r"^topology='x\.toml': the fake backend has no"):
        commkit.init_process_group("fake", topology="x.toml", rank=0, world_size=2)


def test_a_layout_that_does_not_fit_the_world_is_refused_before_anybody_is_waited_for(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29")  # nobody could listen there
    with pytest.raises(commkit.LayoutError, match="a world of 8 is not divisible by tp\\*pp"):
        commkit.init_process_group("gloo", rank=0, world_size=8, layout="tp=3,pp=2")


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("glooo", ["backend='glooo'", "no back end is called 'glooo'", "gloo, ", "nccl"]),
        ("cpu:gloo,cuda:ncl", ["backend='cpu:gloo,cuda:ncl'", "'ncl'"]),
        (7, ["backend=7", "expected a name"]),
    ],
)
def test_an_unknown_back_end_is_named_with_those_there_are(backend, words):
    with pytest.raises(commkit.UsageError) as caught:
        commkit.init_process_group(backend)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_back_end_that_torch_was_built_without_is_named(backend):
    with pytest.raises(commkit.UsageError, match="built without nccl.*") as caught:
        commkit.init_process_group(backend)
    assert torch.__version__ in str(caught.value)


def test_nccl_without_a_visible_gpu_quotes_the_variable(monkeypatch):
    # A torch with NCCL on a machine that hides its GPUs; torch itself is asked for the count.
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(commkit.LaunchError, match="CUDA_VISIBLE_DEVICES='7'"):
        commkit.init_process_group("nccl")


@pytest.mark.parametrize("timeout", [30, datetime.timedelta(0), datetime.timedelta(seconds=-1)])
def test_a_timeout_is_a_positive_timedelta(timeout):
    with pytest.raises(commkit.UsageError, match="^timeout=.*positive datetime.timedelta"):
        commkit.init_process_group("gloo", timeout=timeout)


def test_the_default_timeouts_are_torch_s():
    constants = dist.constants
    assert api._check_timeout(None, {"gloo"}) == constants.default_pg_timeout
    assert api._check_timeout(None, {"gloo", "nccl"}) == constants.default_pg_timeout
    if constants.default_pg_nccl_timeout is not None:
        assert api._check_timeout(None, {"nccl"}) == constants.default_pg_nccl_timeout


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"COMMKIT_STORE": "redis"}, "COMMKIT_STORE='redis': expected auto, wire or python"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "RANK"),
    ],
)
def test_a_wrong_environment_is_named_and_nothing_is_started(
    tmp_path, monkeypatch, variables, word
):
    monkeypatch.setenv("COMMKIT_LOG_DIR", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(commkit.LaunchError) as caught:
        commkit.init_process_group("gloo")
    assert word in str(caught.value)
    assert api.world() is None and not dist.is_initialized()
    assert not list(tmp_path.iterdir())  # an agent begins with its log


@pytest.mark.parametrize("rank", [2, -3])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises((commkit.LaunchError, commkit.UsageError), match=str(rank)):
        commkit.init_process_group("gloo", "tcp://127.0.0.1:29500", rank=rank, world_size=2)


def test_torch_s_setter_that_tells_the_end_of_the_default_group_exists():
    # Without it the tree would be left only at the next init or at exit.
    assert callable(dist.distributed_c10d._update_default_pg)
