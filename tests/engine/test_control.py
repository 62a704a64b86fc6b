"""SGLangEngine's control calls: what is asked in which order, what is repeated, and what is not believed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncrl.engine import buckets, sglang
from asyncrl.engine.sglang import SGLangEngine
from asyncrl.ports import EngineError, EngineInfo, EngineLoad, EngineRejected

from .scripted import Answer, Exchange, Server, collect, finished, hangs, hangs_up, make_engine, refuses
from .test_generate import Abortable

Make = Callable[..., SGLangEngine]


def in_turn(*answers: Answer) -> Answer:
    """Each answer once, the last one for ever."""
    rest = list(answers)

    async def answer(exchange: Exchange) -> web.StreamResponse:
        return await (rest.pop(0) if len(rest) > 1 else rest[0])(exchange)

    return answer


OK = refuses(200, {"success": True, "message": "ok"})


# --- connect, health, load


async def test_connect_describes_the_server(server: Server, make: Make) -> None:
    server.control["/model_info"]["weight_version"] = "12"
    assert await make().connect() == EngineInfo(
        name="s0", version=12, max_running_requests=4, max_total_tokens=1000, context_length=90
    )


async def test_connect_waits_until_the_server_is_healthy(server: Server, make: Make) -> None:
    server.on_control["/health"] = in_turn(refuses(503), hangs_up(), refuses(503), refuses(500), refuses(200, ""))
    async with asyncio.timeout(5):
        assert (await make(retries=0).connect()).version == 0
    assert len(server.asked("/health")) == 5


async def test_connect_gives_up_at_its_deadline_and_says_what_was_wrong(make: Make, server: Server) -> None:
    server.on_control["/health"] = refuses(503, "loading")
    async with asyncio.timeout(3):
        with pytest.raises(EngineError, match=r"s0 .*connect_timeout_s.*loading"):
            await make(connect_timeout_s=0.3).connect()


async def test_connect_gives_up_at_once_on_what_is_no_inference_server(server: Server, make: Make) -> None:
    server.on_control["/health"] = refuses(404, "<html>not found</html>")
    async with asyncio.timeout(2):
        with pytest.raises(EngineError, match="404"):
            await make().connect()
    assert len(server.asked("/health")) == 1


async def test_connect_refuses_another_model(server: Server, make: Make) -> None:
    server.control["/model_info"]["model_type"] = "llama"
    with pytest.raises(EngineError, match=r"serves a llama .*trains a qwen3"):
        await make().connect()


@pytest.mark.parametrize("preferred", [{"top_k": 20, "presence_penalty": 1.5}, '{"min_p": 0.1}'])
async def test_connect_refuses_a_server_that_samples_otherwise_than_it_is_asked(
    server: Server, make: Make, preferred: Any
) -> None:
    server.control["/model_info"]["preferred_sampling_params"] = preferred
    with pytest.raises(EngineError, match=r"s0 .*--preferred-sampling-params, .*; start it without"):
        await make().connect()
    server.control["/model_info"]["preferred_sampling_params"] = None
    await make().connect()


async def test_connect_refuses_what_is_not_json(server: Server, make: Make) -> None:
    server.on_control["/server_info"] = refuses(200, "<html>welcome</html>")
    with pytest.raises(EngineError, match=r"s0 .*server_info.*<html>"):
        await make().connect()


@pytest.mark.parametrize(
    ("answer", "healthy"),
    [(refuses(200, ""), True), (refuses(503), False), (hangs_up(), False), (hangs(headers=False), False)],
)
async def test_health_is_an_answer_in_time(
    server: Server, make: Make, monkeypatch: pytest.MonkeyPatch, answer: Answer, healthy: bool
) -> None:
    monkeypatch.setattr(sglang, "HEALTH_TIMEOUT_S", 0.5)
    server.on_control["/health"] = answer
    async with asyncio.timeout(3):
        assert await make().health() is healthy


async def test_a_paused_server_of_sglang_is_healthy(
    server: Server, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its /health generates a token, which a pause holds back."""
    monkeypatch.setattr(sglang, "HEALTH_TIMEOUT_S", 0.5)
    server.on_control["/health"] = hangs(headers=False)
    engine = make(kind="sglang", connect_timeout_s=2.0)
    assert await engine.health()
    assert (await engine.connect()).version == 0
    assert not server.asked("/health")


