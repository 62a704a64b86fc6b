"""A run is killed and goes on with another fleet: servers that were added and removed while it went on, an outside one
that is gone by then, and other numbers of servers and ranks."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.build.control import Row, _door, _rows, ask
from asyncrl.observe.run_dir import RunDirError
from asyncrl.processes import free_port

from .conftest import Train
from .test_resume import kill_controller
from .test_train import set_

pytestmark = pytest.mark.timeout(1800)


class Outside:
    """An embedded server that somebody starts by hand."""

    def __init__(self, recipe: Path) -> None:
        self._recipe = recipe
        self._process: subprocess.Popen[bytes] | None = None
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        limits = ["--max-running-requests", "16", "--max-total-tokens", "2048", "--log-level", "warning"]
        command = [sys.executable, "-m", "asyncrl.serve", str(self._recipe / "model"), "--port", str(self._port)]
        self._process = subprocess.Popen([*command, *limits], env={**os.environ, "OMP_NUM_THREADS": "1"})

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def generate(self) -> dict[str, Any]:
        body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        request = urllib.request.Request(f"{self.url}/generate", data=json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as reply:
            found: dict[str, Any] = json.load(reply)
        return found


@pytest.fixture
def outside(tiny_recipe: Path) -> Iterator[Outside]:
    server = Outside(tiny_recipe)
    server.start()
    yield server
    server.kill()


def fleet(run: Train) -> list[Row]:
    try:
        return _rows(_door(run.run_dir))
    except RunDirError:  # still starting
        return []


def asked(run: Train, verb: Any, server: str = "") -> str:
    lines: list[str] = []
    assert ask(run.run_dir, verb, server, lines.append) == 0, f"{lines}\n{run.text()}"
    return lines[-1]


def goes_on(run: Train) -> None:
    steps = run.steps()
    run.until(lambda: run.steps() >= steps + 2)


def consumed(run: Train) -> list[tuple[int, int]]:
    """Of each step, how many groups it was given."""
    with closing(sqlite3.connect(run.run_dir / "run.db")) as db:
        return db.execute("SELECT step, count(*) FROM groups WHERE state = 'consumed' GROUP BY step").fetchall()


def check_books(run: Train, steps: int) -> None:
    """Nothing is lost, and nothing was trained twice. What an interrupted run counts as aborted, its store may still
    hold, scored or unfinished, for one that goes on."""
    assert consumed(run) == [(step, 4) for step in range(steps)]
    with closing(sqlite3.connect(run.run_dir / "run.db")) as db:
        ends = dict(db.execute("SELECT state, count(*) FROM trajectories GROUP BY state"))
    ledger = {state: n for state, n in run.summary["ledger"].items() if n and state != "reserved_ever"}
    ends["aborted"] = sum(ends.pop(state, 0) for state in ("aborted", "scored", "live"))
    assert {state: n for state, n in ends.items() if n} == ledger


def test_a_run_goes_on_with_the_servers_that_it_had(
    train: Callable[..., Train], tiny_recipe: Path, outside: Outside
) -> None:
    """One was removed. One that somebody else had started has died too: it joins again when it is back, with what
    weights it may."""
    settings = set_("run.steps=100000", "run.eval_tasks=1", "trainer.ranks=1", "trainer.restarts=0")
    run = train(*settings)
    run.until(lambda: run.steps() >= 1)
    assert "server 2" in asked(run, "add", outside.url)
    run.until(lambda: fleet(run)[2].generated > 0)
    assert asked(run, "remove", "0") == "server 0 has left"
    kill_controller(run, 0)
    outside.kill()

    run = Train(tiny_recipe, run.run_dir, *settings)
    try:
        goes_on(run)
        assert [(row.url == outside.url, row.state) for row in fleet(run)] == [(False, "serves"), (True, "down")]
        assert f"({outside.url}): not ready within 10 s" in run.text()
        outside.start()
        run.until(lambda: all(row.state == "serves" for row in fleet(run)))
        run.until(lambda: fleet(run)[1].generated > 0)
        assert asked(run, "remove", outside.url) == "server 1 has left"
        goes_on(run)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.text()
        assert "Traceback" not in run.text()
        run.check_ended_cleanly()
        check_books(run, len(consumed(run)))
        assert outside.generate()["meta_info"]["completion_tokens"] == 3, "it goes on, and is not paused"
    finally:
        run.kill()


def test_a_run_goes_on_with_other_ranks_servers_transport_and_preset(
    train: Callable[..., Train], tiny_recipe: Path
) -> None:
    """And a rank is killed while the steps since the checkpoint are trained again, on more ranks than before."""
    settings = set_("run.steps=100000", "run.eval_tasks=1", "preset=roll-flash", "trainer.replay_steps=1000")
    run = train(*settings, *set_("trainer.ranks=1"))
    kill_controller(run, 12)

    other = set_("preset=one-step", "weights.transport=relay", "engine.count=1", "trainer.restart_backoff_s=0.1")
    run = Train(tiny_recipe, run.run_dir, *settings, *other)
    try:
        run.until(lambda: "trained again, gave other weights than before" in run.text())
        os.kill(run.processes("asyncrl.train.worker")[-1], signal.SIGKILL)
        goes_on(run)
        assert "starting it again (1 of " in run.text() and "steps since its checkpoint trained again" in run.text()
        assert [row.state for row in fleet(run)] == ["serves"]
        kill_controller(run, 0)  # and with it the relay, whose weights are then removed by somebody else

        last = len(consumed(run)) + 3
        run = Train(
            tiny_recipe, run.run_dir, *settings, *set_("trainer.ranks=1", "engine.count=3", f"run.steps={last}")
        )
        assert run.wait(600) == 0, run.text()
        assert "Traceback" not in run.text() and "starting 3 servers and 1 trainer ranks" in run.text()
        run.check_ended_cleanly()
        check_books(run, last)
    finally:
        run.kill()
