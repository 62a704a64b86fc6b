"""``asyncrl``: the command line. Starts processes and event loops, prints errors as one line, and sets the exit code.

0 done, 1 the run failed, 2 bad input (nothing was started or written), 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from asyncrl import __version__
from asyncrl.config import Recipe, RecipeError, dumps, load, under_preset


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:  # its own parser: it is also started as python -m asyncrl.serve
        from asyncrl.serve.__main__ import main as serve

        return serve(arguments[1:])
    if arguments[:1] == ["relay"]:
        from asyncrl.weights.relay_main import main as relay

        return relay(arguments[1:])
    args = _parser().parse_args(arguments)
    try:
        code = int(args.run(args, arguments))
        sys.stdout.flush()
    except RecipeError as error:
        print(f"asyncrl: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough (asyncrl plan … | head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl", description="Asynchronous RL post-training of language models from one asyncio process."
    )
    parser.add_argument("--version", action="version", version=f"asyncrl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run a recipe")
    _add_recipe(train)
    where = train.add_mutually_exclusive_group()
    where.add_argument(
        "--run-dir", type=Path, help="where the run is written, or goes on (default: a new one, runs/RECIPE-TIME)"
    )
    where.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="a run directory to go on in, or one of its checkpoints to go back to",
    )
    train.set_defaults(run=_train)

    sim = commands.add_parser("sim", help="run recipes on virtual time, against simulated servers and trainer")
    _add_recipe(sim, nargs="+")
    sim.add_argument("--run-dir", type=Path, help="where the run is written (default: runs/sim-RECIPE-TIME)")
    sim.add_argument("--seed", type=int, metavar="S", help="play this seed, in place of the recipe's")
    mode = sim.add_mutually_exclusive_group()
    mode.add_argument("--seeds", type=_count, metavar="N", help="play seeds S, S+1, … on all cores, and write nothing")
    mode.add_argument("--check-determinism", action="store_true", help="play twice and compare the traces")
    mode.add_argument("--compare", action="store_true", help="play several recipes, and draw them side by side")
    sim.add_argument("--presets", metavar="A,B,…", help="with --compare: each recipe under these presets")
    sim.add_argument("--jobs", type=_count, default=0, metavar="J", help="processes of --seeds (default: one a core)")
    sim.set_defaults(run=_sim)

    plan = commands.add_parser("plan", help="what a recipe will come to, from formulas; or measure servers for it")
    _add_recipe(plan, about="recipe.toml or its folder, or the directory of a past run")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="draw staleness against step time for other splits")
    plan.add_argument("--fit", type=Path, metavar="FILE", help="measure the recipe's servers, and write their profile")
    plan.add_argument("--quick", action="store_true", help="with --fit: fewer and shorter loads")
    plan.add_argument("--url", action="append", default=[], help="with --fit: a server that already runs; repeatable")
    plan.set_defaults(run=_plan)

    check = commands.add_parser("check", help="print a recipe as resolved, and start nothing")
    _add_recipe(check)
    check.set_defaults(run=_check)

    env = commands.add_parser("env", help="work on an environment")
    env_check = env.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "check", help="play an environment or a reward function without a model, and say what is wrong with it"
    )
    env_check.add_argument("target", help="package.module:Class or file.py:Class, as env.target in a recipe")
    env_check.add_argument("--kwargs", default="{}", metavar="JSON", help="as env.kwargs")
    env_check.add_argument("--tasks", default="", metavar="FILE", help=".jsonl or .parquet rows")
    env_check.add_argument(
        "--actions",
        type=Path,
        metavar="FILE",
        help="actions that it understands, one a line (or Class.example_actions)",
    )
    env_check.add_argument("--episodes", type=int, default=20, metavar="N")
    env_check.add_argument("--max-turns", type=int, default=50, metavar="N")
    env_check.add_argument("--timeout", type=float, default=60.0, metavar="S", help="of one call")
    env_check.add_argument("--seed", type=int, default=0, metavar="S")
    env_check.set_defaults(run=_env_check)

    report = commands.add_parser("report", help="draw the report page of a run again")
    report.add_argument("run_dir", type=Path)
    report.set_defaults(run=_report)

    view = commands.add_parser("view", help="read the episodes of a run, also while it goes on")
    view.add_argument("run_dir", type=Path)
    view.add_argument("episode", type=int, nargs="?", help="show this one, turn by turn; else list them")
    view.add_argument("--state", default="", metavar="S", help="list those only: consumed, filtered … running, scored")
    view.add_argument("--task", default="", metavar="T", help="list those only whose task's id contains T")
    view.add_argument(
        "--last",
        type=_count,
        default=20,
        metavar="N",
        help="list so many that ended, and so many that have not (default: 20)",
    )
    view.add_argument("--tokens", action="store_true", help="with an episode: each token's id, logprob and version")
    view.set_defaults(run=_view)

    export = commands.add_parser("export", help="write the episodes of a run as a Parquet file")
    export.add_argument("run_dir", type=Path)
    export.add_argument("file", type=Path)
    export.set_defaults(run=_export)

    status = commands.add_parser("status", help="say what a run waits for, since when, and until when; or how it ended")
    status.add_argument("run_dir", type=Path)
    status.set_defaults(run=_status)

    servers = commands.add_parser("servers", help="say which servers a run has, or change them while it goes on")
    actions = servers.add_subparsers(required=True, metavar="COMMAND", dest="verb")
    for verb, what in (
        ("list", "what each does"),
        ("add", "have one join: that URL (its key in ASYNCRL_TOKEN), or one started here; also one that was drained"),
        ("drain", "give one nothing new, until it runs nothing"),
        ("remove", "drain one and forget it; one that was started here is stopped"),
    ):
        action = actions.add_parser(verb, help=what)
        action.add_argument("run_dir", type=Path)
        if verb != "list":
            action.add_argument("server", nargs="?" if verb == "add" else None, default="", help="its URL or number")
    servers.set_defaults(run=_servers, server="")

    commands.add_parser("serve", help="serve a model: SGLang's HTTP API over the embedded engine", add_help=False)
    commands.add_parser("relay", help="keep the newest weights in a host's shared memory", add_help=False)
    return parser


def _add_recipe(
    parser: argparse.ArgumentParser, nargs: str | None = None, about: str = "recipe.toml, or its folder"
) -> None:
    parser.add_argument("recipe", nargs=nargs, help=about)
    parser.add_argument("--with", dest="files", action="append", default=[], metavar="FILE", help="TOML laid over it")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="e.g. staleness.bound=2"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _load(args: argparse.Namespace) -> Recipe:
    return load(args.recipe, files=args.files, overrides=args.overrides)


def _check(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from asyncrl.config.deadlines import inversions

    recipe = _load(args)
    print(dumps(recipe).decode())
    for line in inversions(recipe):
        print(f"asyncrl: {line}", file=sys.stderr)
    return 0


def _env_check(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from asyncrl.build.env_check import check, show

    try:
        kwargs = msgspec.json.decode(args.kwargs, type=dict)
    except msgspec.DecodeError as error:
        raise RecipeError(f"--kwargs {args.kwargs}: not a JSON object: {error}") from None
    try:
        actions = args.actions.read_text(encoding="utf-8").splitlines() if args.actions else []
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"--actions {args.actions}: cannot read it ({error})") from None
    if min(args.episodes, args.max_turns, args.timeout) <= 0:
        raise RecipeError("--episodes, --max-turns and --timeout must be more than 0")
    report = check(
        args.target,
        kwargs=kwargs,
        tasks=args.tasks,
        actions=actions,
        episodes=args.episodes,
        max_turns=args.max_turns,
        timeout_s=args.timeout,
        seed=args.seed,
    )
    show(report, args.target)
    return int(bool(report.findings))


def _report(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from asyncrl.observe.report import write_report
    from asyncrl.observe.run_dir import RunDirError

    try:
        print(write_report(args.run_dir))
    except RunDirError as error:
        raise RecipeError(str(error)) from None
    return 0


def _view(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from rich.console import Console

    from asyncrl.observe.run_dir import RunDirError
    from asyncrl.observe.view import list_episodes, show_episode

    def decode(ids: Sequence[int]) -> str:
        text: str = _tokenizer(args.run_dir).decode(ids)
        return text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        if args.episode is None:
            list_episodes(args.run_dir, console, state=args.state, task=args.task, last=args.last)
        else:
            show_episode(args.run_dir, args.episode, console, tokens=args.tokens, decode=decode)
    except RunDirError as error:
        raise RecipeError(str(error)) from None
    return 0


@cache
def _tokenizer(run_dir: Path) -> Any:
    """The tokenizer of a run's model."""
    from asyncrl.build.past import read_recipe
    from asyncrl.tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(Path(read_recipe(run_dir).model.path))


