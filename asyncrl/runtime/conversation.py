"""One episode's dialogue as token ids: append-only, tokens in and tokens out (DESIGN rule 9).

What the engine generated is kept as ids and never re-tokenised. An observation adds ids behind them: plain text is
encoded as it is; chat messages are rendered by difference, that is, only the text that the template puts behind an
assistant turn is encoded, so a turn costs its own length and not that of the whole dialogue.

Templates of thinking models (Qwen3) drop earlier thoughts when the user speaks again, so that the next prompt is no
extension of the last. Then the dialogue goes on in a new segment: a token sequence of its own, rendered anew from the
messages, in which the earlier turns are observed and not trained again. ``History`` has the alternatives.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import msgspec

from asyncrl.core.types import Turn
from asyncrl.env import Message, Observation, Tool, ToolCall
from asyncrl.ports import Tokenizer
from asyncrl.runtime.tool_calls import Parser, parse_tool_calls, parser_for

History = Literal["segments", "keep", "refuse"]
"""What to do where the template drops thoughts: begin a new segment without them, keep them and extend the sequence
all the same, or fail the episode."""

_MARK = "\u2063assistant\u2063"
_SURROGATES = re.compile("[\ud800-\udfff]")
_THOUGHT = "\u2063thought\u2063"
_BASE = (
    {"role": "user", "content": "."},
    {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_MARK}"},
)


def as_unicode(text: str) -> str:
    """With the replacement character for each half of a surrogate pair, which no tokenizer takes."""
    return _SURROGATES.sub("\ufffd", text)


class ChatTemplate:
    """A tokenizer and what its chat template does; shared by all episodes of a run."""

    def __init__(
        self, tokenizer: Tokenizer, *, history: History = "segments", tool_parser: Parser | Literal["auto"] = "auto"
    ) -> None:
        self.tokenizer = tokenizer
        self.history = history
        self.parser: Parser = parser_for(tokenizer.chat_template) if tool_parser == "auto" else tool_parser

    def encode(self, text: str, enough: int | None = None) -> array[int]:
        """What the model sees of ``text``; what is no Unicode is replaced. Of a text that has more than ``enough``
        tokens a beginning may do that has more, too: tokenizing holds the loop. Raises ``ValueError``."""
        if not isinstance(text, str):
            raise ValueError(f"no text that can be encoded: {text!r:.100}")
        if enough is not None and len(text) > enough:
            text = self.tokenizer.beginning(text, enough + 1)
        return array("i", self.tokenizer.encode(as_unicode(text)))

    def start(self, messages: Sequence[Message], tools: Sequence[Tool], enough: int | None = None) -> array[int]:
        """A whole dialogue, up to where the model speaks. ``enough`` as in ``encode``. Raises ``ValueError``."""
        return self.encode(self.tokenizer.render(messages, True, tools), enough)

    def extension(
        self, last_id: int, messages: Sequence[Message], enough: int | None = None
    ) -> tuple[array[int], bool]:
        """What follows an assistant turn whose last token is ``last_id``, and whether the template leaves the thoughts
        of that turn where they are. ``enough`` as in ``encode``; one less may be there. Raises ``ValueError``."""
        text = self.tokenizer.render([*_BASE, *messages], True)
        before, mark, suffix = text.partition(_MARK)
        if not mark:
            raise ValueError("the model's chat template drops assistant turns, so a dialogue cannot be extended by ids")
        new = self.encode(suffix, enough)
        # The model usually ends its turn itself; then the template's end-of-turn token is there already.
        eos_ids = self.tokenizer.eos_ids
        if new and new[0] in eos_ids and last_id in eos_ids:
            del new[0]
        return new, _THOUGHT in before

    @cached_property
    def opens_thoughts(self) -> bool:
        """True if the template itself begins the model's turn with a thought."""
        try:
            return "<think>" in self.tokenizer.render(_BASE[:1], True)
        except ValueError:  # no template
            return False

    @cached_property
    def drops_thoughts(self) -> bool:
        """True if a user's turn makes the template drop earlier thoughts."""
        try:
            return not self.extension(-1, _BASE[:1])[1]
        except ValueError:  # it takes a single turn; whoever wants another is told then
            return False

    def drops(self) -> bool:
        """Whether a segment ends where the template drops thoughts. Raises ``ValueError`` where that is refused."""
        if self.history == "refuse":
            raise ValueError(
                "the model's chat template drops earlier thoughts here, so the dialogue cannot be extended; set "
                'rollout.history to "segments" or "keep", or answer with messages of the role "tool"'
            )
        return self.history == "segments"

    def has_thoughts(self, text: str) -> bool:
        """True if the template may drop a part of this assistant turn."""
        return "</think>" in text or self.opens_thoughts


