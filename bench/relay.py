"""Relays as real processes on this machine: what a hop reaches of what the machine can copy, chains, chunks, kills.

    python bench/relay.py --json bench/results/relay.json               under two minutes; --quick: less of everything
    python bench/relay.py --only kills --kills 100 --json …             five minutes, or in parts with several --seed

``--json`` replaces in the file what was measured, and leaves the rest.

* hop: trainer → one relay, all of it: orders, sockets, checksums, the rename; GB/s from the order to the controller's
  knowing that the version is there. Against the ceiling, a bare hop by the same path: sendfile from memory, a socket,
  recv into a buffer of the relay's size, write to shared memory, by plain blocking calls and with no checks. Both by
  two processes, in turn, several times; the ratio is that of the medians. New memory, whose pages the kernel has to
  find, and used memory, that of a version that was dropped, are compared each with its own ceiling.
* chain: 1 to 8 relays as fast as they can, and CPU seconds of all relays for each GB: cores bind it here.
* paced: the same with links of 48 MB/s between relays, paced by the kernel, which leaves the cores idle enough to show
  the pipeline. The trainer's link is not paced.
* chunks: eight paced relays with chunks of several sizes, against T(p, k) of core/theory/broadcast.py.
* stall: seconds in which the trainer is held to copy a version into the memory that it offers (without the gathering).
* ranks: two ranks of a real trainer: the stall when each offers what it holds, against rank 0's gathering all of it.
* kills: a relay, at random, killed by SIGKILL at a random moment of a broadcast; each server loads the version and
  compares it. Seconds until the controller has noticed, and until every other relay has the version.

The trainer is played (random weights), relays and the controller's end are the real ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from asyncrl.core.theory.broadcast import Chain, broadcast_time, optimal_chunks
from asyncrl.weights.relay import PIECE_BYTES
from tests.weights.relays import World, tensors, world

PARTS = ("hop", "chain", "paced", "chunks", "stall", "ranks", "kills")
MEMORY = Path("/dev/shm")
LINK_MB_S = 48
START_S = 0.001
"""T_start for the formula: about what a chunk costs here beside its bytes."""


class BareHop:
    """Two processes, this one and another, and nothing but the copy: sendfile from memory, recv, write to shared
    memory. No checksums, no orders, no rename. Use as a context."""

    def __init__(self, megabytes: int) -> None:
        self._size = megabytes * 2**20
        self._source = os.memfd_create("bench-relay")
        block = os.urandom(2**20)
        for _ in range(megabytes):
            os.write(self._source, block)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._orders, theirs = multiprocessing.Pipe()
        target = MEMORY / f"bench-relay-{os.getpid()}"
        fork = multiprocessing.get_context("fork")
        self._receiver = fork.Process(target=_receive, args=(theirs, self._listener.getsockname(), target))
        self._receiver.start()
        theirs.close()

    def __enter__(self) -> BareHop:
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.send("")
        self._receiver.join()
        self._orders.close()
        self._listener.close()
        os.close(self._source)

    def copy(self, memory: str) -> dict[str, float]:
        """Into ``new`` memory, as one more file; or ``used``, that of the last one. GB/s from the receiver's
        connecting to its last byte, and CPU seconds of its process for a GB."""
        self._orders.send(memory)
        peer, _ = self._listener.accept()
        with peer:
            done = 0
            while done < self._size:
                done += os.sendfile(peer.fileno(), self._source, done, self._size - done)
        seconds, cpu = self._orders.recv()
        return {"gb_s": self._size / 1e9 / seconds, "cpu_s_gb": cpu / (self._size / 1e9)}


def _receive(orders: Connection, address: tuple[str, int], target: Path) -> None:
    buffer = memoryview(bytearray(PIECE_BYTES))
    files: list[Path] = []
    try:
        while memory := orders.recv():
            if memory == "new":
                files.append(target.with_name(f"{target.name}-{len(files)}"))
            began, cpu = time.perf_counter(), time.process_time()
            with socket.create_connection(address) as peer:
                file = os.open(files[-1], os.O_RDWR | os.O_CREAT)
                done = got = 0
                while count := peer.recv_into(buffer[got:]):
                    got += count
                    if got == len(buffer):
                        done, got = done + os.pwrite(file, buffer, done), 0
                os.pwrite(file, buffer[:got], done)
                os.close(file)
            orders.send((time.perf_counter() - began, time.process_time() - cpu))
    finally:
        for path in files:
            path.unlink(missing_ok=True)


async def hops(megabytes: int, rounds: int) -> dict[str, Any]:
    """Bare hops and whole ones in turn, as other work on the machine comes and goes. Each round is two processes that
    start anew, and keep what they have until its end, so that neither gets pages that the other has just let go. A
    relay's first three versions get new memory, the others that of those which were dropped. The very first of each is
    not counted: it is for what a process does only once."""
    found: dict[str, dict[str, list[float]]] = {}

    def keep(what: str, gb_s: float, cpu_s_gb: float) -> None:
        rows = found.setdefault(what, {"gb_s": [], "cpu_s_gb": []})
        rows["gb_s"].append(gb_s)
        rows["cpu_s_gb"].append(cpu_s_gb)

    loop = asyncio.get_running_loop()
    weights = tensors(1, megabytes)
    for _ in range(rounds):
        with BareHop(megabytes) as bare:
            async with world(MEMORY, 1, megabytes=megabytes, chunk_mb=32, keep=3, weights=lambda _: weights) as w:
                for version in range(1, 7):
                    memory = "new" if version <= 3 else "used"
                    plain = await asyncio.to_thread(bare.copy, memory)
                    await w.transport.prepare(version)
                    began, before = loop.time(), cpu_seconds(w)
                    await w.transport.arrive(w.engines(), version)
                    seconds = loop.time() - began
                    await asyncio.sleep(0.05)  # what it still does afterwards is counted too
                    size = (w.folder(0) / f"v{version}" / "model.safetensors").stat().st_size / 1e9
                    if version > 1:
                        keep(f"bare, {memory} memory", **plain)
                        keep(f"hop, {memory} memory", size / seconds, (cpu_seconds(w) - before) / size)
    rows: dict[str, Any] = {
        what: {"gb_s": _quartiles(row["gb_s"]), "cpu_s_gb": statistics.median(row["cpu_s_gb"])}
        for what, row in found.items()
    }
    for memory in ("new", "used"):
        hop, ceiling = (found[f"{kind}, {memory} memory"]["gb_s"] for kind in ("hop", "bare"))
        rows[f"hop, {memory} memory"]["of_ceiling"] = statistics.median(hop) / statistics.median(ceiling)
        rows[f"hop, {memory} memory"]["of_ceiling_in_turn"] = _quartiles(
            [one / other for one, other in zip(hop, ceiling, strict=True)]
        )
    return rows


def _quartiles(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "quarter": low, "three_quarters": high, "best": max(values)}


def memory_copy(megabytes: int) -> float:
    """GB/s of one core, from memory that is in use to memory that is."""
    source, target = (np.frombuffer(mmap.mmap(-1, megabytes * 2**20), dtype=np.uint8) for _ in range(2))
    source[:] = 1
    target[:] = 2
    began = time.perf_counter()
    target[:] = source
    return len(source) / 1e9 / (time.perf_counter() - began)


def cpu_seconds(w: World) -> float:
    """Of all relays, so far."""
    ticks = 0
    for process in w.processes.values():
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def broadcast(relays: int, megabytes: float, rounds: int, **settings: Any) -> dict[str, float]:
    """Best and median of ``rounds`` versions, from the offer to the last relay's having it."""
    seconds, cpu, loop = [], [], asyncio.get_running_loop()
    async with world(MEMORY, relays, megabytes=megabytes, **settings) as w:
        for version in range(1, rounds + 1):
            await w.transport.prepare(version)
            began, before = loop.time(), cpu_seconds(w)
            await w.transport.arrive(w.engines(), version)
            seconds.append(loop.time() - began)
            cpu.append(cpu_seconds(w) - before)
        size = next(w.folder(0).glob("v*/model.safetensors")).stat().st_size
    best = min(seconds)
    return {
        "relays": relays,
        "seconds": best,
        "median_s": statistics.median(seconds),
        "gb_s": size / 1e9 / best,
        "bytes": size,
        "cpu_s_gb": statistics.median(cpu) / (size / 1e9) / relays,
    }


