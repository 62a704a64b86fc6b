"""A box from what Linux itself has: bubblewrap for each command, a copy-on-write tree for all of them.

A *keeper* process owns a mount namespace in which a tmpfs of the allowed size holds the writable layer of an overlay
over the pristine tree. Nobody else sees these mounts, so an episode cannot reach another's, and when the controller
ends, however it ends, the keeper reads the end of its input, and the kernel takes all of it away.

Each command joins that namespace, gives up root if it had it, and runs under bubblewrap: user, pid, network, ipc and
cgroup namespaces of its own. When it ends or is killed, the kernel kills all that is left in its pid namespace. A
command takes about 10 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Self

from asyncrl.env import EnvDown
from asyncrl.envs.sandbox.base import Limits, Sandbox, Source, communicate
from asyncrl.envs.sandbox.cgroup import Cgroup
from asyncrl.shield import to_the_end

NOBODY = 65534
"""Who a controller that is root becomes before it runs anything; the best owner for a pristine tree."""
OPEN_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 10.0
TOOLS = ("bwrap", "unshare", "nsenter", "setpriv", "prlimit")

# In the keeper's mount namespace /sys is where the box lies: it is always there, and no box is shown the real one.
BOX = "/sys"
KEEPER = f"""
set -e
tree=$1 size=$2 owner=$3 options=$4 cgroups=$5
shift 5
mount -t tmpfs -o "size=${{size}}m,nr_inodes=$((size * 256)),mode=0755" tmpfs {BOX}
cd {BOX}
mkdir lower upper work tree tmp shown
n=0
for folder; do
    mkdir shown/$n
    mount --rbind "$folder" shown/$n
    n=$((n + 1))
done
if [ -n "$tree" ]; then
    mount --rbind "$tree" lower
    chown --reference=lower upper
    chmod --reference=lower upper
    mount -t overlay overlay -o "lowerdir=lower,upperdir=upper,workdir=work$options" tree 2>/dev/null ||
        cp -a lower/. tree
    [ "$(stat -c %u lower)" = "$owner" ] || chown -R "$owner:$owner" tree
else
    chown "$owner:$owner" tree
fi
chown "$owner:$owner" tmp
echo ready
read -r _ || true
cd /
umount -l {BOX}
for try in 1 2 3 4 5; do
    rmdir $cgroups 2>/dev/null && break
    [ -z "$cgroups" ] || sleep 0.2
