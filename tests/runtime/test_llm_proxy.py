"""LLMProxy on virtual time: queue scheduling, interruption, failover, and books that survive every cancellation."""

from __future__ import annotations

import asyncio
import math
import random
from array import array

import pytest

from asyncrl.core.policy.routing import round_robin
from asyncrl.core.types import Turn
from asyncrl.ports import Chunk, EngineRejected
from asyncrl.runtime.generation import Completion, Prompt
from asyncrl.runtime.llm_proxy import MAX_FRUITLESS, LLMProxy
from asyncrl.runtime.trajectory_server import Start
from asyncrl.sim.engine import GENERATED, SimEngine
from asyncrl.sim.loop import run

from .world import aim, cancelled_at, proxy_over, sim_engine


def prompt(v_traj: int = 0, limit: int = 100, length: int = 10) -> Prompt:
    return Prompt(ids=array("i", [1]) * length, start=Start(v_traj), max_new_tokens=limit)


def whole(completion: Completion, length: int) -> bool:
    """All tokens of a response of ``length`` are there, once, in order."""
    return completion.output_ids.tolist() == [GENERATED + r for r in range(length - 1, -1, -1)]


def books_are_empty(proxy: LLMProxy) -> bool:
    return proxy.snapshot().waiting == 0 and all(i.running == 0 and i.tokens == 0 for i in proxy.instances)


def test_a_free_server_takes_the_next_request_at_once() -> None:
    """Queue scheduling: with one slot each, two servers finish five equal requests in three rounds."""

    async def main() -> float:
        proxy = await proxy_over(*(sim_engine(f"server {i}", max_running=1, prefix_cache=False) for i in range(2)))
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(proxy.generate(prompt()))
        assert books_are_empty(proxy)
        return asyncio.get_running_loop().time()

    async def alone() -> float:
        await (await proxy_over(sim_engine())).generate(prompt())
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(3 * run(alone()))


def test_the_oldest_trajectory_goes_first() -> None:
    async def main() -> list[int]:
        proxy = await proxy_over(sim_engine(max_running=1))
        proxy.set_version(proxy.instances[0], 5)
        proxy.instances[0].engine.version = 5  # type: ignore[attr-defined]
        order: list[int] = []

        async def one(v_traj: int) -> None:
            await proxy.generate(prompt(v_traj))
            order.append(v_traj)

        async with asyncio.TaskGroup() as group:
            for v_traj in (5, 3, 4, 1):
                group.create_task(one(v_traj))
        return order

    assert run(main()) == [5, 1, 3, 4]  # the first found the server free


def test_a_server_older_than_the_trajectory_is_never_used() -> None:
    async def main() -> set[str]:
        old, new = sim_engine("old"), sim_engine("new", max_running=1)
        proxy = await proxy_over(old, new)
        new.version = 2
        proxy.set_version(proxy.instances[1], 2)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(proxy.generate(prompt(v_traj=2))) for _ in range(4)]
        return {task.result()[0].server for task in tasks}

    assert run(main()) == {"new"}


def test_interrupted_requests_go_on_with_their_tokens_and_record_versions() -> None:
    async def main() -> list[Completion]:
        proxy = await proxy_over(*(sim_engine(f"server {i}", length=60) for i in range(2)))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(proxy.generate(prompt())) for _ in range(6)]
            await asyncio.sleep(0.3)
            paused = await proxy.suspend("interrupt")
            assert [i.name for i in paused] == ["server 0", "server 1"]
            await asyncio.sleep(5)
            assert proxy.snapshot().running == 0
            for instance in paused:
                instance.engine.version = 1  # type: ignore[attr-defined]
                proxy.set_version(instance, 1)
            await proxy.resume()
        assert books_are_empty(proxy)
        return [task.result()[0] for task in tasks]

    for completion in run(main()):
        assert whole(completion, 60)
        assert completion.interruptions == 1
        assert sorted(completion.versions) == completion.versions.tolist()
        assert set(completion.versions) == {0, 1}
        assert len(completion.logprobs) == len(completion.versions) == 60


def test_draining_lets_requests_end_and_starts_none() -> None:
    async def main() -> None:
        proxy = await proxy_over(sim_engine(length=50, max_running=2))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(proxy.generate(prompt())) for _ in range(4)]
            await asyncio.sleep(0.1)
            await proxy.suspend("drain")
            assert [t.done() for t in tasks] == [True, True, False, False]
            assert proxy.snapshot().running == 0
            await proxy.resume()
        assert all(whole(t.result()[0], 50) and t.result()[0].interruptions == 0 for t in tasks)

    run(main())


