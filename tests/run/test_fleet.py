"""The fleet of a real run is changed while it goes on, and one of its servers hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from .conftest import Train
from .test_train import set_

pytestmark = pytest.mark.timeout(900)


def test_servers_join_leave_and_hang_while_a_run_goes_on(train: Callable[..., Train]) -> None:
    settings = ["run.steps=100000", "run.eval_tasks=1", "engine.hang_s=6", "engine.restarts=100", "trainer.ranks=1"]
    run = train(*set_(*settings))

    def servers(*words: str) -> list[str]:
        command = [sys.executable, "-m", "asyncrl.cli", "servers", words[0], str(run.run_dir), *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr + run.text()
        return done.stdout.splitlines()

    def goes_on() -> None:
        steps = run.steps()
        run.until(lambda: run.steps() >= steps + 3)

    run.until(lambda: run.steps() >= 2)
    joined = servers("add")[-1]
    assert "server 2" in joined and "serves, version " in joined and "version 0" not in joined
    assert servers("remove", "0")[-1] == "server 0 has left"
    run.until(lambda: len(run.processes("asyncrl.serve")) == 2)
    goes_on()
    assert "exited" not in run.text() and "starting it again" not in run.text()

    hung = run.processes("asyncrl.serve")[0]
    os.kill(hung, signal.SIGSTOP)
    run.until(lambda: ": its process is killed, and another started" in run.text())
    run.until(lambda: hung not in run.processes("asyncrl.serve"))
    run.until(lambda: "serves, with version" in run.text().partition(": its process is killed")[2])
    goes_on()
    assert servers("drain", "2")[-1].count("rests")
    assert [line.split("  ")[0] for line in servers("list")] == ["server 1", "server 2"]
    goes_on()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()
    assert "Traceback" not in run.text()
    run.check_ended_cleanly()
    assert not (run.run_dir / "control.json").exists()
