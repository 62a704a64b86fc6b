"""A request that the proxy moves between two real servers: the same tokens, and nothing is prefilled twice."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyncrl.config import EngineConfig
from asyncrl.core.policy.routing import RequestView
from asyncrl.engine.sglang import SGLangEngine
from asyncrl.ports import EngineRejected
from asyncrl.runtime.generation import Completion, Prompt
from asyncrl.runtime.instance import Instance
from asyncrl.runtime.llm_proxy import LLMProxy
from asyncrl.runtime.trajectory_server import Start
from asyncrl.sim.trace import TraceRecorder

from .harness import CONTEXT, Client, make_model, prompt, save, serving

PROMPT = prompt(4, 150)
NEW = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends by itself."""
    return save(make_model(eos_token_id=None), tmp_path_factory.mktemp("endless"))


class Fleet:
    """Servers ``a`` and ``b`` behind a proxy that sends everything to ``to``."""

    def __init__(self, a: Client, b: Client, proxy: LLMProxy) -> None:
        self.servers = {"a": a, "b": b}
        self.proxy = proxy
        self.to = "a"

    def route(self, instances: Sequence[Instance]) -> Instance | None:
        return next(i for i in instances if i.name == self.to)

    async def generate(self, ids: list[int], after: Completion | None = None, new: int = NEW) -> Completion:
        home = {} if after is None else {"home": after.server, "prefix": len(ids) - 3, "after": after.versions[-1]}
        wanted = Prompt(ids=array("i", ids), start=Start(0), max_new_tokens=new, temperature=0.0, **home)
        return (await self.proxy.generate(wanted))[0]

    async def moved(self, ids: list[int]) -> Completion:
        """A request that is cut on ``a`` in the middle, and goes on at ``b``."""
        a, b = self.proxy.instances
        enough = a.generated + NEW // 4
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            task = group.create_task(self.generate(ids))
            while a.generated < enough:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            self.to = "b"
            for rid in list(a.rids.values()):
                await a.engine.abort(rid)
        assert b.generated > 0
        return task.result()

    async def prefilled(self, name: str) -> int:
        number: int = (await self.servers[name].info())["prefilled_tokens"]
        return number


@asynccontextmanager
async def fleet(folder: Path, *, kv_reuse: bool) -> AsyncIterator[Fleet]:
    config = EngineConfig(kv_reuse=kv_reuse, stream_interval=4)
    async with serving(folder, kv_reuse=True) as a, serving(folder, kv_reuse=True) as b:
        engines = [
            SGLangEngine(client.url, name, config, rng=random.Random(0)) for name, client in (("a", a), ("b", b))
        ]
        made: list[Fleet] = []

        def route(view: RequestView, instances: Sequence[Instance]) -> Instance | None:
            return made[0].route(instances)

        proxy = LLMProxy(route=route, observer=TraceRecorder(), context_length=CONTEXT)
        made.append(Fleet(a, b, proxy))
        for engine in engines:
            proxy.add(engine, await engine.connect())
        try:
            yield made[0]
        finally:
            for engine in engines:
                await engine.close()


@pytest.mark.parametrize("kv_reuse", [True, False])
async def test_a_request_that_moves_takes_its_kv_along(folder: Path, kv_reuse: bool) -> None:
    async with fleet(folder, kv_reuse=kv_reuse) as two:
        whole = await two.generate(PROMPT)
        await two.servers["a"].post("/flush_cache")
        moved = await two.moved(PROMPT)
        assert (moved.output_ids, moved.interruptions, moved.server) == (whole.output_ids, 1, "b")
        assert moved.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
        # What the proxy's books say of it is what the server did.
        before = len(PROMPT) + NEW // 4
        assert (await two.prefilled("b") == 0) if kv_reuse else (await two.prefilled("b") >= before)
        assert (two.proxy.instances[1].prefilled == 0) is kv_reuse


async def test_the_next_turn_at_another_server_takes_it_along_too(folder: Path) -> None:
    async with fleet(folder, kv_reuse=True) as two:
        first = await two.generate(PROMPT)
        two.to = "b"
        ids = [*PROMPT, *first.output_ids, 7, 8, 9]
        second = await two.generate(ids, after=first)
        assert await two.prefilled("b") == 3
        assert two.proxy.instances[1].prefilled == 3
        # And back, where most of it still is: only what is new there travels or is computed.
        two.to = "a"
        before = await two.prefilled("a")
        await two.generate([*ids, *second.output_ids, 7, 8, 9], after=second)
        assert await two.prefilled("a") == before + 3


async def test_newer_weights_are_given_no_kv_of_older_ones(folder: Path, other_folder: Path) -> None:
    async with fleet(folder, kv_reuse=True) as two:
        first = await two.generate(PROMPT)
        await two.proxy.instances[1].engine.load_from_disk(str(other_folder), 1)
        two.proxy.set_version(two.proxy.instances[1], 1)
        two.to = "b"
        ids = [*PROMPT, *first.output_ids, 7, 8, 9]
        await two.generate(ids, after=first)
        assert await two.prefilled("b") == len(ids) - 1
        assert not any((await two.servers["b"].info())["kv_transfers"].values())  # it was not even asked for


async def test_a_server_without_the_option_is_refused(folder: Path) -> None:
    async with serving(folder) as client:
        engine = SGLangEngine(client.url, "a", EngineConfig(kv_reuse=True), rng=random.Random(0))
        with pytest.raises(EngineRejected, match=r"started without --kv-reuse; start it with that, or set engine\.kv"):
            await engine.connect()
        await engine.close()
