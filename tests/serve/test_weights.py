"""Weight updates: from a folder and from a trainer's broadcast, idle, running and paused."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore

from asyncrl.checksum import checksum
from asyncrl.core.manifest import FILE_NAME, Manifest, dumps
from asyncrl.serve import weights as weights_module

from .harness import Client, logprobs, make_model, prompt, reference, save, serving

LONG = 400


async def check_serves(client: Client, model: Any) -> None:
    """What the server samples now is exactly ``model``'s."""
    reply = await client.generate(prompt(8), max_new_tokens=5)
    assert logprobs(reply) == pytest.approx(reference(model, prompt(8), reply["output_ids"]), abs=1e-4)


async def update(client: Client, folder: Path, version: str | None = None, status: int = 200, **more: Any) -> Any:
    body = {"model_path": str(folder), **more}
    if version is not None:
        body["weight_version"] = version
    return await client.post("/update_weights_from_disk", body, status)


# --- From disk --------------------------------------------------------------------------------------------------------


async def test_update_from_disk_replaces_the_weights(client: Client, other_model: Any, other_folder: Path) -> None:
    assert (await update(client, other_folder, "7"))["success"] is True
    await check_serves(client, other_model)
    info = await client.get("/model_info")
    assert (info["weight_version"], info["model_path"]) == ("7", str(other_folder))
    await update(client, other_folder)
    assert (await client.get("/model_info"))["weight_version"] == "7", "kept when none is given"


@pytest.mark.parametrize("kind", ["qwen3-bias", "qwen2-tied", "llama-biases"])
async def test_sharded_folders_of_every_kind(kind: str, tmp_path: Path) -> None:
    new = make_model(kind, seed=5)
    sharded = save(new, tmp_path / "new", max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    async with serving(save(make_model(kind), tmp_path / "old")) as client:
        await update(client, sharded)
        await check_serves(client, new)


async def test_an_update_waits_for_running_requests_and_holds_new_ones(
    client: Client, model: Any, other_model: Any, other_folder: Path
) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(client.generate(prompt(1), max_new_tokens=LONG))
        await client.until_running(1)
        updated = group.create_task(update(client, other_folder, "1"))
        while not (client.server.engine.scheduler.holding or updated.done()):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        assert not updated.done()
        after = group.create_task(client.generate(prompt(2), max_new_tokens=5))
    old, new = running.result(), after.result()
    assert [s["version"] for s in old["meta_info"]["weight_versions"]] == ["default"]
    assert logprobs(old) == pytest.approx(reference(model, prompt(1), old["output_ids"]), abs=1e-4)
    assert new["meta_info"]["weight_version"] == "1"
    assert logprobs(new) == pytest.approx(reference(other_model, prompt(2), new["output_ids"]), abs=1e-4)


async def test_an_update_can_abort_running_requests(client: Client, other_model: Any, other_folder: Path) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(client.generate(prompt(1), max_new_tokens=LONG))
        await client.until_running(1)
        await update(client, other_folder, "1", abort_all_requests=True)
    assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
    await check_serves(client, other_model)


async def test_retract_then_update_gives_exact_logprobs_per_span(
    client: Client, model: Any, other_model: Any, other_folder: Path
) -> None:
    """The interrupted sequence goes on with the new weights over its whole, recomputed prefix."""
    chunks: list[dict[str, Any]] = []
    async for chunk in client.stream(prompt(6, 40), max_new_tokens=LONG, stream_interval=7):
        chunks.append(chunk)
        if len(chunks) == 3:
            await client.post("/pause_generation", {"mode": "retract"})
            await update(client, other_folder, "2")
            await client.post("/continue_generation")
    assert {c["meta_info"]["weight_version"] for c in chunks} == {"default", "2"}
    ids = [t for c in chunks for t in c["output_ids"]]
    values = [lp for c in chunks for lp in logprobs(c)]
    first, second = chunks[-1]["meta_info"]["weight_versions"]
    assert (first["version"], first["start"], second["version"], second["end"]) == ("default", 0, "2", LONG)
    cut = first["end"]
    assert 21 <= cut == second["start"] < LONG
    assert sum(len(c["output_ids"]) for c in chunks if c["meta_info"]["weight_version"] == "default") == cut, (
        "a chunk holds tokens of one version"
    )
    assert values[:cut] == pytest.approx(reference(model, prompt(6, 40), ids)[:cut], abs=1e-4)
    assert values[cut:] == pytest.approx(reference(other_model, prompt(6, 40), ids)[cut:], abs=1e-4)


async def test_pause_abort_update_continue(client: Client, other_model: Any, other_folder: Path) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(client.generate(prompt(1), max_new_tokens=LONG))
        await client.until_running(1)
        await client.post("/pause_generation", {"mode": "abort"})
        await update(client, other_folder, "3")
        await client.post("/continue_generation")
    reply = task.result()["meta_info"]
    assert (reply["finish_reason"]["type"], reply["weight_version"]) == ("abort", "default")
    await check_serves(client, other_model)


async def test_in_place_updates_keep_old_keys_only_when_asked(client: Client, model: Any, other_folder: Path) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(client.generate(prompt(1), rid="x", max_new_tokens=LONG))
        await client.until_running(1)
        await client.post("/pause_generation", {"mode": "in_place"})
        refused = await update(client, other_folder, "9", status=400)
        assert "flush_cache false" in refused["message"]
        assert (await client.get("/model_info"))["weight_version"] == "default"
        await update(client, other_folder, "9", flush_cache=False)
        await client.post("/continue_generation")
    assert [s["version"] for s in task.result()["meta_info"]["weight_versions"]] == ["default", "9"]


def rewrite(folder: Path, change: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NORM), f"tensor {NORM} is missing"),
        (lambda t: t.update({"extra.weight": torch.zeros(1)}), "tensor extra.weight is not part"),
        (lambda t: t.update({NORM: torch.zeros(3)}), f"tensor {NORM} has shape [3], but the model's is [48]"),
    ],
)
async def test_a_wrong_weight_set_is_refused_and_the_old_stays(
    client: Client, model: Any, tmp_path: Path, change: Any, words: str
) -> None:
    broken = rewrite(save(make_model(seed=9), tmp_path), change)
    reply = await update(client, broken, "1", status=400)
    assert reply["success"] is False
    assert words in reply["message"]
    await check_serves(client, model)
    assert (await client.get("/model_info"))["weight_version"] == "default"


