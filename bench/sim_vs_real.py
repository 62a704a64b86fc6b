"""A simulation held against a real run of the same recipe: steps a second, staleness, bubbles, idle trainer, tokens.

    python bench/sim_vs_real.py [--recipe recipes/runsum] [--run-dir DIR] [--quick] [--json PATH] [--out DIR]

Makes a real run (or takes the one in ``--run-dir``), fits the cost model to the recipe's servers, takes everything else
that a simulation has to know from the real run's files, simulates, and prints both.

What the simulation is told, and from where:

* servers: k1 … k5, by ``asyncrl plan --fit``'s code, on the recipe's model. All servers are measured at the same time.
* trainer: seconds of a step over its tokens, by regression over the steps of the real run; a slope or a constant that
  would be negative is 0 (batches hardly differ in size, so the two are barely apart).
* weights: the mean time beside generation, and the mean time for which the servers stand still.
* lengths of responses and prompts: those of the real run's trajectories, and the share of the variance of the former
  that lies between tasks.

Nothing is fitted to the figures that are compared. But on one machine a real run's processes share cores, which the
simulation knows nothing of: its servers are as fast while the trainer works as while it does not. So servers are fitted
twice, once alone, and once beside as many busy processes as the trainer has ranks; the truth lies between. What a real
run has beyond both: the CPU of the controller itself, and of HTTP on both ends (latency of a request, printed below).
The trainer's times are from the real run, so they do contain what the servers took from it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

import msgspec
import uvloop

from asyncrl.build.fit import FULL, QUICK, describe, fit, machine
from asyncrl.build.profile import Profile
from asyncrl.build.simulate import simulate
from asyncrl.config import InstanceModel, Recipe, SimConfig, TrainerModel, WeightsModel, load, loads_json
from asyncrl.core.distributions import Constant, Empirical
from asyncrl.observe.run_dir import METRICS, RECIPE, TRACE, TRAJECTORIES, read_lines
from asyncrl.observe.summary import read_summary
from asyncrl.observe.trace import read_trace

WARM_UP = 5
"""Steps at the start that are not looked at for the trainer's speed: memory is allocated, kernels are chosen."""
FAST = 1e9
"""Gigabytes a second of what takes no time of its own here."""

FIGURES = ("steps/s", "mean staleness", "bubble share", "trainer idle share", "tokens/s")


# --- reading a run ----------------------------------------------------------------------------------------------------


def figures(run_dir: Path) -> dict[str, float]:
    """What is compared, of a real or a simulated run: from the end of the first step to the end of the last."""
    lines = list(read_lines(run_dir / METRICS))
    summary = read_summary(run_dir)
    if summary is None or len(lines) < 3:
        raise SystemExit(f"bench/sim_vs_real.py: {run_dir} holds no run of at least three steps")
    seconds = lines[-1]["time/at"] - lines[0]["time/at"]
    values = (
        (len(lines) - 1) / seconds,
        summary.staleness.mean,
        summary.bubble_share,
        summary.trainer_idle_share,
        (lines[-1]["tokens/total"] - lines[0]["tokens/total"]) / seconds,
    )
    return {name: float("nan") if value is None else value for name, value in zip(FIGURES, values, strict=True)}


def trainer_speed(run_dir: Path) -> TrainerModel:
    """Seconds of a train step = fixed_s + tokens / tokens_per_s, by least squares over the steps."""
    lines = list(read_lines(run_dir / METRICS))[WARM_UP:]
    tokens = [line["trainer/tokens"] for line in lines]
    seconds = [line["time/train"] for line in lines]
    x, y = fmean(tokens), fmean(seconds)
    slope = sum((t - x) * (s - y) for t, s in zip(tokens, seconds, strict=True)) / (
        pvariance(tokens) * len(tokens) or 1
    )
    if slope <= 0.0:  # tokens do not explain the time
        return TrainerModel(tokens_per_s=FAST, fixed_s=y, gpus=1)
    if y - slope * x < 0.0:
        return TrainerModel(tokens_per_s=x / y, fixed_s=0.0, gpus=1)
    return TrainerModel(tokens_per_s=1.0 / slope, fixed_s=y - slope * x, gpus=1)


def weight_update(run_dir: Path) -> tuple[float, float]:
    """Mean seconds (beside generation, with the servers standing still) of a weight update."""
    prepare = fmean(e.dur / 1e6 for e in read_trace(run_dir / TRACE) if e.name == "prepare weights")
    _, *steps = read_lines(run_dir / METRICS)  # the first starts from weights that the servers have
    whole = fmean(line["time/update"] for line in steps)
    return prepare, whole - prepare


def lengths(run_dir: Path) -> tuple[list[float], list[float], float]:
    """Generated and prompt tokens of each trajectory that was trained, and the share of the former's variance that lies
    between groups."""
    generated: list[float] = []
    prompts: list[float] = []
    groups: dict[int, list[float]] = {}
    for line in read_lines(run_dir / TRAJECTORIES):
        if line["state"] != "consumed":
            continue
        runs = line["versions"]
        generated.append(float(sum(count for version, count in runs if version >= 0)))
        prompts.append(float(runs[0][1]))
        groups.setdefault(line["group"], []).append(generated[-1])
    # Within a group of g, the variance around its own mean is that of its trajectories times (g - 1) / g.
    within = fmean(pvariance(g) * len(g) / (len(g) - 1) for g in groups.values() if len(g) > 1)
    total = pvariance(generated)
    return generated, prompts, max(0.0, 1.0 - within / total) if total else 0.0


