"""Live progress: one panel with a row for each component on a terminal, a plain line now and then elsewhere.

Reads the Tally and decides nothing. The CLI's render coroutine calls ``render`` about four times a second; there is
no thread. A display that breaks (terminal gone, stream closed) is switched off: the run goes on without it. What the
stream's encoding cannot show is replaced.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

from asyncrl.observe.summary import Summary, bound_note, duration
from asyncrl.observe.tally import Tally

if TYPE_CHECKING:
    from rich.live import Live
    from rich.panel import Panel

T = TypeVar("T")

PLAIN_INTERVAL_S = 10.0
"""Loop time between two lines where there is no terminal."""
RATE_WINDOW_S = 10.0
"""Tokens per second and busy shares are over this much of the recent past."""
SERVER_ROWS = 4
"""More servers than this share one row."""
SPARKS = {True: "▁▂▃▄▅▆▇█", False: "_.-:=+*#"}
ARROW = {True: "→", False: "->"}
TIMES = {True: "×", False: "x"}


class Progress:
    """What ``tally`` has seen, shown on ``out``. ``render`` and ``close`` never raise for a display that fails."""

    def __init__(self, tally: Tally, out: TextIO) -> None:
        self._tally = tally
        self._out: TextIO | None = out
        self._unicode = _shows_unicode(out)
        self._live: Live | None = None
        self._next_line = tally.clock()
        self._evals_told = 0
        self.ending = ""
        """What the end of the run waits for, if it has come to that."""
        self.rollouts = ""
        """Whether rollouts go on without a trainer that is down, or wait for it."""
        self._samples: deque[tuple[float, float, dict[str, tuple[float, float]]]] = deque()
        if out.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.live import Live

            class GentleConsole(Console):
                def on_broken_pipe(self) -> None:
                    raise BrokenPipeError("the terminal is gone")  # where rich would exit the process

            self._live = Live(console=GentleConsole(file=out), auto_refresh=False, vertical_overflow="crop")
            self._attempt(self._live.start)

    def render(self) -> None:
        """Show the newest state; where there is no terminal, only when a line is due."""
        self._sample()
        if self._live is not None:
            live = self._live
            self._attempt(lambda: live.update(self._panel(), refresh=True))
            return
        for e in self._tally.evals[self._evals_told :]:
            self._print(f"held-out accuracy {e.accuracy:.3f} of version {e.version} ({e.n} tasks)")
        self._evals_told = len(self._tally.evals)
        now = self._tally.clock()
        if now >= self._next_line:
            self._next_line = now + PLAIN_INTERVAL_S
            self._print(f"stopping: {self.ending}" if self.ending else self._line())
            if self.rollouts and not self.ending:
                self._print(f"  {self.rollouts}")

    def note(self, text: str) -> None:
        """Print a line; on a terminal, above the panel."""
        self._print(text)

    def close(self, summary: Summary | None = None, report: Path | None = None) -> None:
        """Leave the last state on the screen, and print the closing summary."""
        if self._live is not None:
            self.render()
        if self._live is not None:
            self._attempt(self._live.stop)
            self._live = None
        for line in closing_lines(summary, report, self._unicode) if summary is not None else ():
            self._print(line)

    def rows(self) -> list[tuple[str, str]]:
        """(component, its state) of the panel, top to bottom."""
        tally = self._tally
        m, gauges, recipe = tally.metrics, tally.gauges, tally.recipe
        reward = f"  reward {tally.rewards[-1]:.3f} {self._sparkline(tally.rewards)}" if tally.rewards else ""
        lag = f"  loop lag {1000 * gauges['loop/lag_p99']:.0f} ms" if "loop/lag_p99" in gauges else ""
        rows = [("controller", f"step {len(tally.rewards)}/{recipe.run.steps}{reward}{self._time_left()}{lag}")]
        if self.ending:
            rows.append(("stopping", self.ending))
        running = sum(s.running for s in tally.servers.values())
        waiting = gauges.get("rollout/waiting", 0)
        bubbles = f"  bubbles {_percent(m.get('bubble/share'))}"
        rate = f"{self._token_rate():,.0f} tok/s"
        rows.append(("rollout", f"running {running:,}  waiting {waiting:,.0f}  {rate}{bubbles}"))
        if self.rollouts:
            rows.append(("", self.rollouts))
        rows += self._server_rows()
        if (error := gauges.get("coordinator/cost_error")) is not None:
            rows.append(("coordinator", f"cost model off by {_percent(error)}"))
        reserved = gauges.get("buffer/reserved", m.get("buffer/reserved", 0))
        occupied = gauges.get("buffer/occupied", m.get("buffer/occupied", 0))
        stale = f"mean {m['staleness/mean']:.2f}{self._expected()} max {m['staleness/max']:.0f}" if m else "-"
        text = f"reserved {reserved:.0f}  occupied {occupied:.0f}/{recipe.rollout.batch_groups}"
        rows.append(("buffer", f"{text}  staleness {stale}{bound_note(recipe.staleness.limit)}"))
        if tally.budget:
            rows.append(("budget", tally.budget))
        if m:
            parts = [f"{key} {m[f'trainer/{key}']:.4g}" for key in ("loss", "grad_norm") if f"trainer/{key}" in m]
            if "trainer/rank/mfu/mean" in m:
                parts.append(f"mfu {_percent(m['trainer/rank/mfu/mean'])}")
            parts += [f"step {m['time/train']:.2f} s", f"idle {_percent(m.get('bubble/trainer_idle'))}"]
            rows.append(("trainer", "  ".join(parts)))
        else:
            rows.append(("trainer", "waiting for the first batch"))
        states = tally.states
        task, infra, retried = (gauges.get(f"envs/{name}", 0) for name in ("failed_task", "failed_infra", "retried"))
        text = f"finished {states.total():,}  filtered {states['filtered']:,}"
        of_infra = f" ({infra:,.0f} infra)" if infra else ""
        rows.append(("envs", f"{text}  failed {task + infra:,.0f}{of_infra}  retried {retried:,.0f}"))
        if tally.evals:
            path = f" {ARROW[self._unicode]} ".join(f"{e.accuracy:.3f}" for e in _first_and_last(tally.evals))
            rows.append(("held-out", path))
        return [(name, self._showable(text)) for name, text in rows]

    def _server_rows(self) -> list[tuple[str, str]]:
        servers = {name: s for name, s in self._tally.servers.items() if name not in self._tally.left}
        if len(servers) <= SERVER_ROWS:
            return [
                (name, f"v{s.version}  running {s.running}  busy {_percent(self._busy([name]))}" if s.up else "down")
                for name, s in servers.items()
            ]
        up = [s for s in servers.values() if s.up]
        versions = sorted({s.version for s in up})
        span = "v" + "-".join(str(v) for v in _first_and_last(versions)) if versions else "-"
        return [("servers", f"{len(up)}/{len(servers)} up  {span}  busy {_percent(self._busy(servers))}")]

    def _line(self) -> str:
        tally, m = self._tally, self._tally.metrics
        parts = [f"step {len(tally.rewards)}/{tally.recipe.run.steps}"]
        if m:
            parts += [
                f"reward {m['reward/mean']:.3f}",
                f"staleness {m['staleness/mean']:.2f}{self._expected()} max {m['staleness/max']:.0f}",
                f"bubbles {_percent(m.get('bubble/share'))}",
            ]
        running = sum(s.running for s in tally.servers.values())
        return "  ".join(parts) + f"  running {running:,}  {self._token_rate():,.0f} tok/s{self._time_left()}"

    def _expected(self) -> str:
        """The mean staleness that the formulas give for the run as it is, and the tail of its lengths, from which a
        change would come."""
        m = self._tally.metrics
        if "predicted/staleness" not in m:
            return ""
        return f" (predicted {m['predicted/staleness']:.2f}, tail {m['response/tailness']:.2f}{TIMES[self._unicode]})"

    def _time_left(self) -> str:
        pace, steps = self._tally.seconds_per_step, self._tally.recipe.run.steps
        if pace is None:
            return ""
        done = len(self._tally.rewards)
        since = self._tally.clock() - self._tally.start - self._tally.metrics["time/at"]
        return f"  left {duration(max(0.0, (steps - done) * pace - since))}"

    def _sample(self) -> None:
        """Remember totals, so that rates are over the recent past."""
        now = self._tally.clock()
        self._samples.append((now, self._tally.tokens, {n: s.totals(now) for n, s in self._tally.servers.items()}))
        while len(self._samples) > 2 and self._samples[1][0] <= now - RATE_WINDOW_S:
            self._samples.popleft()

    def _token_rate(self) -> float:
        (start, before, _), (end, after, _) = self._samples[0], self._samples[-1]
        return (after - before) / (end - start) if end > start else 0.0

    def _busy(self, names: Iterable[str]) -> float | None:
        then, now = self._samples[0][2], self._samples[-1][2]
        busy = available = 0.0
        for name in names:
            b0, a0 = then.get(name, (0.0, 0.0))
            b1, a1 = now.get(name, (0.0, 0.0))
            busy, available = busy + b1 - b0, available + a1 - a0
        return busy / available if available > 0 else None

    def _sparkline(self, values: Sequence[float]) -> str:
        recent = values[-24:]
        low, high = min(values), max(values)
        marks = SPARKS[self._unicode]
        scale = (len(marks) - 1) / (high - low) if high > low else 0.0
        return "".join(marks[round((v - low) * scale)] for v in recent)

    def _panel(self) -> Panel:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, overflow="crop", style="bold cyan")
        table.add_column(no_wrap=True, overflow="crop")
        for name, text in self.rows():
            table.add_row(Text(self._showable(name)), Text(text))
        elapsed = duration(self._tally.clock() - self._tally.start)
        title = Text(self._showable(f"{self._tally.recipe.name}  {elapsed}"), overflow="crop")
        return Panel(table, title=title, title_align="left", border_style="dim")

    def _print(self, text: str) -> None:
        live, out, text = self._live, self._out, self._showable(text)
        if live is not None:
            self._attempt(lambda: live.console.print(text, markup=False, highlight=False, soft_wrap=True))
        elif out is not None:
            self._attempt(lambda: print(text, file=out, flush=True))

    def _showable(self, text: str) -> str:
        encoding = getattr(self._out, "encoding", None) or "ascii"
        return text.encode(encoding, "replace").decode(encoding)

    def _attempt(self, show: Callable[[], object]) -> None:
        try:
            show()
        except (OSError, ValueError):  # terminal gone, stream closed, or a character that it cannot encode
            live, self._live, self._out = self._live, None, None
            if live is not None:
                with contextlib.suppress(OSError, ValueError):
                    live.stop()  # gives sys.stdout and sys.stderr back, before it fails


def closing_lines(summary: Summary, report: Path | None, unicode: bool) -> list[str]:
    """The run in a few lines, for its end."""
    s, arrow = summary, ARROW[unicode]
    lines = [f"{s.recipe}: {s.exit}, {s.steps} steps in {duration(s.seconds)}"]
    if s.reward_first is not None and s.reward_last is not None:
        lines.append(f"  reward     {s.reward_first:.3f} {arrow} {s.reward_last:.3f}")
    if s.heldout_before is not None:
        after = f" {arrow} {s.heldout_after:.3f}" if s.heldout_after is not None else ""
        lines.append(f"  held-out   {s.heldout_before:.3f}{after}")
    if s.staleness.mean is not None:
        mean, bound = s.staleness.mean, s.staleness.bound
        lines.append(f"  staleness  mean {mean:.2f}, max {s.staleness.max}{bound_note(bound)}")
    lines.append(f"  bubbles    servers {_percent(s.bubble_share)}, trainer idle {_percent(s.trainer_idle_share)}")
    lines.append(f"  tokens     {s.tokens:,} ({s.tokens / s.seconds if s.seconds > 0 else 0:,.0f} tok/s)")
    lines.append("  ledger     " + (", ".join(f"{state} {n:,}" for state, n in s.ledger.items() if n) or "empty"))
    if report is not None:
        lines.append(f"  report     {report}")
    return lines


def _shows_unicode(out: TextIO) -> bool:
    try:
        "".join((*SPARKS[True], ARROW[True], TIMES[True])).encode(getattr(out, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _first_and_last(items: Sequence[T]) -> list[T]:
    return [items[0], items[-1]] if len(items) > 1 else list(items)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