async def test_an_unreadable_folder_is_refused(client: Client, model: Any, tmp_path: Path) -> None:
    assert "no such model folder" in (await update(client, tmp_path / "none", status=400))["message"]
    assert "no model.safetensors" in (await update(client, tmp_path, status=400))["message"]
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    assert "cannot read the weights" in (await update(client, tmp_path, status=400))["message"]
    await check_serves(client, model)


# --- From a trainer's broadcast ---------------------------------------------------------------------------------------

TRAINER = """
import sys, torch
from datetime import timedelta
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from safetensors.torch import load_file
folder, name, steps = sys.argv[1:]
torch.set_num_threads(1)
store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
group, _ = c10d._new_process_group_helper(2, 0, [], c10d.Backend("gloo"), c10d.PrefixStore(name, store),
                                          group_name=name, timeout=timedelta(seconds=30))
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
tensors = load_file(folder + "/model.safetensors")
for step in steps.split():
    sys.stdin.readline()
    if step == "die":
        sys.exit(0)
    if step == "bucket":
        dist.broadcast(torch.cat([t.contiguous().view(torch.uint8).flatten() for t in tensors.values()]), 0, group)
    else:
        for tensor in tensors.values():
            dist.broadcast(tensor, 0, group)
    print("sent", flush=True)
sys.stdin.readline()
"""


