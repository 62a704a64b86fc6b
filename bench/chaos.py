"""What a real run loses when its processes are killed, stopped or cut off, or its disk is full, at random moments.

    python bench/chaos.py [RECIPE] [--tries 50] [--minutes M] [--faults kill-server,all-at-once,…] [--quick]
                          [--set KEY=VALUE] [--seed 0] [--json FILE]

Each fault has a run of its own, with two servers, two relays, two trainer ranks and worker processes of environments.
A try waits for a random moment, brings the fault about, and measures the seconds until all processes are there again
and a further step has been trained. A run whose controller ended (it was killed, or the disk was full and it said so)
is started by the same command again. After the last try it is interrupted as by Ctrl-C, and goes on for two more steps
to its end, so that all it had begun comes to something. Then its books are read:

    lost           trajectories in the store that have no final state; steps that are missing; and those of a batch that
                   was trained without being consumed
    trained_twice  trajectories that were consumed twice, groups that were used more than ``buffer.reuse`` times, and
                   steps that were trained twice for good: steps that a restarted trainer repeats are compared by
                   checksum, and a difference ends the run

``--quick`` tries each fault once. ``--json`` keeps the rows that the file has of other faults, if they are of the same
recipe, settings and machine; each says of which commit it is, and how busy the machine was. Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from processes import ALWAYS, Run, kill

from asyncrl.build.fit import machine
from asyncrl.config import load
from asyncrl.observe.run_dir import METRICS, TRAJECTORIES, read_lines
from asyncrl.processes import free_port

SETTINGS = (
    *ALWAYS,
    f"env.target={Path(__file__).with_name('chaos_env.py')}:Digits",
    "env.max_turns=2",
    "rollout.batch_groups=4",  # so that steps are frequent
    "rollout.group_size=4",
    "rollout.num_envs=32",
    "rollout.max_new_tokens=12",
    "env.workers=2",
    "env.step_timeout_s=5",
    "env.retries=1000",
    "env.backoff_s=0.1",
    "env.max_failure_rate=1",
    "env.max_infra_failure_rate=1",
    "engine.count=2",
    "engine.probe_s=0.5",
    "engine.idle_timeout_s=5",
    "engine.control_timeout_s=20",
    "engine.patience_s=600",
    "trainer.ranks=2",
    "trainer.step_timeout_s=30",
    "weights.transport=relay",
    "weights.relays=2",
)
KINDS = ("server", "trainer", "env", "relay")
FINAL = ("consumed", "filtered", "surplus", "failed", "aborted")
GAP_S = 6.0
"""The longest time between a recovery and the next fault."""
STOPPED_S = 12.0
"""How long a stopped process stays so, and a frozen connection: longer than a request may be silent."""
PRINTED_BYTES = 8192
"""What a run whose disk is full may still print."""
RECOVERED_S = 600.0
ENDED_S = 300.0


class Fault(NamedTuple):
    """``kinds`` are killed or stopped, one process of each, and the controller where ``controller``."""

    what: str
    kinds: Sequence[str] = ()
    controller: bool = False


FAULTS = {
    **{f"kill-{kind}": Fault("kill", (kind,)) for kind in KINDS},
    "kill-controller": Fault("kill", (), controller=True),
    "all-at-once": Fault("kill", KINDS, controller=True),
    **{f"stop-{kind}": Fault("stop", (kind,)) for kind in KINDS},
    "half-open": Fault("half-open"),
    "disk-full": Fault("disk-full"),
}


class Chaos:
    """One run, and one fault that is tried on it again and again."""

    def __init__(self, recipe: Path, run_dir: Path, fault: Fault, settings: Sequence[str], rng: random.Random) -> None:
        self.fault = fault
        self.rng = rng
        self.settings = settings
        self.proxies: list[Proxy] = []
        self.run = Run(recipe, run_dir, settings)
        self.expected: Counter[str] = Counter()

    def steps(self) -> int:
        """Trained, as the run store says at this moment."""
        with closing(sqlite3.connect(f"file:{self.run.run_dir / 'run.db'}?mode=ro", uri=True)) as db:
            (count,) = db.execute("SELECT count(*) FROM steps WHERE checksum IS NOT NULL").fetchone()
            return int(count)

    def alive(self) -> Counter[str]:
        return Counter({kind: len(self.run.of(kind)) for kind in KINDS})

    def begin(self) -> None:
        self.run.wait_for_steps(2)
        self.expected = self.alive()

    def attempt(self) -> float:
        """Bring the fault about; seconds until the run goes on."""
        time.sleep(self.rng.uniform(0.5, GAP_S))
        before, began = self.steps(), time.monotonic()
        match self.fault.what:
            case "kill":
                victims = [self.rng.choice(found) for kind in self.fault.kinds if (found := self.run.of(kind))]
                if self.fault.controller:
                    victims.append(self.run.process.pid)
                self.rng.shuffle(victims)
                for pid in victims:
                    kill(pid)
            case "stop":
                with self.stopped():
                    time.sleep(STOPPED_S)
            case "half-open":
                proxy = self.rng.choice(self.proxies)
                with proxy.frozen():
                    time.sleep(STOPPED_S)
            case "disk-full":
                self.fill_disk()
        self.recover(before)
        return time.monotonic() - began

    def recover(self, before: int) -> None:
        deadline = time.monotonic() + RECOVERED_S
        if self.fault.controller or self.fault.what == "disk-full":
            self.run.process.wait(ENDED_S)
            while list(self.run.processes()):  # the kernel ends those
                time.sleep(0.05)
                self.check(deadline)
            self.run.start()
        while self.steps() <= before or self.alive() < self.expected:
            if self.run.process.poll() is not None:
                sys.exit(f"the run ended with {self.run.process.returncode}:\n{self.run.output.read_text()[-3000:]}")
            self.check(deadline)
            time.sleep(0.1)

    def check(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            self.run.kill()
            sys.exit(f"no recovery within {RECOVERED_S:g} s:\n{self.run.output.read_text()[-3000:]}")

    @contextmanager
    def stopped(self) -> Iterator[None]:
        victims = [self.rng.choice(found) for kind in self.fault.kinds if (found := self.run.of(kind))]
        for pid in victims:
            kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in victims:
                kill(pid, signal.SIGCONT)

    def fill_disk(self) -> None:
        """From now on no file of the controller's may grow much, and the run has to end by itself and say why."""
        limit = self.run.output.stat().st_size + PRINTED_BYTES
        resource.prlimit(self.run.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        code = self.run.process.wait(ENDED_S)
        last = self.run.output.read_text().splitlines()[-1]
        if code != 1 or not last.startswith("asyncrl: "):
            sys.exit(f"a full disk ended the run with {code}: {last}")

    def finish(self) -> int:
        """Interrupt it, and let it go on to its end; its exit code."""
        self.run.interrupt(ENDED_S)
        self.run.start(f"run.steps={self.steps() + 2}")
        return self.run.process.wait(RECOVERED_S)

    def account(self, recipe: Path) -> dict[str, Any]:
        run, config = self.run, load(recipe, overrides=list(self.settings))
        with closing(sqlite3.connect(run.run_dir / "run.db")) as db:
            states = dict(db.execute("SELECT state, count(*) FROM trajectories GROUP BY state").fetchall())
            steps = [step for (step,) in db.execute("SELECT step FROM steps WHERE checksum IS NOT NULL ORDER BY step")]
            uses = dict(db.execute("SELECT group_id, count(*) FROM uses GROUP BY 1").fetchall())
        lines = list(read_lines(run.run_dir / METRICS))
        versions = Counter(line["version"] for line in lines)
        consumed = Counter(line["id"] for line in read_lines(run.run_dir / TRAJECTORIES) if line["state"] == "consumed")
        open_ones = sum(count for state, count in states.items() if state not in FINAL)
        missing = set(range(len(steps))) - set(steps)
        short = max(0, len(steps) * config.rollout.batch_groups - sum(uses.values())) * config.rollout.group_size
        often = sum(max(0, n - config.buffer.reuse) for n in uses.values())
        return {
            "steps": len(steps),
            "consumed": states.get("consumed", 0),
            "lost": open_ones + len(missing) + short,
            "trained_twice": often + sum(n - 1 for n in (*consumed.values(), *versions.values())),
            "staleness_max": max((line["staleness/max"] for line in lines), default=0),
            "staleness_limit": config.staleness.limit,
        }


class Proxy:
    """A TCP proxy to ``port``, on a thread of its own, that can stop forwarding without closing anything."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._age = 0
        """How often it was frozen: what was open then stays half-open for ever."""
        self._thawed = asyncio.Event()
        self._thawed.set()
        ready: list[int] = []
        started = threading.Event()

        async def serve() -> None:
            self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
            server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
            ready.append(server.sockets[0].getsockname()[1])
            started.set()
            await self._over.wait()  # what is open then is cancelled by asyncio.run

        self._thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        self._thread.start()
        started.wait()
        self.port = ready[0]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self._loop.call_soon_threadsafe(self._freeze)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._thawed.set)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _freeze(self) -> None:
        self._age += 1
        self._thawed.clear()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        age = self._age
        try:
            await self._thawed.wait()
            there = await asyncio.open_connection("127.0.0.1", self._target)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, there[1], age))
                group.create_task(self._pump(there[0], writer, age))
        except* (OSError, asyncio.CancelledError):
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, age: int) -> None:
        while data := await reader.read(65536):
            if self._age != age:
                await asyncio.Event().wait()
            writer.write(data)
            await writer.drain()
        writer.close()


@contextmanager
def proxies_of(recipe: Path, fault: Fault, settings: Sequence[str]) -> Iterator[list[Proxy]]:
    """For half-open connections, two servers of the recipe's model that run on their own, each behind a proxy."""
    if fault.what != "half-open":
        yield []
        return
    config = load(recipe, overrides=list(settings))
    servers, proxies = [], []
    try:
        for seed in range(2):
            port = free_port()
            command = [sys.executable, "-m", "asyncrl.serve", config.model.path, "--port", str(port)]
            command += ["--max-running-requests", str(config.engine.max_running_requests), "--seed", str(seed)]
            command += ["--max-total-tokens", str(config.engine.max_total_tokens), "--log-level", "error"]
            servers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            proxies.append(Proxy(port))
        yield proxies
    finally:
        for proxy in proxies:
            proxy.close()
        for server in servers:
            server.kill()
            server.wait()


def play(
    recipe: Path, folder: Path, name: str, tries: int, minutes: float, settings: Sequence[str], seed: int
) -> dict[str, Any]:
    """One row. No try begins later than after ``minutes``."""
    fault, rng = FAULTS[name], random.Random(f"{seed}/{name}")
    with proxies_of(recipe, fault, settings) as proxies:
        if proxies:
            urls = ",".join(f'"http://127.0.0.1:{proxy.port}"' for proxy in proxies)
            settings = [*settings, f"engine.urls=[{urls}]", "weights.transport=disk"]
        chaos = Chaos(recipe, folder / name, fault, settings, rng)
        chaos.proxies = proxies
        seconds: list[float] = []
        try:
            chaos.begin()
            ends = time.monotonic() + 60 * minutes
            while len(seconds) < tries and (not seconds or time.monotonic() < ends):
                seconds.append(chaos.attempt())
                print(f"{name}: {len(seconds)} of {tries}, back after {seconds[-1]:.1f} s", flush=True)
            code = chaos.finish()
            left = chaos.run.leftovers()
        finally:
            chaos.run.kill()
    return {
        "fault": name,
        "tries": len(seconds),
        **chaos.account(recipe),
        "seconds_to_recover": round(median(seconds), 1),
        "seconds_most": round(max(seconds), 1),
        "exit_code": code,
        "left_over": left,
        "load": round(os.getloadavg()[2], 1),
    }


def commit() -> str:
    """Of the tree that this file is in; with a plus where it was changed since."""
    told = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+"], cwd=Path(__file__).parent, capture_output=True
    )
    return told.stdout.decode().strip() or "unknown"


