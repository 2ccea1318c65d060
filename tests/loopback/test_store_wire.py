"""torch's own TCPStore client against the native store protocol.

The bodies are functions of (host, port, token), so that they fit any server of the protocol.
"""

from __future__ import annotations

import random
import runpy
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from wire_client import (
    BAR,
    GET,
    LIMIT,
    LIST,
    MAX_KEY,
    SECONDS,
    SET,
    TOKEN,
    Raw,
    connect,
    frame,
    settle,
)

QUEUES = hasattr(dist.Store, "queue_push")
LIST_KEYS = hasattr(dist.Store, "list_keys")
BARRIER = hasattr(dist.Store, "barrier")


# The first test also compiles the module.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def native(repository):
    return runpy.run_path(str(repository / "tests/cpp/native_build.py"))["build"]()


@pytest.fixture(params=[0, 1], ids=["at-once", "late-and-in-any-order"])
def server(native, request):
    return native.Server(TOKEN, seed=request.param)


def every_operation(host, port, token):
    store = connect(host, port, token)
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert store.add("a", 41) == 42
    assert store.get("a") == b"42"
    assert store.add("new", -7) == -7
    assert store.compare_set("absent", "x", "y") == b"x"
    assert not store.check(["absent"])
    assert store.compare_set("absent", "", "y") == b"y"
    assert store.compare_set("absent", "no", "z") == b"y"
    assert store.compare_set("absent", "y", "z") == b"z"
    assert store.get("absent") == b"z"
    assert store.check(["a", "absent"])
    assert not store.check(["a", "missing"])
    assert store.check([])
    store.wait(["a", "a", "new"])
    store.wait([])
    with pytest.raises(dist.DistStoreError, match="missing"):
        store.wait(["a", "missing"], timedelta(milliseconds=50))
    assert store.num_keys() == 3
    assert store.delete_key("new")
    assert not store.delete_key("new")
    store.append("log", "ab")
    store.append("log", "cd")
    assert store.get("log") == b"abcd"
    store.multi_set(["m1", "m2", "m1"], ["1", "", "3"])
    assert store.multi_get(["m2", "log", "m1"]) == [b"", b"abcd", b"3"]
    assert store.num_keys() == 5
    again = connect(host, port, token)
    assert again.get("log") == b"abcd"


def queue_operations(host, port, token):
    store = connect(host, port, token, timedelta(milliseconds=200))
    assert store.queue_len("q") == 0
    for value in (b"first", b"", b"third"):
        store.queue_push("q", value)
    assert store.queue_len("q") == 3
    assert store.check(["q"])
    assert store.num_keys() == 0
    assert not store.delete_key("q")
    assert [store.queue_pop("q"), store.queue_pop("q", False)] == [b"first", b""]
    assert store.queue_pop("q") == b"third"
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("q", False)
    with pytest.raises(dist.DistStoreError, match="wait timeout"):
        store.queue_pop("q")
    assert not store.check(["q"])
    # The connection is in step after both errors.
    store.queue_push("q", b"last")
    assert store.queue_pop("q") == b"last"


def listed_keys(host, port, token):
    store = connect(host, port, token)
    names = ["", "a", "b/c", "/d", f"{token}/e", "f" * 1000]
    for name in names:
        store.set(name, "x")
    assert sorted(store.list_keys()) == sorted(names)
    assert store.num_keys() == len(names)
    nested = dist.PrefixStore("b", store)
    assert nested.get("c") == b"x"


def barriers(host, port, token):
    store = connect(host, port, token)
    store.barrier("prefixed", 1)  # some versions of torch make this of ADD and WAIT
    # Without the PrefixStore the client sends BARRIER itself.
    client = dist.TCPStore(host, port, None, False, wait_for_workers=False)
    client.barrier(f"{token}/alone", 1)
    with pytest.raises(dist.DistStoreError, match="barrier timeout"):
        client.barrier(f"{token}/pair", 2, timedelta(milliseconds=50))
    # The arrival counts even though it has given up, as with torch's own server.
    client.barrier(f"{token}/pair", 2, 10 * SECONDS)
    key = f"/{token}/three".encode()
    with Raw(host, port) as first, Raw(host, port) as second:
        for waiter in (first, second):
            waiter.send(frame(BAR, key, 3))
        settle(lambda: store.check(["three"]) and store.get("three") == b"2")
        client.barrier(f"{token}/three", 3)
        assert first.read(1) == second.read(1) == b"\0"
        assert store.get("three") == b"3"


