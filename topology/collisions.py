"""Flows that a hash spreads over equal uplinks: how full the fullest gets, exactly and expected.

m flows each take one of U uplinks, independently and evenly.  The number of ways to do that with
none above c is m! times the coefficient of z^m in (sum over j <= c of z^j / j!)^U, so

    P(fullest <= c) = m! / U^m [z^m] (1 + z + ... + z^c / c!)^U

Up to EXACT flows that is computed as it stands, in log U convolutions; beyond, by Levin's form of
the same (U independent Poisson counts cut off at c, given that they add up to m) with Edgeworth's
expansion for the sum, and far out by the sum over uplinks.  Errors are below 0.001.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

#: Up to this many flows the distribution is exact, and the same for fewer than FEW uplinks, where
#: the expansion is no good.
EXACT, FEW, EXACT_FEW = 24, 8, 512
#: Beyond the limit where all uplinks together exceed it with less than this, terms are added up.
RARE = 1e-3


@functools.lru_cache(maxsize=200_000)
def at_most(flows: int, uplinks: int, limit: int) -> float:
    """P(no uplink of `uplinks` has more than `limit` of `flows`)."""
    if flows <= limit:
        return 1.0
    if limit <= 0 or flows > limit * uplinks:
        return 0.0
    if flows <= EXACT:
        return _exact_row(uplinks, limit, EXACT)[flows]
    if uplinks < FEW and flows <= EXACT_FEW:
        return _exact_row(uplinks, limit, 1 << flows.bit_length())[flows]
    if limit > 2 * flows / uplinks and (above := uplinks * _above(flows, uplinks, limit)) < RARE:
        return 1.0 - above
    return _levin(flows, uplinks, limit)


@functools.lru_cache(maxsize=4096)
def _exact_row(uplinks: int, limit: int, most: int) -> Sequence[float]:
    """P(fullest <= limit) for 0..most flows: all terms positive, nothing cancels.

    row[m] is the coefficient of z^m in the power, times m! / U^m, kept scaled all the way: the
    probability that m balls thrown at the first u bins leave none above the limit is a mixture
    over how many of them go to the first half of the bins.
    """

    def join(a: tuple[int, list[float]], b: tuple[int, list[float]]) -> tuple[int, list[float]]:
        (x, p), (y, q) = a, b
        share = x / (x + y)
        row = []
        for m in range(most + 1):
            total = 0.0
            for k in range(max(0, m - limit * y), min(m, limit * x) + 1):
                if p[k] and q[m - k]:
                    total += p[k] * q[m - k] * _binomial(m, k, share)
            row.append(min(1.0, total))
        return x + y, row

    one = (1, [1.0 if m <= limit else 0.0 for m in range(most + 1)])
    result: tuple[int, list[float]] | None = None
    power, left = one, uplinks
    while True:
        if left & 1:
            result = power if result is None else join(result, power)
        left >>= 1
        if not left:
            break
        power = join(power, power)
    assert result is not None
    return result[1]


def _binomial(m: int, k: int, share: float) -> float:
    return math.comb(m, k) * share**k * (1 - share) ** (m - k)


def _above(flows: int, uplinks: int, limit: int) -> float:
    """P(a given uplink has more than `limit`): the binomial's tail, limit above its mean."""
    p = 1 / uplinks
    log_term = (
        math.lgamma(flows + 1)
        - math.lgamma(limit + 2)
        - math.lgamma(flows - limit)
        + (limit + 1) * math.log(p)
        + (flows - limit - 1) * (math.log1p(-p) if p < 1 else 0.0)
    )
    total = term = math.exp(log_term)
    for k in range(limit + 1, flows):
        term *= (flows - k) / (k + 1) * p / (1 - p)
        total += term
        if term < total * 1e-12:
            break
    return total


