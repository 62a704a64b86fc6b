"""Speed and staleness of a run before it is started: means, in closed form as far as there is one.

``predict`` takes what works (``System``) and what it works on (``Workload``). A *cycle* is what a trainer that never
waits for a batch does from one to the next: train, prepare the weights, deliver them; servers stand still while weights
are delivered. With ``overlap`` it goes on once they are prepared, if those before have been delivered. The *lag* lies
between a complete batch and the servers having what was learned from it: all of this but what was trained early.

* **Rollout side.** E episodes run at once; those that wait for their environment hold no server (Little's law). With n
  running sequences a server gives each a token in τ(n) seconds: a decode step (StaleFlow's cost model at their mean
  context) and its share of all prefill. An update interrupts and so costs another prefill of what is in progress.
* **Period**, seconds a step: the longest of the trainer's cycle, the rollout of a batch with every slot in use, and
  what the staleness control makes them wait for each other:
  - in-flight cap α > 0: a version's stragglers (Eq. 2 of core/theory/runtime.py, with the chance in it);
  - α < 1: the cycle, and before it the time until 1 − α of the groups that began together have ended; for α = 0 all,
    the tail of synchronous training;
  - draining updates, single turns: what starts after an update ends before the next, so a batch's whole span;
  - streaming: while the trainer waits for a batch it trains what is certain of it, all but the last group at most; with
    α = 0 no more than has ended by then;
  - ``queue_max``: only groups that end in time count, so a step takes as long as the rest needs to fill a batch;
  - ``queue_drop``: nothing waits, what is too much is dropped.
* **Staleness**: core/theory/staleness.py and runtime.py.

Held against simulations the period is within a tenth, mostly within a twentieth, and so is the staleness but where α is
a little above what stragglers need: there chance decides how far it lies between the natural one and α.

Rough where: few slots or groups (everything is a mean; a version's groups are taken to start together), ρ near 1 (no
queue wanders here), filters under a small α (what was filtered begins anew later), draining updates with several turns
or with a queue, batch rollout and round-robin routing (counted as queue scheduling), KV caches that are full (preempted
work is not counted), failures; the servers' idle share where versions overlap (steps of unequal length make it larger).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from asyncrl.core.cost_model import CostModel
from asyncrl.core.observed import Control
from asyncrl.core.theory.runtime import no_bubble_period
from asyncrl.core.theory.staleness import in_queue_staleness, pre_queue_staleness
from asyncrl.core.transfer import Speeds, Transport
from asyncrl.core.types import Record
from asyncrl.core.workload import Workload

Binding = Literal["rollout", "trainer", "tail", "stragglers", "eviction"]


class System(Record, frozen=True, kw_only=True):
    """Servers, trainer, and what the recipe lets them do. Tokens, seconds, GPUs."""

    batch_groups: int
    episodes: int
    """Episodes that may run at once: environment slots."""
    servers: int
    server_gpus: int = 1
    max_running: int
    kv_tokens: int
    """Of each server."""
    cost: CostModel = CostModel()
    prefix_cache: bool = True
    affine: bool = True
    """A later turn finds its server, and there what it said before."""
    trainer_gpus: int
    tokens_per_s: float
    """That one training GPU trains."""
    scaling: float = 1.0
    fixed_s: float = 0.0
    streamed: float = 0.0
    """Share of a batch, its first groups, that may be trained before it is complete."""
    part_tokens: int = 0
    """So many are trained together before it is complete."""
    overlap: bool = False
    """The next train step begins once new weights are prepared; where groups of an older version may be trained."""
    prepare_s: float = 0.0
    """Of a weight update, beside generation."""
    arrive_s: float = 0.0
    """Of a weight update, beside generation, and with ``overlap`` beside training."""
    deliver_s: float = 0.0
    """Of a weight update, with the servers standing still."""
    speeds: Speeds | None = None
    """What these two follow from, where they must be known for other numbers of servers."""
    transport: Transport = "disk"
    load_s: float = 0.0
    control: Control = "inflight_cap"
    bound: float = 1.0
    queue: float = 1.0
    drain: bool = False
    redundant: int = 0
    """Groups that run beside what a batch needs."""
    kept: float = 1.0
    """Share of groups that pass the filter."""

    @property
    def gpus(self) -> int:
        return self.servers * self.server_gpus + self.trainer_gpus

    @property
    def overlaps(self) -> bool:
        return self.overlap and self.control == "inflight_cap" and self.bound > 0

    def train_s(self, tokens: float) -> float:
        return self.fixed_s + tokens / (self.tokens_per_s * math.pow(self.trainer_gpus, self.scaling))

    def cycle_s(self, train_s: float) -> float:
        delivery_s = self.arrive_s + self.deliver_s
        return self.prepare_s + (max(train_s, delivery_s) if self.overlaps else train_s + delivery_s)


class Prediction(Record, frozen=True, kw_only=True):
    """Means of a steady run. Seconds, generated tokens; shares are of the period."""

    per_server: float
    """Sequences that a server runs with every slot in use; ``limit`` says what holds it there."""
    limit: Literal["slots", "max_running_requests", "kv cache"]
    running: float
    """Sequences on all servers as it goes."""
    token_s: float
    """From one token of a sequence to its next."""
    v_r: float
    """Generated tokens a second with every slot in use, updates left out."""
    v_t: float
    """Generated tokens a second that a trainer which never waits trains on."""
    train_s: float
    cycle_s: float
    rollout_s: float
    """Of a batch with every slot in use, the pause of an update in it."""
    rho: float
    tailness: float
    batch_tailness: float
    pre_queue: float
    in_queue: float
    natural: float
    """Staleness with nothing that limits it: their sum for a queue that nothing is dropped from."""
    staleness: float
    period: float
    shortest: float
    """No-bubble bound."""
    binds: Binding
    """What the period waits for."""
    server_idle: float
    trainer_idle: float
    """Waiting for requests to end counts as part of an update, as in observe/busy.py."""
    wasted: float
    """Share of finished groups that are not trained (filtered ones not counted)."""
    trained_length: float
    """Mean response length in a batch over that of all responses."""
    kv_used: float
    """KV tokens in use on a server with every slot in use, over what it has."""
    tokens_per_s: float
    """Generated tokens that are trained on, a second."""
    trajectories_per_s: float

    @property
    def bubble(self) -> float:
        """How far the period is above the shortest possible one, over that one."""
        return self.period / self.shortest - 1.0


class _Pace(Record, frozen=True, kw_only=True):
    """Servers with ``n`` running sequences each."""

    n: float
    token_s: float
    episode_s: float
    """E[D]: server and environment."""
    x: float
    """The environment's share of it."""
    rate: float
    """Episodes that end in a second."""


