"""A scripted server and clients of it, which must all be idle in the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from asyncrl.engine.sglang import SGLangEngine

from .scripted import Server, make_engine, serving


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as server:
        yield server


@pytest.fixture
async def make(server: Server) -> AsyncIterator[Callable[..., SGLangEngine]]:
    """Makes a client of ``server`` with these settings."""
    made: list[SGLangEngine] = []

    def make(**settings: object) -> SGLangEngine:
        made.append(make_engine(server.url, **settings))
        return made[-1]

    yield make
    for engine in made:
        await engine.close()
        assert repr(engine) == "<SGLangEngine s0: 0 requests>"
    await server.until(lambda: server.open == 0)


@pytest.fixture
def engine(make: Callable[..., SGLangEngine]) -> SGLangEngine:
    return make()
