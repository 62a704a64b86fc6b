from __future__ import annotations

import errno
import io
import re
import sys
from pathlib import Path

import pytest

from asyncrl.observe.progress import Progress, closing_lines
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.summary import read_summary

from .synthetic import Clock, make_recipe, make_run, make_step, make_trajectory, tell_run

CONTROL = re.compile(r"[^\S\n ]|[\x00-\x09\x0b-\x1f\x7f-\x9f]")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.TextIOWrapper):
    """A stream in memory that says it is a terminal (or not), with an encoding."""

    def __init__(self, encoding: str = "utf-8", tty: bool = True) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding=encoding, newline="")
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty

    @property
    def text(self) -> str:
        self.flush()
        return self.bytes.getvalue().decode(self.encoding)


class Broken(Terminal):
    """A terminal that has gone away once ``gone`` is set."""

    gone: OSError | None = None

    def write(self, text: str) -> int:
        if self.gone is not None:
            raise self.gone
        return super().write(text)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(tmp_path: Path, clock: Clock):
    recorder = Recorder(tmp_path / "run", make_recipe(steps=20), clock)
    yield recorder
    recorder.close()


@pytest.fixture(autouse=True)
def terminal_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")


def play(recorder: Recorder, clock: Clock, progress: Progress, steps: int = 5) -> None:
    progress.render()
    tell_run(recorder, clock, steps)
    progress.render()


def test_rows_show_every_component(recorder: Recorder, clock: Clock):
    progress = Progress(recorder, Terminal(tty=False))
    recorder.server("server 0", clock.now, 0, 0)
    recorder.server("server 1", clock.now, 0, 0)
    progress.render()
    recorder.counter("rollout/tokens", clock.now, 0)
    clock.now += 1.0
    recorder.server("server 0", clock.now, 5, 0)
    clock.now += 3.0
    recorder.server("server 1", clock.now, 0, 0, up=False)
    for name, value in {
        "rollout/tokens": 8000,
        "rollout/waiting": 3,
        "buffer/reserved": 6,
        "buffer/occupied": 2,
        "envs/failed_task": 1,
        "envs/failed_infra": 2,
        "envs/retried": 4,
    }.items():
        recorder.counter(name, clock.now, value)
    recorder.trajectory(make_trajectory(0), "consumed")
    recorder.trajectory(make_trajectory(1), "filtered")
    recorder.eval(0, 0.25, 64)
    progress.render()
    rows = dict(progress.rows())
    assert rows["controller"] == "step 0/20"
    assert rows["rollout"].startswith("running 5  waiting 3  2,000 tok/s  bubbles ")
    assert rows["server 0"] == "v0  running 5  busy 75 %"
    assert rows["server 1"] == "down"
    assert rows["buffer"] == "reserved 6  occupied 2/4  staleness - (bound 1)"
    assert rows["trainer"] == "waiting for the first batch"
    assert rows["envs"] == "finished 2  filtered 1  failed 3 (2 infra)  retried 4"
    assert rows["held-out"] == "0.250"


def test_rows_show_the_lag_of_the_loop_and_what_the_end_waits_for(recorder: Recorder, clock: Clock):
    out = Terminal(tty=False)
    progress = Progress(recorder, out)
    recorder.counter("loop/lag_p99", clock.now, 0.012)
    progress.ending = "waits for a last checkpoint, 117 s left"
    progress.render()
    assert out.text == "stopping: waits for a last checkpoint, 117 s left\n"
    rows = dict(progress.rows())
    assert rows["controller"].endswith("loop lag 12 ms")
    assert rows["stopping"] == progress.ending
    progress.ending = ""
    assert "stopping" not in dict(progress.rows())


def test_rows_after_steps_show_reward_trainer_and_time_left(recorder: Recorder, clock: Clock):
    progress = Progress(recorder, Terminal(tty=False))
    for step, reward in enumerate([0.0, 0.5, 1.0]):
        clock.now += 4.0
        recorder.step(make_step(step, [make_trajectory(v_traj=step, reward=reward)], clock.now))
    clock.now += 1.0
    progress.render()
    rows = dict(progress.rows())
    # 17 steps of 4 s remain, and the next one began a second ago.
    assert rows["controller"] == "step 3/20  reward 1.000 ▁▅█  left 0:01:07"
    assert rows["trainer"] == "loss 0.1667  grad_norm 1.25  mfu 25 %  step 1.50 s  idle 56 %"
    assert rows["buffer"].endswith("staleness mean 0.00 max 0 (bound 1)")
    recorder.eval(0, 0.25, 64)
    recorder.eval(3, 0.75, 64)
    assert dict(progress.rows())["held-out"] == "0.250 → 0.750"


