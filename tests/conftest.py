"""Settings of every test: property tests have no deadline, because a busy machine is no failure; and temporary files
are made where pytest removes them, because its processes (xdist's workers) may end without tidying up."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("asyncrl", deadline=None)
settings.load_profile("asyncrl")


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = str(tmp_path_factory.mktemp("t"))  # short: sockets' paths have some 100 characters at most
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
