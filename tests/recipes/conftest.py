"""What the tests of recipes share."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def setup(request: pytest.FixtureRequest) -> ModuleType:
    """``setup.py`` of the recipe whose folder the test's module names ``RECIPE``."""
    folder = request.module.RECIPE
    spec = importlib.util.spec_from_file_location(f"{folder.name}_setup", folder / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