@pytest.mark.parametrize(("encoding", "times"), [("utf-8", "×"), ("ascii", "x")])
def test_the_expected_staleness_stands_beside_the_measured_one(
    recorder: Recorder, clock: Clock, encoding: str, times: str
):
    out = Terminal(encoding, tty=False)
    progress = Progress(recorder, out)
    progress.render()
    for step in range(3):
        recorder.server("server 0", clock.now, 4, step)
        clock.now += 4.0
        recorder.span("env 0", "episode", clock.now - 4.0, clock.now)
        batch = [make_trajectory(i, v_traj=step, length=10 + 10 * i) for i in range(4)]
        recorder.step(make_step(step, batch, clock.now))
    m = recorder.metrics
    text = f"(predicted {m['predicted/staleness']:.2f}, tail 1.60{times})"
    assert dict(progress.rows())["buffer"].endswith(f"staleness mean 0.00 {text} max 0 (bound 1)")
    clock.now += 20.0
    progress.render()
    assert f"staleness 0.00 {text} max 0" in out.text.splitlines()[-1]


def test_bubbles_are_those_of_the_newest_step(recorder: Recorder, clock: Clock):
    progress = Progress(recorder, Terminal(tty=False))
    progress.render()
    assert dict(progress.rows())["rollout"].endswith("bubbles -")
    recorder.server("server 0", clock.now, 1, 0)
    tell_run(recorder, clock, 3)
    share = recorder.metrics["bubble/share"]
    assert dict(progress.rows())["rollout"].endswith(f"bubbles {100 * share:.0f} %")


def test_rates_forget_what_is_older_than_their_window(recorder: Recorder, clock: Clock):
    progress = Progress(recorder, Terminal(tty=False))
    for i in range(61):
        recorder.counter("rollout/tokens", clock.now, 100 * min(i, 40))
        recorder.server("server 0", clock.now, int(i < 40), 0)
        progress.render()
        clock.now += 1.0
    rows = dict(progress.rows())
    assert rows["rollout"].endswith(" 0 tok/s  bubbles -")
    assert rows["server 0"].endswith("busy 0 %")


