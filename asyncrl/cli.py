"""``asyncrl``: the command line. Starts processes and event loops, prints errors as one line, and sets the exit code.

0 done, 1 the run failed, 2 bad input (nothing was started or written), 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import traceback
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from asyncrl import __version__
from asyncrl.config import Recipe, RecipeError, dumps, load


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:  # its own parser: it is also started as python -m asyncrl.serve
        from asyncrl.serve.__main__ import main as serve

        return serve(arguments[1:])
    args = _parser().parse_args(arguments)
    try:
        return int(args.run(args, arguments))
    except RecipeError as error:
        print(f"asyncrl: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl", description="Asynchronous RL post-training of language models from one asyncio process."
    )
    parser.add_argument("--version", action="version", version=f"asyncrl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run a recipe")
    _add_recipe(train)
    train.add_argument("--run-dir", type=Path, help="where the run is written (default: runs/RECIPE-TIME)")
    train.set_defaults(run=_train)

    check = commands.add_parser("check", help="print a recipe as resolved, and start nothing")
    _add_recipe(check)
    check.set_defaults(run=_check)

    report = commands.add_parser("report", help="draw the report page of a run again")
    report.add_argument("run_dir", type=Path)
    report.set_defaults(run=_report)

    commands.add_parser("serve", help="serve a model: SGLang's HTTP API over the embedded engine", add_help=False)
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="recipe.toml, or its folder")
    parser.add_argument("--with", dest="files", action="append", default=[], metavar="FILE", help="TOML laid over it")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="e.g. staleness.bound=2"
    )


def _load(args: argparse.Namespace) -> Recipe:
    return load(args.recipe, files=args.files, overrides=args.overrides)


def _check(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    print(dumps(_load(args)).decode())
    return 0


def _report(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from asyncrl.observe.report import write_report
    from asyncrl.observe.run_dir import RunDirError

    try:
        print(write_report(args.run_dir))
    except RunDirError as error:
        raise RecipeError(str(error)) from None
    return 0


def _train(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    import uvloop

    recipe = _load(args)
    now = datetime.now().astimezone()
    run_dir = args.run_dir or Path("runs") / f"{recipe.name}-{now:%Y%m%d-%H%M%S}"
    return uvloop.run(_train_until_signal(recipe, run_dir, ["asyncrl", *arguments], now.isoformat(timespec="seconds")))


async def _train_until_signal(recipe: Recipe, run_dir: Path, command: list[str], started: str) -> int:
    """The run, cancelled by the first SIGINT or SIGTERM; a second one cuts the clean-up short."""
    from asyncrl.build.real import one_line, train
    from asyncrl.observe.run_dir import RunDirError
    from asyncrl.ports import EngineError, TooManyStuck, TrainerError
    from asyncrl.processes import ChildError
    from asyncrl.runtime.llm_proxy import FleetDown
    from asyncrl.runtime.user_code import EnvFailing

    expected = (EngineError, TrainerError, ChildError, FleetDown, EnvFailing, RunDirError, TooManyStuck)
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
        await train(recipe, run_dir, command=command, started=started, out=sys.stdout)
    except asyncio.CancelledError:
        if not signals:
            raise
        print("asyncrl: interrupted", file=sys.stderr)
        return 130
    except RecipeError:
        raise
    except Exception as error:
        leaves = _leaves(error)
        known = [e for e in leaves if isinstance(e, (*expected, RecipeError))]
        if len(known) < len(leaves):
            traceback.print_exception(error)
        for e in dict.fromkeys(str(k) for k in known) if known else [one_line(error)]:
            print(f"asyncrl: {e}", file=sys.stderr)
        return 1
    return 0


def _leaves(error: BaseException) -> list[BaseException]:
    """The exceptions of a group, without the groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for member in error.exceptions for leaf in _leaves(member)]
    return [error]


if __name__ == "__main__":
    sys.exit(main())
