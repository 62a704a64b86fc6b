"""KV that SGLang servers share: its hierarchical cache (HiCache) with Mooncake as storage, one name for each version.

SGLang names what it stores by tokens and by what the client says of a request (``extra_key``); neither says by whose
weights it was computed. A server that restarted with its first weights would write KV of those under the name of the
version that the client takes it for, and others would read it. So no server starts with a storage: one is attached
after a version's weights were loaded, by the name of that version, and detached before the next ones are. What a
server computes before, or after a restart, stays its own.

Both calls need a server without requests, and an admin key, which is the run's token.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from asyncrl.engine.http import Http
from asyncrl.ports import EngineError, EngineRejected
from asyncrl.wire import AttachStorageReq

BACKEND = "mooncake"
TAG = "extra_backend_tag"
"""Of Mooncake's settings, what begins the name of all that is stored."""
PATH = "hicache/storage-backend"


class SharedKv:
    """One server's. ``settings`` are Mooncake's, the same for all servers; ``run`` is in every name."""

    def __init__(self, http: Http, settings: Mapping[str, Any], run: str, timeout_s: float) -> None:
        self._http = http
        self._settings = settings
        self._run = run
        self._timeout_s = timeout_s

    async def check(self) -> None:
        """Raises ``EngineRejected`` where the server cannot share."""
        try:
            await self.detach()
        except EngineError as error:
            raise self._http.rejected(
                f"cannot share KV ({error}); start it with --enable-hierarchical-cache and --admin-api-key "
                "$ASYNCRL_TOKEN, without --hicache-storage-backend, or set engine.kv_reuse = false"
            ) from None

    async def detach(self) -> None:
        """Before weights change. Raises ``EngineError``: then they must not."""
        try:
            await self._http.call("DELETE", PATH, timeout_s=self._timeout_s)
        except EngineRejected as error:  # it has requests still, and may be asked again
            raise EngineError(str(error)) from None

    async def attach(self, version: int) -> None:
        """The server holds ``version``. One that cannot attach a storage goes on without."""
        settings = {**self._settings, TAG: f"{self._run}-{version}"}
        body = AttachStorageReq(
            hicache_storage_backend=BACKEND,
            hicache_storage_backend_extra_config_json=msgspec.json.encode(settings).decode(),
        )
        with suppress(EngineError):
            await self._http.call("PUT", PATH, body=body, timeout_s=self._timeout_s)