class Conversation:
    """Owned by one episode. ``ids`` is the prompt of the next generation. Of what is observed beyond ``max_tokens``, no
    more is there than tells that it is."""

    def __init__(self, template: ChatTemplate, *, max_tokens: int | None = None) -> None:
        self._template = template
        self._tokenizer = template.tokenizer
        self._max_tokens = max_tokens
        self._pending = array("i")
        self._new_segment = False
        self._thoughts = False
        """Whether a turn of this segment has something that the template may drop."""
        self._tools: Sequence[Tool] = ()
        self._messages: list[Message] | None = None
        """All that was said, kept only where it may have to be rendered anew."""
        self.ids = array("i")
        self.turns: list[Turn] = []
        self.reset_s = 0.0

    def observe(self, observation: Observation | str) -> None:
        """Append what the model sees next. Raises ``ValueError`` for messages without a chat template."""
        if isinstance(observation, str):
            observation = Observation(text=observation)
        if not self.ids:
            self._tools = observation.tools
        elif observation.tools and observation.tools != self._tools:
            raise ValueError("the tools of an episode are given with its first observation and stay the same")
        if not observation.messages:
            self._messages = None
            self.append(self._template.encode(observation.text, self._max_tokens))
        elif not self.ids:
            self.append(self._template.start(observation.messages, observation.tools, self._max_tokens))
            if self._template.history == "segments" and self._template.drops_thoughts:
                self._messages = list(observation.messages)
        else:
            new, kept = self._template.extension(self.ids[-1], observation.messages, self._max_tokens)
            if self._messages is not None:
                self._messages += observation.messages
            if self._thoughts and not kept and self._template.drops():
                self._start_anew()
            else:
                self.append(new)

    def append(self, ids: Sequence[int]) -> None:
        """Ids that the model sees next."""
        column = array("i", ids)
        self._pending = self._pending + column
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
                new_segment=self._new_segment,
            )
        )
        self._pending = array("i")
        self._new_segment = False
        self.ids += output_ids
        text = self._tokenizer.decode(output_ids)
        self._thoughts = self._thoughts or self._template.has_thoughts(text)
        if self._messages is not None:
            self._messages.append({"role": "assistant", "content": text})
        return text

    @property
    def pending(self) -> array[int]:
        """What was observed since the last generation. Not changed later."""
        return self._pending

    @property
    def served(self) -> int:
        """How many of its ids a server has seen: all but those observed since its last generation."""
        return len(self.ids) - len(self._pending)

    def tool_calls(self, text: str) -> list[ToolCall]:
        """The calls in the last generation, if the episode has tools."""
        return parse_tool_calls(text, self._template.parser, len(self.turns) - 1) if self._tools else []

    def credit(self, reward: float, seconds: tuple[float, float, float]) -> None:
        """What the last generation brought, and ``Turn.seconds``."""
        self.turns[-1] = msgspec.structs.replace(self.turns[-1], reward=reward, seconds=seconds)

    def add_reward(self, reward: float) -> None:
        """More for the last generation."""
        self.turns[-1] = msgspec.structs.replace(self.turns[-1], reward=self.turns[-1].reward + reward)

    def add_env_seconds(self, seconds: float) -> None:
        """More time in the environment, after the last generation."""
        waited_s, generated_s, in_env_s = self.turns[-1].seconds
        self.turns[-1] = msgspec.structs.replace(self.turns[-1], seconds=(waited_s, generated_s, in_env_s + seconds))

    def _start_anew(self) -> None:
        if self._messages is None:
            raise ValueError("the chat template drops earlier thoughts, and plain text among messages has no template")
        self.ids, self._pending = array("i"), array("i")
        self._new_segment, self._thoughts = True, False
        self.append(self._template.start(self._messages, self._tools, self._max_tokens))