def _export(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from asyncrl.observe.export import export
    from asyncrl.observe.run_dir import RunDirError

    try:
        print(f"{args.file}: {export(args.run_dir, args.file):,} episodes")
    except RunDirError as error:
        raise RecipeError(str(error)) from None
    return 0


def _status(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from asyncrl.build.status import show
    from asyncrl.observe.run_dir import RunDirError

    try:
        return show(args.run_dir, print)
    except RunDirError as error:
        raise RecipeError(str(error)) from None


def _servers(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from asyncrl.access import AccessError, given_token
    from asyncrl.build.control import ask
    from asyncrl.observe.run_dir import RunDirError

    try:
        token = given_token() if args.verb == "add" and args.server else ""
        return ask(args.run_dir, args.verb, args.server, print, token=token)
    except (AccessError, RunDirError) as error:
        raise RecipeError(str(error)) from None
    except KeyboardInterrupt:
        print("asyncrl: it goes on; see asyncrl servers list", file=sys.stderr)
        return 130


def _sim(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from asyncrl.build import simulate
    from asyncrl.build.errors import one_line
    from asyncrl.observe.run_dir import RunDirError

    recipes = [load(path, files=args.files, overrides=args.overrides) for path in args.recipe]
    if args.seed is not None:
        recipes = [msgspec.structs.replace(recipe, seed=args.seed) for recipe in recipes]
    if len(recipes) > 1 and not args.compare:
        raise RecipeError("more than one recipe: say --compare to draw them side by side")
    if args.presets and not args.compare:
        raise RecipeError("--presets: say --compare with it")
    for recipe in recipes:
        simulate.check(recipe)
    recipe = recipes[0]
    replay = f"asyncrl {shlex.join(_without(arguments, '--seeds', '--seed', '--jobs', '--run-dir'))}"
    if args.seeds is not None:
        return _sweep(simulate, recipe, args, replay)
    if args.check_determinism:
        events, difference = simulate.first_difference(recipe)
        print(f"{recipe.name}: seed {recipe.seed}, {events:,} events, " + ("the same twice" if not difference else ""))
        if difference:
            print(f"asyncrl: not deterministic; {difference}", file=sys.stderr)
        return int(bool(difference))
    now = datetime.now().astimezone()
    run_dir = args.run_dir or Path("runs") / f"sim-{recipe.name}-{now:%Y%m%d-%H%M%S}"
    command, started = ["asyncrl", *arguments], now.isoformat(timespec="seconds")
    try:
        if args.compare:
            variants = _variants(args, recipes)
            return int(simulate.compare(variants, run_dir, command=command, started=started, out=sys.stdout) > 0)
        print(f"seed {recipe.seed}")
        _, error = simulate.simulate(recipe, run_dir, command=command, started=started, out=sys.stdout)
    except RunDirError as failure:
        raise RecipeError(str(failure)) from None
    if error is not None:
        if simulate.is_bug(error):
            traceback.print_exception(error)
        print(f"asyncrl: {one_line(error)}", file=sys.stderr)
        print(f"asyncrl: {replay} --seed {recipe.seed}   plays it again", file=sys.stderr)
    return int(error is not None)


def _variants(args: argparse.Namespace, recipes: Sequence[Recipe]) -> list[tuple[str, Recipe]]:
    """(name, recipe) of each run to compare; names are unique."""
    variants: list[tuple[str, Recipe]] = []
    for recipe in recipes:
        if args.presets:
            for preset in args.presets.split(","):
                name = preset if len(recipes) == 1 else f"{recipe.name} {preset}"
                variants.append((name, under_preset(recipe, preset)))
        else:
            variants.append((recipe.name, recipe))
    names = [name for name, _ in variants]
    if len(set(names)) < len(names):
        variants = [(f"{i} {name}", recipe) for i, (name, recipe) in enumerate(variants, start=1)]
    return variants


def _sweep(simulate: ModuleType, recipe: Recipe, args: argparse.Namespace, replay: str) -> int:
    from rich.progress import track

    seeds = range(recipe.seed, recipe.seed + args.seeds)
    outcomes = sorted(
        track(simulate.sweep(recipe, seeds, args.jobs), total=len(seeds), description=recipe.name),
        key=lambda o: o.seed,
    )
    for line in simulate.table_of(outcomes):
        print(line)
    bugs = [o for o in outcomes if o.bug]
    for o in bugs[:10]:
        print(f"asyncrl: {replay} --seed {o.seed}   plays the first again: {o.error}", file=sys.stderr)
    return int(bool(bugs))


def _without(arguments: Sequence[str], *options: str) -> list[str]:
    """The command line without these options and their values."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in options:
            skip = True
        elif not any(argument.startswith(f"{option}=") for option in options):
            kept.append(argument)
    return kept


def _plan(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    if args.fit:
        return _fit(args)
    if args.quick or args.url:
        raise RecipeError("--quick and --url belong to --fit FILE")
    from asyncrl.build.plan import plan, plan_from_run

    if (Path(args.recipe) / "metrics.jsonl").exists():
        if args.files or args.overrides:
            raise RecipeError(f"{args.recipe} is a past run, whose recipe cannot be changed; give the recipe itself")
        plan_from_run(Path(args.recipe), out=sys.stdout, plot=args.plot)
    else:
        plan(_load(args), out=sys.stdout, plot=args.plot)
    return 0


def _fit(args: argparse.Namespace) -> int:
    import uvloop

    from asyncrl.build.errors import leaves
    from asyncrl.build.fit import FULL, QUICK, describe, fit
    from asyncrl.core.fitting import FitError
    from asyncrl.ports import EngineError
    from asyncrl.processes import ChildError

    try:
        profile = uvloop.run(fit(_load(args), args.fit, urls=args.url, effort=QUICK if args.quick else FULL))
    except Exception as error:
        causes = leaves(error)
        if not all(isinstance(cause, (EngineError, ChildError, FitError)) for cause in causes):
            raise
        for line in dict.fromkeys(str(cause) for cause in causes):
            print(f"asyncrl: {line}", file=sys.stderr)
        return 1
    for line in describe(profile):
        print(line)
    print(f"{args.fit}: name it as sim.instance.profile")
    return 0


def _train(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    import uvloop

    from asyncrl.observe.database import STORE

    recipe = _load(args)
    now = datetime.now().astimezone()
    run_dir = args.run_dir or Path("runs") / f"{recipe.name}-{now:%Y%m%d-%H%M%S}"
    started = now.isoformat(timespec="seconds")
    resume = run_dir if (run_dir / STORE).exists() else args.resume
    return uvloop.run(_train_until_signal(recipe, run_dir, ["asyncrl", *arguments], started, resume))


async def _train_until_signal(
    recipe: Recipe, run_dir: Path, command: list[str], started: str, resume: Path | None
) -> int:
    """The run, cancelled by the first SIGINT or SIGTERM; a second one cuts the clean-up short."""
    import asyncio
    import signal

    from asyncrl.build.errors import leaves, one_line
    from asyncrl.build.real import train
    from asyncrl.observe.run_dir import RunDirError
    from asyncrl.ports import EngineError, TooManyStuck, TrainerError
    from asyncrl.processes import ChildError
    from asyncrl.runtime.fleet import FleetDown
    from asyncrl.runtime.stall import RunStalled
    from asyncrl.runtime.user_code import EnvFailing

    expected = (EngineError, TrainerError, ChildError, FleetDown, EnvFailing, RunDirError, TooManyStuck, RunStalled)
    task = asyncio.current_task()
    assert task is not None
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            print("\nasyncrl: stopping; press Ctrl-C again to stop at once", file=sys.stderr)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await train(recipe, run_dir, command=command, started=started, out=sys.stdout, resume=resume)
    except asyncio.CancelledError:
        if not signals:
            raise
        print("asyncrl: interrupted", file=sys.stderr)
        return 130
    except RecipeError:
        raise
    except Exception as error:
        causes = leaves(error)
        known = [e for e in causes if isinstance(e, (*expected, RecipeError))]
        if len(known) < len(causes):
            traceback.print_exception(error)
        for e in dict.fromkeys(str(k) for k in known) if known else [one_line(error)]:
            print(f"asyncrl: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
