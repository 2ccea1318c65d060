"""What a back end raises becomes a refusal, a lost peer or a passed deadline, never a guess."""

from __future__ import annotations

import pytest
import torch

from commkit.bench import session
from commkit.bench.watch import Watch
from commkit.errors import OverlayTimeout, RankDied, UsageError
from commkit.measure.numbers import NUMBERS
from commkit.measure.torch_backend import TorchBackend

LOST = (
    "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:47287. This is "
    "typically caused by a remote worker crashing. Check the logs.\nmore"
)


class Refusing(TorchBackend):
    """A back end without a world, whose collective raises `error`."""

    def __init__(self, error):
        self.error = error
        self.rank, self.world_size = 0, 1
        self.device = torch.device("cpu")

    def all_reduce(self, send, receive, redop):
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Invalid scalar type\nException raised from somewhere"),
        RuntimeError("result type Float can't be cast to the desired output type Char"),
        RuntimeError("Unsupported data type: UInt32"),
        RuntimeError("Cannot use ReduceOp.AVG with Gloo"),
        TypeError("Input tensor data type is not supported for NCCL process group: UInt16"),
    ],
)
def test_a_refused_type_is_reported_in_the_librarys_words(error):
    assert Refusing(error).supports(NUMBERS["float"], "sum") == str(error).partition("\n")[0]


def test_a_type_that_torch_lacks_is_a_refusal(monkeypatch):
    monkeypatch.delattr("torch.float8_e5m2")
    text = Refusing(None).supports(NUMBERS["f8e5m2"], "sum")
    assert text.endswith("has no type float8_e5m2")


def test_an_accepted_type_is_none():
    assert Refusing(None).supports(NUMBERS["float"], "sum") == ""


@pytest.mark.parametrize("text", [LOST, "Socket Timeout", "Connection reset by peer"])
def test_a_lost_connection_is_no_refusal(text):
    with pytest.raises(RuntimeError, match="Connection|Timeout"):
        Refusing(RuntimeError(text)).supports(NUMBERS["float"], "sum")


def lose(watch, error):
    with session._lost_peers(watch, stock=True):
        raise error


def test_a_lost_peer_is_one_sentence_with_rank_and_phase():
    watch = Watch("rank 3 of 8")
    watch.phase("size 64: timing in place")
    with pytest.raises(RankDied) as lost:
        lose(watch, RuntimeError(LOST))
    assert str(lost.value) == (
        "rank 3 of 8: size 64: timing in place: a peer has gone, or the library failed: "
        "Connection closed by peer [10.0.0.2]:47287"
    )


def test_a_peer_lost_when_time_is_up_met_its_own_deadline():
    watch = Watch("rank 3 of 8")
    watch.allow(0.0)
    with pytest.raises(OverlayTimeout, match="a peer gave up at its deadline: Connection closed"):
        lose(watch, RuntimeError(LOST))


@pytest.mark.parametrize("error", [UsageError("mine"), OSError("disk"), KeyboardInterrupt()])
def test_other_errors_are_left_as_they_are(error):
    with pytest.raises(type(error)) as seen:
        lose(Watch("rank 0 of 2"), error)
    assert seen.value is error
