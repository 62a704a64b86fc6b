"""The figure scripts, imported as running them would: their neighbours are top-level modules."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

FIGURES = Path(__file__).resolve().parents[2] / "bench" / "figures"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``script("fig7")`` is that module."""
    monkeypatch.syspath_prepend(str(FIGURES))
    return importlib.import_module
