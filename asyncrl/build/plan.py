"""``asyncrl plan``: what a recipe will come to, from formulas and in milliseconds; or what a past run should have.

Reads a recipe's ``[sim]`` for the speeds of its world, asks core/planning.py, and prints. Imports nothing heavy: a plan
takes longer to start Python than to make. build/past.py reads past runs; build/frontier.py draws, and loads matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import msgspec

from asyncrl.build.profile import cost_of
from asyncrl.build.samples import read_samples
from asyncrl.config import Recipe, RecipeError
from asyncrl.core.choices import best_bound, best_split, with_split
from asyncrl.core.distributions import Constant
from asyncrl.core.planning import Prediction, System, predict
from asyncrl.core.types import Record
from asyncrl.core.workload import Shape, Workload

ASSUMPTIONS = (
    "Means of a steady run; rough where few groups are in flight, near ρ = 1, and for full KV caches. "
    "See asyncrl/core/planning.py."
)


class WhatIf(Record, frozen=True, kw_only=True):
    """One change of one setting, and what it brings."""

    key: str
    change: str
    batch: int
    prediction: Prediction


def shape_of(recipe: Recipe) -> Shape:
    """The trajectories that a recipe describes."""
    r, env = recipe.rollout, recipe.sim.env
    return Shape(
        group_size=r.group_size,
        redundancy=r.group_size_redundancy,
        lengths=recipe.sim.lengths,
        task_share=recipe.sim.task_share,
        max_new_tokens=r.max_new_tokens,
        max_tokens=r.max_tokens,
        prompt=recipe.sim.prompt_tokens,
        observation=env.observation_tokens,
        turns=env.turns or Constant(value=float(recipe.env.max_turns)),
        max_turns=recipe.env.max_turns,
        reset=env.reset,
        step=env.step,
        slow=env.slow,
        slow_factor=env.slow_factor,
    )


def system_of(recipe: Recipe) -> System:
    """Servers and trainer that a recipe describes."""
    r, e, sim = recipe.rollout, recipe.engine, recipe.sim
    servers = len(e.urls) or e.count
    system = System(
        batch_groups=r.batch_groups,
        episodes=r.num_envs * (1 if r.expand_num_return_sequences else r.group_size),
        servers=servers,
        server_gpus=sim.instance.gpus,
        max_running=e.max_running_requests,
        kv_tokens=e.max_total_tokens,
        cost=cost_of(sim.instance),
        prefix_cache=sim.instance.prefix_cache,
        affine=e.routing == "prefix_affine",
        trainer_gpus=sim.trainer.gpus,
        tokens_per_s=sim.trainer.tokens_per_s,
        scaling=sim.trainer.scaling,
        fixed_s=sim.trainer.fixed_s,
        speeds=sim.weights,
        transport=recipe.weights.transport if sim.weights.transport == "recipe" else sim.weights.transport,
        load_s=sim.instance.load_s,
        streamed=recipe.streamed_groups / r.batch_groups,
        part_tokens=recipe.trainer.ranks * recipe.trainer.micro_batch_tokens,
        overlap=recipe.update.overlap,
        control=recipe.staleness.family,
        bound=recipe.staleness.bound,
        queue=recipe.staleness.queue,
        drain=recipe.update.running == "drain",
        redundant=r.max_additional_running_prompts,
        kept=kept_share(sim.env.success, sim.env.spread, r.group_size) if r.filter_zero_variance else 1.0,
    )
    return with_split(system, servers)


def kept_share(success: float, spread: float, group_size: int) -> float:
    """Share of groups whose rewards differ, if a task is solved with a probability of mean ``success`` and variance
    ``spread``·success·(1 − success), beta-distributed over tasks."""
    if not 0.0 < success < 1.0 or spread >= 1.0:
        return 0.0
    if spread == 0.0:
        return 1.0 - success**group_size - (1.0 - success) ** group_size
    weight = 1.0 / spread - 1.0
    a, b = success * weight, (1.0 - success) * weight
    return (
        1.0
        - math.prod((a + i) / (weight + i) for i in range(group_size))
        - math.prod((b + i) / (weight + i) for i in range(group_size))
    )


# --- what if ----------------------------------------------------------------------------------------------------------


def levers(system: System, work: Workload) -> Iterator[WhatIf]:
    """Each setting a quarter down and up (or by one), the rest as it is."""
    replace = msgspec.structs.replace

    def changed(key: str, before: float, after: float, to: System, on: Workload = work, note: str = "") -> WhatIf:
        text = f"{before:,g} → {after:,g}{note}"
        batch = to.batch_groups * work.shape.group_size
        return WhatIf(key=key, change=text, batch=batch, prediction=predict(to, on))

    b = system.batch_groups
    for after in _quarter(b):
        yield changed("rollout.batch_groups", b, after, replace(system, batch_groups=after))
    for after in _quarter(system.episodes):
        yield changed("rollout.num_envs", system.episodes, after, replace(system, episodes=after))
    if system.control == "queue_drop":
        for factor in sorted({max(1.0, 0.75 * system.queue), 1.25 * system.queue} - {system.queue}):
            yield changed("staleness.queue", system.queue, factor, replace(system, queue=factor))
    else:
        for bound in sorted({max(0.0, system.bound - 1.0), system.bound + 1.0} - {system.bound}):
            yield changed("staleness.bound", system.bound, bound, replace(system, bound=bound))
    cap = work.shape.max_new_tokens
    for after in _quarter(cap):
        if after < work.shape.max_tokens and (after < cap or work.cut):
            shorter = Workload(replace(work.shape, max_new_tokens=after))
            yield changed("rollout.max_new_tokens", cap, after, system, shorter)
    for servers in (system.servers - 1, system.servers + 1):
        if servers >= 1 and system.gpus - servers * system.server_gpus >= 1:
            to = with_split(system, servers)
            yield changed("engine.count", system.servers, servers, to, note=f" ({to.trainer_gpus} GPUs train)")


def _quarter(value: int) -> list[int]:
    return sorted({max(1, round(0.75 * value)), max(value + 1, round(1.25 * value))} - {value})


# --- text -------------------------------------------------------------------------------------------------------------


def plan(recipe: Recipe, *, out: TextIO, plot: Path | None = None) -> None:
    """Print what the recipe will come to; with ``plot``, draw staleness against period for other splits and batches.

    Raises ``RecipeError`` for files that cannot be read or written.
    """
    recipe = read_samples(recipe)
    system, work = system_of(recipe), Workload(shape_of(recipe))
    if (prompt := recipe.sim.prompt_tokens.expected) >= recipe.rollout.max_tokens:
        raise RecipeError(
            f"sim.prompt_tokens: prompts of {prompt:g} tokens leave no room within rollout.max_tokens = "
            f"{recipe.rollout.max_tokens}; set it to what the tasks have"
        )
    for line in report(recipe, system, work):
        print(line, file=out)
    if plot is not None:
        _draw(plot, recipe, system, work, [], out)


def plan_from_run(run_dir: Path, *, out: TextIO, plot: Path | None = None) -> None:
    """Print what the formulas give for a past run, from its own speeds and lengths, beside what it measured; with
    ``plot``, draw it into the picture of its recipe.

    Raises ``RecipeError`` for a folder that is no run of at least two steps, and as ``plan`` does.
    """
    from asyncrl.build.past import past_report, read_past
    from asyncrl.observe.run_dir import RunDirError

    try:
        recipe, phases = read_past(run_dir)
    except RunDirError as error:
        raise RecipeError(str(error)) from None
    for line in past_report(run_dir, recipe, phases):
        print(line, file=out)
    if plot is not None:
        recipe = read_samples(recipe)
        points = [(p.period, p.staleness) for p in phases]
        _draw(plot, recipe, system_of(recipe), Workload(shape_of(recipe)), points, out)


def _draw(
    file: Path, recipe: Recipe, system: System, work: Workload, measured: list[tuple[float, float]], out: TextIO
) -> None:
    from asyncrl.build.frontier import draw

    try:
        draw(file, recipe.name, system, work, measured)
    except OSError as error:
        raise RecipeError(f"{file}: cannot write the picture ({error.strerror}); name another file") from None
    except ValueError as error:
        raise RecipeError(f"{file}: {error}") from None
    print(f"\n  {file}", file=out)


def report(recipe: Recipe, system: System, work: Workload) -> Iterator[str]:
    p = predict(system, work)
    control = {
        "inflight_cap": f"in-flight cap, α = {system.bound:g}",
        "buffers": f"staleness buffers, η = {system.bound:g}, taken as a cap",
        "window": f"sliding window, τ = {system.bound:g}, taken as a cap",
        "inherent": f"inherent staleness, taken as a queue of {system.queue:g} batches",
        "queue_drop": f"queue-drop, {system.queue:g} batches",
        "queue_max": f"queue-max, at most {math.floor(system.bound)}",
    }[recipe.staleness.control]
    servers = f"{system.servers} × {system.server_gpus} GPU for rollout"
    yield f"{recipe.name}: {servers}, {system.trainer_gpus} for training; {recipe.preset} ({control})"
    yield ""
    held = {"slots": "all slots", "max_running_requests": "engine.max_running_requests", "kv cache": "KV cache is full"}
    yield (
        f"  rollout     {system.episodes:,} episodes, {p.per_server:,.0f} at once on a server ({held[p.limit]}); "
        f"{1000 * p.token_s:.1f} ms a token, {p.v_r:,.0f} tokens/s"
    )
    yield f"  KV cache    {p.kv_used:.0%} of {system.kv_tokens:,} tokens a server, {work.context:,.0f} a sequence"
    yield (
        f"  responses   {work.generated:,.0f} tokens{f' in {work.turns:.1f} turns' if work.turns > 1 else ''}; "
        f"tail {p.tailness:.2f}× in a group of {work.shape.group_size}, {p.batch_tailness:.2f}× in a batch"
    )
    yield f"  training    {p.train_s:.1f} s a step, {p.cycle_s:.1f} s with the weight update; {p.v_t:,.0f} tokens/s"
    yield ""
    side = "rollout" if p.rho < 1 else "training"
    yield f"  ρ           {p.rho:.2f}: {side} is the slower side"
    parts = f"{p.pre_queue:.2f} in generation + {p.in_queue:.2f} in the queue"
    yield f"  staleness   {p.staleness:.2f}  (without a limit {p.natural:.2f}: {parts})"
    yield f"  period      {p.period:.1f} s a step, {_binds(p)}; no-bubble bound {p.shortest:.1f} s ({p.bubble:+.0%})"
    yield f"  throughput  {p.tokens_per_s:,.0f} tokens/s, {p.trajectories_per_s:,.2f} trajectories/s"
    yield f"  idle        servers {p.server_idle:.0%}, trainer {p.trainer_idle:.0%}"
    if p.wasted > 0.005:
        yield f"  dropped     {p.wasted:.0%} of the finished groups; trained responses {p.trained_length:.2f}× as long"
    yield ""
    best = best_split(system, work)
    b = predict(best, work)
    change = f"period {b.period:.1f} s, staleness {b.staleness:.2f}" if best != system else "as it is"
    gpus = f"{best.servers} × {best.server_gpus} GPU for rollout, {best.trainer_gpus} for training"
    yield f"  best split  {gpus}: {change}"
    if system.control == "inflight_cap":
        alpha = best_bound(system, work)
        a = predict(msgspec.structs.replace(system, bound=float(alpha)), work)
        yield f"  best α      {alpha}: period {a.period:.1f} s, staleness {a.staleness:.2f}"
    yield ""
    yield from _table(system, work, p)
    yield ""
    yield f"  {ASSUMPTIONS}"


def _binds(p: Prediction) -> str:
    return {
        "rollout": "bound by rollout",
        "trainer": "bound by training",
        "tail": "bound by the tail of a batch",
        "stragglers": "bound by the stragglers of a version",
        "eviction": "bound by what is too stale to count",
    }[p.binds]


def _table(system: System, work: Workload, p: Prediction) -> Iterator[str]:
    size = work.shape.group_size
    head = f"{'what if':24}{'':30}{'staleness':>10}{'period s':>10}{'traj/s':>10}{'s/√batch':>10}"
    yield f"  {head}"

    def row(key: str, change: str, batch: int, q: Prediction) -> str:
        noise = q.period / math.sqrt(batch)
        return f"  {key:24}{change:30}{q.staleness:10.2f}{q.period:10.1f}{q.trajectories_per_s:10.2f}{noise:10.2f}"

    yield row("as it is", "", system.batch_groups * size, p)
    found = list(levers(system, work))
    for w in found:
        yield row(w.key, w.change, w.batch, w.prediction)
    yield from _advice(p, found)


def _advice(p: Prediction, found: list[WhatIf]) -> Iterator[str]:
    """Which change buys most: staleness for speed, and speed for staleness."""

    def gain(w: WhatIf) -> tuple[float, float]:
        q = w.prediction
        return p.staleness - q.staleness, q.trajectories_per_s / p.trajectories_per_s - 1.0

    yield ""
    fresher = [(g / max(0.01, -speed), w, g, speed) for w in found for g, speed in [gain(w)] if g > 0.005]
    if fresher:
        _, w, g, speed = max(fresher, key=lambda entry: entry[0])
        yield f"  fresher     {w.key} {w.change}: staleness {-g:+.2f} for {speed:+.1%} trajectories/s"
    faster = [(speed / max(0.01, -g), w, g, speed) for w in found for g, speed in [gain(w)] if speed > 0.005]
    if faster:
        _, w, g, speed = max(faster, key=lambda entry: entry[0])
        yield f"  faster      {w.key} {w.change}: {speed:+.1%} trajectories/s for staleness {0.0 - g:+.2f}"
