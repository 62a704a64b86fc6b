"""Decides what the fleet does next: StaleFlow's algorithm 1, over strategies given by name.

``plan`` is a function of the snapshot and of the *speculative state*: what each server's books will show once the
commands issued so far have taken effect (table 1). A server whose books do not show all of it yet is left out of the
plan, so no decision builds on an effect that has not happened (Eq. 1).

The paper discards the whole snapshot then. Leaving out the one server is as safe. What a decision assumes of a server
that it commands was checked against that server's books; of one left out nothing is assumed but that it is not to be
commanded; and a request that a pending command moves is neither in the queue (its Route is) nor, for long, on a server
that is not left out (its Interrupt is on one that is). And it lets a fleet be planned for in which one server takes
minutes to pull.

The paper compares one number, requests routed minus requests cut; but a Route and an Interrupt of the same server, both
pending, cancel out in it. So both are compared, each counted since the run began: they only grow, and books show what
was issued if and only if they are equal. An Abort, and a request that ends by itself, changes neither.

**Migration does not oscillate.** Nothing in algorithm 5 keeps it from cutting all that a server runs at every plan, if
the requests come back to it, or if the one that they go to is the next to be cut. Here a request moves only if the two
servers together are used better afterwards (``CostModel.use``), with its prefill counted in. Hence without other events
each move raises the use of the fleet, and placements are finite in number: migrations end. What waits inside a server
is of no use there; where another has room it is cut for good, and goes where it runs at once. (Where none has, it would
wait outside as long, and without its prefix.) By the books, that is: a server may see it otherwise and let it wait
again. So a server that was cut so is not cut again before it has generated something; else two servers could send each
other a request for ever, in no time.

**No plan holds the loop for long.** A plan looks at the first ``most`` requests that wait, and says that it is
``unfinished`` if it has routed them all; the next one goes on where it stopped. As the queue is in order, the plans
route together as one without a limit would, and nothing is passed over. Migration waits until routing is through: a
server whose work still waits in the queue is not idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from asyncrl.core.commands import Abort, Command, Interrupt, Pull, Route
from asyncrl.core.cost_model import CostModel
from asyncrl.core.policy.load import Admission, Load, Queue
from asyncrl.core.policy.migration import MIGRATION, Limits
from asyncrl.core.policy.own_batch import Batches
from asyncrl.core.policy.router import EachByItself, MakeRouter, route
from asyncrl.core.policy.routing import ROUTING, RequestView
from asyncrl.core.policy.streaming import Versions
from asyncrl.core.policy.synchronization import SYNCHRONIZATION
from asyncrl.core.policy.waterfall import Waterfall, gain_of
from asyncrl.core.snapshot import FleetSnapshot, InstanceSnapshot


class _Expected:
    """What a server's books will show when all that it was told has taken effect (table 1)."""

    __slots__ = ("interrupted", "routed", "version")

    def __init__(self, instance: InstanceSnapshot) -> None:
        self.version = instance.version
        self.routed = instance.routed
        self.interrupted = instance.interrupted

    def shown_by(self, instance: InstanceSnapshot) -> bool:
        """Eq. 1. A server may have pulled weights that are newer than those expected."""
        return (
            instance.version >= self.version
            and instance.routed == self.routed
            and instance.interrupted == self.interrupted
        )


