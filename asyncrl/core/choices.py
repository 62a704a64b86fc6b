"""What else could be done with the same GPUs, and what of it is best by ``planning.predict``."""

from __future__ import annotations

import math
from bisect import bisect_left

import msgspec

from asyncrl.core.planning import System, predict
from asyncrl.core.transfer import seconds_to_arrive, seconds_to_deliver, seconds_to_prepare
from asyncrl.core.workload import Workload


def with_split(s: System, servers: int) -> System:
    """The same GPUs with ``servers`` servers, the rest for training; weight updates as ``speeds`` says."""
    split = msgspec.structs.replace(s, servers=servers, trainer_gpus=s.gpus - servers * s.server_gpus)
    if s.speeds is None:
        return split
    return msgspec.structs.replace(
        split,
        prepare_s=seconds_to_prepare(s.speeds, s.transport),
        arrive_s=seconds_to_arrive(s.speeds, s.transport, servers),
        deliver_s=seconds_to_deliver(s.speeds, s.transport, servers) + s.load_s,
    )


def splits(s: System, most: int = 32) -> list[System]:
    """The same GPUs in every split between rollout and training, at most about ``most`` of them, evenly."""
    count = (s.gpus - 1) // s.server_gpus
    stride = max(1, math.ceil(count / most))
    chosen = {1, *range(stride, count + 1, stride), count, s.servers}
    return [with_split(s, servers) for servers in sorted(chosen) if servers >= 1]


def best_split(s: System, w: Workload) -> System:
    """The split with most trajectories a second; of equals (within 0.1 %) the one with least staleness."""

    def fastest(candidates: list[System]) -> System:
        found = [(predict(c, w), c) for c in candidates]
        top = max(p.trajectories_per_s for p, _ in found)
        return min(((p.staleness, i, c) for i, (p, c) in enumerate(found) if p.trajectories_per_s >= 0.999 * top))[2]

    coarse = splits(s)
    best = fastest(coarse)
    position = coarse.index(best)
    low = coarse[max(0, position - 1)].servers
    high = coarse[min(len(coarse) - 1, position + 1)].servers
    return fastest([best, *(with_split(s, servers) for servers in range(low, high + 1) if servers != best.servers)])


def best_bound(s: System, w: Workload, *, of_most: float = 0.98, largest: int = 64) -> int:
    """The smallest whole α with ``of_most`` of the throughput of ``largest`` (in-flight cap)."""

    def rate(alpha: int) -> float:
        return predict(msgspec.structs.replace(s, bound=float(alpha)), w).trajectories_per_s

    enough = of_most * rate(largest)
    return bisect_left(range(largest), True, key=lambda alpha: rate(alpha) >= enough)