def values_of_any_size(host, port, token, sizes):
    store = connect(host, port, token)
    for size in sizes:
        blob = random.Random(size).randbytes(size)
        store.set("blob", blob)
        assert store.get("blob") == blob
        assert store.compare_set("blob", blob, blob[::-1]) == blob[::-1]


def keys_with_any_bytes(host, port, token):
    store = connect(host, port, token)
    names = ["", " ", "\0", "a\0b", "ключ", "\n", "//", "%s", "x" * (MAX_KEY - len(token) - 2)]
    for number, name in enumerate(names):
        store.set(name, str(number))
    assert store.multi_get(names) == [str(number).encode() for number in range(len(names))]
    raw_key = f"/{token}/".encode() + bytes(range(256))
    with Raw(host, port) as client:
        client.send(frame(SET, raw_key, b"raw") + frame(GET, raw_key) + bytes([LIST]))
        assert client.value() == b"raw"
        listed = [client.value() for _ in range(client.number())]
        assert raw_key in listed
        assert len(listed) == len(names) + 1


def operation(rng, store, values, queues, key):
    """One operation on `key`, compared with what the model says; returns how many calls it took."""
    value = rng.randbytes(rng.choice((0, 1, 20, 300)))
    kind = rng.randrange(14 if QUEUES else 10)
    if kind <= 1:
        store.set(key, value)
        values[key] = value
    elif kind == 2 and key in values:
        assert store.get(key) == values[key]
    elif kind == 3:
        number = rng.randrange(-(1 << 40), 1 << 40)
        counter = f"n{key}"
        total = int(values.get(counter, b"0")) + number
        values[counter] = str(total).encode()
        assert store.add(counter, number) == total
    elif kind == 4:
        expected = rng.choice((values.get(key, b""), value))
        want = rng.randbytes(5)
        now = values.get(key)
        if now == expected or (now is None and not expected):
            values[key] = want
        answer = values.get(key, expected)
        assert store.compare_set(key, expected, want) == answer
    elif kind == 5:
        assert store.check([key]) == (key in values or bool(queues.get(key)))
    elif kind == 6:
        assert store.delete_key(key) == (values.pop(key, None) is not None)
    elif kind == 7:
        store.append(key, value)
        values[key] = values.get(key, b"") + value
    elif kind == 8:
        names = [key, f"m{key}"]
        store.multi_set(names, [value, value[:3]])
        values.update(zip(names, (value, value[:3]), strict=True))
    elif kind == 9 and values:
        names = rng.sample(sorted(values), min(3, len(values)))
        assert store.multi_get(names) == [values[name] for name in names]
        return 2 * len(names)
    elif kind == 10:
        store.queue_push(key, value)
        queues.setdefault(key, []).append(value)
    elif kind == 11 and queues.get(key):
        assert store.queue_pop(key) == queues[key].pop(0)
    elif kind == 12:
        assert store.queue_len(key) == len(queues.get(key, ()))
    else:
        store.wait([name for name in (key,) if name in values])
    return 1