async def stall(megabytes: int) -> dict[str, float]:
    """Of the first version, which gets its memory from the kernel, and of a later one."""
    from asyncrl.core.manifest import Manifest, TensorInfo
    from asyncrl.weights.outlet import Outlet

    outlet = Outlet("127.0.0.1")
    count = megabytes * 2**20
    gathered = np.ones(count, dtype=np.uint8)
    manifest = Manifest(version=1, tensors=(TensorInfo(name="a", shape=(count,), dtype="uint8"),))
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        layout, memory = outlet.begin(manifest)
        np.frombuffer(memory, dtype=np.uint8, count=count, offset=layout.places[0].start)[:] = gathered
        outlet.offer(manifest)
        seconds.append(time.perf_counter() - began)
    outlet.close()
    return {"first_s": seconds[0], "later_s": min(seconds[1:]), "gigabytes": count / 1e9}


def _on_a_rank(folder: str, rounds: int) -> dict[str, float]:
    """Seconds in which this rank of a trainer is held: by rank 0's gathering everything into its memory, and by each
    rank's offering what it has. In turn, the best of each."""
    import torch
    import torch.distributed as dist

    from asyncrl.config import ModelConfig, Recipe
    from asyncrl.train.rank import Rank

    rank = Rank(Recipe(model=ModelConfig(path=folder, dtype="bfloat16")), folder, torch.device("cpu"))
    first = dist.get_rank() == 0
    memory = mmap.mmap(-1, rank.weights.nbytes)
    gathered, offered = [], []
    for _ in range(rounds + 1):
        dist.barrier()
        began, offset = time.perf_counter(), 0
        for bucket in rank.gather(keep=first):
            for tensor in bucket.values():
                copy = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
                copy.copy_(tensor.reshape(-1).view(torch.uint8))
                offset += tensor.nbytes
        dist.barrier()
        gathered.append(time.perf_counter() - began)
        began = time.perf_counter()
        rank.offer(0)
        offered.append(time.perf_counter() - began)
    return {"gathered_s": min(gathered[1:]), "offered_s": min(offered[1:]), "gigabytes": rank.weights.nbytes / 1e9}