async def test_a_server_of_sglang_whose_scheduler_hangs_is_not_connected(server: Server, make: Make) -> None:
    """Its HTTP side answers where its scheduler hangs."""
    server.on_control["/server_info"] = hangs(headers=False)
    engine = make(kind="sglang", connect_timeout_s=0.3)
    assert await engine.health()
    with pytest.raises(EngineError, match=r"not ready within engine.connect_timeout_s"):
        await engine.connect()


async def test_a_server_that_is_not_there_is_not_healthy() -> None:
    engine = make_engine("http://127.0.0.1:9")
    assert not await engine.health()
    await engine.close()


async def test_load_sums_the_replicas_behind_one_address(server: Server, make: Make) -> None:
    one = {"num_running_reqs": 3, "num_waiting_reqs": 1, "num_used_tokens": 50, "token_usage": 0.1}
    server.control["/v1/loads"] = {"loads": [one, one], "version": "0.5.23"}
    assert await make().load() == EngineLoad(running=6, waiting=2, used_tokens=100)


async def test_control_calls_do_not_share_connections(server: Server, make: Make) -> None:
    """One that must not be repeated has to know that it never met a connection which the server had just dropped."""
    engine = make()
    for _ in range(3):
        await engine.resume()
    assert len({exchange.peer for exchange in server.exchanges}) == 3


async def test_a_control_call_has_a_deadline(server: Server, make: Make) -> None:
    server.on_control["/continue_generation"] = hangs(headers=False)
    async with asyncio.timeout(3):
        with pytest.raises(EngineError, match=r"continue_generation within 0.2 s"):
            await make(control_timeout_s=0.2).resume()


# --- pause and resume


async def test_pause_ends_what_runs_before_it_pauses(server: Server, make: Make) -> None:
    engine = make()
    Abortable(server, begins=True)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(collect(engine))
        await server.until(lambda: server.open == 1)
        await asyncio.sleep(0.02)
        await engine.pause()
        assert [x.path for x in server.exchanges] == ["/generate", "/abort_request", "/pause_generation"]
        assert task.done() or server.open == 0
    assert server.asked("/abort_request") == [{"abort_all": True}]
    assert server.asked("/pause_generation") == [{"mode": "abort"}]
    assert task.result()[-1].finish_reason == "abort"


async def test_pause_waits_until_what_it_aborted_has_ended(server: Server, make: Make) -> None:
    """Else SGLang's own pause finds it running, and looks again only a second later."""
    engine = make()
    script = Abortable(server, begins=True, slow_s=0.1)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(collect(engine))
        await server.until(lambda: server.open == 1)
        pausing = group.create_task(engine.pause())
        await script.heard.wait()
        await asyncio.sleep(0.05)
        assert not server.asked("/pause_generation")
        await pausing
    assert [x.path for x in server.answered] == ["/abort_request", "/generate", "/pause_generation"]
    assert task.result()[-1].finish_reason == "abort"


async def test_pause_does_not_wait_for_ever_for_what_does_not_end(
    server: Server, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "ABORT_GRACE_S", 0.1)
    engine = make()
    server.answers = [hangs()]
    async with asyncio.timeout(3), asyncio.TaskGroup() as group:
        task = group.create_task(collect(engine))
        await server.until(lambda: server.open == 1)
        await engine.pause()
        task.cancel()
    assert len(server.asked("/pause_generation")) == 1


async def test_pause_of_an_idle_server_aborts_nothing(server: Server, make: Make) -> None:
    engine = make()
    await engine.pause()
    await engine.resume()
    assert [x.path for x in server.exchanges] == ["/pause_generation", "/continue_generation"]
    assert server.asked("/continue_generation") == [{}]


async def test_abort_of_a_request_that_a_pause_holds_is_immediate(server: Server, make: Make) -> None:
    engine = make()
    await engine.pause()
    server.answers = [hangs()]
    async with asyncio.timeout(1), asyncio.TaskGroup() as group:
        task = group.create_task(collect(engine))
        await server.until(lambda: server.open == 1)
        await engine.abort("r1")
    assert [chunk.finish_reason for chunk in task.result()] == ["abort"]


