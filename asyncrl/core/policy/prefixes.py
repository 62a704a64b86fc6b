"""What a server has to do for a request before it decodes: compute the KV of its tokens, or have it brought.

A server holds the prefix of what it ran last, while its weights are those. Another of the same version may take it from
there (DORA §4.4: what one version computed is the same everywhere) where the deployment has that, ``engine.kv_reuse``.
A server that takes newer weights gives what it held for a while. In all other cases the tokens are prefilled.

Seconds of the way count like seconds of prefill, although the server decodes meanwhile: what is brought takes bandwidth
from it, and the sequence is late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from asyncrl.core.cost_model import CostModel
from asyncrl.core.policy.load import Load
from asyncrl.core.policy.routing import RequestView


class Prefixes:
    """Of one plan. ``kv_token_s``: seconds for the KV of a token from one server to another; infinite where none goes.
    Where it takes longer than prefill, it counts as prefill."""

    __slots__ = ("_held", "_way_s", "cost")

    def __init__(self, cost: CostModel, loads: Iterable[Load], kv_token_s: float = math.inf) -> None:
        self.cost = cost
        self._way_s = kv_token_s
        self._held = {(load.name, load.had) for load in loads if load.promised >= 0} if kv_token_s < cost.k5 else set()

    def seconds(self, request: RequestView, load: Load) -> float:
        """Before the server goes on with the request."""
        if load.version != request.after:
            return self.anew(request)
        if load.name == request.home and load.had == request.after:
            return self.cost.k5 * (request.tokens - request.prefix)
        return self.brought(request)

    def anew(self, request: RequestView) -> float:
        """Where no KV of it is, nor comes."""
        return self.cost.k5 * request.tokens

    def brought(self, request: RequestView) -> float:
        """On another server of the version that it goes on with."""
        if (request.home, request.after) not in self._held:
            return self.anew(request)
        return self.cost.k5 * (request.tokens - request.prefix) + self._way_s * request.prefix
