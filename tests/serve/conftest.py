from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from .harness import Client, make_model, save, serving


@pytest.fixture(scope="session")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="session")
def other_model() -> Any:
    """The same architecture with other weights."""
    return make_model(seed=7)


@pytest.fixture(scope="session")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def other_folder(other_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(other_model, tmp_path_factory.mktemp("other"))


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[Client]:
    async with serving(folder) as client:
        yield client
