"""Over real families of chat templates: what the trainer sees is what the engine sampled, and the prompt is the whole
dialogue rendered wherever the template allows that."""

from __future__ import annotations

from array import array
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.types import flatten
from asyncrl.env import Observation
from asyncrl.runtime.conversation import ChatTemplate, Conversation

from .families import FAMILIES, Counting, bytewise, make_tokenizer

TOOL = {"type": "function", "function": {"name": "bash", "description": "Run it.", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ab"}}\n</tool_call>'
WITH_TOOL_ROLE = ("qwen2.5", "qwen3", "llama3", "mistral", "chatml")


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class Player:
    """Plays a dialogue and keeps account of it beside: the messages, and what was sampled."""

    def __init__(self, tokenizer: Counting, **settings: Any) -> None:
        self.tokenizer = tokenizer
        self.dialogue = Conversation(ChatTemplate(tokenizer, **settings))
        self.messages: list[dict[str, str]] = []
        self.sampled: list[list[int]] = []
        self.prompts: list[list[int]] = []
        """What the engine was given before each generation."""

    def hear(self, *messages: dict[str, str], tools: list[Any] | None = None) -> None:
        self.messages += messages
        self.dialogue.observe(Observation(messages=messages, tools=tools or ()))

    def speak(self, ids: list[int], text: str, reason: str = "stop") -> str:
        self.prompts.append(self.dialogue.ids.tolist())
        n, turn = len(ids), len(self.sampled)
        logprobs, versions = array("f", [-0.5 * (turn + 1)] * n), array("i", [turn] * n)
        heard = self.dialogue.add_output(array("i", ids), logprobs, versions, reason)
        assert heard == text
        self.sampled.append(ids)
        self.messages.append(say("assistant", text))
        return heard

    def whole(self, tools: list[Any] | None = None) -> list[int]:
        return self.tokenizer.encode(self.tokenizer.render(self.messages, True, tools or ()))

    def check_trained(self) -> list[list[int]]:
        """What the trainer sees of each segment: exactly what was prompted and sampled. The segments."""
        turns = self.dialogue.turns
        tokens, mask, logprobs, versions = flatten(turns)
        assert [i for i, m in zip(tokens, mask, strict=True) if m] == [i for ids in self.sampled for i in ids]
        expected = [-0.5 * (turn + 1) for turn, ids in enumerate(self.sampled) for _ in ids]
        assert [p for p, m in zip(logprobs, mask, strict=True) if m] == expected
        assert [v for v in versions if v >= 0] == [turn for turn, ids in enumerate(self.sampled) for _ in ids]
        ends = list(accumulate(len(t.prompt_ids) + len(t.output_ids) for t in turns))
        starts = [0, *(end for end, after in zip(ends, turns[1:], strict=False) if after.new_segment), len(tokens)]
        segments = [tokens[a:b].tolist() for a, b in pairwise(starts)]
        for turn, (prompt, end) in enumerate(zip(self.prompts, ends, strict=True)):
            segment = max(i for i, start in enumerate(starts) if start < end)
            seen = tokens[starts[segment] : end].tolist()
            assert seen == prompt + self.sampled[turn], "the model was prompted with what it is trained on"
        return segments


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "truncated"])
def test_the_prompt_is_the_whole_dialogue_rendered(tmp_path: Path, family: str, truncated: bool) -> None:
    tokenizer = make_tokenizer(tmp_path, family)
    lead = " " if family == "mistral" else ""
    end = [] if truncated else list(tokenizer.eos_ids)
    player = Player(tokenizer)
    player.hear(say("user", "Begin, ab."))
    for turn in range(4):
        assert player.dialogue.ids.tolist() == player.whole()
        text = f"{lead}Turn {turn}."
        player.speak([*tokenizer.encode(text), *end], text, "length" if truncated else "stop")
        player.hear(say("user", f"Go on, ab {turn}."))
    assert len(player.check_trained()) == 1
    assert all(len(set(end) & set(turn.prompt_ids[:1])) == 0 for turn in player.dialogue.turns), "one end of turn only"


@pytest.mark.parametrize("family", WITH_TOOL_ROLE)
def test_tools_and_their_results(tmp_path: Path, family: str) -> None:
    """Tools are in the first prompt, calls are parsed, results are observed, thoughts stay."""
    tokenizer = make_tokenizer(tmp_path, family)
    lead = {"mistral": " ", "qwen3": "<think>\nI look.\n</think>\n\n"}.get(family, "")
    call = CALL if family.startswith("qwen") else '{"name": "bash", "arguments": {"command": "ab"}}'
    player = Player(tokenizer)
    player.hear(say("user", "What is there?"), tools=[TOOL])
    for turn in range(3):
        if family != "chatml":
            assert "bash" in tokenizer.decode(player.dialogue.ids)
        assert player.dialogue.ids.tolist() == player.whole([TOOL])
        text = lead + call
        player.speak([*tokenizer.encode(text), *tokenizer.eos_ids], text)
        [parsed] = player.dialogue.tool_calls(text)
        assert (parsed.name, parsed.arguments, parsed.id) == ("bash", {"command": "ab"}, f"call{turn:03d}00")
        player.hear(*(say("tool", f"{turn}{i}") for i in range(turn + 1)))
    assert len(player.check_trained()) == 1


