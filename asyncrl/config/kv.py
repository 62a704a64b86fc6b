"""Between which servers KV may go (``engine.kv_reuse``)."""

from __future__ import annotations

from urllib.parse import urlsplit

from asyncrl.access import is_loopback
from asyncrl.config.base import require
from asyncrl.config.recipe import EngineConfig


def check_kv(engine: EngineConfig) -> None:
    """Raises ``RecipeError``."""
    require(
        not engine.host_kv_tokens or engine.kind == "embedded" or engine.device != "cpu",
        "engine.host_kv_tokens",
        engine.host_kv_tokens,
        "SGLang registers such memory with CUDA, and does not start without; leave it out on a CPU",
    )
    if not engine.kv_reuse:
        return
    if engine.kind == "sglang":
        require(
            bool(engine.urls),
            "engine.kv_reuse",
            "true",
            "needs engine.urls of SGLang servers that were started for it (engine/shared_kv.py); servers started here "
            "have no key for it",
        )
        require(bool(engine.kv_storage), "engine.kv_storage", "{}", "give Mooncake's settings, or leave kv_reuse out")
        return
    local = [url for url in engine.urls if is_loopback(urlsplit(url).hostname or "")]
    require(
        len(local) in (0, len(engine.urls)),
        "engine.urls",
        (local or [""])[0],
        "other hosts' servers cannot take KV from there; name its host, or leave engine.kv_reuse out",
    )