class Coordinator:
    """``routing``, ``synchronization`` and ``migration`` are names in ``ROUTING``, ``SYNCHRONIZATION`` and
    ``MIGRATION``, or ``waterfall``; they go together in any way. ``cost`` may be replaced at any time by one that was
    fitted since. ``most`` is the number of waiting requests that a plan looks at, or routes.

    Where each trajectory is one version's, ``one_version`` has the books of that, and says how requests are routed, and
    how they move unless ``migration`` is ``none``: Laminar's ``Batches`` or DORA's ``Versions``. Servers pull
    ``when_empty`` then."""

    def __init__(
        self,
        *,
        routing: str,
        synchronization: str,
        migration: str,
        cost: CostModel,
        mu: float = 0.8,
        limits: Limits | None = None,
        most: int = 128,
        one_version: Batches | Versions | None = None,
    ) -> None:
        self._routing = routing
        self._synchronize = SYNCHRONIZATION[synchronization]
        self._migrate = MIGRATION["none" if one_version else migration]
        self._rebalances = migration != "none"
        self.cost = cost
        self._mu = mu
        self._limits = limits or Limits()
        self._most = most
        self._books = one_version
        self._expected: dict[str, _Expected] = {}
        self._cut_at: dict[str, int] = {}
        """What a server had generated when requests that waited inside it were cut last."""
        self.unfinished = False
        """The last plan stopped at its limit: plan again soon, though nothing else happens."""
        self.look = False
        """The next plan looks whether to repack or repartition. It also does so when there is a new version."""
        self._looked_at = -1
        """The newest version at the last look."""

    def forget(self, instance: str) -> None:
        """The server failed or drains: what it was told has no effect any more. Its next snapshot is taken as it is."""
        self._expected.pop(instance, None)

    def rests(self, group: int, playing: int = 0) -> None:
        """So many trajectories of the group are under way, as one has ended, or has failed and begins anew later."""
        if self._books is not None:
            self._books.left(group, playing)

    def has_begun(self, instance: str) -> bool:
        """Whether trajectories are under way that only this server is to go on with."""
        return self._books is not None and self._books.has_begun(instance)

    def plan(self, snapshot: FleetSnapshot, room: Callable[[int], int]) -> list[Command]:
        """What to do now; nothing, if all is well. ``room(version)`` says how many groups without V_traj may start on a
        version (``StalenessControl.room``).

        The commands count as issued. Plan again when they have taken effect and whenever something else happens: what a
        plan leaves undone for a server that it left out, or for room that it could not be sure of, the next one does.
        """
        if snapshot.suspended:
            return []
        loads = [self._load(index, instance) for index, instance in enumerate(snapshot.instances)]
        if self._books is not None:
            self._books.see(loads, snapshot.waiting_requests)
        queue, admission = Queue(snapshot.waiting_requests, None if self._books else self._most), Admission(room)
        router = self._router(snapshot)
        commands = _Commands()
        for load in self._synchronize(loads, snapshot.newest, queue, admission, router):
            commands.pull(load)
            queue.add(load.requests.values())
            load.pull(snapshot.newest)
        if self._books is not None:
            self._rebalance(loads, snapshot.newest, commands, self._books, room)
        elif not self.unfinished:
            self._move(loads, queue, commands, 1.0 / snapshot.mean_new_tokens)
        routed = 0
        for request, load in route(router(loads, admission), queue, admission):
            commands.route(request, load)
            routed += 1
            if routed == self._most:
                break
        self.unfinished = routed == self._most
        issued = commands.all()
        for command in issued:
            self._issue(command, snapshot.newest)
        lost = () if self._books is None else _lost(snapshot, loads)
        return [*issued, Abort(requests=lost)] if lost else [*issued]

    def _load(self, index: int, instance: InstanceSnapshot) -> Load:
        if not instance.up or (instance.draining and self._books is None):
            self.forget(instance.name)
            return Load(index, instance, up=False, promised=-1)
        expected = self._expected.get(instance.name)
        if expected is None:
            expected = self._expected[instance.name] = _Expected(instance)
        shown = expected.shown_by(instance)
        if shown:
            expected.version = instance.version
        return Load(
            index, instance, up=shown and not instance.pulling, promised=max(expected.version, instance.version)
        )

    def _issue(self, command: Pull | Route | Interrupt, newest: int) -> None:
        expected = self._expected[command.instance]
        match command:
            case Pull():
                expected.version = newest
            case Route(requests=requests):
                expected.routed += len(requests)
            case Interrupt(requests=requests):
                expected.interrupted += len(requests)

    def _router(self, snapshot: FleetSnapshot) -> MakeRouter:
        if self._books is not None:
            books, newest = self._books, snapshot.newest
            return lambda loads, admission, offered=(), waiting=1: books.router(newest, loads, admission)
        if self._routing == "waterfall":
            mean, pace = snapshot.mean_new_tokens, snapshot.pace
            return partial(Waterfall, cost=self.cost, mu=self._mu, mean_new_tokens=mean, pace=pace)
        return partial(EachByItself, ROUTING[self._routing])

    def _move(self, loads: list[Load], queue: Queue, commands: _Commands, spread: float) -> None:
        """Migration."""
        migration = self._migrate(loads, self.cost, self._limits)
        for load, requests in migration.excess:
            if self._cut_at.get(load.name) == load.generated:
                continue
            requests = _with_room(requests, load, loads)
            if not requests:
                continue
            self._cut_at[load.name] = load.generated
            for request in requests:
                load.lose(request)
            commands.interrupt(load, requests)
            queue.add(requests)
        if migration.pair is not None:
            source, target = migration.pair
            for request in self._better(source, target, spread):
                commands.interrupt(source, [request])
                commands.route(request, target)

    def _rebalance(
        self,
        loads: list[Load],
        newest: int,
        commands: _Commands,
        books: Batches | Versions,
        room: Callable[[int], int],
    ) -> None:
        """Laminar §5.1, DORA §4.3: now and then, and at each new version."""
        due = self.look or newest != self._looked_at
        self.look, self._looked_at = False, newest
        if not self._rebalances:
            return
        for source, destination, requests in books.moves(loads, newest, self._limits, room if due else None):
            commands.interrupt(source, requests)
            for request in requests:
                commands.route(request, destination)

    def _better(self, source: Load, target: Load, spread: float) -> list[RequestView]:
        """Of what ``source`` runs, the last to come first, what is better on ``target``; moved there in the loads."""
        moves = []
        for request in reversed(source.requests.values()):
            gain = gain_of(self.cost, request, target, spread)
            if gain is None:
                continue
            n, kv = source.running - request.slots, max(0, source.kv_tokens - request.tokens)
            loss = (self.cost.use(source.running, source.kv_tokens) - self.cost.use(n, kv)) / source.slowness
            if gain > loss:
                source.lose(request)
                target.take(request)
                moves.append(request)
        return moves


