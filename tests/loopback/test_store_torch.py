"""The world's store answers as torch's own stores do, from one rank and from eight at once."""

from __future__ import annotations

import os
import random
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
import torch_jobs

from commkit import launch, overlay
from commkit import store as module
from commkit.settings import load
from commkit.store import AgentStore, open_store, probe

MINUTE = timedelta(seconds=60)
KINDS = ["wire", "python"]
QUEUES = hasattr(dist.Store, "queue_push")


@pytest.fixture(scope="module", params=KINDS)
def store(request, tmp_path_factory):
    """The store of a world of one rank, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMMKIT_LOG_DIR", str(tmp_path_factory.mktemp("log")))
        patch.setenv("COMMKIT_STORE", request.param)
        world = overlay.join(launch.resolve(), 30.0, settings=load())
        made = open_store(world, 30.0, settings=load())
    assert isinstance(made, AgentStore) == (request.param == "python")
    yield made
    del made
    world.leave(10.0)


@pytest.fixture
def key(store, request):
    """A fresh name for each test: the world outlives the test."""
    return f"{request.node.name}/{random.getrandbits(64):x}"


@pytest.fixture(autouse=True)
def _leaves_no_process():
    """The module's world keeps its agent from test to test."""


def test_the_probe_that_decides_passes(store, key):
    before = store.num_keys()
    probe(store, key)
    assert store.num_keys() == before


def test_only_a_probe_of_the_whole_world_counts_its_keys(store, key):
    class Uncountable:
        def __getattr__(self, name):
            assert name != "num_keys", "every agent of the world is asked for its keys"
            return getattr(store, name)

    probe(Uncountable(), key, whole=False)
    with pytest.raises(AssertionError):
        probe(Uncountable(), key, whole=True)


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("2.13.0", True),
        ("2.13.1+cu130", True),
        ("2.6.0+cpu", True),
        ("2.13.0a0+git1234567", False),  # built from a source of that time
        ("2.13.0.dev20260301", False),
        ("2.130.0", False),
        ("12.13.0", False),
        ("3.0.0", False),
    ],
)
def test_only_releases_that_have_passed_the_probe_are_spared_it(version, known):
    assert module._proven(version) is known


@pytest.mark.parametrize("proven", [True, False])
def test_a_torch_is_probed_once_a_process_unless_it_is_proven(tmp_path, monkeypatch, proven):
    monkeypatch.setenv("COMMKIT_LOG_DIR", str(tmp_path))
    monkeypatch.setenv("COMMKIT_JOB_ID", f"proven-{proven}")
    monkeypatch.setattr(module.torch, "__version__", "2.13.0")
    monkeypatch.setattr(module, "_probed", {})
    monkeypatch.setattr(module, "PROVEN", frozenset({(2, 13)} if proven else ()))
    asked = []

    def watched(store, key, *, whole=True):
        asked.append(whole)
        probe(store, key, whole=whole)

    monkeypatch.setattr(module, "probe", watched)
    world = overlay.join(launch.resolve(), 30.0, settings=load())
    try:
        for _ in range(2):
            opened = open_store(world, 10.0, settings=load({}))
            assert not isinstance(opened, AgentStore)
            opened.set("here", b"yes")
            assert opened.get("here") == b"yes"
    finally:
        world.leave(10.0)
    assert asked == ([] if proven else [True])


class _Wrong:
    """A client that understands one of the agent's answers wrongly."""

    def __init__(self, store, operation):
        self._store, self._operation = store, operation

    def __getattr__(self, name):
        method = getattr(self._store, name)
        return (
            (lambda *arguments: [method(*arguments), None][1])
            if name == self._operation
            else method
        )


@pytest.mark.parametrize(
    "operation", ["check", "add", "compare_set", "get", "multi_get", "delete_key"]
)
def test_the_probe_names_the_operation_that_another_dialect_breaks(store, key, operation):
    with pytest.raises(RuntimeError, match=f"^{operation}.* gave None, not "):
        probe(_Wrong(store, operation), key)
    store.delete_key(key)