def test_many_servers_share_a_row(recorder: Recorder, clock: Clock):
    progress = Progress(recorder, Terminal(tty=False))
    for i in range(12):
        recorder.server(f"server {i}", clock.now, 1, i // 6, up=i > 0)
    progress.render()
    clock.now += 1.0
    progress.render()
    rows = dict(progress.rows())
    assert rows["servers"] == "11/12 up  v0-1  busy 100 %"
    assert "server 3" not in rows


def test_a_server_that_left_has_no_row(recorder: Recorder, clock: Clock):
    progress = Progress(recorder, Terminal(tty=False))
    progress.render()
    for name in ("server 0", "server 1"):
        recorder.server(name, clock(), 0, 3)
    recorder.server("server 0", clock(), 0, 3, up=False)
    assert ("server 0", "down") in progress.rows()
    recorder.instant("server 0", "left", clock(), {})
    assert [name for name, _ in progress.rows() if name.startswith("server")] == ["server 1"]


def test_rollouts_without_a_trainer_are_told_of(recorder: Recorder, clock: Clock):
    out = Terminal(tty=False)
    progress = Progress(recorder, out)
    progress.rollouts = "rollouts go on with version 3 without the trainer"
    progress.render()
    assert ("", progress.rollouts) in progress.rows()
    assert out.text.splitlines()[-1] == f"  {progress.rollouts}"


def test_a_terminal_shows_one_panel_that_is_drawn_over(recorder: Recorder, clock: Clock):
    out = Terminal()
    progress = Progress(recorder, out)
    play(recorder, clock, progress)
    progress.close()
    last = ESCAPES.sub("", out.text).replace("\r", "").rstrip().split("╭")[-1]
    assert last.startswith("─ countdown  0:00:")
    for name in ("controller", "rollout", "server 0", "server 1", "buffer", "trainer", "envs", "held-out"):
        assert last.count(name) == 1
    assert "step 5/20" in last
    assert max(map(len, last.splitlines())) <= 100
    assert out.text.endswith("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "cp437"])
@pytest.mark.parametrize("columns", [1, 2, 5, 12, 30, 300])
@pytest.mark.parametrize("lines", [1, 3, 50])
def test_no_terminal_is_too_small_or_too_plain(
    recorder: Recorder, clock: Clock, monkeypatch: pytest.MonkeyPatch, encoding: str, columns: int, lines: int
):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(lines))
    out = Terminal(encoding)
    progress = Progress(recorder, out)
    play(recorder, clock, progress, steps=2)
    progress.note("server 1 → gone ✗ [bold]")
    progress.render()
    progress.close()
    assert progress._out is out, "the display was not switched off"
    shown = ESCAPES.sub("", out.text)
    if columns == 300:
        assert "[bold]" in shown
        if lines == 50:
            assert "step 2/20" in shown


@pytest.mark.parametrize("error", [BrokenPipeError("gone"), OSError(errno.EIO, "gone")])
def test_a_terminal_that_goes_away_does_not_end_the_run(recorder: Recorder, clock: Clock, error: OSError):
    out, stdout = Broken(), sys.stdout
    progress = Progress(recorder, out)
    play(recorder, clock, progress)
    out.gone = error
    progress.render()
    assert sys.stdout is stdout, "the standard streams were given back"
    progress.render()
    progress.note("hello")
    progress.close()


@pytest.mark.parametrize("tty", [True, False])
def test_a_closed_stream_does_not_end_the_run(recorder: Recorder, clock: Clock, tty: bool):
    out = Terminal(tty=tty)
    progress = Progress(recorder, out)
    out.close()
    clock.now += 100
    progress.render()
    progress.note("hello")
    progress.close()


def test_without_a_terminal_there_is_a_line_every_ten_seconds(recorder: Recorder, clock: Clock):
    out = Terminal(tty=False)
    progress = Progress(recorder, out)
    start, times = clock.now, []
    for _ in range(4 * 65):
        before = out.text.count("\n")
        progress.render()
        times += [clock.now - start] * (out.text.count("\n") - before)
        clock.now += 0.25
    assert times == [0, 10, 20, 30, 40, 50, 60]
    assert not CONTROL.search(out.text)


def test_without_a_terminal_each_evaluation_has_a_line(recorder: Recorder, clock: Clock):
    out = Terminal("ascii", tty=False)
    progress = Progress(recorder, out)
    play(recorder, clock, progress)
    progress.render()
    lines = out.text.splitlines()
    assert [line for line in lines if "held-out" in line] == [
        "held-out accuracy 0.210 of version 0 (128 tasks)",
        "held-out accuracy 0.920 of version 5 (128 tasks)",
    ]
    assert lines[0] == "step 0/20  running 0  0 tok/s"
    figures = r"reward 0\.\d{3}  staleness \d\.\d\d max 1  bubbles \d+ %  running \d+  [\d,]+ tok/s  left 0:00:\d\d"
    assert re.fullmatch(r"step 5/20  " + figures, lines[-1])
    assert not CONTROL.search(out.text)


def test_a_dumb_terminal_gets_lines(recorder: Recorder, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    progress = Progress(recorder, out)
    play(recorder, clock, progress)
    assert out.text.startswith("step 0/20")
    assert not CONTROL.search(out.text)


@pytest.mark.parametrize("tty", [True, False])
def test_the_closing_summary_stands_last(tmp_path: Path, tty: bool):
    recorder = make_run(tmp_path, steps=10)
    summary = read_summary(tmp_path)
    out = Terminal(tty=tty)
    progress = Progress(recorder, out)
    progress.render()
    progress.close(summary, tmp_path / "report.png")
    lines = ESCAPES.sub("", out.text).replace("\r", "").splitlines()
    expected = closing_lines(summary, tmp_path / "report.png", unicode=True)
    assert lines[-len(expected) :] == expected


def test_closing_lines_tell_the_outcome(tmp_path: Path):
    make_run(tmp_path, steps=10)
    summary = read_summary(tmp_path)
    assert summary is not None
    lines = closing_lines(summary, tmp_path / "report.png", unicode=False)
    assert lines[0] == f"countdown: finished, 10 steps in 0:00:{round(summary.seconds):02}"
    assert lines[1] == f"  reward     {summary.reward_first:.3f} -> {summary.reward_last:.3f}"
    assert lines[2] == "  held-out   0.210 -> 0.920"
    assert lines[3] == f"  staleness  mean {summary.staleness.mean:.2f}, max 1 (bound 1)"
    assert lines[4].startswith(f"  bubbles    servers {100 * summary.bubble_share:.0f} %, trainer idle ")
    assert lines[6] == "  ledger     consumed 160, surplus 3"
    assert lines[7] == f"  report     {tmp_path / 'report.png'}"


def test_closing_lines_of_a_run_that_did_nothing(tmp_path: Path):
    recorder = Recorder(tmp_path, make_recipe(), Clock())
    recorder.close()
    summary = recorder.summary(exit="failed: no server came up", started="", command=[], ledger={})
    assert closing_lines(summary, None, unicode=True) == [
        "countdown: failed: no server came up, 0 steps in 0:00:00",
        "  bubbles    servers -, trainer idle -",
        "  tokens     0 (0 tok/s)",
        "  ledger     empty",
    ]
