"""One episode's dialogue as token ids: append-only, tokens in and tokens out (DESIGN rule 9).

What the engine generated is kept as ids and never re-tokenised. An observation adds ids behind them: plain text is
encoded as it is; chat messages are rendered by difference, that is, only the text that the template puts behind an
assistant turn is encoded, so a turn costs its own length and not that of the whole dialogue.
"""

from __future__ import annotations

from array import array

import msgspec

from asyncrl.core.types import Turn
from asyncrl.env import Observation
from asyncrl.ports import Tokenizer

_MARK = "\u2063assistant\u2063"
_BASE = ({"role": "user", "content": "."}, {"role": "assistant", "content": _MARK})


class Conversation:
    """Owned by one EnvManager. ``ids`` is the prompt of the next generation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending = array("i")
        self.ids = array("i")
        self.turns: list[Turn] = []
        self.reset_s = 0.0

    def observe(self, observation: Observation | str) -> None:
        """Append what the model sees next. Raises ``ValueError`` for messages without a chat template."""
        if isinstance(observation, str):
            new = self._tokenizer.encode(observation)
        elif not observation.messages:
            new = self._tokenizer.encode(observation.text)
        elif not self.ids:
            new = self._tokenizer.encode(self._tokenizer.render(observation.messages, True))
        else:
            new = self._after_assistant(observation)
        column = array("i", new)
        self._pending += column
        self.ids += column

    def add_output(
        self, output_ids: array[int], logprobs: array[float], versions: array[int], finish_reason: str
    ) -> str:
        """Append one generation exactly as it was sampled; its text, without special tokens."""
        self.turns.append(
            Turn(
                prompt_ids=self._pending,
                output_ids=output_ids,
                logprobs=logprobs,
                versions=versions,
                finish_reason=finish_reason,
            )
        )
        self._pending = array("i")
        self.ids += output_ids
        return self._tokenizer.decode(output_ids)

    def credit(self, reward: float, seconds: tuple[float, float, float]) -> None:
        """What the last generation brought, and ``Turn.seconds``."""
        self.turns[-1] = msgspec.structs.replace(self.turns[-1], reward=reward, seconds=seconds)

    def _after_assistant(self, observation: Observation) -> list[int]:
        text = self._tokenizer.render([*_BASE, *observation.messages], True)
        _, mark, suffix = text.partition(_MARK)
        if not mark:
            raise ValueError("the model's chat template drops assistant turns, so a dialogue cannot be extended by ids")
        new = self._tokenizer.encode(suffix)
        # The model usually ends its turn itself; then the template's end-of-turn token is there already.
        if new and self.ids[-1] == new[0] and new[0] in self._tokenizer.eos_ids:
            del new[0]
        return new