@pytest.mark.parametrize("size", [0, 1, 1439, 1440, 70_000, 3_000_000])
def test_values_of_any_size_come_back(store, key, size):
    blob = random.Random(size).randbytes(size)
    store.set(key, blob)
    assert store.get(key) == blob


@pytest.mark.parametrize("name", ["", "a b", "ключ", "a/b//c", "\0nul\n", "x" * 4000])
def test_keys_of_any_text_are_told_apart(store, key, name):
    store.set(f"{key}{name}", "here")
    assert store.get(f"{key}{name}") == b"here"
    assert not store.check([f"{key}{name}."])


def test_text_and_bytes_are_the_same_value(store, key):
    store.set(key, "text")
    assert store.get(key) == b"text"
    store.set(key, b"bytes")
    assert store.get(key) == b"bytes"


def test_add_counts_from_nothing_and_is_read_as_text(store, key):
    assert [store.add(key, amount) for amount in (1, 41, -50, 0)] == [1, 42, -8, -8]
    assert store.get(key) == b"-8"
    assert store.add(f"{key}big", 2**62) == 2**62


def test_compare_set_follows_torch_s_own_store(store, key):
    reference = dist.HashStore()
    steps = [("", "first"), ("other", "no"), ("first", "second"), ("", "third"), ("second", "")]
    for expected, desired in steps:
        ours = store.compare_set(key, expected, desired)
        assert ours == reference.compare_set(key, expected, desired), (expected, desired)
        assert store.get(key) == reference.get(key)


def test_compare_set_of_a_key_that_is_not_there_makes_none(store, key):
    assert store.compare_set(key, "expected", "desired") == b"expected"
    assert not store.check([key])


def test_delete_and_check_and_num_keys(store, key):
    before = store.num_keys()
    store.set(f"{key}1", "x")
    store.set(f"{key}2", "x")
    assert store.check([f"{key}1", f"{key}2"])
    assert store.num_keys() - before == 2
    assert store.delete_key(f"{key}1") is True
    assert store.delete_key(f"{key}1") is False
    assert not store.check([f"{key}1", f"{key}2"])
    assert store.num_keys() - before == 1


def test_append_and_the_multiple_operations(store, key):
    assert store.has_extended_api()
    store.append(key, "one ")
    store.append(key, b"\xfftwo")
    store.multi_set([f"{key}b", f"{key}c"], [b"", "c"])
    assert store.multi_get([key, f"{key}c", f"{key}b"]) == [b"one \xfftwo", b"c", b""]


@pytest.mark.skipif(not QUEUES, reason="this torch has no queues")
def test_a_queue_is_first_in_first_out(store, key):
    for value in (b"1", b"", b"3"):
        store.queue_push(key, value)
    assert store.queue_len(key) == 3
    assert [store.queue_pop(key), store.queue_pop(key, False), store.queue_pop(key)] == [
        b"1",
        b"",
        b"3",
    ]
    assert store.queue_len(key) == 0
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop(key, False)


@pytest.mark.skipif(not hasattr(dist.Store, "list_keys"), reason="this torch lists no keys")
def test_keys_are_listed(store, key):
    store.set(f"{key}/listed", "x")
    assert any(name.endswith(f"{key}/listed") for name in store.list_keys())


@pytest.mark.parametrize(
    "operation",
    [
        lambda store, key: store.wait([key], timedelta(milliseconds=60)),
        lambda store, key: store.wait([key]),
        lambda store, key: store.get(key),
        lambda store, key: store.multi_get([key]),
    ],
    ids=["wait with its own timeout", "wait", "get", "multi_get"],
)
def test_a_wait_ends_with_torch_s_error_and_the_store_goes_on(store, key, operation):
    usual = store.timeout
    store.set_timeout(timedelta(milliseconds=60))
    try:
        with pytest.raises(dist.DistStoreError):
            operation(store, key)
    finally:
        store.set_timeout(usual)
    store.set(key, "late")
    assert store.get(key) == b"late"


