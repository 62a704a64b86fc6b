"""Limits on all processes of a box together, where the machine's cgroups (v1 or v2) may be written. Best effort: where
they may not, the box has the limits of each process that ``prlimit`` sets."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Self

from asyncrl.envs.sandbox.base import Limits

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


class Cgroup:
    """``folders`` of one box, which its keeper removes. ``joins`` are the files that a process writes ``0`` into to
    join; ``memory`` says whether RAM is limited."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = [str(folder) for folder in sorted(set(folders.values()))]
        self.joins = [f"{folder}/cgroup.procs" for folder in self.folders]
        self.memory = "memory" in folders

    def kill(self) -> None:
        """All that runs in it."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                for pid in Path(folder, "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        """What a keeper does in the end, where there is none."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                Path(folder).rmdir()

    @classmethod
    def make(cls, name: str, limits: Limits, root: Path = ROOT) -> Self:
        # What a box writes to its disk is RAM, and the kernel counts it as such.
        memory = (limits.memory_mb + limits.disk_mb) * 2**20
        quota = max(1000, round(limits.cpus * PERIOD_US))
        folders: dict[str, Path] = {}
        if (root / "cgroup.controllers").is_file():
            settings = {
                "memory": {"memory.max": str(memory), "memory.swap.max": "0"},
                "pids": {"pids.max": str(limits.processes)},
                "cpu": {"cpu.max": f"{quota} {PERIOD_US}"},
            }
            places = dict.fromkeys(settings, root / name)
        else:
            settings = {
                "memory": {"memory.limit_in_bytes": str(memory), "memory.memsw.limit_in_bytes": str(memory)},
                "pids": {"pids.max": str(limits.processes)},
                "cpu": {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota)},
            }
            places = {controller: root / controller / name for controller in settings}
        for controller, values in settings.items():
            folder = places[controller]
            with contextlib.suppress(OSError):
                if not folder.parent.is_dir():
                    continue
                folder.mkdir(exist_ok=True)
                (first, value), *others = values.items()
                if not (folder / first).exists():
                    continue  # the controller is not handed down to us
                (folder / first).write_text(value)
                folders[controller] = folder
                for optional, text in others:
                    with contextlib.suppress(OSError):  # accounting of swap may be off
                        (folder / optional).write_text(text)
        for folder in set(places.values()) - set(folders.values()):
            with contextlib.suppress(OSError):
                folder.rmdir()
        return cls(folders)
