from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import sleep

import msgspec
import pytest

from asyncrl.core.types import OBSERVED_VERSION
from asyncrl.observe import recorder as recorder_module
from asyncrl.observe.recorder import Recorder, trajectory_line
from asyncrl.observe.run_dir import EVALS, METRICS, TRACE, TRAJECTORIES, RunDirError, read_lines
from asyncrl.observe.trace import BUSY, read_trace

from .synthetic import Clock, by_staleness, make_recipe, make_run, make_step, make_trajectory, tell_run
from .test_run_dir import files_at_most


@pytest.fixture
def clock() -> Clock:
    return Clock()


def summary_of(recorder: Recorder, exit: str = "finished"):
    return recorder.summary(exit=exit, started="2026-01-02T03:04:05+00:00", command=["asyncrl"], ledger={"consumed": 4})


def test_a_step_becomes_one_flat_line_of_numbers(tmp_path: Path, clock: Clock):
    recorder = Recorder(tmp_path, make_recipe(), clock)
    recorder.server("server 0", clock.now, 0, 0)
    recorder.server("server 0", clock.now + 1, 3, 0)
    batch = [
        make_trajectory(0, v_traj=4, reward=1.0, length=10),
        make_trajectory(1, v_traj=4, reward=0.0, length=20),
        make_trajectory(2, v_traj=5, reward=0.0, length=30),
        make_trajectory(3, v_traj=3, reward=1.0, length=40),
    ]
    recorder.step(make_step(5, batch, clock.now + 4, tokens=200))
    recorder.close()
    (line,) = read_lines(tmp_path / METRICS)
    assert all(isinstance(value, int | float) for value in line.values())
    expected = {
        "step": 5,
        "version": 6,
        "time/at": 4.0,
        "time/step": 3.0,
        "time/wait": 1.0,
        "time/train": 1.5,
        "time/update": 0.25,
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "response/mean": 25.0,
        "response/p95": 40,
        "response/max": 40,
        "response/tailness": 1.6,
        "staleness/mean": 1.0,
        "staleness/max": 2,
        "staleness/count/0": 1,
        "staleness/count/1": 2,
        "staleness/count/2": 1,
        "tokens/batch": 100,
        "tokens/total": 200,
        "tokens/s": 50.0,
        "env/accuracy": 0.5,
        "trainer/loss": 0.5 / 6,
        "trainer/grad_norm": 1.25,
        "trainer/entropy": 3.0 / 6,
        "trainer/rank/mfu/mean": 0.25,
        **{f"trainer/{name}": value for name, value in by_staleness(5).items()},
        "buffer/reserved": 3,
        "buffer/occupied": 2,
        "ledger/running": 5,
        "ledger/consumed": 96,
        "bubble/share": 0.25,
        "bubble/trainer_idle": 1 - 1.75 / 4,
    }
    assert line == pytest.approx(expected)


def test_p95_is_the_nearest_rank(tmp_path: Path, clock: Clock):
    recorder = Recorder(tmp_path, make_recipe(), clock)
    recorder.step(make_step(0, [make_trajectory(i, length=i + 1) for i in range(100)], clock.now))
    recorder.close()
    assert recorder.metrics["response/p95"] == 95


def test_shares_of_a_step_count_from_the_step_before(tmp_path: Path, clock: Clock):
    recorder = Recorder(tmp_path, make_recipe(), clock)
    recorder.server("server 0", clock.now, 2, 0)
    recorder.step(make_step(0, [make_trajectory()], clock.now + 2, tokens=100))
    recorder.server("server 0", clock.now + 3, 0, 0)
    recorder.step(make_step(1, [make_trajectory(v_traj=1)], clock.now + 6, tokens=500))
    recorder.close()
    first, second = read_lines(tmp_path / METRICS)
    assert (first["bubble/share"], second["bubble/share"]) == pytest.approx((0.0, 0.75))
    assert (first["tokens/s"], second["tokens/s"]) == pytest.approx((50.0, 100.0))
    assert second["bubble/trainer_idle"] == pytest.approx(1 - 1.75 / 4)


