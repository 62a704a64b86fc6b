"""A real SGLang server that somebody started by hand joins a run on the embedded engine, and leaves it again. Some
minutes of two cores: ``ASYNCRL_SGLANG_PYTHON=… pytest -m slow tests/run/test_outside_sglang.py``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from contract.rigs import SGLANG_PYTHON, SGLangTwoRanksRig

from .conftest import Train
from .test_train import set_

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(not SGLANG_PYTHON, reason="ASYNCRL_SGLANG_PYTHON names no interpreter that has SGLang"),
    pytest.mark.timeout(900),
]

KEY = "key-of-whoever-started-it"


class OutsideRig(SGLangTwoRanksRig):
    def command(self, model: Path, port: int) -> list[str]:
        return [*super().command(model, port), "--api-key", KEY]


def test_a_server_of_two_ranks_with_its_own_key_joins_catches_up_and_leaves(
    train: Callable[..., Train], tiny_recipe: Path, tmp_path: Path
) -> None:
    """The weights travel by a process group, in which it takes two places beside the embedded server's one."""
    settings = ["run.steps=100000", "run.eval_tasks=1", "engine.count=1", "trainer.ranks=1"]
    run = train(*set_(*settings, "weights.transport=collective"))
    outside, log = OutsideRig(), tmp_path / "outside.log"

    def servers(*words: str, key: str = KEY, code: int = 0) -> list[str]:
        command = [sys.executable, "-m", "asyncrl.cli", "servers", words[0], str(run.run_dir), *words[1:]]
        environment = {**os.environ, "ASYNCRL_TOKEN": key}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == code, done.stdout + done.stderr + run.text()
        return done.stdout.splitlines()

    def goes_on() -> None:
        steps = run.steps()
        run.until(lambda: run.steps() >= steps + 3)

    def requests() -> int:
        return log.read_text().count("POST /generate")

    outside.start(tiny_recipe / "model", log)
    try:
        url = f"http://127.0.0.1:{outside.port}"
        run.until(lambda: run.steps() >= 2)
        [refusal] = servers("add", url, key="key-of-somebody-else", code=1)
        assert "answered 401" in refusal and "set ASYNCRL_TOKEN to the key that it was started with" in refusal
        joined = servers("add", url)[-1]
        assert url in joined and "serves, version " in joined and "version 0" not in joined
        run.until(lambda: requests() > 0)
        goes_on()
        versions = [line.partition("version ")[2].partition(",")[0] for line in servers("list")]
        assert len(versions) == 2 and abs(int(versions[0]) - int(versions[1])) <= 1
        assert servers("remove", url)[-1].endswith("has left")
        served = requests()
        goes_on()
        assert requests() == served
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.text()
        assert "Traceback" not in run.text()
        run.check_ended_cleanly()
        assert outside._ready(), "who started it stops it"
        written = [file for file in run.run_dir.rglob("*") if file.is_file()]
        assert not any(KEY.encode() in file.read_bytes() for file in written)
    finally:
        outside.stop()
