"""The main job, whole: what a run leaves, and how it ends when something dies, hangs or is interrupted."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.build.status import show
from asyncrl.observe.run_dir import TRACE
from asyncrl.observe.timeline import TRAINER, read_timeline

from .conftest import Train

pytestmark = pytest.mark.timeout(300)

Start = Callable[..., Train]


def set_(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


@pytest.mark.parametrize(
    "overrides",
    [
        ["weights.transport=disk"],
        ["weights.transport=collective", "staleness.bound=0", "rollout.expand_num_return_sequences=false"],
        ["weights.transport=relay", "weights.relays=2", "engine.kv_reuse=true", "engine.host_kv_tokens=1000"],
        pytest.param(
            ["weights.transport=relay", "weights.relays=2", "weights.link=nixl"],
            marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs NIXL (pip install nixl)"),
        ),
    ],
    ids=["disk", "collective, synchronous, one request a group", "two relays", "NIXL"],
)
def test_a_run_leaves_everything_it_promises(train: Start, tiny_recipe: Path, overrides: list[str]) -> None:
    run = train(*set_(*overrides))
    assert run.wait() == 0, run.text()
    run.check_ended_cleanly()

    summary = run.summary
    assert summary["exit"] == "finished"
    assert summary["steps"] == 4
    assert summary["ledger"]["consumed"] == 4 * 16
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"] <= 1
    assert min(summary["heldout_before"], summary["heldout_after"]) >= 0
    assert 0 <= summary["bubble_share"] <= 1
    assert summary["tokens"] > 0
    assert summary["packages"]["torch"].startswith("2.")

    metrics = run.lines("metrics.jsonl")
    assert [line["version"] for line in metrics] == [1, 2, 3, 4]
    assert all(line["trainer/grad_norm"] > 0 for line in metrics)
    # The engine's logprobs are those of the trainer's weights, up to how stale the tokens are.
    assert metrics[0]["trainer/engine_gap"] < 1e-4

    trajectories = run.lines("trajectories.jsonl")
    assert sum(line["state"] == "consumed" for line in trajectories) == 64
    assert all(len(line["tokens"]) == sum(n for _, n in line["versions"]) for line in trajectories)

    before = AutoModelForCausalLM.from_pretrained(tiny_recipe / "model").state_dict()
    checkpoint = run.run_dir / "checkpoints" / "version-4"
    after = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    assert before.keys() == after.keys()
    assert not all(torch.equal(before[name], after[name]) for name in before)
    assert AutoTokenizer.from_pretrained(checkpoint).encode("1+2=") == [3, 13, 4, 12]

    with Image.open(run.run_dir / "report.png") as page:
        assert page.width >= 1000
    assert "report" in run.text()
    assert "Traceback" not in run.text()


def test_servers_of_two_versions_generate_side_by_side_each_trajectory_by_one(train: Start) -> None:
    run = train(*set_("preset=dora", "engine.rebalance_s=0.1", "engine.stream_interval=1", "run.steps=8"))
    assert run.wait() == 0, run.text()
    run.check_ended_cleanly()
    summary = run.summary
    assert summary["steps"] == 8 and summary["staleness"]["max"] <= 2
    assert summary["ledger"]["surplus"] == 0 and summary["ledger"]["failed"] == 0
    for line in run.lines("trajectories.jsonl"):
        assert len({version for version, _ in line["versions"]} - {-1}) <= 1
    first, second = (lane for lane in read_timeline(run.run_dir / TRACE) if lane.name != TRAINER)
    assert any(
        a.version != b.version and a.start < b.end and b.start < a.end for a in first.segments for b in second.segments
    ), "at no time did the servers generate by different versions"


def test_a_run_that_has_finished_is_left_alone(train: Start, tiny_recipe: Path) -> None:
    first = train(*set_("run.steps=1"))
    assert first.wait() == 0, first.text()
    kept = (first.run_dir / "summary.json").read_bytes()
    second = Train(tiny_recipe, first.run_dir, *set_("run.steps=1"))
    assert second.wait() != 0
    assert "run.steps = 1" in second.text() and len(second.text().splitlines()) == 1
    assert (first.run_dir / "summary.json").read_bytes() == kept


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_run_in_order(train: Start, number: signal.Signals) -> None:
    """Of the controller alone, as by Ctrl-C, and of all processes at once, as Slurm ends a step."""
    run = train(*set_("run.steps=5000", "staleness.bound=4"))  # so there are always groups under way
    run.until(lambda: run.steps() >= 2)
    for pid in run.processes() if number is signal.SIGTERM else []:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    run.process.send_signal(number)
    assert run.wait(90) == 130
    run.check_ended_cleanly()
    assert run.summary["exit"] == "interrupted"
    assert run.summary["ledger"]["aborted"] > 0
    assert (run.run_dir / "report.png").exists()
    assert "interrupted" in run.text() and "Traceback" not in run.text()


def test_a_second_interrupt_stops_at_once_and_still_leaves_a_summary(train: Start) -> None:
    run = train(*set_("run.steps=5000"))
    run.until(lambda: run.steps() >= 1)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(90) == 130  # at once, but a loaded machine draws the report slowly
    for _ in range(50):  # the kernel ends what was not waited for
        if not run.processes():
            break
        time.sleep(0.1)
    run.check_ended_cleanly()
    assert run.summary["exit"] == "interrupted"
    assert "Traceback" not in run.text()


def test_an_interrupt_while_starting_leaves_nothing_running(train: Start) -> None:
    run = train()
    run.until(lambda: run.processes("asyncrl.serve"))
    run.process.send_signal(signal.SIGINT)
    assert run.wait(90) == 130
    assert run.processes() == [] and run.leftovers() == []
    assert "Traceback" not in run.text()


def test_a_killed_server_is_replaced_and_the_run_finishes(train: Start) -> None:
    run = train(*set_("run.steps=40"))
    run.until(lambda: run.steps() >= 2)
    os.kill(run.processes("asyncrl.serve")[0], signal.SIGKILL)
    assert run.wait(240) == 0, run.text()
    run.check_ended_cleanly()
    assert run.summary["ledger"]["consumed"] == 40 * 16
    assert run.summary["staleness"]["max"] <= 1
    assert "was killed by signal 9" in run.text() and "starting it again" in run.text()


def test_a_killed_trainer_rank_ends_a_run_without_restarts_with_one_line(train: Start) -> None:
    run = train(*set_("run.steps=5000", "trainer.restarts=0"))
    run.until(lambda: run.steps() >= 2)
    os.kill(run.processes("asyncrl.train.worker", "-u")[0], signal.SIGKILL)
    assert run.wait(60) == 1
    run.check_ended_cleanly()
    last = run.text().splitlines()[-1]
    assert last.startswith("asyncrl: trainer:") and "log" in last
    assert run.summary["exit"].startswith("failed: trainer:")
    assert "Traceback" not in run.text()


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_killed_trainer_ranks_cost_time_and_nothing_else(train: Start, transport: str) -> None:
    """Of rank 0 and of another; the steps since the checkpoint are trained again, and have the same weights, or the run
    would have ended."""
    overrides = set_(f"weights.transport={transport}", "trainer.restart_backoff_s=0.2", "trainer.replay_steps=12")
    run = train(*set_("run.steps=40"), *overrides)
    index = run.run_dir / "checkpoints" / "index.json"
    for when, rank in ((lambda: run.steps() >= 1, 1), (index.exists, 0)):
        run.until(when)
        [pid] = [p for p in run.processes("asyncrl.train.worker", "-u") if rank_of(p) == rank]
        os.kill(pid, signal.SIGKILL)
    assert run.wait(300) == 0, run.text()
    run.check_ended_cleanly()
    metrics = run.lines("metrics.jsonl")
    assert [row["version"] for row in metrics] == list(range(1, 41))
    assert all(row["trainer/engine_gap"] < 0.05 for row in metrics)
    assert run.summary["ledger"]["consumed"] == 40 * 16
    assert run.summary["staleness"]["max"] <= 1
    text = run.text()
    assert "rank 1 was killed by SIGKILL" in text and "rank 0 was killed by SIGKILL" in text
    back = re.findall(r"trainer: back at version (\d+) after \d+ s, (\d+) steps trained again", text)
    assert len(back) == 2
    assert int(back[0][0]) == int(back[0][1]) >= 1  # there was no checkpoint yet
    assert int(back[1][1]) < int(back[1][0]), text
    assert not list(index.parent.glob(".version-*"))


def rank_of(pid: int) -> int:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return int(next(v for v in variables if v.startswith(b"RANK=")).removeprefix(b"RANK="))


def test_a_full_disk_ends_the_run_with_one_line_naming_the_file(tiny_recipe: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the kernel refuses to let any file of the run grow past it."""
    run = Train(tiny_recipe, tmp_path / "run", *set_("run.steps=5000"), file_limit=200_000)
    try:
        assert run.wait(90) == 1, run.text()
        last = run.text().splitlines()[-1]
        assert re.match(rf"asyncrl: {re.escape(str(run.run_dir))}/\S+: .*free space there", last), last
        assert "Traceback" not in run.text()
        assert run.processes() == []
        for name in ("metrics.jsonl", "trajectories.jsonl"):
            assert run.lines(name), "what was written before stays readable"
    finally:
        run.kill()


