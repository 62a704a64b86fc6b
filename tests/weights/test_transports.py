"""What the transports ask of the trainer and the servers, and which failure they report; both sides are played here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.ports import Engine, EngineError, TrainerDied, TrainerError, WeightTransport
from asyncrl.weights.collective import CollectiveTransport
from asyncrl.weights.disk import DiskTransport
from asyncrl.wire import TrainerInfo


class PlayedTrainer:
    """Joins and broadcasts are done only together with all servers, as in a real group."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.alive = True
        self.fails: TrainerError | None = None
        self.superseded = False
        self.info = TrainerInfo(
            version=0,
            world_size=1,
            backend="gloo",
            parameters=2,
            names=["a", "b"],
            dtypes=["float32"] * 2,
            shapes=[[1], [1]],
        )
        self.meeting = asyncio.Barrier(1)
        self.port = 5000

    async def publish(self, version: int, transport: str, path: str = "") -> None:
        self.log.append(f"publish {version} {transport} {path}".strip())
        await self._collective(transport == "collective")

    async def hold(self, version: int) -> bool:
        self.log.append(f"hold {version}")
        if self.fails is not None:
            raise self.fails
        return self.log.count(f"publish {version} stage") > 0 and not self.superseded

    async def open_group(self, address: str, world_size: int, group: str, backend: str) -> int:
        self.log.append(f"open {address} for {world_size} {backend}")
        if self.fails is not None:
            raise self.fails
        self.meeting = asyncio.Barrier(world_size)
        self.port += 1
        return self.port

    async def join_group(self) -> None:
        await self._collective(True)

    async def _collective(self, together: bool) -> None:
        if self.fails is not None:
            await self.meeting.abort()
            raise self.fails
        if together:
            try:
                await self.meeting.wait()
            except asyncio.BrokenBarrierError:
                raise TrainerError("trainer: the group broke") from None


class PlayedServer:
    """The part of ``Engine`` that transports use."""

    def __init__(self, name: str, trainer: PlayedTrainer) -> None:
        self.name = name
        self.ranks = 1
        self.trainer = trainer
        self.group = ""
        self.rank = 0
        self.held: object = None
        self.fails: EngineError | None = None

    async def load_from_disk(self, path: str, version: int) -> None:
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        self.held = (path, version)

    async def join_group(self, address: str, port: int, rank: int, world_size: int, group: str, backend: str) -> None:
        assert (address, port) == ("10.0.0.1", self.trainer.port), "asked before the trainer listened there"
        await asyncio.sleep(0)
        await self._meet()
        self.group, self.rank = group, rank

    async def load_from_group(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        version: int,
        checksums: Sequence[int] = (),
    ) -> None:
        assert group == self.group, "a server was asked to receive from a group that it is not in"
        await self._meet()
        self.held = (tuple(names), version)

    async def _meet(self) -> None:
        if self.fails is not None:
            await self.trainer.meeting.abort()
            raise self.fails
        try:
            async with asyncio.TaskGroup() as members:
                for _ in range(self.ranks):
                    members.create_task(self.trainer.meeting.wait())
        except* asyncio.BrokenBarrierError:
            raise EngineError(f"{self.name}: the group broke") from None


@pytest.fixture
def trainer() -> PlayedTrainer:
    return PlayedTrainer()


@pytest.fixture
def servers(trainer: PlayedTrainer) -> list[PlayedServer]:
    return [PlayedServer(name, trainer) for name in ("s0", "s1", "s2")]


async def collective(trainer: PlayedTrainer, version: int = 1) -> CollectiveTransport:
    """With a version to deliver."""
    transport = CollectiveTransport(trainer, address="10.0.0.1", backend="gloo")
    await transport.prepare(version)
    trainer.log.clear()
    trainer.log.append(f"publish {version} stage")
    return transport


# --- disk


async def test_disk_writes_before_the_pause_and_loads_in_it(
    trainer: PlayedTrainer, servers: list[PlayedServer], tmp_path: Path
) -> None:
    transport: WeightTransport = DiskTransport(trainer, tmp_path)
    await transport.prepare(3)
    assert trainer.log == [f"publish 3 disk {tmp_path}/v3"]
    assert not any(server.held for server in servers)
    await transport.deliver(as_engines(servers), 3)
    assert all(server.held == (f"{tmp_path}/v3", 3) for server in servers)


async def test_one_server_that_fails_to_load_does_not_stop_the_others(
    trainer: PlayedTrainer, servers: list[PlayedServer], tmp_path: Path
) -> None:
    servers[0].fails = EngineError("s0: gone")
    with pytest.raises(EngineError, match="s0: gone"):
        await DiskTransport(trainer, tmp_path).deliver(as_engines(servers), 3)
    assert [server.held is not None for server in servers] == [False, True, True]


