"""busbw over algbw.  doc/PERFORMANCE.md of nccl-tests derives the factors."""

from __future__ import annotations

_OTHERS = ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "gather", "scatter")
_ONCE = ("broadcast", "reduce", "hypercube", "ping_pong", "stream", "stream_both")


def factor(collective: str, n: int) -> float | None:
    """For `n` ranks; None where busbw is not defined: one rank, no data, not known."""
    if n < 2:
        return None
    if collective == "all_reduce":
        return 2 * (n - 1) / n
    if collective in _OTHERS:
        return (n - 1) / n
    if collective in _ONCE or collective.startswith("sendrecv"):
        return 1.0
    return None


def ranks_behind(collective: str, algbw: float, busbw: float, digit: float = 0.01) -> int:
    """The number of ranks for which both bandwidths are right as printed; 0: none or several.

    Each is rounded to `digit`.
    """
    if algbw <= digit or busbw <= digit:
        return 0
    low = (busbw - digit / 2) / (algbw + digit / 2)
    high = (busbw + digit / 2) / (algbw - digit / 2)
    fitting = []
    for n in range(2, 1 << 14):
        value = factor(collective, n)
        if value is not None and low <= value <= high:
            fitting.append(n)
            if len(fitting) > 1:
                return 0
    return fitting[0] if fitting else 0
