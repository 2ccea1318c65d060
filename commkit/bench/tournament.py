"""Who meets whom in which round, so that everybody meets everybody in pairs that share no rank."""

from __future__ import annotations

from collections.abc import Sequence

Pair = tuple[int, int]
Round = tuple[Pair, ...]


def everybody(n: int) -> tuple[Round, ...]:
    """A round-robin tournament of n players: n - 1 rounds for even n, n for odd ones.

    The circle method: one player stands still, the others move on by a place each round; with an
    odd number that player is nobody, and whoever meets nobody rests.
    """
    if n < 2:
        return ()
    places = n + n % 2
    rounds = []
    for turn in range(places - 1):
        moving = [(turn + step) % (places - 1) for step in range(places - 1)]
        pairs = [(moving[0], places - 1)]
        pairs += [(moving[i], moving[-i]) for i in range(1, places // 2)]
        rounds.append(tuple((min(p), max(p)) for p in pairs if max(p) < n))
    return tuple(rounds)


def ring(n: int) -> tuple[Round, ...]:
    """Each player and the next one, in two rounds; three where n is odd."""
    edges = [(i, (i + 1) % n) for i in range(n if n > 2 else n - 1)]
    rounds = [edges[0 : n - n % 2 : 2], edges[1 : n - n % 2 : 2], edges[n - n % 2 :]]
    return tuple(tuple((min(e), max(e)) for e in some) for some in rounds if some)


def bisection(n: int) -> tuple[Round, ...]:
    """Each player of the lower half with the one half the world away, all at once."""
    half = n // 2
    return (tuple((i, i + half) for i in range(half)),) if half else ()


def rails(hosts: Sequence[Sequence[int]]) -> tuple[Round, ...]:
    """Ranks of equal place on every two hosts; in each round all ranks of a pair of hosts."""
    return tuple(
        tuple(
            (min(x, y), max(x, y))
            for a, b in some
            for x, y in zip(hosts[a], hosts[b], strict=False)
        )
        for some in everybody(len(hosts))
    )
