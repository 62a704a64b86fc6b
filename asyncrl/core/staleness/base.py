"""The interface of every staleness control, and the error that its assertion raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from asyncrl.core.types import OBSERVED_VERSION, Record, Trajectory

UNBOUNDED = 2**63 - 1
"""``room`` and ``capacity`` of a control that does not limit admission."""


class StalenessViolation(Exception):
    """A group was about to be trained beyond its bound, or the protocol was broken: a bug, which ends the run."""


class StalenessSnapshot(Record, frozen=True, kw_only=True):
    """Counts of groups."""

    step: int
    reserved: int
    """Admitted and not finished."""
    occupied: int
    """Finished and waiting for their batch."""
    due: int
    """Unfinished groups whose last chance is the next batch."""
    capacity: int
    """Most groups that may be live at the next step; of a queue, that may be occupied."""


class StalenessControl(Protocol):
    """Decides admission and the order of consumption. Versions are integers; all methods are synchronous.

    A group goes ``reserve → occupy → (returned by consume)``, or leaves at any time by ``release``.
    """

    @property
    def limit(self) -> int | None:
        """Largest staleness that a consumed group can have; None: it is not bounded."""

    @property
    def evicts(self) -> bool:
        """True if ``occupy`` may drop groups: then what is live is not what will be trained."""

    @property
    def assigns_late(self) -> bool:
        """True if a group opens without a version and is reserved when its first request is routed, on the version
        of that server; False if it is reserved as it opens."""

    @property
    def capacity(self) -> int:
        """Most groups that may be live at once, opened and not reserved yet among them."""

    @property
    def missing(self) -> int:
        """Groups to start, beside those occupied, so that the next batch and the redundant groups are complete."""

    def admits(self, version: int) -> bool:
        """May a group start now on servers that hold ``version``?"""

    def room(self, version: int) -> int:
        """How many groups more may start now on ``version``. Each reservation, on whatever version, takes at most one
        from it."""

    def reserve(self, group_id: int, version: int) -> None:
        """Hold a place for a group whose oldest token may come from ``version``."""

    def deadline(self, version: int) -> int | None:
        """The last step that may train a group that starts on ``version`` now; None: any."""

    def restore(self, group_id: int, version: int, deadline: int | None) -> None:
        """Hold the place of a group that was reserved before this control was made, by one of the same numbers. All are
        restored before anything else."""

    def occupy(self, group_id: int) -> dict[int, str]:
        """The group is complete. Groups that leave untrained for it (perhaps itself), each with the reason."""

    def consume(self) -> tuple[list[int], list[int]] | None:
        """The groups of the next batch, and those that can no longer be trained in time (surplus, released by this
        call). None while the next batch is not certain yet. Advances the step."""

    def certain(self, count: int) -> list[int]:
        """Finished groups, in the batch's order, that will be among the first ``count`` (at most a batch) of the very
        next batch, whatever happens but their own release. It holds where ``consume`` is called after every change
        from now on until it gives the batch, and where the versions that groups start on never go back. A group that
        is certain stays so."""

    def release(self, group_id: int) -> None:
        """The group leaves without being trained (filtered, failed, aborted); its place is free again."""

    def snapshot(self) -> StalenessSnapshot: ...


@runtime_checkable
class SampledControl(StalenessControl, Protocol):
    """A control that leaves to a sampler (core/experience.py) what its proof does not need."""

    def sample(self, ranking: Callable[[], Sequence[int]], used: int) -> tuple[list[int], list[int]] | None:
        """As ``consume``, but the batch is as much as can be of the front of the order that ``ranking`` gives, which is
        asked only where there is a batch. It has every finished group, and ``used`` others that were trained before,
        which make up a batch with them: the control knows nothing of those, and they may all be left."""


def check_reserve(group_id: int, version: int, *, step: int, admitted: bool, live: bool) -> None:
    """Raises ``StalenessViolation`` if the group, perhaps ``live`` already, must not be reserved on ``version``."""
    if version > step:
        raise StalenessViolation(f"group {group_id} starts on version {version}, but only {step} is trained")
    if not admitted:
        raise StalenessViolation(f"group {group_id} on version {version} was not admitted at step {step}")
    if live:
        raise StalenessViolation(f"group {group_id} is reserved already")


def check_one_version(trajectory: Trajectory) -> None:
    """Raises ``StalenessViolation`` if not all of its generated tokens are of one version (DORA's C1)."""
    if len(several := set(trajectory.versions) - {OBSERVED_VERSION}) > 1:
        raise StalenessViolation(f"trajectory {trajectory.id}: several versions generated it: {sorted(several)}")