def ranks(rounds: int) -> dict[str, float]:
    """Two of them, on this machine's loopback by gloo; the first round is not counted."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.train.ranks import on_ranks

    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        Qwen3ForCausalLM(config).save_pretrained(folder)
        row = on_ranks(2, _on_a_rank, folder, rounds)[0]
    return row | {"gathered_over_offered": row["gathered_s"] / row["offered_s"]}


async def kills(count: int, megabytes: float, seed: int) -> dict[str, Any]:
    """Corrupt weights would raise in ``PlayedServer.load_from_disk``."""
    rng, relays, loop = random.Random(seed), 4, asyncio.get_running_loop()
    noticed, recovered, undisturbed, middle, again = [], [], [], 0, 0
    async with world(MEMORY, relays, megabytes=megabytes) as w:
        states = w.transport.states
        for version in (1, 2, 3):
            await w.transport.prepare(version)
            began = loop.time()
            await w.transport.arrive(w.engines(), version)
            undisturbed.append(loop.time() - began)
        usual = statistics.median(undisturbed)
        for version in range(4, 4 + count):
            victim = rng.randrange(relays)
            others = [i for i in range(relays) if i != victim]
            await w.transport.prepare(version)
            before = {i: w.state(i).received for i in others}
            await asyncio.sleep(rng.uniform(0, usual))
            middle += any(version not in w.state(i).versions for i in others)
            began = loop.time()
            await w.kill(victim)
            await w.without(victim)
            noticed.append(loop.time() - began)
            await w.transport.arrive(w.engines(*others), version)
            recovered.append(loop.time() - began)
            await w.transport.deliver(w.engines(*others), version)
            size = (w.folder(others[0]) / f"v{version}" / "model.safetensors").stat().st_size
            again += sum(w.state(i).received - before[i] - size for i in others)
            await w.start(victim)
            await w.up(victim)
            await w.until(lambda v=w.urls[victim], n=version: v in states and states[v].versions == [n - 1, n])
            await w.transport.deliver(w.engines(victim), version)
    return {
        "seed": seed,
        "kills": count,
        "in_mid_broadcast": middle,
        "corrupt_loads": 0,
        "bytes_sent_twice": again,
        "undisturbed_s": usual,
        "noticed_s": _spread(noticed),
        "recovered_s": _spread(recovered),
    }


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "p95": ordered[int(0.95 * len(ordered))], "max": ordered[-1]}


def _judge(what: str, holds: bool) -> None:
    print(f"{'ok' if holds else 'MISSED':8} {what}", flush=True)


def _show(part: str, row: dict[str, Any]) -> None:
    print(f"{part:8}", json.dumps(row, default=str), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--kills", type=int, default=10, metavar="N")
    parser.add_argument("--add", action="store_true", help="add this run's hops to those in the file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="PART,…", help=", ".join(PARTS))
    args = parser.parse_args()
    wanted = set(args.only.split(",")) if args.only else set(PARTS) - {"kills"}
    if unknown := wanted - set(PARTS):
        parser.error(f"--only {', '.join(sorted(unknown))}: choose of {', '.join(PARTS)}")
    megabytes, rounds = (64, 2) if args.quick else (256, 3)
    found: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    found |= {"megabytes": megabytes, "cores": os.cpu_count()}

    if "hop" in wanted:
        row = asyncio.run(hops(megabytes, 2 if args.quick else 5)) | {"memory_gb_s": memory_copy(megabytes)}
        found["hop"] = [*(found.get("hop", []) if args.add else []), row]
        for what, value in row.items():
            _show("hop", {what: value})
        for memory in ("new", "used"):
            share = row[f"hop, {memory} memory"]["of_ceiling"]
            _judge(f"a hop into {memory} memory reaches {share:.0%} of a bare one", share >= 0.8)
    if "chain" in wanted:
        found["chain"] = [asyncio.run(broadcast(n, megabytes / 2, rounds, chunk_mb=8)) for n in (1, 2, 4, 8)]
        for row in found["chain"]:
            row["cores_busy"] = row["cpu_s_gb"] * row["relays"] * row["gb_s"]
            _show("chain", row)
    paced = {"max_mb_s": LINK_MB_S, "megabytes": 24 if args.quick else 48}
    if "paced" in wanted:
        found["paced"] = [asyncio.run(broadcast(n, rounds=rounds, chunk_mb=1, **paced)) for n in (2, 4, 8)]
        for row in found["paced"]:
            _show("paced", row)
        growth = found["paced"][-1]["seconds"] / found["paced"][0]["seconds"]
        _judge(f"8 relays take {growth:.2f} times as long as 2, at {LINK_MB_S} MB/s a link", growth <= 1.25)
    if "chunks" in wanted:
        found["chunks"] = []
        for chunk in (1, 4, 16) if args.quick else (1, 2, 4, 8, 16, 48):
            row = asyncio.run(broadcast(8, rounds=1, chunk_mb=chunk, **paced)) | {"chunk_mb": chunk}
            chain = Chain(nodes=8, size=row["bytes"], byte_s=1 / (LINK_MB_S * 2**20), start_s=START_S)
            row["formula_s"] = broadcast_time(chain, row["bytes"] / (chunk * 2**20))
            row["best_chunk_mb"] = row["bytes"] / 2**20 / optimal_chunks(chain)
            found["chunks"].append(row)
            _show("chunks", row)
    if "stall" in wanted:
        found["stall"] = asyncio.run(stall(megabytes))
        _show("stall", found["stall"])
    if "ranks" in wanted:
        found["ranks"] = ranks(rounds)
        _show("ranks", found["ranks"])
        _judge("each rank's offering its share holds the trainer less", found["ranks"]["gathered_over_offered"] > 1)
    if "kills" in wanted:
        row = asyncio.run(kills(args.kills, 32, args.seed))
        found["kills"] = [*(old for old in found.get("kills", []) if old["seed"] != args.seed), row]
        _show("kills", row)
        _judge("nothing corrupt was loaded, nothing sent twice", row["corrupt_loads"] == row["bytes_sent_twice"] == 0)
        _judge("the chain was rebuilt within a second", row["noticed_s"]["max"] < 1)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