def _levin(flows: int, uplinks: int, limit: int) -> float:
    """The same for many flows: Levin (1981)."""
    mean = flows / uplinks
    # The representation holds for any rate; the one whose cut-off counts have the right mean
    # puts the sum's normal density where it is best known.
    low, high = mean, max(4.0 * limit, 4.0 * mean)
    if _moments(high, limit)[1] < mean:
        high *= 16
    for _ in range(24):
        rate = (low + high) / 2
        if _moments(rate, limit)[1] < mean:
            low = rate
        else:
            high = rate
    rate = (low + high) / 2
    log_mass, _, variance, third, fourth = _moments(rate, limit)
    if variance <= 0:
        return 0.0
    skew = third / (variance**1.5) / math.sqrt(uplinks)
    excess = (fourth / variance**2 - 3) / uplinks
    # Edgeworth's expansion at the mean.
    density = (1 + excess / 8 - 5 * skew * skew / 24) / math.sqrt(2 * math.pi * uplinks * variance)
    # Over the probability that U uncut Poisson counts add up to m.
    log_sum = flows * math.log(uplinks * rate) - uplinks * rate - math.lgamma(flows + 1)
    value = uplinks * log_mass + math.log(max(density, 1e-300)) - log_sum
    return max(0.0, min(1.0, math.exp(min(0.0, value))))


@functools.lru_cache(maxsize=65536)
def _moments(rate: float, limit: int) -> tuple[float, float, float, float, float]:
    """Of a Poisson count cut off at `limit`: log of the mass kept, mean, central moments 2 to 4."""
    logs = [j * math.log(rate) - math.lgamma(j + 1) for j in range(limit + 1)]
    top = max(logs)
    weights = [math.exp(x - top) for x in logs]
    mass = sum(weights)
    mean = sum(j * w for j, w in enumerate(weights)) / mass
    second = sum((j - mean) ** 2 * w for j, w in enumerate(weights)) / mass
    third = sum((j - mean) ** 3 * w for j, w in enumerate(weights)) / mass
    fourth = sum((j - mean) ** 4 * w for j, w in enumerate(weights)) / mass
    return math.log(mass) + top - rate, mean, second, third, fourth


def conflict(flows: int, uplinks: int, per_uplink: int = 1) -> float:
    """P(some uplink gets more than `per_uplink` of these flows).

    8 flows over 32 uplinks: 0.61; with uplinks that carry two flows each: 0.05.
    """
    return 1.0 - at_most(flows, uplinks, per_uplink)


def expected_fullest(flows: int, uplinks: int) -> float:
    """Expected number of flows on the fullest uplink."""
    return expected_time([(flows, uplinks, 1.0)])


def expected_time(
    loads: Iterable[tuple[int, int, float]], floor: float = 0.0, tail: float = 1e-7
) -> float:
    """Expected seconds of the slowest uplink, of many groups that hash independently.

    loads  (flows, uplinks, seconds a flow takes an uplink by itself) of each group of uplinks;
           equal ones may repeat
    floor  what it takes in any case, the NIC's time
    """
    classes: dict[tuple[int, int, float], int] = {}
    for flows, uplinks, seconds in loads:
        if flows > 0 and seconds > 0:
            key = (_round(flows), uplinks, seconds)
            classes[key] = classes.get(key, 0) + 1
    # The maximum is below t with probability prod over classes of at_most(t / seconds) ** times;
    # it is a step function, so E = floor + sum over steps of width times P(above).
    steps: list[tuple[float, tuple[int, int, float], float]] = []
    current: dict[tuple[int, int, float], float] = {}
    for key, times in classes.items():
        flows, uplinks, seconds = key
        limit = max(-(-flows // uplinks) - 1, int(floor / seconds * (1 + 1e-12)))
        below = at_most(flows, uplinks, limit)
        current[key] = times * math.log(below) if below > 0 else -math.inf
        while below < 1 - tail and limit < flows:
            limit += 1
            below = at_most(flows, uplinks, limit)
            after = times * math.log(below) if below > 0 else -math.inf
            steps.append((limit * seconds, key, after))
    infinite = sum(value == -math.inf for value in current.values())
    finite = sum(value for value in current.values() if value > -math.inf)
    steps.sort(key=lambda step: step[0])
    expected, at = floor, floor
    for time, key, after in steps:
        above = 1.0 if infinite else 1.0 - math.exp(min(0.0, finite))
        expected += (time - at) * above
        at = time
        before = current[key]
        if after == before:
            continue
        if before == -math.inf:
            infinite -= after > -math.inf
        else:
            finite -= before
        if after > -math.inf:
            finite += after
        current[key] = after
    return expected


def _round(flows: int) -> int:
    """Many flows to within 0.5 %: their classes are then few."""
    step = 1 << max(0, flows.bit_length() - 8)
    return (flows + step // 2) // step * step
