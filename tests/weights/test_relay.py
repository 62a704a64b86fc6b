"""One relay on this loop, whose source is played: what it asks for, and what it does with what it gets."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import load_file

from asyncrl.core.manifest import Manifest
from asyncrl.core.weight_file import lay_out
from asyncrl.weights import link
from asyncrl.weights.link import LinkBroken, connect, exactly, frame, receive
from asyncrl.weights.outlet import Outlet
from asyncrl.weights.relay import Relay
from asyncrl.weights.store import Store
from asyncrl.wire import FetchEnd, FetchReply, FetchReq, RelayOrders

from .relays import PlayedTrainer, tensors

CHUNK = 2**16
MEGABYTES = 0.5


def listener() -> socket.socket:
    made = socket.create_server(("127.0.0.1", 0))
    made.setblocking(False)
    return made


async def published(version: int, seed: int | None = None) -> tuple[Manifest, bytes]:
    """A version with its checksums, and its file. With ``seed`` it has the weights of another one."""
    loop = asyncio.get_running_loop()
    trainer = PlayedTrainer(lambda version: tensors(version if seed is None else seed, MEGABYTES))
    await trainer.publish(version, "relay")
    with await connect(f"127.0.0.1:{trainer.outlet.port}") as sock:
        await loop.sock_sendall(sock, frame(FetchReq(run="", version=version, offset=0)))
        manifest = (await receive(sock, FetchReply)).manifest
        assert manifest is not None
        file = await exactly(sock, lay_out(manifest).size)
        checksums = (await receive(sock, FetchEnd)).checksums
    trainer.outlet.close()
    return msgspec.structs.replace(manifest, checksums=checksums), file


def opening(manifest: Manifest | None) -> bytes:
    """What a giver sends before the bytes."""
    return frame(FetchReply(manifest=manifest and msgspec.structs.replace(manifest, checksums={})))


def ending(manifest: Manifest) -> bytes:
    """And after them."""
    return frame(FetchEnd(checksums=dict(manifest.checksums)))


class Source:
    """Gives one file to whoever asks, as ``give`` says: the bytes to send in answer to the n-th request."""

    def __init__(self, manifest: Manifest | None, give: Callable[[int, int], bytes]) -> None:
        self.manifest = manifest
        self.give = give
        self.requests: list[FetchReq] = []
        self.listener = listener()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self.listener)
            with sock, suppress(LinkBroken, ConnectionError):  # a relay may be told otherwise at any moment
                self.requests.append(request := await receive(sock, FetchReq))
                await loop.sock_sendall(sock, opening(self.manifest))
                data = self.give(len(self.requests) - 1, request.offset)
                await loop.sock_sendall(sock, data)
                if self.manifest is not None and request.offset + len(data) == lay_out(self.manifest).size:
                    await loop.sock_sendall(sock, ending(self.manifest))


@asynccontextmanager
async def relay(memory: Path, *sources: Source) -> AsyncIterator[Relay]:
    with Store(memory, "x") as store, listener() as data:
        made = Relay(store, data, CHUNK)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(made.run()), *(tasks.create_task(source.run()) for source in sources)]
            yield made
            for task in running:
                task.cancel()
    for source in sources:
        source.listener.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (a thread or the kernel may be what is waited for)
            await asyncio.sleep(0.002)


def check_loads(memory: Path, version: int) -> None:
    found = load_file(memory / "asyncrl-relay-x" / f"v{version}" / "model.safetensors")
    assert all((found[name] == data).all() for name, data in tensors(version, MEGABYTES).items())


async def test_after_a_broken_connection_it_goes_on_from_the_byte_it_has(tmp_path: Path) -> None:
    manifest, file = await published(1)
    cut = random.Random(1).randrange(len(file))
    source = Source(manifest, lambda n, offset: file[offset:cut] if n == 0 else file[offset:])
    async with relay(tmp_path, source) as one:
        one.obey(RelayOrders(run="r", sources=(source.address,), versions=(1,)))
        await until(lambda: one.state().versions == [1])
        check_loads(tmp_path, 1)
        assert [request.offset for request in source.requests] == [0, cut]
        assert one.state().received == len(file)


async def test_a_corrupt_tensor_is_refused_and_only_it_comes_again(tmp_path: Path) -> None:
    manifest, file = await published(1)
    place = lay_out(manifest).places[2]
    spoilt = bytearray(file)
    spoilt[place.start + 12345] ^= 4
    source = Source(manifest, lambda n, offset: bytes(spoilt[offset:]) if n == 0 else file[offset:])
    async with relay(tmp_path, source) as one:
        one.obey(RelayOrders(run="r", sources=(source.address,), versions=(1,)))
        await until(lambda: one.state().versions == [1])
        check_loads(tmp_path, 1)
        assert [request.offset for request in source.requests] == [0, place.start]
        assert one.state().refused == 1


async def test_what_stays_corrupt_never_becomes_visible(tmp_path: Path) -> None:
    manifest, file = await published(1)
    spoilt = file[:-1] + bytes([file[-1] ^ 1])
    source = Source(manifest, lambda n, offset: spoilt[offset:])
    async with relay(tmp_path, source) as one:
        one.obey(RelayOrders(run="r", sources=(source.address,), versions=(1,)))
        await until(lambda: one.state().refused >= 3)
        assert one.state().versions == [] and not list(tmp_path.glob("*/v1"))


async def test_a_source_that_has_other_weights_of_the_version_gives_all_of_them(tmp_path: Path) -> None:
    """A trainer that was started again may have made it anew, while half of it was here."""
    (before, other), (manifest, file) = await published(1, seed=5), await published(1)
    place = lay_out(manifest).places[0]
    cut = len(file) // 2
    first, second = Source(before, lambda n, offset: other[offset:cut]), Source(manifest, lambda n, o: file[o:])
    async with relay(tmp_path, first, second) as one:
        one.obey(RelayOrders(run="r", sources=(first.address,), versions=(1,)))
        await until(lambda: one.state().received == cut)
        one.obey(RelayOrders(run="r", sources=(second.address,), versions=(1,)))
        await until(lambda: one.state().versions == [1])
        check_loads(tmp_path, 1)
        assert [request.offset for request in second.requests] == [cut, place.start]


async def test_another_source_goes_on_where_the_first_was_at_once(tmp_path: Path) -> None:
    manifest, file = await published(1)
    half = len(file) // 2
    stuck = Source(manifest, lambda n, offset: file[:half])
    hangs = asyncio.Event()

    async def run() -> None:  # sends half, and then nothing, and does not close
        sock, _ = await asyncio.get_running_loop().sock_accept(stuck.listener)
        with sock:
            stuck.requests.append(await receive(sock, FetchReq))
            await asyncio.get_running_loop().sock_sendall(sock, opening(manifest) + file[:half])
            await hangs.wait()

    stuck.run = run  # type: ignore[method-assign]
    other = Source(manifest, lambda n, offset: file[offset:])
    async with relay(tmp_path, stuck, other) as one:
        one.obey(RelayOrders(run="r", sources=(stuck.address,), versions=(1,)))
        await until(lambda: len(stuck.requests) == 1 and one._incoming is not None)
        await asyncio.sleep(0.05)
        one.obey(RelayOrders(run="r", sources=(other.address,), versions=(1,)))
        await until(lambda: one.state().versions == [1])
        check_loads(tmp_path, 1)
        assert other.requests[0].offset == one.state().received - (len(file) - other.requests[0].offset)
        assert 0 < other.requests[0].offset <= half
        hangs.set()


async def test_a_source_that_stays_dead_is_asked_less_and_less_and_a_new_one_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, file = await published(1)
    dead, other = Source(manifest, lambda n, offset: b""), Source(manifest, lambda n, offset: file[offset:])
    async with relay(tmp_path, dead, other) as one:
        one.obey(RelayOrders(run="r", sources=(dead.address,), versions=(1,)))
        await asyncio.sleep(0.7)
        assert 1 < len(dead.requests) < 10
        monkeypatch.setattr("asyncrl.weights.relay.MAX_RETRY_S", 600.0)
        monkeypatch.setattr("asyncrl.weights.relay.RETRY_S", 600.0)
        one.obey(RelayOrders(run="r", sources=(dead.address,), versions=(0, 1)))
        asked = len(dead.requests)
        await until(lambda: len(dead.requests) > asked)
        await asyncio.sleep(0.05)
        one.obey(RelayOrders(run="r", sources=(other.address,), versions=(1,)))
        await until(lambda: one.state().versions == [1])
        check_loads(tmp_path, 1)


@pytest.mark.parametrize("network", ["tcp", "nixl"])
async def test_a_rank_with_nothing_to_send_gives_nothing(tmp_path: Path, network: str) -> None:
    """By no door: NIXL cannot show nothing."""
    manifest, file = await published(1)
    outlets = [Outlet("127.0.0.1"), Outlet("127.0.0.1", spans=())]
    for outlet in outlets:
        outlet.begin(manifest)[1][: len(file)] = file
        outlet.offer(manifest)
    addresses = tuple(f"127.0.0.1:{outlet.port}" for outlet in outlets)
    with await connect(addresses[1]) as sock:
        source = link.Source([sock])
        await source.ask(FetchReq(run="r", version=1, offset=0, link=network))
        assert source.manifest is not None
        with pytest.raises(LinkBroken, match="nobody gives byte 0"):
            await source.receive_into(0, memoryview(bytearray(1)))
        assert set((await source.checksums()).values()) == {0}
    async with relay(tmp_path) as one:
        one.obey(RelayOrders(run="r", sources=addresses, versions=(1,)))
        await until(lambda: one.state().versions == [1])
        assert one.state().received == len(file) and one.state().refused == 0
        check_loads(tmp_path, 1)
    for outlet in outlets:
        outlet.close()


async def test_several_sources_give_their_parts_of_one_version(tmp_path: Path) -> None:
    """As a trainer's ranks do. With one of them missing nothing ever becomes visible; and from any byte on they give
    the rest."""
    rng = random.Random(3)
    manifest, file = await published(1)
    size = len(file)
    cuts = [0, *sorted(rng.sample(range(1, size), 9)), size]
    spans = [tuple(pairwise(cuts))[n::3] for n in range(3)]
    outlets = [Outlet("127.0.0.1", spans=part) for part in spans]
    for outlet, part in zip(outlets, spans, strict=True):
        _, memory = outlet.begin(manifest)
        for start, end in part:
            memory[start:end] = file[start:end]
        outlet.offer(manifest)
    addresses = tuple(f"127.0.0.1:{outlet.port}" for outlet in outlets)
    async with relay(tmp_path) as one:
        one.obey(RelayOrders(run="r", sources=addresses[:2], versions=(1,)))
        await until(lambda: one._incoming is not None)
        assert one.state().versions == [], "a part is missing"
        one.obey(RelayOrders(run="r", sources=addresses, versions=(1,)))
        await until(lambda: one.state().versions == [1])
        check_loads(tmp_path, 1)
    offset = rng.randrange(size)
    sockets = [await connect(address) for address in addresses]
    source = link.Source(sockets)
    await source.ask(FetchReq(run="r", version=1, offset=offset))
    assert source.manifest == msgspec.structs.replace(manifest, checksums={})
    rest = bytearray(file[:offset]) + bytearray(size - offset)
    while offset < size:
        offset += await source.receive_into(offset, memoryview(rest)[offset:])
    assert rest == file
    assert await source.checksums() == manifest.checksums
    for sock in sockets:
        sock.close()
    for outlet in outlets:
        outlet.close()


async def test_orders_may_change_at_any_moment_and_any_number_of_times(tmp_path: Path) -> None:
    manifest, file = await published(1)
    cut = Source(manifest, lambda n, offset: file[offset : offset + 50_000])
    whole = Source(manifest, lambda n, offset: file[offset:])
    rng = random.Random(2)
    async with relay(tmp_path, cut, whole) as one:
        for number in range(200):
            address = rng.choice([cut.address, "127.0.0.1:1", f"127.0.0.1:{one.state().data_port}"])
            one.obey(RelayOrders(run="r", sources=(address,), versions=(2, 1)[rng.randrange(2) :]))
            if number % 3:
                await asyncio.sleep(rng.choice([0, 0, 0.001, 0.03]))
        one.obey(RelayOrders(run="r", sources=(whole.address,), versions=(1,)))
        await until(lambda: one.state().versions == [1])
        check_loads(tmp_path, 1)


async def test_what_is_begun_is_ended_before_a_newer_version_is_taken(tmp_path: Path) -> None:
    """Else a slow link would bring no version at all."""
    (first, file), (second, newer) = await published(1), await published(2)
    files = {1: file, 2: newer}
    gate = asyncio.Event()
    source = Source(first, lambda n, offset: b"")
    asked: list[int] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(source.listener)
            with sock:
                request = await receive(sock, FetchReq)
                asked.append(request.version)
                manifest, data = (first if request.version == 1 else second), files[request.version]
                await loop.sock_sendall(sock, opening(manifest) + data[:CHUNK])
                await gate.wait()
                await loop.sock_sendall(sock, data[CHUNK:] + ending(manifest))

    source.run = run  # type: ignore[method-assign]
    async with relay(tmp_path, source) as one:
        one.obey(RelayOrders(run="r", sources=(source.address,), versions=(1,)))
        await until(lambda: one._incoming is not None and one._incoming.received >= CHUNK)
        one.obey(RelayOrders(run="r", sources=(source.address,), versions=(2, 1)))
        gate.set()
        await until(lambda: one.state().versions == [1, 2])
        assert asked == [1, 2]


async def test_what_another_run_left_is_dropped_before_anything_else(tmp_path: Path) -> None:
    manifest, file = await published(1)
    source = Source(manifest, lambda n, offset: file[offset:])
    async with relay(tmp_path, source) as one:
        one.obey(RelayOrders(run="r", sources=(source.address,), versions=(1,)))
        await until(lambda: one.state().versions == [1])
        one.obey(RelayOrders(run="other", versions=(1,)))
        assert one.state().versions == [] and not list(tmp_path.glob("*/v1"))


async def test_it_gives_on_whole_chunks_while_the_rest_is_still_to_come(tmp_path: Path) -> None:
    manifest, file = await published(1)
    gate = asyncio.Event()
    source = Source(manifest, lambda n, offset: b"")
    sent = 3 * CHUNK + 100

    async def run() -> None:
        sock, _ = await asyncio.get_running_loop().sock_accept(source.listener)
        with sock:
            await receive(sock, FetchReq)
            await asyncio.get_running_loop().sock_sendall(sock, opening(manifest) + file[:sent])
            await gate.wait()
            await asyncio.get_running_loop().sock_sendall(sock, file[sent:] + ending(manifest))

    source.run = run  # type: ignore[method-assign]
    async with relay(tmp_path, source) as one:
        one.obey(RelayOrders(run="r", sources=(source.address,), versions=(1,)))
        loop = asyncio.get_running_loop()
        with await connect(f"127.0.0.1:{one.state().data_port}") as sock:
            await loop.sock_sendall(sock, frame(FetchReq(run="r", version=1, offset=10)))
            assert frame(await receive(sock, FetchReply)) == opening(manifest)
            got = bytearray()
            while len(got) < 3 * CHUNK - 10:
                got += await loop.sock_recv(sock, 2**20)
            assert len(got) == 3 * CHUNK - 10, "the part of a chunk is not given on"
            gate.set()
            while part := await loop.sock_recv(sock, 2**20):
                got += part
            assert got == file[10:] + ending(manifest)


async def test_an_older_version_that_is_not_there_is_answered_at_once(tmp_path: Path) -> None:
    async with relay(tmp_path) as one:
        one.obey(RelayOrders(run="r", versions=(5, 4)))
        with await connect(f"127.0.0.1:{one.state().data_port}") as sock:
            await asyncio.get_running_loop().sock_sendall(sock, frame(FetchReq(run="r", version=4, offset=0)))
            assert (await receive(sock, FetchReply)).manifest is None


async def test_nonsense_on_the_data_port_harms_nobody(tmp_path: Path) -> None:
    async with relay(tmp_path) as one:
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x03\x00\x00\x00abc", b""):
            with await connect(f"127.0.0.1:{one.state().data_port}") as sock:
                await asyncio.get_running_loop().sock_sendall(sock, noise)
                sock.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):  # it did not read all of it
                    assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""


async def test_a_slow_taker_gets_the_version_it_asked_for_though_newer_ones_have_come(tmp_path: Path) -> None:
    """What the kernel has taken to send it are still pages of the file."""
    (first, file), (second, newer), (third, newest) = [await published(version) for version in (1, 2, 3)]
    sources = [
        Source(first, lambda n, offset: file[offset:]),
        Source(second, lambda n, offset: newer[offset:]),
        Source(third, lambda n, offset: newest[offset:]),
    ]
    loop = asyncio.get_running_loop()
    async with relay(tmp_path, *sources) as one:

        async def take(version: int, *before: int) -> None:
            address = sources[version - 1].address
            one.obey(RelayOrders(run="r", sources=(address,), versions=(version, *before)))
            await until(lambda: version in one.state().versions)

        await take(1)
        with await connect(f"127.0.0.1:{one.state().data_port}") as sock:
            await loop.sock_sendall(sock, frame(FetchReq(run="r", version=1, offset=0)))
            assert frame(await receive(sock, FetchReply)) == opening(first)
            await take(2, 1)
            await take(3, 2)
            check_loads(tmp_path, 3)
            assert await exactly(sock, len(file)) == file
            assert await receive(sock, FetchEnd) == FetchEnd(checksums=dict(first.checksums))


# --- the trainer's end


async def test_the_outlet_offers_one_version_and_cuts_off_who_takes_the_one_before(tmp_path: Path) -> None:
    trainer = PlayedTrainer(lambda version: tensors(version, 16))
    loop = asyncio.get_running_loop()
    for version in (1, 2):
        await trainer.publish(version, "relay")
    with await connect(f"127.0.0.1:{trainer.outlet.port}") as sock:
        await loop.sock_sendall(sock, frame(FetchReq(run="", version=1, offset=0)))
        assert (await receive(sock, FetchReply)).manifest is None
    with await connect(f"127.0.0.1:{trainer.outlet.port}") as sock:
        await loop.sock_sendall(sock, frame(FetchReq(run="", version=2, offset=0)))
        manifest = (await receive(sock, FetchReply)).manifest
        assert manifest is not None and manifest.version == 2
        await trainer.publish(3, "relay")  # while the taker does not read: it waits for nobody
        got = 0
        while part := await loop.sock_recv(sock, 2**20):
            got += len(part)
        assert got < lay_out(manifest).size
    trainer.outlet.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign"):
        Outlet("192.0.2.1")


def test_messages_survive_their_encoding() -> None:
    request = FetchReq(run="r", version=1, offset=2**40)
    assert msgspec.msgpack.decode(frame(request)[4:], type=FetchReq) == request