@pytest.mark.skipif(not hasattr(dist.Store, "clone"), reason="this torch clones no stores")
def test_a_wait_is_ended_by_a_clone_s_set(store, key):
    other = store.clone()
    waiter = threading.Thread(target=store.wait, args=([f"{key}1", f"{key}2"], MINUTE))
    waiter.start()
    other.set(f"{key}1", "x")
    other.set(f"{key}2", "x")
    waiter.join(30)
    assert not waiter.is_alive()


def test_the_python_store_behaves_the_same_below_torch_s_prefix(store, key):
    below = dist.PrefixStore(key, store)
    below.set("k", b"\xff")
    assert below.get("k") == b"\xff" and store.get(f"{key}/k") == b"\xff"
    assert below.add("n", 3) == 3
    below.wait(["k", "n"], MINUTE)
    assert below.check(["k"]) and not below.check(["absent"])
    assert below.compare_set("n", "3", "x") == b"x"
    assert below.delete_key("n") is True
    assert below.multi_get(["k"]) == [b"\xff"]
    assert below.num_keys() >= 1


def test_an_unusable_wire_is_an_error_only_when_it_was_asked_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("COMMKIT_LOG_DIR", str(tmp_path))
    # The world of the fixture may still be there.
    monkeypatch.setenv("COMMKIT_JOB_ID", "unusable-wire")
    world = overlay.join(launch.resolve(), 30.0, settings=load())
    try:
        monkeypatch.setattr(module, "_probed", {module.torch.__version__: "a dialect of its own"})
        fallen = open_store(world, 10.0, settings=load({}))
        assert isinstance(fallen, AgentStore)
        assert "a dialect of its own" in caplog.text
        with pytest.raises(module.OverlayError, match="COMMKIT_STORE=wire.*a dialect of its own"):
            open_store(world, 10.0, settings=load({"COMMKIT_STORE": "wire"}))
    finally:
        world.leave(10.0)


# --- Eight ranks ------------------------------------------------------------------------------


def _mixed(count, seed):
    world = overlay.join(launch.resolve(), 30.0, settings=load())
    store = open_store(world, 40.0, settings=load())
    rank, size = world.identity.rank, world.identity.world_size
    dice = random.Random(seed + rank)
    mine = {}
    for step in range(count):
        name = f"own/{rank}/{dice.randrange(50)}"
        kind = dice.randrange(6)
        if kind == 0:
            mine[name] = dice.randbytes(dice.choice([0, 1, 30, 2000]))
            store.set(name, mine[name])
        elif kind == 1:
            assert store.check([name]) == (name in mine)
        elif kind == 2 and name in mine:
            assert store.get(name) == mine[name], step
        elif kind == 3:
            assert store.delete_key(name) == (mine.pop(name, None) is not None)
        elif kind == 4:
            store.append(name, b"+")
            mine[name] = mine.get(name, b"") + b"+"
        else:
            store.add("shared/total", 1)
            mine["adds"] = mine.get("adds", 0) + 1
    adds = mine.pop("adds", 0)
    # Everybody waits for everybody through the store alone.
    store.add("shared/expected", adds)
    store.set(f"done/{rank}", "x")
    store.wait([f"done/{other}" for other in range(size)])
    assert store.get("shared/total") == store.get("shared/expected")
    owner = (rank + 1) % size
    store.set(f"from/{rank}", str(rank))
    assert store.get(f"from/{owner}") == str(owner).encode()
    world.barrier(tag="end")
    del store
    assert world.leave(20.0)
    return adds


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "hosts"), [("wire", 1), ("wire", 4), ("python", 4)])
def test_eight_ranks_mix_operations_without_losing_any(tmp_path, kind, hosts):
    seed = int(os.environ.get("COMMKIT_TEST_SEED", "7"))
    adds = torch_jobs.run(
        *(_mixed, 8, 1500, seed),
        hosts=hosts,
        env={"COMMKIT_STORE": kind},
        log_dir=tmp_path,
        deadline=110,
    )
    assert all(count > 0 for count in adds)
