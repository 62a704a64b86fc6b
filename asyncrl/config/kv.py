"""Between which servers KV may go (``engine.kv_reuse``)."""

from __future__ import annotations

from urllib.parse import urlsplit

from asyncrl.access import is_loopback
from asyncrl.config.base import require
from asyncrl.config.recipe import EngineConfig


def check_kv(engine: EngineConfig) -> None:
    """Raises ``RecipeError``."""
    if not engine.kv_reuse:
        return
    require(
        engine.kind == "embedded",
        "engine.kv_reuse",
        "true",
        "SGLang's shared KV storage takes the client's word for whose weights its KV is of, so that a server which "
        "restarted with older ones would poison it; leave it out, or use the embedded engine",
    )
    local = [url for url in engine.urls if is_loopback(urlsplit(url).hostname or "")]
    require(
        len(local) in (0, len(engine.urls)),
        "engine.urls",
        (local or [""])[0],
        "other hosts' servers cannot take KV from there; name its host, or leave engine.kv_reuse out",
    )
