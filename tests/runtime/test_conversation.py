"""Tokens in, tokens out: what was sampled stays as it was, and chat by difference is the whole chat rendered."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncrl.env import Observation
from asyncrl.runtime.conversation import ChatTemplate, Conversation

CHATML = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
NO_ASSISTANT = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
SPECIALS = ("<|im_start|>", "<|im_end|>")
START, END = 0x110000, 0x110001


class CharTokenizer:
    """A character is a token, except for two special tokens. Counts what it encodes."""

    def __init__(self, template: str = CHATML) -> None:
        self.eos_ids = (END,)
        self.chat_template = template
        self.encoded = 0
        self._template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)

    def encode(self, text: str) -> list[int]:
        self.encoded += len(text)
        ids: list[int] = []
        while text:
            special = next((s for s in SPECIALS if text.startswith(s)), None)
            ids.append(START + SPECIALS.index(special) if special else ord(text[0]))
            text = text[len(special or text[0]) :]
        return ids

    def beginning(self, text: str, tokens: int) -> str:
        return text[: tokens * max(map(len, SPECIALS))]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i < START)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, tools=tools)


def user(text: str) -> Observation:
    return Observation(messages=[{"role": "user", "content": text}])


def sampled(dialogue: Conversation, ids: Sequence[int], logprob: float, version: int, reason: str) -> str:
    n = len(ids)
    return dialogue.add_output(array("i", ids), array("f", [logprob] * n), array("i", [version] * n), reason)


def answer(dialogue: Conversation, ids: Sequence[int], reason: str = "stop", version: int = 0) -> str:
    return sampled(dialogue, ids, -0.5, version, reason)


words = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=8)


@given(first=words, turns=st.lists(st.tuples(words, words), max_size=5), system=st.booleans())
def test_chat_by_difference_is_the_whole_chat_rendered(first: str, turns: list[tuple[str, str]], system: bool) -> None:
    """Where the model ended its turns itself."""
    tokenizer = CharTokenizer()
    messages = [{"role": "system", "content": "Speak."}] * system + [{"role": "user", "content": first}]
    dialogue = Conversation(ChatTemplate(tokenizer))
    dialogue.observe(Observation(messages=messages))
    for said, heard in turns:
        assert answer(dialogue, [*map(ord, said), END]) == said
        dialogue.observe(user(heard))
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": heard}]
        assert dialogue.ids.tolist() == tokenizer.encode(tokenizer.render(messages, True))


@given(first=words, turns=st.lists(st.tuples(words, words), max_size=5))
def test_a_truncated_turn_is_closed_by_the_template(first: str, turns: list[tuple[str, str]]) -> None:
    tokenizer = CharTokenizer()
    messages = [{"role": "user", "content": first}]
    dialogue = Conversation(ChatTemplate(tokenizer))
    dialogue.observe(user(first))
    for said, heard in turns:
        answer(dialogue, [*map(ord, said)], "length")
        dialogue.observe(user(heard))
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": heard}]
        assert dialogue.ids.tolist() == tokenizer.encode(tokenizer.render(messages, True))
    for turn in dialogue.turns[1:]:
        assert turn.prompt_ids[0] == END, "observed, not sampled: the loss must not see it"


def test_several_messages_at_once_and_other_roles_are_rendered_too() -> None:
    tokenizer = CharTokenizer()
    dialogue = Conversation(ChatTemplate(tokenizer))
    dialogue.observe(user("search"))
    answer(dialogue, [ord("a"), END])
    results = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    dialogue.observe(Observation(messages=results))
    whole = [{"role": "user", "content": "search"}, {"role": "assistant", "content": "a"}, *results]
    assert dialogue.ids.tolist() == tokenizer.encode(tokenizer.render(whole, True))


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2**31 - 1), max_size=5), st.sampled_from(["chat", "text", "str"])), max_size=6
    )
)
def test_what_was_sampled_stays_in_place_whatever_follows(turns: list[tuple[list[int], str]]) -> None:
    """Append-only: every state of the ids is a prefix of the next, and the turns add up to them."""
    dialogue = Conversation(ChatTemplate(CharTokenizer()))
    dialogue.observe("hi")
    before: list[int] = []
    for version, (output, kind) in enumerate(turns):
        assert dialogue.ids[: len(before)].tolist() == before
        before = list(dialogue.ids)
        sampled(dialogue, output, -0.25, version, "stop")
        assert dialogue.ids.tolist() == before + output
        before = list(dialogue.ids)
        dialogue.observe(user("x") if kind == "chat" else Observation(text="x") if kind == "text" else "x")
    assert dialogue.ids[: len(before)].tolist() == before
    told = [i for turn in dialogue.turns for i in (*turn.prompt_ids, *turn.output_ids)]
    assert dialogue.ids[: len(told)].tolist() == told
    assert [list(turn.output_ids) for turn in dialogue.turns] == [output for output, _ in turns]
    assert [list(turn.versions) for turn in dialogue.turns] == [[v] * len(o) for v, (o, _) in enumerate(turns)]
    assert all(turn.logprobs.tolist() == [-0.25] * len(turn.output_ids) for turn in dialogue.turns)


def test_text_observations_are_encoded_as_they_are() -> None:
    dialogue = Conversation(ChatTemplate(CharTokenizer()))
    dialogue.observe("3+4=")
    assert answer(dialogue, [ord("7"), END]) == "7"
    dialogue.observe(Observation(text="\nwrong "))
    assert dialogue.ids.tolist() == [*map(ord, "3+4=7"), END, *map(ord, "\nwrong ")]
    assert dialogue.turns[0].prompt_ids.tolist() == [*map(ord, "3+4=")]


def test_a_template_that_drops_the_model_s_turns_is_refused() -> None:
    dialogue = Conversation(ChatTemplate(CharTokenizer(NO_ASSISTANT)))
    dialogue.observe(user("hi"))
    answer(dialogue, [ord("a"), END])
    before = list(dialogue.ids)
    with pytest.raises(ValueError, match="drops assistant turns"):
        dialogue.observe(user("again"))
    assert dialogue.ids.tolist() == before


def test_a_user_s_text_that_looks_like_the_mark_harms_nothing() -> None:
    tokenizer = CharTokenizer()
    dialogue = Conversation(ChatTemplate(tokenizer))
    dialogue.observe(user("hi"))
    answer(dialogue, [ord("a"), END])
    text = "\u2063assistant\u2063 again"
    dialogue.observe(user(text))
    assert text in tokenizer.decode(dialogue.ids)


def test_an_episode_of_many_turns_costs_its_own_length() -> None:
    """Encoded characters grow linearly with the turns: the dialogue so far is never encoded again."""
    costs = []
    for turns in (100, 200):
        tokenizer = CharTokenizer()
        dialogue = Conversation(ChatTemplate(tokenizer))
        dialogue.observe(user("begin"))
        for _ in range(turns):
            answer(dialogue, [*map(ord, "go north"), END])
            dialogue.observe(user("You are in a room."))
        costs.append(tokenizer.encoded)
    assert costs[1] <= 2 * costs[0]
    assert costs[1] <= 200 * 120


@pytest.mark.parametrize("observation", ["x" * 10**6, user("x" * 10**6)])
def test_of_what_is_too_long_only_a_beginning_is_encoded(observation: Observation | str) -> None:
    tokenizer = CharTokenizer()
    dialogue = Conversation(ChatTemplate(tokenizer), max_tokens=50)
    dialogue.observe(user("hi"))
    answer(dialogue, [5])
    before = dialogue.served
    dialogue.observe(observation)
    assert dialogue.ids[:before].tolist() == dialogue.ids.tolist()[:before]
    assert 50 < len(dialogue.ids) < 1000 and tokenizer.encoded < 1000


def test_what_fits_is_encoded_whole() -> None:
    for length in (49, 50, 51):
        dialogue = Conversation(ChatTemplate(CharTokenizer()), max_tokens=50)
        dialogue.observe("x" * length)
        assert len(dialogue.ids) == length


@pytest.mark.parametrize("observation", ["a\ud83db", user("a\udcffb")])
def test_what_is_no_unicode_is_replaced(observation: Observation | str) -> None:
    dialogue = Conversation(ChatTemplate(CharTokenizer()))
    dialogue.observe(observation)
    assert "a\ufffdb" in "".join(map(chr, (i for i in dialogue.ids if i < START)))


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no text that can be encoded: 5"):
        Conversation(ChatTemplate(CharTokenizer())).observe(Observation(text=5))  # type: ignore[arg-type]
