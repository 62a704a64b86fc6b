"""The sandbox, for real: what an agent may do to it, and what it may not. Skipped where bubblewrap is missing."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from asyncrl import EnvDown
from asyncrl.envs.sandbox import Bubblewrap, Limits, Sandbox, Source, open_sandbox
from asyncrl.envs.sandbox.base import MAX_COMMAND, TOO_LONG, Bounded
from asyncrl.envs.sandbox.cgroup import Cgroup

real = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
LIMITS = Limits(memory_mb=128, disk_mb=32, processes=24, output_bytes=10_000)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file.txt").write_text("pristine\n")
    return folder


@pytest.fixture
async def box(tree: Path) -> AsyncIterator[Sandbox]:
    sandbox = await open_sandbox(Source(tree=str(tree)), LIMITS)
    yield sandbox
    await sandbox.close()


@real
async def test_commands_share_a_tree_and_leave_the_pristine_one_alone(box: Sandbox, tree: Path) -> None:
    assert (await box.run("cat sub/file.txt; pwd", 10)).output == "pristine\n/testbed\n"
    done = await box.run("echo changed > sub/file.txt; touch new; rm -r sub/none 2>&1; exit 3", 10)
    assert (done.returncode, done.timed_out) == (3, False)
    assert (await box.run("cat sub/file.txt; ls", 10)).output == "changed\nnew\nsub\n"
    assert [p.name for p in tree.iterdir()] == ["sub"] and (tree / "sub/file.txt").read_text() == "pristine\n"


@pytest.mark.parametrize("limit", ["memory_mb", "disk_mb", "processes", "cpus", "output_bytes"])
def test_a_limit_of_nothing_is_refused(limit: str) -> None:
    """Some of them would mean: no limit at all."""
    with pytest.raises(ValueError, match=f"{limit} = 0: must be more than 0"):
        Limits(**{limit: 0})


@real
async def test_closing_ends_what_runs_and_leaves_no_cgroup(tree: Path) -> None:
    box = await Bubblewrap.open(Source(tree=str(tree)), LIMITS)
    cgroups = [Path(folder) for folder in box._cgroup.folders]
    if not cgroups:
        pytest.skip("no cgroup can be written here")
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(ended_by_closing(box))
        await asyncio.sleep(0.3)
        await box.close()
    assert not any(folder.exists() for folder in cgroups)


async def ended_by_closing(box: Sandbox) -> None:
    with pytest.raises(EnvDown):
        await box.run("sleep 60", 60)


@real
async def test_files_are_read_and_written_through_the_box(box: Sandbox) -> None:
    data = bytes(range(256)) * 2000
    await box.write_file("deep/er/file", data)
    assert await box.read_file("deep/er/file") == data
    with pytest.raises(OSError, match="no such file"):
        await box.read_file("nope")
    with pytest.raises(OSError, match="longer than 10 bytes"):
        await box.read_file("deep/er/file", limit=10)
    with pytest.raises(OSError, match=r"sub: .*directory"):
        await box.write_file("sub", b"x")


@real
async def test_text_that_no_process_can_be_given(box: Sandbox) -> None:
    """A model may write anything; it is the command that fails then, not the sandbox."""
    assert (await box.run("echo a\0b \ud800", 10)).output == "ab ?\n"
    assert (await box.run("echo " + "é" * MAX_COMMAND, 10)).returncode == TOO_LONG
    assert (await box.run("echo " + "x" * (MAX_COMMAND - 5) + " | wc -c", 10)).returncode == TOO_LONG
    assert (await box.run(": " + "x" * (MAX_COMMAND - 2), 10)).returncode == 0
    await box.write_file("a\0", b"x")
    assert await box.read_file("a") == b"x"


@real
async def test_nothing_outside_can_be_written_or_seen(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    await box.run("ln -s / host; ln -s ../../.. up", 10)
    for command in (
        *(f"cat {secret}", f"cat host{secret}", f"cat up{secret}", f"echo x > {secret}"),
        *(
            "touch /usr/x",
            "touch /etc/x",
            "touch /x",
            "echo x > /proc/sys/kernel/hostname",
            "mount -t tmpfs x /tmp",
            "ls /sys",
        ),
        *("unshare -U true", "echo 0 > /proc/1/oom_score_adj; ls /home"),
    ):
        assert (await box.run(command, 10)).returncode != 0, command
    await box.write_file(f"host{secret}", b"x")  # the box has a /tmp of its own
    with pytest.raises(OSError, match="usr"):
        await box.write_file("host/usr/x", b"x")
    assert secret.read_text() == "s3cret" and not Path("/usr/x").exists()


@real
async def test_there_is_no_network_and_no_environment_of_the_host(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "s3cret")
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert (await box.run(f"exec 3<>/dev/tcp/127.0.0.1/{port}", 10)).returncode != 0
    assert "s3cret" not in (await box.run("env; cat /proc/1/environ", 10)).output


@real
@pytest.mark.parametrize(
    ("bomb", "survives"),
    [
        (":(){ :|:& };: 2>/dev/null; sleep 0.3", "fork"),
        ("python3 -c 'x = bytearray(2**30)'", "memory"),
        ("head -c 200M /dev/zero > big", "disk"),
        ("head -c 200M /dev/zero > /tmp/big", "disk"),
        ("for i in $(seq 1 20000); do echo > f$i || exit 1; done 2>/dev/null", "inodes"),
    ],
)
async def test_bombs_end_in_their_box(box: Sandbox, bomb: str, survives: str) -> None:
    done = await box.run(bomb, 20)
    assert survives == "fork" or done.returncode != 0
    await box.run("rm -rf big /tmp/big f*", 20)
    assert (await box.run("echo alive", 10)).output == "alive\n"


@real
async def test_a_deadline_kills_all_of_a_command(box: Sandbox) -> None:
    started = time.monotonic()
    done = await box.run("echo begun; (trap '' TERM; setsid sleep 300) & sleep 300", 0.5)
    assert (done.output, done.returncode, done.timed_out) == ("begun\n", 124, True)
    assert time.monotonic() - started < 5
    assert (await box.run("exit 124", 10)).timed_out is False


@real
async def test_what_a_command_leaves_running_dies_with_it(box: Sandbox) -> None:
    started = time.monotonic()
    await box.run("setsid nohup sh -c 'sleep 0.3; echo late > late' & disown; echo", 10)
    await asyncio.sleep(0.6)
    assert "late" not in (await box.run("ls; ps aux | grep -c '[s]leep'", 10)).output
    assert time.monotonic() - started < 10


@real
async def test_huge_output_is_bounded(box: Sandbox) -> None:
    done = await box.run("echo first; yes | head -c 5000000; echo last", 20)
    assert len(done.output) < 10_100 and done.output.startswith("first\n") and done.output.endswith("last\n")
    assert "bytes left out" in done.output


@real
async def test_an_episode_cannot_see_another(box: Sandbox, tree: Path) -> None:
    other = await open_sandbox(Source(tree=str(tree)), LIMITS)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(box.run("echo s3cret > mine; echo s3cret > /tmp/mine; sleep 0.5", 10))
            await asyncio.sleep(0.2)
            seen = await other.run(
                "find / \\( -path /proc -o -path /usr \\) -prune -o -name mine -print; ps -eo comm", 10
            )
    finally:
        await other.close()
    assert "mine" not in seen.output and "sleep" not in seen.output


@real
async def test_many_open_at_once_and_the_loop_is_not_held(tree: Path) -> None:
    boxes: list[Sandbox] = []
    lags: list[float] = []

    async def one() -> None:
        box = await open_sandbox(Source(tree=str(tree)), LIMITS)
        boxes.append(box)
        assert (await box.run("cat sub/file.txt", 60)).output == "pristine\n"

    async def watch() -> None:
        while len(lags) < 20:
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(0.02)
            lags.append(asyncio.get_running_loop().time() - began - 0.02)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        for _ in range(32):
            group.create_task(one())
    async with asyncio.TaskGroup() as group:
        for box in boxes:
            group.create_task(box.close())
    assert sorted(lags)[len(lags) // 2] < 0.2


@real
async def test_cancellation_ends_the_command_and_close_what_is_mounted(box: Sandbox) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(box.run("touch begun; sleep 300", 600))
        await asyncio.sleep(0.3)
        task.cancel()
    assert (await box.run("ls", 10)).output == "begun\nsub\n"
    await box.close()
    await box.close()
    with pytest.raises(EnvDown, match="closed"):
        await box.run("true", 10)


@real
async def test_what_the_machine_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvDown, match=r"no folder .*gone"):
        await open_sandbox(Source(tree=str(tmp_path / "gone")))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvDown, match="no bwrap here; install bubblewrap"):
        await open_sandbox(Source())
    with pytest.raises(EnvDown, match="needs docker or podman"):
        await open_sandbox(Source(image="some/image"))


def test_bounded_keeps_both_ends() -> None:
    kept = Bounded(10)
    for number in range(100):
        kept.add(b"%02d" % number)
    assert kept.value() == b"00010\n[... 190 bytes left out ...]\n79899"
    short = Bounded(10)
    short.add(b"0123456789")
    assert short.value() == b"0123456789"


@pytest.mark.parametrize("version", ["v1", "v2", "none"])
def test_cgroups_of_either_version_or_none(tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On plain folders: the kernel makes the files of a new cgroup, so here they are made first."""
    files = {"memory": "memory.limit_in_bytes", "pids": "pids.max", "cpu": "cpu.cfs_period_us"}
    if version == "v1":
        for controller, file in files.items():
            (tmp_path / controller / "box").mkdir(parents=True)
            (tmp_path / controller / "box" / file).touch()
    elif version == "v2":
        (tmp_path / "box").mkdir()
        (tmp_path / "cgroup.controllers").touch()
        for file in ("memory.max", "pids.max"):  # no cpu controller
            (tmp_path / "box" / file).touch()
    group = Cgroup.make("box", LIMITS, root=tmp_path)
    if version == "none":
        assert (group.joins, group.memory, list(tmp_path.iterdir())) == ([], False, [])
    else:
        folder = tmp_path / "memory" / "box" if version == "v1" else tmp_path / "box"
        limit = "memory.limit_in_bytes" if version == "v1" else "memory.max"
        assert (folder / limit).read_text() == str(160 * 2**20)
        assert group.memory and len(group.joins) == (3 if version == "v1" else 1)