async def test_closing_removes_the_versions_and_nothing_else(trainer: PlayedTrainer, tmp_path: Path) -> None:
    for name in ("v2", "v10", "values", "v"):
        (tmp_path / name).mkdir()
    await DiskTransport(trainer, tmp_path).close()
    assert {p.name for p in tmp_path.iterdir()} == {"values", "v"}


# --- collective


async def test_all_members_meet_in_one_group_with_the_trainer_as_rank_0(
    trainer: PlayedTrainer, servers: list[PlayedServer]
) -> None:
    transport: WeightTransport = await collective(trainer)
    await transport.deliver(as_engines(servers), 1)
    assert trainer.log == ["publish 1 stage", "hold 1", "open 10.0.0.1 for 4 gloo", "publish 1 collective"]
    assert [server.rank for server in servers] == [1, 2, 3]
    assert all(server.held == (("a", "b"), 1) for server in servers)


async def test_every_tensor_parallel_rank_of_a_server_is_a_member(
    trainer: PlayedTrainer, servers: list[PlayedServer]
) -> None:
    for server, ranks in zip(servers, (2, 1, 4), strict=True):
        server.ranks = ranks
    await (await collective(trainer)).deliver(as_engines(servers), 1)
    assert "open 10.0.0.1 for 8 gloo" in trainer.log
    assert [server.rank for server in servers] == [1, 3, 4]


async def test_a_group_is_formed_anew_for_another_set_of_servers_and_kept_for_the_same(
    trainer: PlayedTrainer, servers: list[PlayedServer]
) -> None:
    transport = await collective(trainer)
    groups = []
    for members in (servers, list(reversed(servers)), servers[:1], servers):
        await transport.deliver(as_engines(members), 1)
        groups.append(servers[0].group)
    assert groups[0] == groups[1]
    assert len(set(groups)) == 3


async def test_after_a_failed_delivery_the_group_is_not_used_again(
    trainer: PlayedTrainer, servers: list[PlayedServer]
) -> None:
    transport = await collective(trainer)
    await transport.deliver(as_engines(servers), 1)
    first = servers[0].group
    await transport.prepare(2)
    servers[1].fails = EngineError("s1: gone")
    with pytest.raises(EngineError, match="s1: gone"):
        await transport.deliver(as_engines(servers), 2)
    servers[1].fails = None
    await transport.deliver(as_engines(servers), 2)
    assert servers[0].group != first
    assert all(server.held == (("a", "b"), 2) for server in servers)


async def test_a_version_whose_place_was_taken_is_refused_before_servers_wait_for_it(
    trainer: PlayedTrainer, servers: list[PlayedServer]
) -> None:
    """A server that comes back may ask for it just when the next one is prepared."""
    for server in servers:
        server.fails = EngineError("was asked")
    transport = await collective(trainer)
    trainer.superseded = True  # the trainer has staged the next one already
    with pytest.raises(EngineError, match="version 1 cannot be broadcast: another has taken its place"):
        await transport.deliver(as_engines(servers), 1)
    await transport.prepare(2)
    with pytest.raises(EngineError, match="version 1 cannot be broadcast: another has taken its place"):
        await transport.deliver(as_engines(servers), 1)


async def test_a_dead_trainer_is_told_from_the_servers_that_lost_it(
    trainer: PlayedTrainer, servers: list[PlayedServer]
) -> None:
    transport = await collective(trainer)
    await transport.deliver(as_engines(servers), 1)
    trainer.alive, trainer.fails = False, TrainerError("trainer: the job ended")
    with pytest.raises(TrainerError, match="the job ended"):
        await transport.deliver(as_engines(servers), 1)


async def test_servers_are_not_asked_to_join_a_trainer_that_does_not_listen(
    trainer: PlayedTrainer, servers: list[PlayedServer]
) -> None:
    """They would wait for it, and the run for them."""
    transport = await collective(trainer)
    trainer.fails = TrainerDied("trainer: rank 0 was killed by SIGKILL")
    for server in servers:
        server.fails = EngineError("was asked")
    with pytest.raises(TrainerDied):
        await transport.deliver(as_engines(servers), 1)


async def test_a_refusal_by_the_trainer_alone_is_reported_as_such(
    trainer: PlayedTrainer, servers: list[PlayedServer]
) -> None:
    transport = await collective(trainer)
    trainer.fails = TrainerError("trainer: version 5 cannot be published: the weights are version 4")
    with pytest.raises(TrainerError, match="version 5 cannot be published"):
        await transport.prepare(5)


def as_engines(servers: Sequence[PlayedServer]) -> list[Engine]:
    return list(servers)  # type: ignore[arg-type]  # a server plays only the weight methods