def _pace(s: System, w: Workload, n: float) -> _Pace:
    busy, cost = max(1.0, n), s.cost
    size = w.shape.group_size
    if s.prefix_cache:
        # A group's prompt is computed once on each server that gets a part of it; a later turn's past is where the turn
        # before it ran.
        prompt = w.prompt * min(size, s.servers) / size
        missed = 0.0 if s.affine else 1.0 - 1.0 / s.servers
        prefill = prompt + (w.fresh - w.prompt) + missed * (w.read - w.fresh)
    else:
        prefill = w.read
    decode = cost.k1 * busy * w.context + max(cost.k2, cost.k3 * busy) + cost.k4
    token_s = decode + n * cost.k5 * prefill / w.generated
    served = w.generated * token_s
    return _Pace(
        n=n,
        token_s=token_s,
        episode_s=served + w.wait,
        x=w.wait / (served + w.wait),
        rate=s.servers * n / served,
    )


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    """Where the falling function ``f`` crosses 0 between ``low`` and ``high``; one of the ends if it does not."""
    if f(high) >= 0:
        return high
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if f(middle) > 0 else (low, middle)
    return 0.5 * (low + high)


def predict(s: System, w: Workload) -> Prediction:
    """What ``s`` makes of ``w`` (module docstring). Raises ``ValueError`` for a system without servers or trainer."""
    if s.servers < 1 or s.trainer_gpus < 1:
        raise ValueError(f"{s.servers} servers and {s.trainer_gpus} training GPUs; both sides need at least one")
    size, alpha = w.shape.group_size, s.bound
    batch = s.batch_groups * size
    # Every slot in use.
    most = min(float(s.max_running), s.kv_tokens / w.context)
    n = _root(lambda n: s.episodes - s.servers * n - _pace(s, w, n).rate * w.wait, 0.0, most)
    full = _pace(s, w, n)
    limit: Literal["slots", "max_running_requests", "kv cache"] = "slots"
    if n == most:
        limit = "max_running_requests" if most == s.max_running else "kv cache"
    episode_s = s.episodes / full.rate  # waiting for a server included
    x = w.wait / episode_s
    trained_length = w.counted(x)
    started = batch * w.held(x) / s.kept
    train_s = s.train_s(batch * (w.observed + w.generated * trained_length))
    cycle_s = s.cycle_s(train_s)
    again = 0.0 if s.drain else (n + full.rate * w.wait / s.servers) * w.context * s.cost.k5
    pause = s.deliver_s + again
    rollout_s = started / full.rate + pause
    tailness = w.tailness(x)
    groups = max(1, round(s.batch_groups / s.kept))
    longest = w.ranked(groups, groups + s.redundant, x)
    early_s = _early(s, w, train_s, groups, x)

    def batches(seconds: float) -> float:
        """Trajectories that end in that time, over those of a batch; one pause falls into it."""
        return max(seconds / rollout_s, (seconds - pause) / (rollout_s - pause))

    rho = batches(cycle_s)
    lag_s = train_s + s.prepare_s + s.arrive_s + s.deliver_s - min(early_s, max(0.0, rollout_s - cycle_s))
    pre_queue = pre_queue_staleness(concurrency=s.episodes, batch=started, tailness=tailness, rho=rho)
    in_queue = batches(lag_s) / max(1.0, rho)
    natural = pre_queue + in_queue
    period = max(cycle_s, rollout_s)
    binds: Binding = "trainer" if cycle_s >= rollout_s else "rollout"
    idle_servers = s.deliver_s / period
    drained = s.drain and w.shape.max_turns == 1 and (s.control != "inflight_cap" or alpha >= 1.0)
    """Whatever starts after an update has ended before the next one."""
    match s.control:
        case "inflight_cap":
            ahead = math.floor(alpha * s.batch_groups + 1e-9) / s.batch_groups
            reason: Binding = "tail"
            staleness = ahead
            if ahead == 0:
                wave = _wave(s, w, groups, most)
                forced = wave.span + cycle_s - min(early_s, wave.trained(train_s - s.fixed_s, s.streamed))
            elif drained:
                forced = max(cycle_s, _wave(s, w, groups, most).span + s.deliver_s)
            else:
                room = max(0.0, ahead - natural)
                forced, credit = _stragglers(s, w, full, train_s, early_s, rollout_s, pause, groups, room)
                staleness, reason = min(ahead, natural + credit), "stragglers"
            if forced > 1.001 * period:
                period, binds = forced, reason
            idle_servers = _idle(s, w, full, period, started)
        case "queue_drop":
            in_queue = in_queue_staleness(rho=rho if rho >= 1.0 else in_queue, q=s.queue)
            staleness = pre_queue + in_queue
        case "queue_max":
            for _ in range(5):  # what is trained is shorter, and so is the cycle
                period, staleness, trained_length = _queue_max(s, w, episode_s, x, cycle_s, rollout_s, pause)
                train_s = s.train_s(batch * (w.observed + w.generated * trained_length))
                cycle_s = s.cycle_s(train_s)
            period = max(period, cycle_s)
            if period > 1.001 * max(cycle_s, rollout_s):
                binds = "eviction"
            idle_servers = s.deliver_s / period
    batch_tokens = batch * w.generated * trained_length
    ended = full.rate / w.held(x) * s.kept * max(0.0, period - pause)
    shortest = no_bubble_period(
        batch_tokens=batch_tokens,
        v_r=full.rate * w.generated * trained_length * batch / started,
        v_t=batch_tokens / (train_s - s.fixed_s),
        fixed_s=s.fixed_s + s.prepare_s,
        update_s=0.0 if s.overlaps else s.deliver_s,
        pause_s=s.deliver_s if s.overlaps else 0.0,
    )
    return Prediction(
        per_server=full.n,
        limit=limit,
        running=min(s.servers * full.n, started / period * w.generated * full.token_s),
        token_s=full.token_s,
        v_r=full.rate * w.generated,
        v_t=batch_tokens / cycle_s,
        train_s=train_s,
        cycle_s=cycle_s,
        rollout_s=rollout_s,
        rho=rho,
        tailness=tailness,
        batch_tailness=longest,
        pre_queue=pre_queue,
        in_queue=in_queue,
        natural=natural,
        staleness=staleness,
        period=period,
        shortest=shortest,
        binds=binds,
        server_idle=idle_servers,
        trainer_idle=0.0 if drained else max(0.0, 1.0 - cycle_s / period),
        wasted=0.0 if s.control == "inflight_cap" else max(0.0, 1.0 - batch / ended),
        trained_length=trained_length,
        kv_used=full.n * w.context / s.kv_tokens,
        tokens_per_s=batch_tokens / period,
        trajectories_per_s=batch / period,
    )


