"""Runs the contract suite on each engine (``rigs.RIGS``), starting each server once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from asyncrl.ports import Engine

from .rigs import PROMPT, RIGS, SGLANG_PYTHON, Models, Rig
from .tiny_model import greedy, make_model


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*abilities): only for engines that can do this (contract/rigs.py)")


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    if SGLANG_PYTHON:
        return f"contract: the real SGLang runs with {SGLANG_PYTHON}"
    return "contract: NOT run on the real SGLang; set ASYNCRL_SGLANG_PYTHON=VENV/bin/python (launch/install_sglang.sh)"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    needed = {ability for mark in metafunc.definition.iter_markers("needs") for ability in mark.args}
    able = [rig for rig in RIGS if needed <= rig.can]
    for fixture in ("rig", "doomed"):
        if fixture in metafunc.fixturenames:
            parameters = [pytest.param(rig, id=rig.kind, marks=rig.marks) for rig in able]
            metafunc.parametrize(fixture, parameters, indirect=True, scope="module" if fixture == "rig" else None)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    first = make_model(root / "first", 0)
    path = greedy(first, PROMPT, 40)
    late = next(token for i, token in enumerate(path) if i >= 8 and token not in path[:i])
    return Models(first, make_model(root / "second", 1), make_model(root / "stops", 0, stop_instead_of=late))


def _started(kind: type[Rig], models: Models, folder: Path) -> Iterator[Rig]:
    rig = kind()
    rig.start(models.first, folder / f"{kind.kind}.log")
    try:
        yield rig
    finally:
        rig.stop()


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """The engine's server, the same for all tests. A test leaves it as it was: running, on ``models.first``."""
    yield from _started(request.param, models, tmp_path_factory.mktemp("server"))


@pytest.fixture
def doomed(request: pytest.FixtureRequest, models: Models, tmp_path: Path) -> Iterator[Rig]:
    """A server for one test, which may kill it."""
    yield from _started(request.param, models, tmp_path)


@pytest.fixture
async def engine(rig: Rig) -> AsyncIterator[Engine]:
    """A connected client."""
    client = rig.engine()
    await client.connect()
    try:
        yield client
        await client.resume()
    finally:
        await client.close()