def kept(file: Path, about: dict[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows that ``file`` has of other faults than ``names``, measured under the same conditions."""
    if not file.exists():
        return []
    written = json.loads(file.read_text())
    if {**written, "rows": []} != {**about, "rows": []}:
        sys.exit(f"{file}: of another recipe, settings or machine; name another file, or remove it")
    return [row for row in written["rows"] if row["fault"] not in names]


def in_order(row: dict[str, Any]) -> bool:
    limit = row["staleness_limit"]
    kept = limit is None or row["staleness_max"] <= limit
    return kept and row["exit_code"] == 0 and not (row["lost"] or row["trained_twice"] or row["left_over"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", type=Path, nargs="?", default=Path("recipes/runsum"))
    parser.add_argument("--tries", type=int, default=50, help="of each fault")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no try of a fault later than that")
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--quick", action="store_true", help="one try of each")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="lay over the recipe")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    names = args.faults.split(",")
    if unknown := set(names) - set(FAULTS):
        parser.error(f"--faults: unknown {', '.join(sorted(unknown))}; known are {', '.join(FAULTS)}")
    tries = 1 if args.quick else args.tries
    settings = [*SETTINGS, *args.set]
    about = {"recipe": args.recipe.name, "machine": machine(), "settings": args.set}
    others = kept(args.json, about, names) if args.json else []
    rows: list[dict[str, Any]] = []
    tree = commit()
    for name in names:
        with tempfile.TemporaryDirectory(prefix="asyncrl-chaos-", ignore_cleanup_errors=True) as folder:
            row = play(args.recipe, Path(folder), name, tries, args.minutes, settings, args.seed)
            rows.append({**row, "commit": tree})
        print(json.dumps(rows[-1]), flush=True)
        if args.json:
            ordered = sorted(others + rows, key=lambda row: list(FAULTS).index(row["fault"]))
            args.json.write_text(json.dumps({**about, "rows": ordered}, indent=1) + "\n")
    print(f"{'fault':<18}{'tries':>6}{'lost':>6}{'trained twice':>15}{'seconds to recover (median, most)':>36}")
    for row in rows:
        most = f"{row['seconds_to_recover']:.1f}, {row['seconds_most']:.1f}"
        print(f"{row['fault']:<18}{row['tries']:>6}{row['lost']:>6}{row['trained_twice']:>15}{most:>36}")
    good = all(in_order(row) for row in rows)
    print("all accounted for" if good else "NOT in order")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
