"""Before anything starts: the run's token, and the recipe's setup script, which makes the model and the data, once. Its
folder appears whole or not at all."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import TextIO

from asyncrl.access import AccessError, demand, given_token, run_token
from asyncrl.config import Recipe, RecipeError
from asyncrl.processes import die_with_parent, end_group

GRACE_S = 10.0
FILES = 256
"""That a controller has open beside a connection for each request that runs: logs, control calls, libraries."""


def checked_token(recipe: Recipe) -> str:
    """The run's (``access.py``). Raises ``RecipeError`` where relays on other machines need one that is given."""
    try:
        if recipe.weights.transport == "relay" and recipe.weights.relay_urls:
            demand("weights.address =", recipe.weights.address, given_token())
        return run_token()
    except AccessError as error:
        raise RecipeError(str(error)) from None


def allow_files(recipe: Recipe, servers: int) -> None:
    """Raise this process's limit of open files to what the recipe needs. Raises ``RecipeError`` where it may not."""
    needed = FILES + min(recipe.rollout.num_envs, servers * recipe.engine.max_running_requests)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RecipeError(
            f"engine.max_running_requests = {recipe.engine.max_running_requests}: up to {needed} open files for "
            f"{servers} servers, this machine allows {hard}; raise the limit (ulimit -Hn), or lower rollout.num_envs"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


async def set_up(recipe: Recipe, out: TextIO) -> None:
    """Run ``setup.script`` if ``setup.out`` is not there; its output goes to ``out``. Raises ``RecipeError``."""
    script, target = Path(recipe.setup.script), Path(recipe.setup.out)
    if not recipe.setup.script or target.exists():
        return
    if not script.is_file():
        raise RecipeError(f"setup.script: no file {script}")
    part = target.with_name(f"{target.name}.part-{os.getpid()}")
    print(f"setup: {script.parent.name}/{script.name} makes {target}", file=out, flush=True)
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(script), "--out", str(part), "--seed", str(recipe.seed)),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            await end_group(process, GRACE_S)
            raise
        if code:
            raise RecipeError(f"setup.script: {script} exited with {code}; its last line says why")
        if not part.is_dir():
            raise RecipeError(f"setup.script: {script} made no folder at its --out")
        try:
            part.rename(target)
        except OSError:
            if not target.is_dir():  # else another run made it meanwhile
                raise
    except OSError as error:
        raise RecipeError(f"setup.out: cannot make {target} ({error.strerror})") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