def mixed_operations(host, port, token, clients, operations):
    """Each client has keys of its own, compared with a model, and all share a few counters."""
    models = [({}, {}) for _ in range(clients)]
    totals = [0] * clients
    errors: list[BaseException] = []

    def work(client):
        rng = random.Random(client)
        values, queues = models[client]
        try:
            store = connect(host, port, token, 60 * SECONDS)
            for done in range(operations // clients):
                if done % 10 == 0:
                    amount = rng.randrange(100)
                    store.add("shared", amount)
                    totals[client] += amount
                else:
                    operation(rng, store, values, queues, f"{client}/{rng.randrange(40)}")
                if errors:
                    return
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    store = connect(host, port, token)
    assert store.add("shared", 0) == sum(totals)
    assert store.num_keys() == 1 + sum(len(values) for values, _ in models)
    for values, queues in models:
        for key, value in values.items():
            assert store.get(key) == value
        for key, elements in queues.items():
            assert store.queue_len(key) == len(elements)


def waits(host, port, token):
    """A wait ends when its last key appears, whoever sets it, and one that timed out is over."""
    store = connect(host, port, token)
    ends = []

    def waiter(number):
        mine = connect(host, port, token)
        mine.wait([f"w{i}" for i in range(3)], 60 * SECONDS)
        ends.append((number, mine.get("w2")))

    threads = [threading.Thread(target=waiter, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    store.set("w0", "x")
    store.add("w1", 1)
    with pytest.raises(dist.DistStoreError):
        store.wait(["w0", "never"], timedelta(milliseconds=100))
    assert ends == []
    assert store.compare_set("w2", "", "end") == b"end"
    for thread in threads:
        thread.join()
    assert sorted(ends) == [(number, b"end") for number in range(4)]
    store.set("never", "too late")
    assert store.get("never") == b"too late"


def test_every_operation(server):
    every_operation("127.0.0.1", server.port, TOKEN)


@pytest.mark.skipif(not QUEUES, reason="this torch has no queues")
def test_queues(server):
    queue_operations("127.0.0.1", server.port, TOKEN)


@pytest.mark.skipif(not LIST_KEYS, reason="this torch cannot list keys")
def test_keys_are_listed_as_they_were_set(server):
    listed_keys("127.0.0.1", server.port, TOKEN)


@pytest.mark.skipif(not BARRIER, reason="this torch's store has no barrier")
def test_barriers(server):
    barriers("127.0.0.1", server.port, TOKEN)


def test_values_from_nothing_to_torchs_limit(server):
    sizes = [0, 1, 1439, 1440, 1441, 65_536, 1_000_003, LIMIT - 1, LIMIT]
    values_of_any_size("127.0.0.1", server.port, TOKEN, sizes)


def test_keys_with_any_bytes(server):
    keys_with_any_bytes("127.0.0.1", server.port, TOKEN)


def test_waits(server):
    waits("127.0.0.1", server.port, TOKEN)
    settle(lambda: server.counters()["waiting"] == 0)


def test_a_hundred_thousand_operations_of_eight_clients(native):
    server = native.Server(TOKEN, seed=5)
    mixed_operations("127.0.0.1", server.port, TOKEN, clients=8, operations=100_000)
    assert server.counters()["operations"] >= 100_000
    assert server.drops() == []


def test_frames_that_are_fed_one_byte_at_a_time(native):
    server = native.Server(TOKEN, piece=1)
    every_operation("127.0.0.1", server.port, TOKEN)
    values_of_any_size("127.0.0.1", server.port, TOKEN, [0, 1, 70_000])


def test_the_constructor_may_wait_for_workers(server):
    """It counts itself under a key of its own, without the token."""
    client = dist.TCPStore("127.0.0.1", server.port, 4, False, 10 * SECONDS, True)
    dist.PrefixStore(TOKEN, client).set("a", "1")
    assert client.num_keys() == 1


@pytest.mark.skipif(not hasattr(dist.Store, "clone"), reason="this torch cannot clone a store")
def test_a_fresh_clone_may_ask_about_the_whole_store(native):
    server = native.Server(TOKEN, default_token=TOKEN)
    store = connect("127.0.0.1", server.port, TOKEN)
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert store.clone().num_keys() == 1
    if LIST_KEYS:
        assert store.clone().list_keys() == ["a"]


BODIES = [every_operation, keys_with_any_bytes, waits]
BODIES += [queue_operations] * QUEUES + [listed_keys] * LIST_KEYS + [barriers] * BARRIER


@pytest.mark.parametrize("body", BODIES)
def test_torchs_own_server_does_the_same(body):
    """What is expected here is what torch does, not what we think it does."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    body("127.0.0.1", server.port, TOKEN)


def test_torchs_own_server_agrees_on_mixed_operations():
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    mixed_operations("127.0.0.1", server.port, TOKEN, clients=4, operations=10_000)