def _early(s: System, w: Workload, train_s: float, groups: int, x: float) -> float:
    """Seconds of a step that can be trained before its batch is complete, if there is time: not its last group, the
    longest as a rule, and not what waits for more to be trained with it."""
    if not s.streamed or groups < 2:
        return 0.0
    begun = groups + s.redundant
    before = w.worked(w.ranked(groups - 1, begun, x), x) / math.prod(w.ended_within(w.ranked(groups, begun, x), x))
    waits_s = s.train_s(s.part_tokens) - s.fixed_s
    return max(0.0, min(s.streamed, before) * (train_s - s.fixed_s) - waits_s)


class _Wave(Record, frozen=True, kw_only=True):
    """Groups of a batch that begin together: seconds until all have ended, and some moments with the share of their
    tokens that has ended before."""

    span: float
    ended: list[tuple[float, float]]

    def trained(self, seconds: float, share: float) -> float:
        """Of the ``seconds`` that they take to train, what can be done within the span if the first ``share`` may be: a
        trainer is behind at its end by the most that came after some moment and could not be trained since."""
        behind = (seconds * max(0.0, share - done) - (self.span - at) for at, done in self.ended)
        return seconds * share - max(0.0, *behind)


def _wave(s: System, w: Workload, groups: int, most: float) -> _Wave:
    """Of groups that begin on idle servers."""
    size = w.members
    total = (groups + s.redundant) * size
    slots = min(s.episodes, total)
    if not w.wait:
        slots = min(slots, int(s.servers * most))

    def span(pace: _Pace, count: int = groups) -> float:
        if slots < total:
            ratio = w.makespan(count * size, slots, pace.x)
        else:
            ratio = w.ranked(count, groups + s.redundant, pace.x)
        return ratio * pace.episode_s

    def surplus(n: float) -> float:
        pace = _pace(s, w, n)
        work = groups * w.shape.group_size * w.held(pace.x) * w.generated * pace.token_s
        return work / (span(pace) * s.servers) - n

    pace = _pace(s, w, _root(surplus, 0.0, min(most, slots / s.servers)))
    last = span(pace)
    ended = [(0.0, 0.0)]
    for k in sorted({1, *(groups * i // 8 for i in range(1, 8))} - {0}) if s.streamed else ():
        at = span(pace, k)
        done = k / groups if slots < total else w.worked(at / pace.episode_s, pace.x)
        ended.append((at, done))
    if slots >= total:
        whole = math.prod(w.ended_within(last / pace.episode_s, pace.x))
        ended = [(at, done / whole) for at, done in ended]
    return _Wave(span=last, ended=ended)


def _stragglers(
    s: System,
    w: Workload,
    full: _Pace,
    train_s: float,
    early_s: float,
    rollout_s: float,
    pause: float,
    groups: int,
    room: float,
) -> tuple[float, float]:
    """(period, batches that rollout is ahead by) where step v waits for the longest group of version v − ⌈α⌉. With f(v)
    when the trainer is free for it, its batch is complete at b(v), and version v + 1 is on the servers at the switch

        b(v)      =  max(f(v), b(v − 1) + rollout − c(v), s(v − ⌈α⌉) + X + ⌈α⌉·pause)
        s(v + 1)  =  max(b(v) + train − min(early, b(v) − f(v)), s(v)) + prepare + arrive + deliver,

    X drawn anew for each version. The trainer is free again at the switch, or with ``overlap`` after preparing. Where
    every step waits, the mean is Eq. 2 of core/theory/runtime.py; chance makes the period longer. While a step waits
    rollout gets ahead, which is the credit c, as long as the cap lets it: at most by ``room`` batches beyond the
    natural staleness. Below α = 1 step v also needs a share 1 − α of the groups that version v begins. X is at the
    speed of as many sequences as the period lets run; each update on their way costs them ``pause``.
    """
    behind, begun = math.ceil(s.bound), groups + s.redundant
    needed = math.ceil((1.0 - s.bound) * groups - 1e-9)
    pace, period, ahead = full, rollout_s, 0.0
    for _ in range(4):  # a contraction: the period hardly depends on the speed
        switches, credit, total = [rollout_s * (i - behind) for i in range(behind + 1)], 0.0, 0.0
        free, complete = 0.0, -train_s
        longest = w.draws(groups, begun, pace.x)
        own = w.draws(needed, begun, pace.x) if needed > 0 else [-math.inf] * len(longest)
        skipped = len(longest) // 8
        for i, (span, first) in enumerate(zip(longest, own, strict=True)):
            last, before = switches[-1], complete
            ended = switches[-1 - behind] + span * pace.episode_s + behind * pause
            complete = max(free, before + rollout_s - credit, last + first * pace.episode_s, ended)
            trained = complete + train_s - min(early_s, complete - free)
            prepared = max(trained, last) + s.prepare_s
            switches.append(prepared + s.arrive_s + s.deliver_s)
            free = prepared if s.overlaps else switches[-1]
            credit = min(max(0.0, credit + complete - before - rollout_s), room * rollout_s)
            total += credit if i >= skipped else 0.0
        start = behind + skipped
        period = (switches[-1] - switches[start]) / (len(switches) - 1 - start)
        ahead = total / (len(longest) - skipped) / rollout_s
        work = groups * w.shape.group_size * w.held(pace.x) * w.generated * pace.token_s
        pace = _pace(s, w, min(full.n, work / (s.servers * max(period - pause, 1e-9))))
    return period, ahead


def _idle(s: System, w: Workload, full: _Pace, period: float, started: float) -> float:
    """Share of the time in which a server has nothing to do under the in-flight cap.

    At each switch ``started`` trajectories begin, as far as there are slots, and are dealt to the servers. A server is
    idle when all of its part have ended, of this version and of those before; and while weights are delivered.
    """
    part, count = started / s.servers, 32
    late = max(0.0, started - s.episodes) / full.rate
    moments = [(i + 0.5) / count * (period - s.deliver_s) - late for i in range(count)]
    pace, idle = full, 0.0
    for _ in range(4):  # a contraction: the sequences on a busy server, and with them the speed, follow from the share
        busy = 0.0
        for at in moments:
            ended = 1.0
            for version in range(math.ceil(s.bound) + 1):
                since = at + version * period
                ended *= w.ended_by(since / pace.episode_s, pace.x) ** part if since > 0 else 0.0
                if ended < 1e-6:
                    break
            busy += (1.0 - ended) / count * (1.0 - s.deliver_s / period)
        idle = 1.0 - busy
        pace = _pace(s, w, min(full.n, part * w.generated * pace.token_s / (period * max(busy, 1e-9))))
    return idle


def _queue_max(
    s: System, w: Workload, episode_s: float, x: float, cycle_s: float, rollout_s: float, pause: float
) -> tuple[float, float, float]:
    """(period, mean staleness, mean length of what is trained over E[L]) of a queue that drops what is too stale.

    A group of span D that waits for its batch for u seconds has ⌈(D + u + cycle)/T⌉ − 1 updates between its start and
    its training, for a start at any moment; so it counts iff D + u ≤ (bound + 1)·T − cycle. Rollout-bound, u is even in
    0 … T, and T is such that what counts fills a batch. Train-bound, T is the cycle, and the queue grows by such a wait
    that what it drops is what is too much.
    """
    bound, phases = math.floor(s.bound), [(i + 0.5) / 16 for i in range(16)]

    def passed(period: float, extra: float) -> tuple[float, float, float]:
        """Share of groups that count, and their mean length and staleness."""
        unit = episode_s * period / (period - pause)  # pauses are part of what they take
        share = length = stale = 0.0
        for phase in phases:
            room = (bound + 1 - phase) * period - cycle_s - extra
            part, mean = w.ended_within(room / unit, x) if room > 0 else (0.0, 0.0)
            share += part / len(phases)
            length += part * mean / len(phases)
            for k in range(1, bound + 1):  # E[staleness] is the sum of P(staleness ≥ k)
                within = room - (bound + 1 - k) * period
                stale += (part - (w.ended_within(within / unit, x)[0] if within > 0 else 0.0)) / len(phases)
        return (share, length / share, stale / share) if share else (0.0, 1.0, float(bound))

    def missing(period: float, extra: float = 0.0) -> float:
        """Seconds of rollout that a batch lacks after a ``period``."""
        return rollout_s - pause - (period - pause) * passed(period, extra)[0]

    if cycle_s > rollout_s and missing(cycle_s) < 0:
        extra = _root(lambda u: -missing(cycle_s, u), 0.0, (bound + 1) * cycle_s)
        _, length, stale = passed(cycle_s, extra)
        return cycle_s, stale, length
    low = high = max(cycle_s, rollout_s)
    while missing(high) > 0:
        high *= 2.0
    period = _root(missing, low, high)
    _, length, stale = passed(period, 0.0)
    return period, stale, length
