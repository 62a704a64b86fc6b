"""The life of every trajectory, in one transition table, and the law that none is lost.

Everything that decides whether a trajectory may go from one state to another lives in this file. Illegal transitions
raise ``LedgerError`` and change nothing. Owned by the SampleBuffer; read by metrics, tests and the run's last check.

    reserved ──▶ running ⇄ waiting ──▶ scored ──▶ occupied ──▶ consumed
        │            │         │          ├──▶ filtered
        └────────────┴─────────┴──────────┴──────────┴──▶ surplus | failed | aborted

Conservation: reserved ever = live now + Σ final states; at the end of a run live is 0 (``check_balanced``).

A trajectory is consumed once, whatever comes: when it is first trained. Where samples are reused, each further use is
counted (``use_again``), and the law of uses holds: a consumed trajectory has 1 … ``reuse`` uses, any other none, so
consumed ≤ uses ≤ reuse · consumed, and the uses are the trajectories of all batches, each as often as it was in one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum


class State(StrEnum):
    RESERVED = "reserved"
    """Admitted: its place in a future batch is held."""
    RUNNING = "running"
    """A server generates for it, or it is on its way there."""
    WAITING = "waiting"
    """Waits for a server or for its environment; holds no server slot."""
    SCORED = "scored"
    """Ended, with its reward; its group is not complete yet."""
    OCCUPIED = "occupied"
    """Its group is complete and waits for its batch."""
    CONSUMED = "consumed"
    FILTERED = "filtered"
    """Its group taught nothing (dynamic filtering)."""
    SURPLUS = "surplus"
    """Enough others finished first (redundancy)."""
    FAILED = "failed"
    """Its environment, reward or servers failed, for the reason noted."""
    ABORTED = "aborted"
    """The run did not want it any more, for the reason noted."""


FINAL = frozenset({State.CONSUMED, State.FILTERED, State.SURPLUS, State.FAILED, State.ABORTED})
_GIVEN_UP = frozenset({State.SURPLUS, State.FAILED, State.ABORTED})

TRANSITIONS: dict[State, frozenset[State]] = {
    State.RESERVED: frozenset({State.RUNNING, State.WAITING}) | _GIVEN_UP,
    State.RUNNING: frozenset({State.WAITING, State.SCORED}) | _GIVEN_UP,
    State.WAITING: frozenset({State.RUNNING, State.SCORED}) | _GIVEN_UP,
    State.SCORED: frozenset({State.OCCUPIED, State.FILTERED}) | _GIVEN_UP,
    State.OCCUPIED: frozenset({State.CONSUMED, State.SURPLUS, State.ABORTED}),
    **{state: frozenset() for state in FINAL},
}


class LedgerError(Exception):
    """An illegal transition, or books that do not balance: a bug in the runtime, which ends the run."""


class Ledger:
    """States of all live trajectories and counts of all final ones. O(1) a transition; final ones are forgotten, but
    those that may be trained again, up to ``reuse`` times."""

    def __init__(self, reuse: int = 1) -> None:
        self._reuse = reuse
        self._uses = 0
        self._again: dict[int, int] = {}
        """Consumed trajectory that may be used again → its uses."""
        self._live: dict[int, State] = {}
        self._last_id = -1
        self._reserved = 0
        self._final: Counter[State] = Counter()
        self._reasons: Counter[tuple[State, str]] = Counter()

    def reserve(self, trajectory_id: int) -> None:
        """A new trajectory enters. Ids only ever grow, so none can be used twice."""
        if trajectory_id <= self._last_id:
            raise LedgerError(f"trajectory {trajectory_id} was reserved before (last id {self._last_id})")
        self._last_id = trajectory_id
        self._live[trajectory_id] = State.RESERVED
        self._reserved += 1

    def restore(
        self,
        final: Mapping[tuple[str, str], int],
        live: Mapping[int, State],
        last_id: int,
        *,
        uses: int = 0,
        again: Mapping[int, int] | None = None,
    ) -> None:
        """The books of the run that goes on here: counts by final state and reason, what is not final, ``uses`` of
        whatever was consumed, and those of what may be used ``again``."""
        for (state, reason), count in final.items():
            self._final[State(state)] += count
            if reason:
                self._reasons[State(state), reason] += count
        self._live = dict(sorted(live.items()))
        self._last_id = last_id
        self._reserved = len(live) + self._final.total()
        self._uses = uses
        self._again = dict(again or {})

    def move(self, trajectory_id: int, to: State, reason: str = "") -> None:
        """One transition. ``reason`` is counted for final states."""
        state = self._live.get(trajectory_id)
        if state is None:
            raise LedgerError(f"trajectory {trajectory_id} is not live, so it cannot become {to}")
        if to not in TRANSITIONS[state]:
            raise LedgerError(f"trajectory {trajectory_id} cannot go from {state} to {to}")
        if to in FINAL:
            del self._live[trajectory_id]
            self._final[to] += 1
            if reason:
                self._reasons[to, reason] += 1
            if to is State.CONSUMED:
                self._uses += 1
                if self._reuse > 1:
                    self._again[trajectory_id] = 1
        else:
            self._live[trajectory_id] = to

    def use_again(self, trajectory_id: int) -> None:
        """A consumed trajectory is trained once more."""
        uses = self._again.get(trajectory_id)
        if uses is None:
            raise LedgerError(f"trajectory {trajectory_id} cannot be used again: it was not consumed, or is spent")
        if uses >= self._reuse:
            raise LedgerError(f"trajectory {trajectory_id} was used {uses} times already, the most there may be")
        self._again[trajectory_id] = uses + 1
        self._uses += 1

    def spend(self, trajectory_id: int) -> None:
        """A consumed trajectory is not used again."""
        if self._again.pop(trajectory_id, None) is None:
            raise LedgerError(f"trajectory {trajectory_id} is not one that could be used again")

    @property
    def uses(self) -> int:
        """How often trajectories were trained on, each use counted."""
        return self._uses

    def state(self, trajectory_id: int) -> State | None:
        """The state of a live trajectory; None once it is final."""
        return self._live.get(trajectory_id)

    @property
    def live(self) -> list[int]:
        return list(self._live)

    def counts(self) -> dict[str, int]:
        """Trajectories by state, live and final, states in the table's order, and ``reserved_ever``."""
        live = Counter(self._live.values())
        return {str(s): live[s] + self._final[s] for s in State} | {"reserved_ever": self._reserved}

    def reasons(self) -> dict[str, dict[str, int]]:
        """Why trajectories ended: state → reason → count."""
        table: dict[str, dict[str, int]] = {}
        for (state, reason), n in sorted(self._reasons.items()):
            table.setdefault(str(state), {})[reason] = n
        return table

    def check_conserved(self) -> None:
        """Raises ``LedgerError`` unless every trajectory ever reserved is live or final exactly once, and the uses are
        such as the consumed ones can have."""
        accounted = len(self._live) + self._final.total()
        if accounted != self._reserved:
            raise LedgerError(f"{self._reserved} trajectories were reserved but {accounted} are accounted for")
        consumed = self._final[State.CONSUMED]
        if not consumed <= self._uses <= self._reuse * consumed:
            raise LedgerError(f"{consumed} trajectories were consumed, but used {self._uses} times")

    def check_balanced(self) -> None:
        """At the end of a run: conserved, and none live."""
        self.check_conserved()
        if self._live:
            some = ", ".join(f"{i} {s}" for i, s in list(self._live.items())[:5])
            raise LedgerError(f"{len(self._live)} trajectories never reached a final state ({some})")
        if self._again:
            raise LedgerError(f"{len(self._again)} trajectories still wait to be used again")

    def __repr__(self) -> str:
        return f"<Ledger {', '.join(f'{k} {v}' for k, v in self.counts().items() if v)}>"