def _with_room(requests: Iterable[RequestView], source: Load, loads: Iterable[Load]) -> list[RequestView]:
    """Those that another server has room for. The others would wait outside as they do inside, without their prefix."""
    others = (o for o in loads if o is not source and o.up and not o.waiting and o.running < o.max_running)
    rooms = {load: load.max_tokens - load.kv_tokens for load in others}
    found = []
    for request in requests:
        fit = (load for load in rooms if load.version >= request.oldest and request.tokens <= rooms[load])
        load = max(fit, key=rooms.__getitem__, default=None)
        if load is not None:
            rooms[load] -= request.tokens
            found.append(request)
    return found


def _lost(snapshot: FleetSnapshot, loads: Iterable[Load]) -> tuple[int, ...]:
    """Waiting requests with tokens of a version that no server has any more, a failed one as far as is known."""
    held = {load.version if load.promised < 0 else load.promised for load in loads}
    return tuple(
        request.id
        for version, level in snapshot.waiting_requests.items()
        if version is not None and version not in held
        for request in level
        if request.after == version
    )


class _Commands:
    """The commands of one plan: one of a kind for each server."""

    def __init__(self) -> None:
        self._pulls: list[str] = []
        self._interrupts: dict[str, dict[int, None]] = {}
        self._routes: dict[str, dict[int, None]] = {}
        self._versions: dict[str, int] = {}

    def pull(self, load: Load) -> None:
        self._pulls.append(load.name)

    def interrupt(self, load: Load, requests: Iterable[RequestView]) -> None:
        self._interrupts.setdefault(load.name, {}).update((r.id, None) for r in requests)

    def route(self, request: RequestView, load: Load) -> None:
        """What comes back to the server that it would be cut on stays there."""
        if request.id in self._interrupts.get(load.name, ()):
            del self._interrupts[load.name][request.id]
        else:
            self._routes.setdefault(load.name, {})[request.id] = None
            self._versions[load.name] = load.version

    def all(self) -> list[Pull | Route | Interrupt]:
        """Routes to old versions first: in this order the first of a group is the one that set its V_traj."""
        routes = sorted(self._routes.items(), key=lambda item: self._versions[item[0]])
        return [
            *(Pull(instance=name) for name in self._pulls),
            *(Interrupt(instance=name, requests=tuple(ids)) for name, ids in self._interrupts.items() if ids),
            *(Route(instance=name, requests=tuple(ids)) for name, ids in routes),
        ]