def test_summary_of_a_run_agrees_with_brute_force(tmp_path: Path, clock: Clock):
    """Servers come, go and change load at random moments; the shares are recounted in steps of a millisecond."""
    rng = random.Random(3)
    recorder = Recorder(tmp_path, make_recipe(), clock)
    history: dict[str, list[tuple[int, int, bool]]] = {"server 0": [], "server 1": []}
    ends, now = [], 0
    for i in range(300):
        now += rng.randint(0, 40)
        clock.now = 1000 + now / 1000
        name, running, up = f"server {rng.randint(0, 1)}", rng.choice([0, 0, 1, 5]), rng.random() < 0.9
        history[name].append((now, running if up else 0, up))
        recorder.server(name, clock.now, running, i // 50, up)
        if i % 30 == 29:
            recorder.step(make_step(i // 30, [make_trajectory(v_traj=i // 30)], clock.now, train_s=0.3, update_s=0.1))
            ends.append(now)
    recorder.close()
    busy = available = 0
    for events in history.values():
        state = iter([*events, (10**9, 0, False)])
        current, following = (0, 0, False), next(state)
        for tick in range(ends[-1]):
            while following[0] <= tick:
                current, following = following, next(state)
            if tick >= ends[0]:
                busy += current[1] > 0
                available += current[2]
    summary = summary_of(recorder)
    assert summary.bubble_share == pytest.approx(1 - busy / available)
    assert summary.trainer_idle_share == pytest.approx(1 - 9 * 0.4 / ((ends[-1] - ends[0]) / 1000))
    painted = sum(e.dur for e in read_trace(tmp_path / TRACE) if e.cat == BUSY) / 1000
    all_busy = sum(
        end[0] - start[0] for ev in history.values() for start, end in pairwise([*ev, (now, 0, False)]) if start[1] > 0
    )
    assert painted == pytest.approx(all_busy, abs=1)


def test_summary_says_how_the_run_went(tmp_path: Path):
    recorder = make_run(tmp_path, steps=20)
    summary = summary_of(recorder, "interrupted")
    assert (summary.recipe, summary.exit, summary.steps, summary.seed) == ("countdown", "interrupted", 20, 7)
    rewards = [row["reward/mean"] for row in read_lines(tmp_path / METRICS)]
    assert summary.reward_first == pytest.approx(sum(rewards[:5]) / 5)
    assert summary.reward_last == pytest.approx(sum(rewards[-5:]) / 5)
    assert (summary.heldout_before, summary.heldout_after) == (0.21, 0.92)
    staleness = [row["staleness/mean"] for row in read_lines(tmp_path / METRICS)]
    assert summary.staleness.mean == pytest.approx(sum(staleness) / 20)
    assert (summary.staleness.max, summary.staleness.bound) == (1, 1)
    assert summary.tokens == list(read_lines(tmp_path / METRICS))[-1]["tokens/total"]
    assert summary.ledger == {"consumed": 4}
    assert summary.seconds == pytest.approx(recorder.clock() - recorder.start)
    assert 0 < summary.bubble_share < 1
    assert 0 < summary.trainer_idle_share < 1


def test_summary_of_a_run_that_did_nothing_has_no_figures(tmp_path: Path, clock: Clock):
    recorder = Recorder(tmp_path, make_recipe(bound=0.5), clock)
    recorder.close()
    summary = summary_of(recorder, "failed: no server came up")
    assert (summary.steps, summary.tokens) == (0, 0)
    assert (summary.reward_first, summary.reward_last, summary.heldout_before, summary.heldout_after) == (None,) * 4
    assert (summary.staleness.mean, summary.staleness.max, summary.staleness.bound) == (None, None, 1)
    assert (summary.bubble_share, summary.trainer_idle_share) == (None, None)


def test_one_evaluation_is_before_and_not_after(tmp_path: Path, clock: Clock):
    recorder = Recorder(tmp_path, make_recipe(), clock)
    clock.now += 2
    recorder.eval(0, 0.25, 64)
    recorder.close()
    assert (summary_of(recorder).heldout_before, summary_of(recorder).heldout_after) == (0.25, None)
    assert list(read_lines(tmp_path / EVALS)) == [{"version": 0, "accuracy": 0.25, "n": 64, "at": 2.0, "details": {}}]


def test_a_trajectory_line_gives_the_columns_back():
    t = make_trajectory(6, v_traj=3, reward=1.0, versions=[3, 3, 3, 4, 4])
    line = json.loads(json.dumps(trajectory_line(t, "consumed", 1.23456, None)))
    versions = [version for version, n in line["versions"] for _ in range(n)]
    assert versions == t.versions.tolist()
    assert [int(v != OBSERVED_VERSION) for v in versions] == t.loss_mask.tolist()
    assert line["versions"] == [[OBSERVED_VERSION, 2], [3, 3], [4, 2]]
    assert line["tokens"] == t.tokens.tolist()
    assert line["logprobs"] == [-0.1235] * 5
    assert "text" not in line
    del line["versions"], line["tokens"], line["logprobs"]
    assert line == {
        "id": 6,
        "group": 1,
        "index": 2,
        "task": "train/1",
        "state": "consumed",
        "reward": 1.0,
        "v_traj": 3,
        "turns": 1,
        "finish_reason": "stop",
        "at": 1.235,
        "metrics": {"accuracy": 1.0},
        "turn_ends": [],
        "turn_rewards": [],
        "turn_seconds": [],
        "segment_ends": [],
        "reset_s": 0.0,
    }


def test_logprobs_are_rounded_to_four_digits():
    t = make_trajectory(length=400)
    rng = random.Random(1)
    t.logprobs[2:] = array("f", [-rng.expovariate(1) for _ in range(398)] + [0.0, -12.3])
    written = json.loads(json.dumps(trajectory_line(t, "consumed", 0.0, None)))["logprobs"]
    assert written == pytest.approx(t.logprobs[2:].tolist(), abs=0.5001e-4)
    assert written == [round(p, 4) for p in written]


def test_text_has_a_piece_for_each_stretch_whoever_sampled_it():
    t = make_trajectory(versions=[3, 4, OBSERVED_VERSION, OBSERVED_VERSION, 4])
    t = msgspec.structs.replace(t, loss_mask=array("b", [0, 0, 1, 1, 0, 0, 1]))
    line = trajectory_line(t, "consumed", 0.0, lambda ids: " ".join(map(str, ids)))
    assert line["text"] == [
        {"by": "env", "text": "0 1"},
        {"by": "policy", "text": "2 3"},
        {"by": "env", "text": "4 5"},
        {"by": "policy", "text": "6"},
    ]


def test_counters_keep_the_newest_value_and_thin_out_the_trace(tmp_path: Path, clock: Clock):
    recorder = Recorder(tmp_path, make_recipe(), clock)
    for i in range(1000):
        recorder.counter("rollout/waiting", clock.now + i / 1000, i)
    recorder.counter("buffer/occupied", clock.now, 4)
    recorder.close()
    assert recorder.gauges == {"rollout/waiting": 999, "buffer/occupied": 4}
    values = [e.args["value"] for e in read_trace(tmp_path / TRACE) if e.name == "rollout/waiting"]
    assert 9 <= len(values) <= 10
    assert values[0] == 0


def test_a_flush_writes_what_came_before_and_a_kill_loses_only_what_came_after(tmp_path: Path, clock: Clock):
    recorder = Recorder(tmp_path, make_recipe(), clock)
    recorder.trajectory(make_trajectory(0), "consumed")
    assert list(read_lines(tmp_path / TRAJECTORIES)) == []
    recorder.flush()
    recorder.trajectory(make_trajectory(1), "filtered")
    assert [(r["id"], r["state"]) for r in read_lines(tmp_path / TRAJECTORIES)] == [(0, "consumed")]
    recorder.close()
    assert [(r["id"], r["state"]) for r in read_lines(tmp_path / TRAJECTORIES)] == [(0, "consumed"), (1, "filtered")]
    assert recorder.states == {"consumed": 1, "filtered": 1}


def test_nothing_is_lost_when_the_queue_is_full(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorder_module, "QUEUE_LIMIT", 8)
    recorder = Recorder(tmp_path, make_recipe(), clock)
    for i in range(50):
        recorder.trajectory(make_trajectory(i), "consumed")
        assert len(recorder._queue) <= 8
    recorder.close()
    assert [row["id"] for row in read_lines(tmp_path / TRAJECTORIES)] == list(range(50))


def test_flushes_on_other_threads_take_turns_and_lose_and_repeat_nothing(tmp_path: Path, clock: Clock):
    inside, most = 0, 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        sleep(0.0002)  # lets another thread in
        inside -= 1
        return ""

    recorder = Recorder(tmp_path, make_recipe(), clock, decode=decode)
    stop = threading.Event()

    def flush_all_the_time() -> None:
        while not stop.is_set():
            recorder.flush()

    threads = [threading.Thread(target=flush_all_the_time) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(1000):
        recorder.span("trainer", f"{i}", clock.now + i, clock.now + i + 1)
        if i % 10 == 0:
            recorder.trajectory(make_trajectory(i), "consumed")
            sleep(0)
    stop.set()
    for thread in threads:
        thread.join()
    recorder.close()
    assert most == 1
    assert [e.name for e in read_trace(tmp_path / TRACE) if e.ph == "X"] == [str(i) for i in range(1000)]
    assert [row["id"] for row in read_lines(tmp_path / TRAJECTORIES)] == list(range(0, 1000, 10))


def test_a_full_disk_is_told_by_flush_never_by_an_event(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorder_module, "QUEUE_LIMIT", 8)
    recorder = Recorder(tmp_path, make_recipe(), clock)
    recorder.trajectory(make_trajectory(0), "consumed")
    recorder.flush()
    with files_at_most(400):
        tell_run(recorder, clock, steps=3)
        assert len(recorder._queue) <= 8
        with pytest.raises(RunDirError, match=r"cannot write .*: free space there, or give another --run-dir"):
            recorder.flush()
    with pytest.raises(RunDirError, match="cannot write"):
        recorder.close()
    assert len(recorder.rewards) == 3
    assert [row["id"] for row in read_lines(tmp_path / TRAJECTORIES)][:1] == [0]


def test_after_close_servers_are_idle_and_not_down(tmp_path: Path, clock: Clock):
    recorder = Recorder(tmp_path, make_recipe(), clock)
    recorder.server("server 0", clock.now, 2, 7)
    clock.now += 1.5
    recorder.close()
    (server,) = recorder.servers.values()
    assert (server.up, server.running) == (True, 0)
    (segment,) = (e for e in read_trace(tmp_path / TRACE) if e.cat == BUSY)
    assert (segment.name, segment.dur) == ("v7", 1_500_000)


def test_a_folder_that_holds_a_run_is_refused_untouched(tmp_path: Path, clock: Clock):
    make_run(tmp_path, steps=3)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(RunDirError, match=r"metrics\.jsonl: already exists"):
        Recorder(tmp_path, make_recipe(), clock)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path, clock: Clock):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"file/run: cannot make the folder \(Not a directory\)"):
        Recorder(tmp_path / "file" / "run", make_recipe(), clock)


def test_the_controllers_side_loads_no_plotting_terminal_or_torch():
    code = (
        "import sys, asyncrl.observe.recorder, asyncrl.observe.progress, asyncrl.observe.summary;"
        "print([m for m in ('torch', 'matplotlib', 'rich', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
