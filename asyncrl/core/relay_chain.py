"""The chain of relays (Laminar §4.2, §4.3): who takes weights from whom, and which versions are kept.

The controller alone decides, from what the relays say of themselves: no relay can then believe in another chain than
its neighbours do, and nothing has to be voted on. The master is the first of the chain, the one that takes weights from
the trainer. Relays stand in the order in which they came: one that comes late, or comes back empty, is at the end,
behind those that already have what it lacks. A dead one is cut out, and only the one after it has another source then.
"""

from __future__ import annotations

from collections import Counter

from asyncrl.core.types import Record


class Orders(Record, frozen=True, kw_only=True):
    """What one relay is to do: take ``versions`` that it lacks from ``sources`` (``host:port``), newest first, and drop
    all others. There is one source, or for the master each rank of the trainer, which together have all."""

    sources: tuple[str, ...] = ()
    versions: tuple[int, ...] = ()


class RelayChain:
    """``keep`` versions stay, the newest ones, and any that is being loaded."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._chain: dict[str, str] = {}
        """Relay → where others take weights from it, in the order of the chain."""
        self._trainer: tuple[str, ...] = ()
        self._versions: list[int] = []
        """Newest first."""
        self._held: Counter[int] = Counter()
        self._unable: set[str] = set()
        """Relays that have no room for the newest version."""

    @property
    def relays(self) -> tuple[str, ...]:
        return tuple(self._chain)

    @property
    def newest(self) -> int | None:
        return self._versions[0] if self._versions else None

    def is_able(self, relay: str) -> bool:
        """Whether it stands in the chain and can take the newest version."""
        return relay in self._chain and relay not in self._unable

    def join(self, relay: str, address: str) -> None:
        """At the end, also if it stood elsewhere before."""
        self.lose(relay)
        self._chain[relay] = address

    def lose(self, relay: str) -> None:
        self._chain.pop(relay, None)
        self._unable.discard(relay)

    def announce(self, version: int, trainer: tuple[str, ...]) -> None:
        """The trainer's ranks offer ``version`` at ``trainer``, in place of the one before. A version that comes again
        after others, from a trainer that went back to a checkpoint, is the newest again."""
        self._trainer = trainer
        self._versions = [version, *(v for v in self._versions if v < version)]
        self._unable.clear()
        self._forget()

    def unable(self, relay: str) -> None:
        """It cannot take the newest version: the next one takes it from the one before."""
        self._unable.add(relay)

    def hold(self, version: int) -> None:
        """A server loads ``version``: it stays until ``release``."""
        self._held[version] += 1

    def release(self, version: int) -> None:
        self._held[version] -= 1
        self._forget()

    def _forget(self) -> None:
        self._versions = self._versions[: self._keep] + [v for v in self._versions[self._keep :] if self._held[v] > 0]

    def orders(self) -> dict[str, Orders]:
        """Of every relay in the chain."""
        orders = {}
        sources = self._trainer
        for relay, address in self._chain.items():
            orders[relay] = Orders(sources=sources, versions=tuple(self._versions))
            if relay not in self._unable:
                sources = (address,)
        return orders
