"""StaleFlow's algorithms 2 to 5 and equations 2 to 4 written down as the paper has them: slow, and with no thought.

What asyncrl adds is marked: servers that may not be commanded, slots, the limit of running requests, and prefill.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

from asyncrl.core.cost_model import CostModel
from asyncrl.core.policy.routing import RequestView
from asyncrl.core.snapshot import InstanceSnapshot


@dataclass
class Inst:
    """S[i]."""

    snapshot: InstanceSnapshot
    inst_version: int
    run_trajs: list[RequestView]
    wait_trajs: list[RequestView]
    kv_cache: int

    @property
    def n(self) -> int:
        return sum(t.slots for t in self.run_trajs)


@dataclass
class Staleness:
    """The staleness manager, as far as a plan sees it: rooms that each reservation makes smaller by one."""

    rooms: dict[int, int]
    reserved: dict[int, int] = field(default_factory=dict)

    def verify(self, version: int) -> bool:
        return self.rooms.get(version, 0) > len(self.reserved)


def system(instances: list[InstanceSnapshot]) -> list[Inst]:
    found = []
    for i in instances:
        requests, waiting, run, wait = list(i.requests.values()), i.waiting, [], []
        for request in reversed(requests):
            if waiting > 0:
                wait.insert(0, request)
                waiting -= request.slots
            else:
                run.insert(0, request)
        found.append(Inst(i, i.version, run, wait, i.kv_tokens))
    return found


def check_routable(t: RequestView, i: Inst, staleness: Staleness) -> bool:
    if not i.snapshot.up or i.snapshot.pulling or i.inst_version < t.after:  # asyncrl's
        return False
    v_traj = staleness.reserved.get(t.group) if t.v_traj is None else t.v_traj
    if v_traj is None:
        return staleness.verify(i.inst_version)
    return i.inst_version >= v_traj


def throughput(cost: CostModel, n: int, kv_cache: int, prefill: float = 0.0) -> float:
    if n == 0:
        return 0.0
    return n / (cost.k1 * kv_cache + max(cost.k2, cost.k3 * n) + cost.k4 + cost.k5 * prefill)


def compute_marginal_gain(cost: CostModel, t: RequestView, i: Inst, spread: float) -> float:
    y = i.kv_cache + t.tokens <= i.snapshot.max_tokens and len(i.wait_trajs) == 0
    if i.n and i.n + t.slots > i.snapshot.max_running:  # asyncrl's
        y = False
    if not y:
        return 0.0
    held = t.prefix if t.home == i.snapshot.name and i.inst_version == t.after else 0  # asyncrl's
    prefill = (t.tokens - held) * spread
    after = throughput(cost, i.n + t.slots, i.kv_cache + t.tokens, prefill)
    return after - throughput(cost, i.n, i.kv_cache)


def levels(ts_trajs: list[RequestView]) -> list[list[RequestView]]:
    """The multi-level queue."""
    initial = [t for t in ts_trajs if t.v_traj is None]
    partial = [t for t in ts_trajs if t.v_traj is not None]
    started = sorted({t.oldest for t in partial})  # V_traj, or the version of the last token, which is asyncrl's
    return [[t for t in partial if t.oldest == v] for v in started] + [initial]


def ideal_gain(cost: CostModel, t: RequestView, spread: float) -> float:
    return throughput(cost, t.slots, t.tokens, t.tokens * spread)


def select(
    cost: CostModel, mu: float, s: list[Inst], t: RequestView, staleness: Staleness, spread: float
) -> Inst | None:
    """Algorithm 3 for one trajectory."""
    candidates = [i for i in s if check_routable(t, i, staleness)]
    groups = [[i for i in candidates if i.inst_version == v] for v in sorted({c.inst_version for c in candidates})]
    for group in groups:
        most, best_inst = float("-inf"), None
        for i in group:
            gain = compute_marginal_gain(cost, t, i, spread)
            if gain > most:
                most, best_inst = gain, i
        if most >= mu * ideal_gain(cost, t, spread):
            return best_inst
    return None


def assign(t: RequestView, i: Inst, staleness: Staleness) -> None:
    if t.v_traj is None:
        staleness.reserved.setdefault(t.group, i.inst_version)
    i.run_trajs.append(t)
    i.kv_cache += t.tokens


def routing_strategy(
    cost: CostModel, mu: float, s: list[Inst], ts_trajs: list[RequestView], staleness: Staleness, spread: float = 0.0
) -> list[tuple[str, int]]:
    """Algorithm 3. Changes ``s`` and ``staleness``."""
    routing: list[tuple[str, int]] = []
    for queue in levels(ts_trajs):
        for t in queue:
            selected = select(cost, mu, s, t, staleness, spread)
            if selected is None:
                return routing
            routing.append((selected.snapshot.name, t.id))
            assign(t, selected, staleness)
    return routing


def gain_of_pulling(cost: CostModel, t: RequestView, i: Inst, spread: float) -> float:
    """asyncrl's: what the instance would gain if it pulled for the trajectory, and prefilled all that it runs again."""
    if compute_marginal_gain(cost, t, i, 0.0) == 0.0:
        return float("-inf")
    after = throughput(cost, i.n + t.slots, i.kv_cache + t.tokens, (t.tokens + i.kv_cache) * spread)
    return after - throughput(cost, i.n, i.kv_cache)