@pytest.mark.parametrize("interval", [0, 7])
def test_a_dying_server_costs_only_what_it_had_not_streamed(interval: int) -> None:
    async def main() -> list[Completion]:
        engines = [sim_engine(f"server {i}", length=80, stream_interval=interval) for i in range(2)]
        proxy = await proxy_over(*engines)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(proxy.generate(prompt())) for _ in range(4)]
            await asyncio.sleep(0.5)
            engines[0].kill()
        assert not proxy.instances[0].up
        assert books_are_empty(proxy)
        return [task.result()[0] for task in tasks]

    for completion in run(main()):
        assert whole(completion, 80)
        assert completion.server == "server 1"


def test_n_replies_of_one_request_survive_an_interruption() -> None:
    async def main() -> list[Completion]:
        lengths = iter([30, 60, 90])
        engine = SimEngine("server 0", rng=random.Random(0), lengths=lambda rng, ids: next(lengths))
        proxy = await proxy_over(engine)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(proxy.generate(prompt(), n=3))
            await asyncio.sleep(0.5)
            assert proxy.instances[0].running == 3
            await proxy.suspend("interrupt")
            await proxy.resume()
        assert books_are_empty(proxy)
        return task.result()

    completions = run(main())
    assert [whole(c, n) for c, n in zip(completions, (30, 60, 90), strict=True)] == [True] * 3
    assert [c.interruptions for c in completions] == [0, 1, 1]


def test_a_request_cut_at_its_last_token_ends_there() -> None:
    async def main() -> None:
        class CutAtLimit(SimEngine):
            async def generate(self, request):  # type: ignore[no-untyped-def]
                n = request.max_new_tokens
                zeros = array("i", [0]) * n
                yield Chunk(output_ids=zeros, logprobs=array("f", zeros), versions=zeros, finish_reason="abort")

        proxy = await proxy_over(CutAtLimit("s", rng=random.Random(0), lengths=lambda rng: 1))
        [completion] = await proxy.generate(prompt(limit=5))
        assert completion.finish_reason == "length"
        assert len(completion.output_ids) == 5

    run(main())


@pytest.mark.parametrize("limit", [8, 5])
def test_what_a_run_had_before_its_limit_was_lowered_is_whole(limit: int) -> None:
    """And no mean is made of tokens that nobody generated here."""

    async def main() -> None:
        proxy = await proxy_over()
        ids = array("i", range(8))
        begun = Turn(
            prompt_ids=array("i", [1]), output_ids=ids, logprobs=array("f", ids), versions=ids, finish_reason=""
        )
        [done] = await proxy.generate(Prompt(ids=array("i", [1]), start=Start(0), max_new_tokens=limit, begun=begun))
        assert (done.output_ids, done.finish_reason) == (ids, "length")
        assert proxy.snapshot().mean_new_tokens == math.inf

    run(main())


def test_a_server_that_aborts_everything_is_given_up() -> None:
    class Aborting(SimEngine):
        requests = 0

        async def generate(self, request):  # type: ignore[no-untyped-def]
            self.requests += 1
            yield Chunk(output_ids=array("i"), logprobs=array("f"), versions=array("i"), finish_reason="abort")

    async def main() -> int:
        engine = Aborting("s", rng=random.Random(0), lengths=lambda rng: 1)
        proxy = await proxy_over(engine)
        with pytest.raises(EngineRejected, match="without a token"):
            await proxy.generate(prompt())
        assert books_are_empty(proxy)
        return engine.requests

    assert run(main()) == MAX_FRUITLESS


def test_a_request_that_updates_cut_again_and_again_is_not_given_up() -> None:
    """Its prompt takes longer than the time between two of them."""

    async def main() -> Completion:
        proxy = await proxy_over(sim_engine())
        async with asyncio.TaskGroup() as group:
            task = group.create_task(proxy.generate(prompt()))
            for _ in range(2 * MAX_FRUITLESS):
                await asyncio.sleep(1e-6)
                await proxy.suspend("interrupt")
                await proxy.resume()
        return task.result()[0]

    completion = run(main())
    assert completion.interruptions > MAX_FRUITLESS
    assert completion.finish_reason == "stop"


def test_prompts_beyond_the_context_are_refused_with_the_key() -> None:
    async def main() -> None:
        proxy = await proxy_over(sim_engine())
        for length, limit in ((1000, 1), (990, 50)):
            with pytest.raises(EngineRejected, match=r"rollout\.max_tokens"):
                await proxy.generate(prompt(length=length, limit=limit))

    run(main())