def test_a_server_that_cannot_start_ends_the_run_with_its_last_words(train: Start) -> None:
    run = train(*set_('engine.args=["--bogus"]'))
    assert run.wait(60) == 1
    assert run.processes() == []
    last = run.text().splitlines()[-1]
    assert last.startswith("asyncrl: server ") and "exited with 2" in last and "--bogus" in last
    assert "Traceback" not in run.text()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_killed_controller_leaves_no_process_and_a_status_that_says_so(train: Start, steps: int) -> None:
    """Also while its children are only starting."""
    run = train(*set_("run.steps=5000"))
    run.until(lambda: run.processes("asyncrl.serve") and (run.run_dir / "status.json").exists())
    run.until(lambda: run.steps() >= steps)
    assert show(run.run_dir, lambda line: None) == 0
    run.process.kill()
    run.process.wait()
    for _ in range(300):  # the kernel ends the children, and those their own
        if not run.processes():
            break
        time.sleep(0.1)
    assert run.processes() == []
    lines: list[str] = []
    assert show(run.run_dir, lambda line: lines.append(str(line))) == 1
    assert lines[0].startswith(f"killed: process {run.process.pid} is gone")


def test_a_reward_that_always_raises_ends_the_run_with_its_traceback(train: Start) -> None:
    run = train(*set_("env.target=env.py:broken", "run.eval_tasks=1", "env.failure_window=16"))
    assert run.wait() == 1
    run.check_ended_cleanly()
    assert "100% of the last 16 episodes of " in run.text() and "env.py:broken failed" in run.text()
    assert "KeyError: 'no such board'" in run.text()
    assert "env.py" in run.text(), "the traceback names the user's file"