def world(run_dir: Path) -> SimConfig:
    """What the simulation is told, but for the servers' speed."""
    generated, prompts, share = lengths(run_dir)
    prepare_s, still_s = weight_update(run_dir)
    return SimConfig(
        # The embedded engine has no prefix cache, and prefills first.
        instance=InstanceModel(prefix_cache=False, chunked_prefill=0, load_s=still_s),
        trainer=trainer_speed(run_dir),
        weights=WeightsModel(
            transport="disk",
            gigabytes=1.0,
            gather_gb_s=1.0 / prepare_s,
            disk_gb_s=FAST,
            link_gb_s=FAST,
            local_gb_s=FAST,
        ),
        lengths=Empirical(values=tuple(generated)),
        prompt_tokens=Constant(value=prompts[0]) if len(set(prompts)) == 1 else Empirical(values=tuple(prompts)),
        task_share=share,
        tasks=8192,
    )


# --- running ----------------------------------------------------------------------------------------------------------


def run_for_real(recipe: str, run_dir: Path, quick: bool) -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "train", recipe, "--run-dir", str(run_dir)]
    subprocess.run([*command, *(("--set", "run.steps=40") if quick else ())], check=True)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that compute for nothing, as a trainer's ranks would."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def fit_servers(recipe: Recipe, out: Path, beside: int, quick: bool) -> Profile:
    with busy_processes(beside):
        return uvloop.run(fit(recipe, out, effort=QUICK if quick else FULL, note=lambda line: None))


def simulated(recipe: Recipe, run_dir: Path) -> dict[str, float]:
    with (run_dir.parent / f"{run_dir.name}.log").open("w") as log:
        _, error = simulate(recipe, run_dir, command=["bench/sim_vs_real.py"], started="", out=log)
    if error is not None:
        raise error
    return figures(run_dir)


def compare(recipe: Recipe, real: Path, out: Path, quick: bool) -> dict[str, Any]:
    sim = world(real)
    inputs: dict[str, Any] = {
        "steps": recipe.run.steps,
        "trainer": msgspec.to_builtins(sim.trainer),
        "weights, s beside generation": 1.0 / sim.weights.gather_gb_s,
        "weights, s that servers stand still": sim.instance.load_s,
        "tokens of a response": sim.lengths.expected,
        "tokens of a prompt": sim.prompt_tokens.expected,
        "share of the lengths' variance between tasks": sim.task_share,
    }
    # Evaluations lie outside of what is compared.
    told = msgspec.structs.replace(recipe, sim=sim, run=msgspec.structs.replace(recipe.run, eval_tasks=0))
    simulations: dict[str, dict[str, float]] = {}
    for name, beside in (("fitted alone", 0), ("fitted beside a busy trainer", recipe.trainer.ranks)):
        slug = "-".join(name.split()[1:])
        profile = fit_servers(told, out / f"profile-{slug}.json", beside, quick)
        print(f"\nservers {name}:\n" + "\n".join(f"  {line}" for line in describe(profile)), flush=True)
        instance = msgspec.structs.replace(sim.instance, cost=profile.fit.cost)
        virtual = msgspec.structs.replace(told, sim=msgspec.structs.replace(sim, instance=instance))
        simulations[name] = simulated(virtual, out / f"simulated-{slug}")
        fit = profile.fit
        inputs[f"servers {name}"] = msgspec.to_builtins(fit.cost) | {
            "decode error": fit.decode.mean,
            "prefill error": fit.prefill.mean,
            "request_s": fit.request_s,
            "latency_s": fit.latency_s,
        }
    return {
        "recipe": recipe.name,
        "machine": machine(),
        "real": figures(real),
        "simulated": simulations,
        "inputs": inputs,
    }


def report(result: dict[str, Any]) -> Sequence[str]:
    real, sims = result["real"], result["simulated"]
    lines = [
        f"{result['recipe']}, {result['inputs']['steps']} steps, {result['machine']}",
        f"{'':22}{'real':>10}" + "".join(f"{name:>38}" for name in sims),
    ]
    for name in FIGURES:
        cells = "".join(f"{sim[name]:>26.3f}{_ratio(sim[name], real[name]):>12}" for sim in sims.values())
        lines.append(f"{name:22}{real[name]:>10.3f}{cells}")
    return lines


def _ratio(ours: float, theirs: float) -> str:
    return f"× {ours / theirs:.2f}" if theirs else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/runsum")
    parser.add_argument("--run-dir", type=Path, help="a real run that is there already")
    parser.add_argument("--out", type=Path, help="keep the runs and profiles in this folder, which must be new")
    parser.add_argument("--quick", action="store_true", help="40 steps, a small grid")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        real = args.run_dir or out / "real"
        if args.run_dir is None:
            run_for_real(args.recipe, real, args.quick)
        recipe = loads_json((real / RECIPE).read_bytes()) if (real / RECIPE).exists() else load(args.recipe)
        result = compare(recipe, real, out, args.quick)
    print("\n" + "\n".join(report(result)))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