@pytest.mark.parametrize("held", [0, 2])
def test_tokens_of_a_version_that_a_server_was_not_given_are_not_used(held: int) -> None:
    """It was restarted with its first weights, or somebody else gives it some."""

    async def main() -> tuple[LLMProxy, Completion]:
        engines = [sim_engine(f"server {i}", length=20) for i in range(2)]
        proxy = await proxy_over(*engines)
        for instance, version in zip(proxy.instances, (held, 1), strict=True):
            proxy.set_version(instance, 1)
            instance.engine.version = version  # type: ignore[attr-defined]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(proxy.generate(prompt())) for _ in range(2)]
        assert all(set(task.result()[0].versions) == {1} for task in tasks)
        return proxy, tasks[0].result()[0]

    proxy, completion = run(main())
    assert whole(completion, 20) and completion.server == "server 1"
    assert [instance.up for instance in proxy.instances] == [False, True]


def test_a_version_never_goes_backwards() -> None:
    async def main() -> None:
        proxy = await proxy_over(sim_engine())
        proxy.set_version(proxy.instances[0], 3)
        with pytest.raises(ValueError, match="back from version 3 to 2"):
            proxy.set_version(proxy.instances[0], 2)

    run(main())


def test_cancelling_a_request_at_any_await_frees_its_room() -> None:
    """One victim among others that compete for two slots; after its end the others finish and the books are empty."""
    turn, ended = 1, 0
    while True:
        proxies: list[LLMProxy] = []
        finished: list[Completion] = []

        async def main(proxies: list[LLMProxy] = proxies, finished: list[Completion] = finished) -> None:
            nonlocal ended
            proxy = await proxy_over(sim_engine(length=12, max_running=2, stream_interval=4))
            proxies.append(proxy)

            async def other() -> None:
                finished.extend(await proxy.generate(prompt()))

            async def disturb() -> None:
                await asyncio.sleep(0.1)
                await proxy.suspend("interrupt")
                await asyncio.sleep(0.1)
                await proxy.resume()

            async with asyncio.TaskGroup() as group:
                for work in (other, other, disturb):
                    group.create_task(work())
                aim(group.create_task(proxy.generate(prompt())))
                group.create_task(other())
            assert len(finished) == 3 and all(whole(c, 12) for c in finished)
            ended += 1

        hit = cancelled_at(turn, main())
        assert not proxies or books_are_empty(proxies[0])
        if not hit:
            break
        turn += 1
    assert ended > 20, "the sweep must have cancelled the victim at many awaits while the others went on"


def test_a_cancellation_that_meets_a_refusal_is_not_lost() -> None:
    async def main() -> None:
        proxy = await proxy_over()  # no server: the request waits
        task = asyncio.get_running_loop().create_task(proxy.generate(prompt()))
        await asyncio.sleep(0)
        proxy.refuse([request.view.id for request in proxy.waiting], "its servers are gone")
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert books_are_empty(proxy)

    run(main())


def test_static_routing_holds_only_those_of_the_same_server() -> None:
    """Round robin over a slow and a fast server with one slot each: the fast one's requests do not wait for the slow
    one's, and each server plays exactly its own."""

    async def main() -> dict[str, list[float]]:
        engines = [sim_engine("slow", length=100, max_running=1), sim_engine("fast", length=10, max_running=1)]
        proxy = await proxy_over(*engines, route=round_robin)
        ended: dict[str, list[float]] = {"slow": [], "fast": []}

        async def one() -> None:
            [completion] = await proxy.generate(prompt())
            ended[completion.server].append(asyncio.get_running_loop().time())

        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(one())
        assert books_are_empty(proxy)
        return ended

    ended = run(main())
    assert [len(times) for times in ended.values()] == [3, 3]
    assert max(ended["fast"]) < min(ended["slow"])


def test_requests_that_wait_for_a_server_that_dies_go_elsewhere() -> None:
    async def main() -> list[str]:
        engines = [sim_engine(f"server {i}", max_running=1) for i in range(2)]
        proxy = await proxy_over(*engines, route=round_robin)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(proxy.generate(prompt())) for _ in range(6)]
            await asyncio.sleep(0.01)
            engines[1].kill()
        assert books_are_empty(proxy)
        return [completion.server for task in tasks for completion in task.result()]

    assert run(main()) == ["server 0"] * 6