def test_gemma_refuses_what_its_template_refuses(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "gemma")
    player = Player(tokenizer)
    player.hear(say("user", "hi"))
    player.speak([*tokenizer.encode("ho"), *tokenizer.eos_ids], "ho")
    with pytest.raises(ValueError, match="roles must alternate"):
        player.hear(say("tool", "5"))


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_ids_are_never_tokenised_again(tmp_path: Path, family: str) -> None:
    """The sampled ids are not those that the text would be encoded to, and stay."""
    tokenizer = make_tokenizer(tmp_path, family)
    player = Player(tokenizer)
    player.hear(say("user", "ab"))
    for _ in range(3):
        ids = bytewise(tokenizer, "abab")
        assert ids != tokenizer.encode("abab")
        player.speak([*ids, *tokenizer.eos_ids], "abab")
        player.hear(say("user", "more"))
    assert player.dialogue.ids.tolist() != player.whole()
    player.check_trained()


# --- templates that drop thoughts -------------------------------------------------------------------------------------


def think(tokenizer: Counting, player: Player, text: str) -> None:
    said = f"<think>\nhm ab\n</think>\n\n{text}"
    player.speak([*bytewise(tokenizer, said), *tokenizer.eos_ids], said)


def test_a_dropped_thought_begins_a_new_segment(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "qwen3")
    player = Player(tokenizer)
    player.hear(say("user", "one"))
    think(tokenizer, player, "first")
    player.hear(say("user", "two"))
    assert player.dialogue.ids.tolist() == player.whole(), "rendered anew, without the thought"
    assert "hm" not in tokenizer.decode(player.dialogue.ids)
    think(tokenizer, player, CALL)
    player.hear(say("tool", "5"))  # goes on in the same segment, thought and all
    assert "hm" in tokenizer.decode(player.dialogue.ids)
    think(tokenizer, player, "second")
    player.hear(say("user", "three"))
    assert player.dialogue.ids.tolist() == player.whole()
    think(tokenizer, player, "third")
    segments = player.check_trained()
    assert len(segments) == 3
    assert [turn.new_segment for turn in player.dialogue.turns] == [False, True, False, True]


def test_without_a_thought_there_is_nothing_to_drop(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "qwen3")
    player = Player(tokenizer)
    player.hear(say("user", "one"))
    for _ in range(3):
        player.speak([*tokenizer.encode("yes"), *tokenizer.eos_ids], "yes")
        player.hear(say("user", "more"))
        assert player.dialogue.ids.tolist() == player.whole()
    assert len(player.check_trained()) == 1


def test_a_thought_that_the_template_opens_is_dropped_too(tmp_path: Path) -> None:
    """As in Qwen3-Thinking: the text begins in the midst of a thought, and need not get to its end."""
    tokenizer = make_tokenizer(tmp_path, "qwen3")
    opening = tokenizer.chat_template.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")
    assert opening != tokenizer.chat_template
    tokenizer._tokenizer.chat_template = opening
    player = Player(tokenizer)
    player.hear(say("user", "one"))
    player.speak(tokenizer.encode("hm"), "hm", "length")
    player.hear(say("user", "two"))
    assert player.dialogue.ids.tolist() == player.whole()
    player.speak([*tokenizer.encode("hm\n</think>\n\nyes"), *tokenizer.eos_ids], "hm\n</think>\n\nyes")
    assert len(player.check_trained()) == 2


def test_thoughts_can_be_kept(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "qwen3")
    player = Player(tokenizer, history="keep")
    player.hear(say("user", "one"))
    think(tokenizer, player, "first")
    player.hear(say("user", "two"))
    assert "hm" in tokenizer.decode(player.dialogue.ids)
    think(tokenizer, player, "second")
    assert len(player.check_trained()) == 1


def test_or_the_episode_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "qwen3")
    player = Player(tokenizer, history="refuse")
    player.hear(say("user", "one"))
    think(tokenizer, player, CALL)
    player.hear(say("tool", "5"))
    think(tokenizer, player, "first")
    with pytest.raises(ValueError, match=r"rollout\.history"):
        player.hear(say("user", "two"))


def test_plain_text_among_messages_cannot_be_rendered_anew(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "qwen3")
    player = Player(tokenizer)
    player.hear(say("user", "one"))
    think(tokenizer, player, "first")
    player.dialogue.observe("plain")
    player.speak([*tokenizer.encode("ho"), *tokenizer.eos_ids], "ho")
    with pytest.raises(ValueError, match="plain text"):
        player.hear(say("user", "two"))


def test_other_tools_later_are_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "qwen3")
    player = Player(tokenizer)
    player.hear(say("user", "one"), tools=[TOOL])
    player.speak([*tokenizer.encode("ho"), *tokenizer.eos_ids], "ho")
    with pytest.raises(ValueError, match="first observation"):
        player.hear(say("user", "two"), tools=[TOOL, TOOL])


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "role"), [*((family, "user") for family in FAMILIES), *((family, "tool") for family in WITH_TOOL_ROLE)]
)
def test_two_hundred_turns_cost_their_own_length(tmp_path: Path, family: str, role: str) -> None:
    costs = []
    for turns in (100, 200):
        tokenizer = make_tokenizer(tmp_path / str(turns), family)
        player = Player(tokenizer)
        player.hear(say("user", "begin"), tools=[TOOL])
        said = "<think>\nhm\n</think>\n\nnorth" if (family, role) == ("qwen3", "tool") else "north"
        ids = [*tokenizer.encode(said), *tokenizer.eos_ids]
        before = tokenizer.rendered + tokenizer.encoded
        for _ in range(turns):
            player.speak(ids, said)
            player.dialogue.tool_calls(said)
            player.hear(say(role, "You are in a room. There is an exit to the north."))
        costs.append(tokenizer.rendered + tokenizer.encoded - before)
    assert costs[1] < 2.1 * costs[0] and costs[1] / 200 < 600