class Trainer:
    """A plain torch process that is rank 0 of the group."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        await self.process.stdin.drain()


@asynccontextmanager
async def trainer(client: Client, folder: Path, steps: str, name: str = "g1") -> AsyncIterator[Trainer]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(TRAINER), str(folder), name, steps,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    port = int(await process.stdout.readline())
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "group_name": name}
    try:
        await client.post("/init_weights_update_group", {**body, "backend": "gloo"})
        yield Trainer(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def manifest(folder: Path, **more: Any) -> dict[str, Any]:
    tensors = load_file(folder / "model.safetensors")
    return {
        "names": list(tensors),
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
        "group_name": "g1",
        **more,
    }


async def test_weights_arrive_over_a_gloo_group(
    client: Client, model: Any, other_model: Any, folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    """Tensor by tensor, then again as one bucket, from another dtype; the second waits for a running request."""
    third = make_model(seed=11).to(torch.bfloat16)
    async with trainer(client, other_folder, "each") as peer:
        refused = await client.post("/update_weights_from_distributed", manifest(other_folder), 400)
        assert "between begin_weight_update" in refused["message"]
        await client.post("/begin_weight_update")
        assert "open already" in (await client.post("/begin_weight_update", status=400))["message"]
        await peer.go()
        await client.post("/update_weights_from_distributed", manifest(other_folder, weight_version="4"))
        await client.post("/end_weight_update")
        assert "no weight update is open" in (await client.post("/end_weight_update", status=400))["message"]
        await check_serves(client, other_model)
        assert (await client.get("/model_info"))["weight_version"] == "4"
        again = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "g1"}
        assert "exists already" in (await client.post("/init_weights_update_group", again, 400))["message"]
        await client.post("/destroy_weights_update_group", {"group_name": "g1"})
        assert "no group" in (await client.post("/destroy_weights_update_group", {"group_name": "g1"}, 400))["message"]
    saved = save(third, tmp_path / "third")
    async with trainer(client, saved, "bucket") as peer, asyncio.TaskGroup() as group:
        running = group.create_task(client.generate(prompt(1), max_new_tokens=LONG))
        await client.until_running(1)
        await client.post("/begin_weight_update")
        assert running.done() or (await client.load())["num_running_reqs"] == 0
        held = group.create_task(client.generate(prompt(2), max_new_tokens=3))
        await peer.go()
        await client.post("/update_weights_from_distributed", manifest(saved, load_format="flattened_bucket"))
        assert not held.done()
        await client.post("/end_weight_update")
        await held
        await client.post("/destroy_weights_update_group", {"group_name": "g1"})
    await check_serves(client, type(third).from_pretrained(saved, dtype=torch.float32))


async def test_who_joins_a_group_leaves_the_one_before(client: Client, folder: Path) -> None:
    """The trainer forms one for each set of servers, and a server would keep them all, with their threads."""
    async with trainer(client, folder, "each"):
        pass
    async with trainer(client, folder, "each", name="g2"):
        assert "no group" in (await client.post("/destroy_weights_update_group", {"group_name": "g1"}, 400))["message"]
        await client.post("/destroy_weights_update_group", {"group_name": "g2"})


async def test_what_the_trainer_sent_along_is_compared_and_a_corrupt_broadcast_changes_nothing(
    client: Client, model: Any, other_model: Any, other_folder: Path
) -> None:
    tensors = load_file(other_folder / "model.safetensors")
    sums = [checksum(tensor) for tensor in tensors.values()]
    for wrong in (True, False):
        async with trainer(client, other_folder, "each") as peer:
            await client.post("/begin_weight_update")
            await peer.go()
            body = manifest(other_folder, weight_version="4", checksums=[sums[0] ^ wrong, *sums[1:]])
            reply = await client.post("/update_weights_from_distributed", body, 400 if wrong else 200)
            await client.post("/end_weight_update")
            if wrong:
                assert f"version 4: tensor {next(iter(tensors))} is corrupt (checksum {sums[0]:x}" in reply["message"]
            await check_serves(client, model if wrong else other_model)
            await client.post("/destroy_weights_update_group", {"group_name": "g1"})


async def test_a_corrupt_tensor_of_a_folder_is_named_and_the_old_weights_stay(
    client: Client, model: Any, other_model: Any, other_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "v4"
    shutil.copytree(other_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    listed = Manifest(version=4, tensors=(), checksums={name: checksum(tensor) for name, tensor in tensors.items()})
    (folder / FILE_NAME).write_bytes(dumps(listed))
    await update(client, folder, "4")
    await check_serves(client, other_model)
    name = sorted(tensors)[3]
    tensors[name].view(torch.uint8).view(-1)[5] ^= 16
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    reply = await update(client, folder, "5", 400)
    assert f"{folder}, version 4: tensor {name} is corrupt (checksum " in reply["message"]
    await check_serves(client, other_model)
    (folder / FILE_NAME).write_text("{}")
    assert "not a weight manifest" in (await update(client, folder, "5", 400))["message"]


async def test_a_broadcast_that_does_not_fit_is_refused_before_it_starts(
    client: Client, model: Any, folder: Path
) -> None:
    async with trainer(client, folder, "each"):
        await client.post("/begin_weight_update")
        good = manifest(folder)
        for change, words in (
            ({"names": ["nothing", *good["names"][1:]]}, "tensor nothing is not part"),
            ({"shapes": [[1], *good["shapes"][1:]]}, "has shape [1]"),
            ({"dtypes": ["int8", *good["dtypes"][1:]]}, "dtype 'int8'"),
            ({"dtypes": good["dtypes"][1:]}, "one entry a tensor"),
            ({"checksums": [1]}, "one entry a tensor"),
            ({"load_format": "zip"}, "load_format 'zip'"),
            ({"group_name": "g2"}, "no group 'g2'"),
        ):
            reply = await client.post("/update_weights_from_distributed", {**good, **change}, 400)
            assert words in reply["message"]
        await client.post("/end_weight_update")
        await check_serves(client, model)
        await client.post("/destroy_weights_update_group", {"group_name": "g1"})


async def test_a_trainer_that_dies_does_not_wedge_the_server(client: Client, model: Any, folder: Path) -> None:
    async with trainer(client, folder, "die") as peer:
        await client.post("/begin_weight_update")
        async with asyncio.TaskGroup() as group:
            failed = group.create_task(client.post("/update_weights_from_distributed", manifest(folder), 400))
            await client.get("/health")
            await peer.go()
        assert "the broadcast failed" in failed.result()["message"]
        await client.post("/end_weight_update")
        await check_serves(client, model)
        await client.post("/destroy_weights_update_group", {"group_name": "g1"})


async def test_a_trainer_that_goes_while_the_group_is_formed_is_given_up_at_once(client: Client) -> None:
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    body = {"master_address": "127.0.0.1", "rank_offset": 1, "world_size": 2, "group_name": "g1", "backend": "gloo"}
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        joining = group.create_task(client.post("/init_weights_update_group", {**body, "master_port": store.port}, 400))
        await asyncio.sleep(0.3)
        assert not joining.done()
        del store
    assert "group g1: cannot join" in joining.result()["message"]


async def test_a_trainer_that_never_comes_is_given_up(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "CONNECT_TIMEOUT", weights_module.timedelta(seconds=0.3))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "group_name": "g1"}
    async with asyncio.TaskGroup() as group:
        joining = group.create_task(client.post("/init_weights_update_group", {**body, "backend": "gloo"}, 400))
        assert len((await client.generate(prompt(1), max_new_tokens=3))["output_ids"]) == 3, "it serves meanwhile"
    assert "group g1: cannot join at tcp://127.0.0.1" in joining.result()["message"]
    for change, words in (
        ({"backend": "smoke"}, "no backend 'smoke'"),
        ({"backend": "nccl"}, "nccl"),
        ({"rank_offset": 0}, "rank_offset 0"),
    ):
        reply = await client.post("/init_weights_update_group", {**body, "backend": "gloo", **change}, 400)
        assert words in reply["message"]
