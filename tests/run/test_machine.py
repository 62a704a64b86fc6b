"""Whole runs on a machine that lacks something, or with a server that serves something else."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.processes import free_port

from .conftest import Train
from .test_train import set_

pytestmark = pytest.mark.timeout(600)

Start = Callable[..., Train]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for the beginning of a run."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "asyncrl-test", mount], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)


def test_a_run_on_a_full_disk_says_so_and_goes_on_when_there_is_room(tiny_recipe: Path, small_disk: Path) -> None:
    overrides = set_(
        "run.steps=12", "run.eval_tasks=1", "run.checkpoint_every=4", f"weights.folder={small_disk}-weights"
    )
    run = Train(tiny_recipe, small_disk / "run", *overrides, output=small_disk.with_suffix(".out"))
    try:
        assert run.wait(280) == 1, run.text()
        last = run.text().splitlines()[-1]
        assert last.startswith(f"asyncrl: {small_disk}/run/") and "free space there" in last, run.text()
        assert "Traceback" not in run.text()
        assert run.processes() == []
        trained = run.steps()
        subprocess.run(["mount", "-o", "remount,size=200m", small_disk], check=True)
        run = Train(tiny_recipe, run.run_dir, *overrides, output=small_disk.with_suffix(".again"))
        assert run.wait(280) == 0, run.text()
        run.check_ended_cleanly()
        assert run.summary["exit"] == "finished"
        assert [row["version"] for row in run.lines("metrics.jsonl")] == list(range(1, 13))
        assert trained < 12 and run.summary["ledger"]["consumed"] == 12 * 16
    finally:
        run.kill()


def test_too_few_files_for_a_recipe_is_one_line_before_anything_starts(tiny_recipe: Path, tmp_path: Path) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    command = [sys.executable, "-m", "asyncrl.cli", "train", str(tiny_recipe), "--run-dir", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=limited)
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith("asyncrl: engine.max_running_requests = 16: up to 288 open files for 2 servers")
    assert "this machine allows 200; raise the limit (ulimit -Hn)" in line
    assert not (tmp_path / "run").exists()


def test_a_server_with_another_model_ends_the_run_at_once_with_one_line(
    train: Start, tiny_recipe: Path, tmp_path: Path
) -> None:
    """Of the same type, under the same name, and it says that it holds version 0."""
    config = json.loads((tiny_recipe / "model" / "config.json").read_text())
    Qwen3ForCausalLM(Qwen3Config(**{**config, "intermediate_size": 48})).save_pretrained(tmp_path / "other")
    port = free_port()
    command = [sys.executable, "-m", "asyncrl.serve", str(tmp_path / "other"), "--port", str(port)]
    server = subprocess.Popen([*command, "--log-level", "error"], env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        run = train(*set_(f'engine.urls=["http://127.0.0.1:{port}"]', "run.eval_tasks=1"))
        assert run.wait(280) == 1, run.text()
        last = run.text().splitlines()[-1]
        assert last.startswith("asyncrl: engine server 0 (http://127.0.0.1:"), run.text()
        assert "serves a model with intermediate_size = 48" in last and "the recipe's has 64" in last
        assert "Traceback" not in run.text()
        run.check_ended_cleanly()
        assert server.poll() is None, "it is not ours to end"
    finally:
        server.kill()
        server.wait()
