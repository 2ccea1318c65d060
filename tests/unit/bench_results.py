"""Results for tests of charts: invented, the same every time."""

from __future__ import annotations

import random
import statistics

from tests.unit.test_records import measurement

SIZES = tuple(8 << 3 * step for step in range(10))


def sweep(*, scale=1.0, ranks=16, sizes=SIZES, **changes):
    """Two placements over ten sizes; rank 5 is slower than the others."""
    generator = random.Random(1)
    found = []
    for size in sizes:
        for in_place in (False, True):
            base = scale * (25 + size / 40e3) * (0.95 if in_place else 1.0)
            times = sorted(base * (1 + generator.expovariate(20)) for _ in range(20))
            of_rank = [base * generator.uniform(0.96, 1.0) for _ in range(ranks)]
            of_rank[5 % ranks] = base * 1.1
            time = statistics.median(times)
            values = {
                "bytes": size,
                "count": size // 4,
                "in_place": in_place,
                "world_size": ranks,
                "hosts": 2,
                "times_us": tuple(times),
                "time_us": time,
                "min_us": times[0],
                "mean_us": statistics.mean(times),
                "p95_us": times[18],
                "p99_us": times[19],
                "max_us": times[19],
                "algbw_gbps": size / time / 1e3,
                "busbw_gbps": size / time / 1e3 * 1.875,
                "rank_times_us": tuple(of_rank),
                "slowest_rank": 5,
                "slowest_rank_time_us": of_rank[5 % ranks],
            }
            found.append(measurement(**{**values, **changes}))
    return found


def pairs(*, ranks=16, skip=()):
    """Every pair of ranks at a small and a large size, as `commkit bench pairs` records them."""
    generator = random.Random(2)
    found = []
    for source in range(ranks):
        for peer in range(source + 1, ranks):
            far = (source < ranks // 2) != (peer < ranks // 2)
            for size, time in ((8, 20.0 if far else 8.0), (1 << 20, 60.0 if far else 30.0)):
                if (source, peer) in skip:
                    continue
                time *= generator.uniform(0.95, 1.05)
                found.append(
                    measurement(
                        collective="ping_pong" if size == 8 else "exchange",
                        redop="none",
                        in_place=False,
                        bytes=size,
                        count=size // 4,
                        world_size=2,
                        time_us=time,
                        algbw_gbps=size / time / 1e3,
                        busbw_gbps=size / time / 1e3,
                        source=source,
                        peer=peer,
                    )
                )
    return found