done
"""
JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'


class Bubblewrap(Sandbox):
    """See the module. Made with ``open``."""

    def __init__(self, keeper: asyncio.subprocess.Process, cgroup: Cgroup, source: Source, limits: Limits) -> None:
        self.limits = limits
        self._keeper = keeper
        self._cgroup = cgroup
        self._prefix = [*self._outside(), *_bwrap(source)]

    @classmethod
    async def open(cls, source: Source, limits: Limits) -> Self:
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise EnvDown(f"sandbox: no {missing[0]} here; install bubblewrap and util-linux")
        for path in filter(None, (source.tree, *source.read_only)):
            if not Path(path).is_dir():
                raise EnvDown(f"sandbox: no folder {path}")
        root = os.getuid() == 0
        unshare = ["unshare", "--mount", *([] if root else ["--user", "--map-root-user"]), "--propagation", "private"]
        cgroup = Cgroup.make(f"asyncrl-{uuid.uuid4().hex[:12]}", limits)
        tree = str(Path(source.tree).resolve()) if source.tree else ""
        owner, options = (str(NOBODY), "") if root else ("0", ",userxattr")
        arguments = [tree, str(limits.disk_mb), owner, options, " ".join(cgroup.folders), *_shown(source)]
        try:
            keeper = await asyncio.create_subprocess_exec(
                *(*unshare, "sh", "-c", KEEPER, "keeper", *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, asyncio.CancelledError) as error:
            cgroup.remove()
            if not isinstance(error, OSError):
                raise
            raise EnvDown(f"sandbox: cannot start unshare ({error.strerror})") from None
        box = cls(keeper, cgroup, source, limits)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                assert keeper.stdout is not None
                said = [line async for line in _until(keeper.stdout, b"ready\n")]
        except TimeoutError:
            await box.close()
            raise EnvDown(f"sandbox: {tree or 'a box'} was not mounted within {OPEN_TIMEOUT_S:g} s") from None
        except asyncio.CancelledError:
            await box.close()
            raise
        if not said or said[-1] != b"ready\n":
            await box.close()
            why = b" ".join(said).decode(errors="replace").strip() or "no word of why"
            raise EnvDown(f"sandbox: no box over {tree or 'an empty tree'}: {why} (user namespaces may be forbidden)")
        return box

    def _outside(self) -> list[str]:
        """From the controller's place into the keeper's namespaces, without its rights."""
        join = ["sh", "-c", JOIN, "join", *self._cgroup.joins, "--"] if self._cgroup.joins else []
        spaces = f"/proc/{self._keeper.pid}/ns"
        if os.getuid() == 0:
            ids = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
            return [*join, "nsenter", f"--mount={spaces}/mnt", "setpriv", *ids]
        return [*join, "nsenter", f"--user={spaces}/user", f"--mount={spaces}/mnt", "--preserve-credentials"]

    async def execute(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", output_bytes: int | None = None
    ) -> tuple[bytes, int | None]:
        if self._keeper.returncode is not None:
            raise EnvDown("sandbox: the box is closed")
        # bubblewrap reports on this pipe, which the command does not inherit: without a report it never ran.
        status, reports = os.pipe()
        try:
            try:
                output, code = await communicate(
                    [*self._prefix, "--json-status-fd", str(reports), "--", *self._limited(timeout_s), *argv],
                    stdin=stdin,
                    timeout_s=timeout_s,
                    output_bytes=output_bytes or self.limits.output_bytes,
                    pass_fds=(reports,),
                    variables={"PATH": os.environ.get("PATH", os.defpath)},  # /proc/1/environ is there for all to read
                )
            finally:
                os.close(reports)
            report = os.read(status, 4096)  # all who could write to it are gone
        finally:
            os.close(status)
        if code is not None and not _ended(report):
            said = output.decode(errors="replace").strip().splitlines()
            raise EnvDown(f"sandbox: bubblewrap failed: {said[-1] if said else f'exit code {code}'}")
        return output, code

    def _limited(self, timeout_s: float) -> list[str]:
        limits = [f"--nproc={self.limits.processes}", f"--cpu={round(timeout_s) + 1}", "--core=0"]
        limits.append(f"--fsize={self.limits.disk_mb * 2**20}")
        if not self._cgroup.memory:
            limits.append(f"--as={self.limits.memory_mb * 2**20}")
        return ["prlimit", *limits]

    async def close(self) -> None:
        """The namespace goes when the keeper and the last command in it are gone."""
        if self._keeper.returncode is None:
            self._cgroup.kill()  # else what still runs goes on to its deadline
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            try:
                await to_the_end(self._keeper.wait(), CLOSE_TIMEOUT_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._keeper.kill()
                await self._keeper.wait()
                self._cgroup.remove()


def _shown(source: Source) -> dict[str, str]:
    """Folders of the host that commands see, read-only: host path → path in the box. The interpreter that virtual
    environments point to is one. The keeper mounts them, so that they may lie where only root can go."""
    interpreter = {} if Path(sys.base_prefix).is_relative_to("/usr") else {sys.base_prefix: sys.base_prefix}
    return interpreter | {str(Path(outer).resolve()): inner for outer, inner in source.read_only.items()}


def _bwrap(source: Source) -> list[str]:
    """bubblewrap's command line, up to its status pipe."""
    argv = ["bwrap", "--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session"]
    argv += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--proc", "/proc", "--dev", "/dev"]
    argv += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if Path("/", name).is_symlink():
            argv += ["--symlink", f"usr/{name}", f"/{name}"]
        elif Path("/", name).is_dir():
            argv += ["--ro-bind", f"/{name}", f"/{name}"]
    for name in ("alternatives", "ld.so.cache", "localtime"):
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for number, inner in enumerate(_shown(source).values()):
        argv += ["--ro-bind", f"{BOX}/shown/{number}", inner]
    argv += ["--bind", f"{BOX}/tmp", "/tmp", "--bind", f"{BOX}/tree", source.workdir, "--remount-ro", "/"]
    argv += ["--chdir", source.workdir]
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", **source.variables}
    argv.append("--clearenv")
    for name, value in variables.items():
        argv += ["--setenv", name, value]
    return argv


def _ended(report: bytes) -> bool:
    """Whether bubblewrap's JSON lines tell of a command that ran and ended."""
    for line in report.splitlines():
        with contextlib.suppress(ValueError):
            if "exit-code" in json.loads(line):
                return True
    return False


async def _until(stream: asyncio.StreamReader, last: bytes) -> AsyncIterator[bytes]:
    """Lines, up to ``last`` or the end."""
    while line := await stream.readline():
        yield line
        if line == last:
            return
