"""init_process_group over the agent tree leaves torch.distributed as torch's own would."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch_jobs

import commkit
from commkit import api, creation

MINUTE = datetime.timedelta(seconds=60)


def _all_reduce(group=None):
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value, group=group)
    return value.item()


# --- One process ------------------------------------------------------------------------------


def _alone():
    before = dict(os.environ)
    commkit.init_process_group("gloo", timeout=MINUTE)
    world = api.world()
    seen = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    result = (dist.get_rank(), dist.get_world_size(), _all_reduce(), dist.get_backend())
    method = dist.distributed_c10d._default_pg_init_method
    phases = api.start_up_phases()
    assert api.is_initialized() and world.identity.hosts == 1
    commkit.destroy_process_group()
    assert api.world() is None and not api.is_initialized() and not dist.is_initialized()
    assert dict(os.environ) == before
    return seen, result, method, phases


def test_a_plain_process_is_a_world_of_one(tmp_path):
    absent = {name: "" for name in torch_jobs.Job(1).environment(0) if not name.startswith("COMM")}
    with torch_jobs.Job(1, log_dir=tmp_path) as job:
        job.start(0, _alone, env=absent)
        outcome = job.outcomes()[0]
    assert not outcome.error, outcome.trace
    seen, result, method, phases = outcome.value
    assert seen == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert result == (0, 1, 1.0, "gloo")
    assert method == "env://"
    assert list(phases) == ["resolve", "join", "store", "process_group"]
    assert all(seconds >= 0 for seconds in phases.values())


# --- What torch offers afterwards -------------------------------------------------------------


def _everything():
    commkit.init_process_group("gloo", timeout=MINUTE)
    rank, size = dist.get_rank(), dist.get_world_size()
    identity = api.world().identity
    assert (identity.local_rank, identity.local_world_size) == (rank % 4, size // 4)
    assert identity.hosts == 4
    assert _all_reduce() == size * (size + 1) / 2

    rows = [dist.new_group(list(range(4 * row, 4 * row + 4))) for row in range(4)]
    assert _all_reduce(rows[rank // 4]) == sum(range(4 * (rank // 4) + 1, 4 * (rank // 4) + 5))

    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "host": identity.host_index})
    assert [each["rank"] for each in gathered] == list(range(size))
    hosts = [{each["host"] for each in gathered[4 * row : 4 * row + 4]} for row in range(4)]
    assert sorted(hosts, key=min) == [{0}, {1}, {2}, {3}]  # numbered as they arrived
    objects = [f"from {rank}"] if rank == 3 else [None]
    dist.broadcast_object_list(objects, src=3)
    assert objects == ["from 3"]

    mesh = dist.device_mesh.init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
    assert _all_reduce(mesh.get_group("dp")) == sum(range(rank % 4 + 1, size + 1, 4))
    dist.monitored_barrier(timeout=MINUTE)

    store = dist.distributed_c10d._get_default_store()
    store.set(f"mine/{rank}", b"\0\xff")
    store.wait([f"mine/{other}" for other in range(size)])
    assert store.get(f"mine/{(rank + 1) % size}") == b"\0\xff"
    # Last: from torch 2.14 on it changes the names of the groups that its members make later.
    local_only = dist.new_group([0, size - 1], use_local_synchronization=True)
    if rank in (0, size - 1):
        assert _all_reduce(local_only) == size + 1
    dist.barrier()
    dist.destroy_process_group()
    assert api.world() is None
    return True


@pytest.mark.timeout(120)
def test_groups_meshes_objects_and_the_default_store_work_on_four_hosts_of_four(tmp_path):
    assert all(torch_jobs.run(_everything, 16, hosts=4, log_dir=tmp_path, deadline=110))


def _ddp_step():
    commkit.init_process_group("gloo", timeout=MINUTE)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    alone = torch.nn.Linear(4, 2)
    alone.load_state_dict(model.state_dict())
    batches = torch.randn(size, 3, 4)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped(batches[rank]).square().mean().backward()
    alone(batches.flatten(0, 1)).square().mean().backward()
    commkit.destroy_process_group()
    return torch.allclose(model.weight.grad, alone.weight.grad, atol=1e-6)


def test_ddp_averages_gradients_as_one_process_would(tmp_path):
    assert torch_jobs.run(_ddp_step, 2, log_dir=tmp_path) == [True, True]


def _sum(*arguments, **named):
    commkit.init_process_group(*arguments, timeout=MINUTE, **named)
    total = _all_reduce()
    dist.destroy_process_group()
    return total


def _by_url(url, explicit):
    rank, size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    if explicit:
        return _sum("gloo", url, rank=rank, world_size=size)
    return _sum("gloo", f"{url}?rank={rank}&world_size={size}")


@pytest.mark.parametrize("explicit", [True, False], ids=["arguments", "query"])
@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_init_method_is_torch_s(tmp_path, scheme, explicit):
    port = torch_jobs.free_port()
    url = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else f"file://{tmp_path}/rendezvous"
    assert torch_jobs.run(_by_url, 2, url, explicit, log_dir=tmp_path) == [3.0, 3.0]


@pytest.mark.parametrize("backend", ["gloo", None, "cpu:gloo"])
def test_back_ends_as_torch_names_them(tmp_path, backend):
    assert torch_jobs.run(_sum, 2, backend, log_dir=tmp_path) == [3.0, 3.0]


def test_the_python_store_carries_a_job_too(tmp_path):
    env = {"COMMKIT_STORE": "python"}
    assert torch_jobs.run(_sum, 4, "gloo", hosts=2, env=env, log_dir=tmp_path) == [10.0] * 4


def test_torch_s_own_barrier_after_init_still_works(tmp_path):
    env = {"TORCH_DIST_INIT_BARRIER": "1"}
    assert torch_jobs.run(_sum, 4, "gloo", env=env, log_dir=tmp_path) == [10.0] * 4


def _lazy(largest):
    api.EAGER_WORLD = largest
    commkit.init_process_group("gloo", timeout=MINUTE)
    seen = os.environ.get("TORCH_GLOO_LAZY_INIT")
    dist.destroy_process_group()
    return seen, os.environ.get("TORCH_GLOO_LAZY_INIT")


@pytest.mark.skipif(creation.torch_version() < (2, 8), reason="torch < 2.8 has no lazy gloo")
@pytest.mark.parametrize(
    ("given", "largest", "during"),
    [("", 1, None), ("", 0, "1"), ("0", 0, "0"), ("1", 1, "1")],
)
def test_gloo_is_lazy_in_large_worlds_unless_the_user_said_otherwise(
    tmp_path, given, largest, during
):
    with torch_jobs.Job(1, log_dir=tmp_path) as job:
        job.start(0, _lazy, largest, env={"TORCH_GLOO_LAZY_INIT": given})
        outcome = job.outcomes()[0]
    assert outcome.value == (during, given or None), outcome.trace


def _absent(path):
    commkit.init_process_group("gloo", timeout=MINUTE)
    if dist.get_rank() == 1:
        while not os.path.exists(path):
            time.sleep(0.02)
        os._exit(0)
    try:
        dist.monitored_barrier(timeout=datetime.timedelta(milliseconds=200))
    except RuntimeError as error:
        return str(error)
    finally:
        open(path, "w").close()


def test_an_operation_s_own_timeout_holds_for_a_peer_that_never_did_anything(tmp_path):
    # Connected lazily, gloo would wait five minutes here: five times the group's timeout.
    with torch_jobs.Job(2, log_dir=tmp_path) as job:
        for rank in range(2):
            job.start(rank, _absent, str(tmp_path / "over"))
        outcomes = job.outcomes()
    assert "Rank 1 failed to pass monitoredBarrier in 200 ms" in outcomes[0].value


# --- Where torch does it all ------------------------------------------------------------------


def _own_store(path):
    store = dist.FileStore(path, 2)
    commkit.init_process_group(
        "gloo", store=store, rank=int(os.environ["RANK"]), world_size=2, timeout=MINUTE
    )
    total, in_tree = _all_reduce(), api.world() is not None
    dist.destroy_process_group()
    return total, in_tree


def test_a_store_of_the_user_needs_no_tree(tmp_path):
    assert torch_jobs.run(_own_store, 2, str(tmp_path / "store")) == [(3.0, False)] * 2


def test_a_store_of_the_user_is_mentioned_once(caplog):
    api._told.clear()
    for _ in range(2):
        commkit.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
    assert [record.message for record in caplog.records] == [
        "a store was passed to init_process_group: torch starts this group by itself, "
        "without commkit's tree"
    ]


def test_the_fake_backend_pretends_a_world_without_peers():
    given = {}
    if not hasattr(dist.Backend, "FAKE"):  # older versions of torch want to be given its store
        from torch.testing._internal.distributed.fake_pg import FakeStore

        given["store"] = FakeStore()
    commkit.init_process_group("fake", rank=5, world_size=64, **given)
    try:
        assert (dist.get_rank(), dist.get_world_size(), api.world()) == (5, 64, None)
    finally:
        commkit.destroy_process_group()


def _disabled():
    commkit.init_process_group("gloo", timeout=MINUTE)
    assert api.world() is None
    return _all_reduce()


def test_commkit_disable_is_stock_torch(tmp_path):
    assert torch_jobs.run(_disabled, 2, env={"COMMKIT_DISABLE": "1"}) == [3.0, 3.0]


def test_initialising_twice_is_torch_s_error():
    commkit.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="twice"):
            commkit.init_process_group("gloo")
    finally:
        dist.destroy_process_group()


# --- Under a launcher -------------------------------------------------------------------------

SCRIPT = """
import sys, torch, torch.distributed as dist
import commkit
from commkit import api
commkit.init_process_group("gloo")
assert dist.is_torchelastic_launched() and api.world() is not None
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: {value.item()}\\n")
commkit.destroy_process_group()
"""


@pytest.mark.timeout(120)
def test_torchrun_starts_four_ranks(tmp_path, repository):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"),
            f"--master-port={torch_jobs.free_port()}",
            str(tmp_path / "train.py"),
        ],
        env={**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    lines = torch_jobs.own_output(done.stdout).splitlines()
    assert sorted(lines) == [f"rank {rank} of 4: 10.0" for rank in range(4)]