def test_raising_hanging_and_blocking_environments_cost_only_their_episodes(train: Start) -> None:
    run = train(
        *set_(
            "env.target=env.py:Moody",
            "env.max_turns=2",
            "env.step_timeout_s=1",
            "env.reset_timeout_s=1",
            "env.reward_timeout_s=1",
            "env.episode_timeout_s=30",
            "env.block_timeout_s=0.5",
            "env.max_failure_rate=0.9",
            "run.steps=12",
        )
    )
    assert run.wait(200) == 0, run.text()
    run.check_ended_cleanly()
    assert run.summary["ledger"]["consumed"] == 12 * 16
    failed = run.summary["reasons"]["failed"]
    assert sum(failed.values()) == run.summary["ledger"]["failed"] > 0
    assert {reason.partition(" ")[0] for reason in failed} == {"step:"}


def test_an_engine_that_blocks_and_dies_is_played_in_processes_of_its_own(train: Start) -> None:
    run = train(
        *set_(
            "env.target=env.py:Engine",
            "env.max_turns=2",
            "env.step_timeout_s=1",
            "env.retries=3",
            "env.backoff_s=0.1",
            "env.max_failure_rate=0.9",
            "env.max_infra_failure_rate=0.9",
            "run.steps=8",
        )
    )
    assert run.wait(200) == 0, run.text()
    run.check_ended_cleanly()
    assert run.summary["ledger"]["consumed"] == 8 * 16
    failed = run.summary["reasons"]["failed"]
    assert any(reason.startswith("infra: step: its worker process exited with 3") for reason in failed), failed
    last = run.lines("metrics.jsonl")[-1]
    assert last["envs/failed_task"] + last["envs/failed_infra"] <= sum(failed.values())
    assert last["envs/failed_infra"] > 0
