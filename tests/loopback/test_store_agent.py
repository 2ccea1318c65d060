"""The store of a real agent: what test_store_wire and test_store_frames ask of the protocol."""

from __future__ import annotations

import pytest
from test_store_frames import CONVERSATION
from test_store_wire import (
    barriers,
    every_operation,
    keys_with_any_bytes,
    listed_keys,
    mixed_operations,
    queue_operations,
    values_of_any_size,
    waits,
)
from torch.distributed import PrefixStore
from wire_client import HELLO, LIMIT, TOKEN, Raw

from commkit import launch, overlay

pytestmark = pytest.mark.timeout(120)

#: Operations that torch 2.6 does not have yet.
NEWER = {barriers: "barrier", listed_keys: "list_keys", queue_operations: "queue_len"}


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """(host, port, token) of the store of a world of one; its keys end with it."""
    monkeypatch.setenv("COMMKIT_LOG_DIR", str(tmp_path))
    world = overlay.join(launch.resolve(), 20)
    me = world.identity
    yield me.store_host, me.store_port, me.store_token
    assert world.leave(10)


@pytest.mark.parametrize(
    "body",
    [barriers, every_operation, keys_with_any_bytes, listed_keys, queue_operations, waits],
    ids=lambda body: body.__name__,
)
def test_torchs_client_finds_what_torchs_server_would_say(agent, body):
    operation = NEWER.get(body)
    if operation and not hasattr(PrefixStore, operation):
        pytest.skip(f"this torch's stores have no {operation}")
    body(*agent)


def test_values_from_nothing_to_torchs_limit(agent):
    values_of_any_size(*agent, [0, 1, 65_536, LIMIT - 1, LIMIT])


def test_a_hundred_thousand_operations_of_eight_clients(agent):
    mixed_operations(*agent, clients=8, operations=100_000)


def test_each_frame_one_byte_at_a_time(agent):
    host, port, token = agent
    assert len(token) == len(TOKEN), "the recorded frames carry lengths"
    with Raw(host, port, hello=b"") as client:
        for byte in HELLO:
            client.send(bytes([byte]))
        for recorded, expected in CONVERSATION:
            for byte in recorded.replace(TOKEN.encode(), token.encode()):
                client.send(bytes([byte]))
            answer = expected.replace(TOKEN.encode(), token.encode())
            assert client.read(len(answer)) == answer, recorded