@pytest.mark.parametrize("call", ["pause", "resume"])
async def test_pause_and_resume_are_repeated(server: Server, make: Make, call: str) -> None:
    path = {"pause": "/pause_generation", "resume": "/continue_generation"}[call]
    server.on_control[path] = in_turn(hangs_up(), refuses(503), OK)
    await getattr(make(), call)()
    assert len(server.asked(path)) == 3


# --- weights


async def test_weights_from_disk_are_checked_by_their_version(server: Server, make: Make) -> None:
    server.control["/model_info"]["weight_version"] = "7"
    engine = make()
    await engine.load_from_disk("/weights/7", 7)
    assert server.asked("/update_weights_from_disk") == [{"model_path": "/weights/7", "weight_version": "7"}]
    with pytest.raises(EngineError, match=r"'7' after it was given version 8"):
        await engine.load_from_disk("/weights/8", 8)


@pytest.mark.parametrize("answer", [refuses(503), hangs_up(), refuses(500), refuses(200, {"success": False})])
async def test_an_update_is_never_repeated(server: Server, make: Make, answer: Answer) -> None:
    server.on_control["/update_weights_from_disk"] = answer
    with pytest.raises(EngineError):
        await make().load_from_disk("/weights/1", 1)
    assert len(server.asked("/update_weights_from_disk")) == 1


async def test_an_update_that_fails_says_why(server: Server, make: Make) -> None:
    server.on_control["/update_weights_from_disk"] = refuses(400, {"success": False, "message": "no such folder"})
    with pytest.raises(EngineRejected, match="no such folder"):
        await make().load_from_disk("/weights/1", 1)


async def test_join_group_says_who_is_who(server: Server, make: Make) -> None:
    await make().join_group("10.0.0.1", 4711, 3, 5, "g", "nccl")
    assert server.asked("/init_weights_update_group") == [
        {
            "master_address": "10.0.0.1",
            "master_port": 4711,
            "rank_offset": 3,
            "world_size": 5,
            "group_name": "g",
            "backend": "nccl",
        }
    ]


@pytest.mark.parametrize("answer", [{"success": True}, refuses(400, {"success": False, "message": "no such group"})])
async def test_a_server_leaves_a_group_before_it_joins_the_next(server: Server, make: Make, answer: Any) -> None:
    if callable(answer):
        server.on_control["/destroy_weights_update_group"] = answer
    engine = make()
    for group in ("g1", "g2"):
        await engine.join_group("10.0.0.1", 4711, 1, 2, group, "gloo")
    join, leave = "/init_weights_update_group", "/destroy_weights_update_group"
    assert [(x.path, x.body["group_name"]) for x in server.exchanges] == [(join, "g1"), (leave, "g1"), (join, "g2")]


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"hidden_size": 96}, r"hidden_size = 96 \(.*theirs\), the recipe's has 64; start it with .* model\.path"),
        ({"hidden_size": 64, "text_config": {"num_hidden_layers": 3}}, r"num_hidden_layers = 3 .* has 2"),
    ],
)
async def test_a_model_of_another_size_is_refused_where_its_folder_can_be_read(
    server: Server, make: Make, tmp_path: Path, theirs: dict[str, Any], said: str
) -> None:
    for name, table in (("ours", {"hidden_size": 64, "num_hidden_layers": 2}), ("theirs", theirs)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(table))
    engine = make(model_path=str(tmp_path / "ours"))
    for harmless in ("/srv/models/m", "org/name", str(tmp_path / "ours")):
        server.control["/server_info"]["model_path"] = harmless
        await engine.connect()
    server.control["/server_info"]["model_path"] = str(tmp_path / "theirs")
    server.control["/model_info"]["model_path"] = "weights/that/are/gone"
    with pytest.raises(EngineError, match=said):
        await engine.connect()


async def test_a_wrong_key_is_one_line_that_says_where_it_is_set(server: Server, make: Make) -> None:
    server.on_control["/server_info"] = refuses(401, {"error": "Unauthorized"})
    with pytest.raises(EngineRejected, match=r"answered 401: Unauthorized; set ASYNCRL_TOKEN to the key .*--api-key"):
        await make().connect()


