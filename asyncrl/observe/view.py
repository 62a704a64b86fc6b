"""``asyncrl view``: the episodes of a run directory, for a person to read, also while the run goes on.

``list_episodes`` is a table of the last that ended and of those that have not; ``show_episode`` is one of them turn by
turn: what the environment said and the policy wrote, with the seconds that each part took, its versions, its
probabilities and its reward.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from asyncrl.core.types import OBSERVED_VERSION, Trajectory
from asyncrl.observe.recorder import trajectory_line
from asyncrl.observe.run_dir import TRAJECTORIES, RunDirError, read_lines
from asyncrl.observe.unfinished import STATES, find_unfinished, list_unfinished

Decode = Callable[[Sequence[int]], str]

UNLIKELY = math.log(0.1)
"""A token that the policy gave less than this is underlined in the table of tokens."""
TASK_WIDTH = 24
_SYMBOLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | dict.fromkeys(range(127, 160), "␡")


class Piece(msgspec.Struct):
    """What one side said in a stretch of a turn."""

    by: str
    text: str


class EpisodeLine(msgspec.Struct, kw_only=True):
    """One line of ``trajectories.jsonl`` (``recorder.trajectory_line``). Some fields are empty without tokens."""

    id: int
    group: int
    index: int
    task: str
    state: str
    reward: float
    v_traj: int
    versions: list[tuple[int, int]]
    turns: int
    finish_reason: str
    at: float
    metrics: dict[str, float] = {}
    turn_ends: list[int] = []
    turn_rewards: list[float] = []
    turn_seconds: list[tuple[float, float, float]] = []
    segment_ends: list[int] = []
    reset_s: float = 0.0
    tokens: list[int] = []
    logprobs: list[float] = []
    text: list[Piece] = []

    @property
    def ended(self) -> bool:
        """It has come to its final state."""
        return self.state not in STATES

    @property
    def generated(self) -> int:
        return sum(n for version, n in self.versions if version != OBSERVED_VERSION)

    @property
    def length(self) -> int:
        return sum(n for _, n in self.versions)

    @property
    def seconds(self) -> float:
        return self.reset_s + sum(map(sum, self.turn_seconds))


def read_episodes(run_dir: Path) -> Iterator[EpisodeLine]:
    """In the order in which they ended. Raises ``RunDirError``."""
    path = run_dir / TRAJECTORIES
    if not path.is_file():
        raise RunDirError(f"{path}: no such file; give the directory of a run that has begun")
    for number, line in enumerate(read_lines(path), 1):
        try:
            yield msgspec.convert(line, EpisodeLine)
        except msgspec.ValidationError as error:
            raise RunDirError(f"{path}:{number}: not an episode of this version of asyncrl ({error})") from None


def list_episodes(run_dir: Path, console: Console, *, state: str = "", task: str = "", last: int = 20) -> None:
    """A table of the ``last`` episodes that ended (generated tokens, how long each took, when in the run it ended), and
    of as many that have not, those that were begun first; of this state and of tasks whose id contains ``task``, if
    said. Raises ``RunDirError``."""
    # Before those that ended, so that none is missed that ends meanwhile.
    count, unfinished = list_unfinished(run_dir, last, state=state, task=task)
    matching = (e for e in read_episodes(run_dir) if state in ("", e.state) and task in e.task)
    shown = deque(matching, maxlen=last)
    known = {e.id for e in shown}
    going_on = [_unfinished(*found, None, tokens=False) for found in unfinished if found[1].id not in known]
    if not shown and not going_on:
        states = sorted({e.state for e in read_episodes(run_dir)})
        raise RunDirError(f"{run_dir}: no such episode" + (f"; its episodes are {', '.join(states)}" if states else ""))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("episode", "group", "task", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("reward", "turns", "tokens", "versions", "took", "ended"):
        table.add_column(name, justify="right", no_wrap=True)
    for e in (*shown, *going_on):
        table.add_row(
            str(e.id),
            str(e.group),
            _shortened(e.task),
            e.state,
            f"{e.reward:g}" if e.finish_reason else "–",
            str(e.turns),
            f"{e.generated:,}",
            _versions(e.versions),
            f"{e.seconds:.1f} s" if e.finish_reason else "–",
            f"{e.at:.0f} s" if e.ended else "not yet",
        )
    console.print(table)
    if count > last:
        console.print(f"{count - last:,} more have not ended; --last N shows more", style="dim")


def show_episode(
    run_dir: Path,
    episode: int,
    console: Console,
    *,
    tokens: bool = False,
    decode: Decode | None = None,
) -> None:
    """One episode, turn by turn; with every token's id, probability and version, if ``tokens``. ``decode`` gives the
    text of one that has not ended. Raises ``RunDirError``."""
    found = _find(run_dir, episode, decode)
    if found is None:
        raise RunDirError(f"{run_dir}: it has no episode {episode}; asyncrl view {run_dir} lists the newest")
    console.print(_heading(found))
    if found.metrics:
        console.print(Text("  ".join(f"{k} {v:g}" for k, v in found.metrics.items()), style="dim"))
    if tokens and not found.tokens:
        console.print(Text("its tokens were not recorded", style="dim"))
    begin, pieces, logprobs = 0, deque(found.text), deque(found.logprobs)
    for turn, end in enumerate(found.turn_ends or [found.length]):
        console.print()
        if begin in found.segment_ends:
            console.print(Text("new segment", style="magenta"))
        for generated, stretch in _stretches(found.versions, begin, end):
            count = sum(n for _, n in stretch)
            values = [logprobs.popleft() for _ in range(count)] if generated and logprobs else []
            head = _policy_line(found, turn, stretch, values) if generated else _env_line(found, turn, count)
            console.print(head)
            if pieces:
                style = "bold" if generated else ""
                console.print(Padding(Text(_harmless(pieces.popleft().text), style=style), (0, 0, 0, 2)))
            if tokens and generated and found.tokens:
                console.print(Padding(_token_table(found.tokens[begin : begin + count], values, stretch), (0, 0, 0, 2)))
            begin += count


def _find(run_dir: Path, episode: int, decode: Decode | None) -> EpisodeLine | None:
    failure: RunDirError | None = None
    found = None
    try:
        found = find_unfinished(run_dir, episode)
    except RunDirError as error:
        failure = error  # unless it has ended meanwhile
    for e in read_episodes(run_dir):
        if e.id == episode:
            return e
    if failure is not None:
        raise failure
    return None if found is None else _unfinished(*found, decode)


def _unfinished(state: str, trajectory: Trajectory, decode: Decode | None, tokens: bool = True) -> EpisodeLine:
    line = trajectory_line(trajectory, state, 0.0, decode, tokens)
    if state != "scored":
        line["turn_rewards"] = []  # none is known yet
    return msgspec.convert(line, EpisodeLine)


def _heading(e: EpisodeLine) -> Text:
    text = Text.assemble(("episode ", "dim"), (str(e.id), "bold"), ("  group ", "dim"), str(e.group))
    text.append(f"  task {e.task}", "dim")
    text.append(f"  {e.state}", "bold")
    reward = f"reward {e.reward:g}  " if e.finish_reason else ""
    text.append(f"  {reward}{e.turns} turns  {e.generated:,} of {e.length:,} tokens generated")
    text.append(f"  versions {_versions(e.versions)}")
    text.append(f"  ended by {e.finish_reason} after {e.seconds:.2f} s" if e.finish_reason else "  has not ended")
    if e.state == "scored":
        text.append(", waits for its batch")
    return text


def _env_line(e: EpisodeLine, turn: int, count: int) -> Text:
    seconds = f", {e.reset_s:.2f} s" if turn == 0 and e.turn_seconds else ""
    return Text(f"environment: {count:,} tokens{seconds}", style="cyan")


def _policy_line(e: EpisodeLine, turn: int, stretch: Sequence[tuple[int, int]], logprobs: Sequence[float]) -> Text:
    text = Text(f"turn {turn + 1}: {sum(n for _, n in stretch):,} tokens of version {_versions(stretch)}", "green")
    if logprobs:
        text.append(f", mean logprob {math.fsum(logprobs) / len(logprobs):.2f}")
    if turn < len(e.turn_seconds):
        waited, generated, in_env = e.turn_seconds[turn]
        text.append(f"; waited {waited:.2f} s, generated {generated:.2f} s, environment {in_env:.2f} s")
    if turn < len(e.turn_rewards):
        text.append(f"; reward {e.turn_rewards[turn]:g}", "bold" if e.turn_rewards[turn] else "")
    return text


def _token_table(ids: Sequence[int], logprobs: Sequence[float], stretch: Sequence[tuple[int, int]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("token id", "logprob", "version"):
        table.add_column(name, justify="right")
    versions = [version for version, n in stretch for _ in range(n)]
    for token, logprob, version in zip(ids, logprobs, versions, strict=True):
        style = "underline" if logprob < UNLIKELY else ""
        table.add_row(str(token), Text(f"{logprob:.4f}", style=style), str(version))
    return table


def _stretches(runs: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[bool, list[tuple[int, int]]]]:
    """What lies in [begin, end) of run-length coded versions: (generated, its runs), one for each change of sides."""
    at, stretch = 0, list[tuple[int, int]]()
    for version, n in runs:
        low, high = max(at, begin), min(at + n, end)
        at += n
        if low >= high:
            continue
        if stretch and (stretch[-1][0] == OBSERVED_VERSION) != (version == OBSERVED_VERSION):
            yield stretch[0][0] != OBSERVED_VERSION, stretch
            stretch = []
        stretch.append((version, high - low))
    if stretch:
        yield stretch[0][0] != OBSERVED_VERSION, stretch


def _versions(runs: Sequence[Sequence[Any]]) -> str:
    versions = [int(version) for version, _ in runs if version != OBSERVED_VERSION]
    if not versions:
        return "–"
    low, high = min(versions), max(versions)
    return str(low) if low == high else f"{low}–{high}"


def _harmless(text: str) -> str:
    """Control codes as symbols: a model may write what sets a terminal's title, or worse."""
    return text.translate(_SYMBOLS)


def _shortened(task: str) -> str:
    return task if len(task) <= TASK_WIDTH else "…" + task[1 - TASK_WIDTH :]