# --- containers -------------------------------------------------------------------------------------------------------

FAKE = """#!/bin/bash
# Records its calls; "exec" runs the command here, in a session of its own, where kill -1 must not reach anybody.
printf '%s\\x1f' "$@" >> "$CALLS"; printf '\\x1e' >> "$CALLS"
case "$1" in
  run) [ "${@: -3:1}" != bad/image ] || { echo 'Error: no such image' >&2; exit 125; }; echo 0123abcd;;
  exec)
    shift 5  # exec --interactive --workdir W NAME
    script=${3/kill -KILL -1/true}
    exec "$1" "$2" "$script" "${@:4}";;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake ``docker`` on the path records what it is called with."""
    tool = tmp_path / "bin" / "docker"
    tool.parent.mkdir()
    tool.write_text(FAKE)
    tool.chmod(0o755)
    record = tmp_path / "calls"
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setenv("CALLS", str(record))
    return record


def read(record: Path) -> list[list[str]]:
    return [call.split("\x1f")[:-1] for call in record.read_text().split("\x1e")[:-1]]


async def test_a_container_is_started_without_network_and_with_limits(calls: Path) -> None:
    box = await open_sandbox(Source(image="some/image", read_only={"/opt/h": "/h"}, variables={"A": "b"}), LIMITS)
    await box.close()
    await box.close()
    [run, remove] = read(calls)
    text = " ".join(run)
    assert run[0] == "run" and run[-3:-1] == ["some/image", "-c"]
    for part in ("--network none", "--memory 128m", "--pids-limit 24", "--cpus 1", "--cap-drop ALL", "--env A=b"):
        assert part in text
    assert "--volume /opt/h:/h:ro" in text and "no-new-privileges" in text
    assert remove == ["rm", "--force", "--volumes", run[run.index("--name") + 1]]


async def test_commands_in_a_container(calls: Path) -> None:
    box = await open_sandbox(Source(image="some/image"), LIMITS)
    done = await box.run("echo out; echo err >&2; exit 5", 10)
    assert (sorted(done.output.split()), done.returncode, done.timed_out) == (["err", "out"], 5, False)
    done = await box.run("echo begun; sleep 30", 0.3)
    assert done.timed_out and "begun" in done.output
    assert (await box.run("kill -9 $$", 10)).timed_out is False
    output, code = await box.execute(["cat"], timeout_s=10, stdin=b"fed")
    assert (output, code) == (b"fed", 0)
    await box.close()
    assert "kill -KILL -1" in read(calls)[1][7], "what a command leaves running must be killed"
    with pytest.raises(EnvDown, match="closed"):
        await box.run("true", 1)


async def test_a_container_that_does_not_start(calls: Path) -> None:
    with pytest.raises(EnvDown, match="docker cannot start bad/image: Error: no such image"):
        await open_sandbox(Source(image="bad/image"), LIMITS)
    assert [call[0] for call in read(calls)] == ["run", "rm"]