async def test_a_server_says_how_many_members_of_a_group_it_is(server: Server, make: Make) -> None:
    engine = make()
    await engine.connect()
    assert engine.ranks == 1
    server.control["/server_info"] |= {"tp_size": 4, "dp_size": 1, "pp_size": 1}
    await engine.connect()  # it was started again, otherwise
    assert engine.ranks == 4


@pytest.mark.parametrize("replicas", ["dp_size", "pp_size"])
async def test_replicas_that_no_group_can_take_are_refused_before_it_waits_for_them(
    server: Server, make: Make, replicas: str
) -> None:
    engine = make()
    server.control["/server_info"] |= {"tp_size": 2, replicas: 2}
    await engine.connect()
    with pytest.raises(EngineRejected, match=r'--dp-size or --pp-size .* weights\.transport = "disk" or "relay"'):
        await engine.join_group("10.0.0.1", 4711, 1, 3, "g", "nccl")
    assert not server.asked("/init_weights_update_group")


SHAPES = [[2, 3], [4], [1000], [8], [8]]
NAMES = [f"w{i}" for i in range(len(SHAPES))]


async def test_weights_from_a_group_come_in_order_in_pieces_within_one_session(
    server: Server, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 64)
    server.control["/model_info"]["weight_version"] = "2"
    await make().load_from_group(NAMES, ["bfloat16"] * 5, SHAPES, "g", 2)
    paths = [x.path for x in server.exchanges]
    pieces = server.asked("/update_weights_from_distributed")
    middle = ["/update_weights_from_distributed"] * len(pieces)
    assert paths == ["/begin_weight_update", *middle, "/end_weight_update", "/model_info"]
    assert [piece["names"] for piece in pieces] == [["w0", "w1"], ["w2"], ["w3", "w4"]]
    assert [shape for piece in pieces for shape in piece["shapes"]] == SHAPES
    # Only with the last one are the weights a version, and only then is there anything to flush for.
    assert [piece.get("weight_version") for piece in pieces] == [None, None, "2"]
    assert [piece.get("flush_cache", True) for piece in pieces] == [False, False, True]


async def test_a_weight_session_that_fails_is_closed(server: Server, make: Make) -> None:
    server.on_control["/update_weights_from_distributed"] = refuses(400, {"success": False, "message": "bad shape"})
    with pytest.raises(EngineError, match="bad shape"):
        await make().load_from_group(NAMES, ["float32"] * 5, SHAPES, "g", 1)
    assert [x.path for x in server.exchanges][-1] == "/end_weight_update"


async def test_a_weight_session_that_is_cancelled_is_closed(server: Server, make: Make) -> None:
    server.on_control["/update_weights_from_distributed"] = hangs(headers=False)
    engine = make()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(engine.load_from_group(NAMES, ["float32"] * 5, SHAPES, "g", 1))
        await server.until(lambda: bool(server.asked("/update_weights_from_distributed")))
        task.cancel()
    assert task.cancelled()
    assert [x.path for x in server.exchanges][-1] == "/end_weight_update"


async def test_a_client_that_was_never_used_can_be_closed() -> None:
    await make_engine("http://127.0.0.1:9").close()


async def test_close_leaves_no_server_paused(server: Server, make: Make) -> None:
    """It may be of use to others than the run that ends."""
    engine = make()
    await engine.pause()
    await engine.close()
    assert [x.path for x in server.exchanges] == ["/pause_generation", "/continue_generation"]


async def test_connect_may_be_given_less_time(make: Make, server: Server) -> None:
    server.on_control["/health"] = refuses(503, "loading")
    with pytest.raises(EngineError, match=r"s0 .*not ready within 0.2 s; .*loading"):
        await make(retries=0).connect(0.2)


async def test_close_leaves_no_connection(server: Server, make: Make) -> None:
    engine = make()
    server.answers = [finished(4)]
    await collect(engine)
    sessions: list[Any] = [engine._http.session(fresh=fresh) for fresh in (False, True)]
    await engine.close()
    assert all(session.closed for session in sessions)