def synchronization_strategy(
    cost: CostModel,
    mu: float,
    s: list[Inst],
    ts_trajs: list[RequestView],
    staleness: Staleness,
    ps_version: int,
    spread: float = 0.0,
) -> list[str]:
    """Algorithm 4, whose candidates asyncrl tries one after another as the trajectories need them, not each alone."""
    s = copy.deepcopy(s)
    candidates = []
    for i in s:
        if not i.snapshot.up or i.snapshot.pulling or i.snapshot.pinned:  # asyncrl's
            continue
        if ps_version > i.inst_version and not any(check_routable(t, i, staleness) for t in ts_trajs):
            candidates.append(i)
    sync = []
    for t in [t for queue in levels(ts_trajs) for t in queue]:
        selected = select(cost, mu, s, t, staleness, spread)
        updated = [replace(i, inst_version=ps_version) for i in candidates]
        updated = [i for i in updated if check_routable(t, i, staleness)]
        if updated and (selected is None or selected.inst_version >= ps_version):
            best = max(updated, key=lambda i: gain_of_pulling(cost, t, i, spread))
            if selected is not None:
                pays = gain_of_pulling(cost, t, best, spread) > compute_marginal_gain(cost, t, selected, spread)
            else:
                pays = compute_marginal_gain(cost, t, best, spread) >= mu * ideal_gain(cost, t, spread)
            if pays:
                sync.append(best.snapshot.name)
                candidates = [i for i in candidates if i.snapshot.name != best.snapshot.name]
                s[[i.snapshot.name for i in s].index(best.snapshot.name)] = selected = best
        if selected is None:
            break
        assign(t, selected, staleness)
    return sorted(sync)


def migration_strategy(
    cost: CostModel, phi_wait: int, phi_throughput: float, s: list[Inst]
) -> list[tuple[str, set[int]]]:
    """Algorithm 5."""
    migration = []
    s = [i for i in copy.deepcopy(s) if i.snapshot.up and not i.snapshot.pulling and not i.snapshot.pinned]  # asyncrl's
    for i in s:
        wait_cnt = len(i.wait_trajs)
        if wait_cnt > phi_wait:
            excess = wait_cnt - phi_wait
            migration.append((i.snapshot.name, {t.id for t in i.wait_trajs[-excess:]}))
    if not s:
        return migration
    throughputs = [throughput(cost, i.n, i.kv_cache) for i in s]
    highest, lowest = max(throughputs), min(throughputs)
    if lowest * phi_throughput < highest:  # the gap, where the lowest may be 0
        fastest = s[throughputs.index(highest)]
        everything = {t.id for t in fastest.run_trajs + fastest.wait_trajs}
        for name, cut in migration:
            if name == fastest.snapshot.name:
                everything -= cut
        if everything:
            migration.append((fastest.snapshot.name, everything))
    return migration
