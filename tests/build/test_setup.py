"""The setup script: run once, its folder whole or absent, its failure one line, its end certain."""

from __future__ import annotations

import asyncio
import io
import signal
import sys
from pathlib import Path

import pytest

import asyncrl.build.setup
from asyncrl.build.setup import set_up
from asyncrl.config import Recipe, RecipeError, SetupConfig

PARSE = """
import argparse, pathlib, sys, time, signal
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path, required=True)
parser.add_argument("--seed", type=int, required=True)
args = parser.parse_args()
"""
MAKE = PARSE + 'args.out.mkdir()\n(args.out / "seed").write_text(str(args.seed))\n'


def recipe(folder: Path, code: str) -> Recipe:
    script = folder / "prepare.py"
    script.write_text(code)
    return Recipe(seed=11, setup=SetupConfig(script=str(script), out=str(folder / "deep" / "build")))


def left(folder: Path) -> list[str]:
    """Everything beside the script."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.name != "prepare.py")


async def refused(settings: Recipe) -> str:
    with pytest.raises(RecipeError) as error:
        await set_up(settings, io.StringIO())
    assert "\n" not in str(error.value)
    return str(error.value)


async def test_the_folder_appears_with_what_the_script_made(tmp_path: Path) -> None:
    out = io.StringIO()
    await set_up(recipe(tmp_path, MAKE), out)
    assert (tmp_path / "deep" / "build" / "seed").read_text() == "11"
    assert left(tmp_path) == ["deep", "deep/build", "deep/build/seed"]
    assert "prepare.py makes" in out.getvalue()


async def test_it_runs_once(tmp_path: Path) -> None:
    settings = recipe(tmp_path, MAKE)
    await set_up(settings, io.StringIO())
    (tmp_path / "prepare.py").write_text("raise SystemExit('ran again')")
    out = io.StringIO()
    await set_up(settings, out)
    assert out.getvalue() == ""
    assert (tmp_path / "deep" / "build" / "seed").read_text() == "11"


async def test_a_recipe_without_a_script_makes_nothing(tmp_path: Path) -> None:
    await set_up(Recipe(setup=SetupConfig(out=str(tmp_path / "build"))), io.StringIO())
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (MAKE + "sys.exit(3)", "exited with 3; its last line says why"),
        (MAKE + "import os; os.kill(os.getpid(), 9)", "exited with -9; its last line says why"),
        (PARSE, "made no folder at its --out"),
    ],
)
async def test_a_script_that_fails_is_one_line_and_leaves_nothing(tmp_path: Path, code: str, why: str) -> None:
    assert await refused(recipe(tmp_path, code)) == f"setup.script: {tmp_path / 'prepare.py'} {why}"
    assert left(tmp_path) == ["deep"]


async def test_a_missing_script_is_one_line(tmp_path: Path) -> None:
    settings = recipe(tmp_path, "")
    (tmp_path / "prepare.py").unlink()
    assert await refused(settings) == f"setup.script: no file {tmp_path / 'prepare.py'}"
    assert left(tmp_path) == []


async def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    settings = recipe(tmp_path, MAKE)
    (tmp_path / "deep").write_text("a file in the way")
    assert await refused(settings) == f"setup.out: cannot make {tmp_path / 'deep' / 'build'} (File exists)"


@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN"])
async def test_a_cancelled_script_is_ended_and_leaves_nothing(
    tmp_path: Path, handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that does not listen."""
    monkeypatch.setattr(asyncrl.build.setup, "GRACE_S", 0.1)
    code = f"signal.signal(signal.SIGTERM, signal.{signal.Handlers[handler].name})\n{MAKE}time.sleep(600)"
    settings = recipe(tmp_path, PARSE + code)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(set_up(settings, sys.stdout))
        async with asyncio.timeout(20):
            while not list(tmp_path.glob("deep/build.part-*/seed")):  # noqa: ASYNC110 (the script makes it)
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])
    assert task.cancelled()
    assert left(tmp_path) == ["deep"]
