"""Chat templates of the usual families, written small but faithful, over a byte tokenizer that has their special tokens
and one merge, so that a text has more than one tokenisation."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from asyncrl.tokenizer import HuggingFaceTokenizer

_TOOL_RESPONSES = """\
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}"""
_TOOLS = """\
{{- '\\n\\n# Tools\\n<tools>' }}{% for t in tools %}{{ '\\n' + (t | tojson) }}{% endfor %}
{{- '\\n</tools>\\nReturn <tool_call>{"name": …, "arguments": …}</tool_call>' }}"""

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN25 = (
    """\
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}{{ 'You are Qwen.' }}{% endif %}
{%- if tools %}"""
    + _TOOLS
    + """{% endif %}{{ '<|im_end|>\\n' }}
{%- for m in messages %}
{%- if m.role == 'user' or m.role == 'assistant' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
"""
    + _TOOL_RESPONSES
    + """{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)

QWEN3 = (
    """\
{%- if tools %}{{ '<|im_start|>system\\n' }}"""
    + _TOOLS
    + """{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last_query=messages|length - 1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content %}{% set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last_query and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- content + '<|im_end|>\\n' }}
"""
    + _TOOL_RESPONSES
    + """{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)

LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}{{ 'Respond in the format {"name": …, "parameters": …}.\\n\\n' }}
{%- for t in tools %}{{ t | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}{% endif %}
{{- m.content | trim }}{{ '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (first if loop.first else '') }}
{{- m.content | trim }}{{ '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + (m.content | trim) + eos_token }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content + '}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('only user, assistant and tool roles') }}{% endif %}{% endfor %}"""

FAMILIES: dict[str, tuple[str, str]] = {
    "chatml": (CHATML, "<|im_end|>"),
    "qwen2.5": (QWEN25, "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "mistral": (MISTRAL, "</s>"),
}
"""Name → template, end of turn."""

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<bos>", "</s>", "<start_of_turn>", "<end_of_turn>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens of their own that decoding keeps."""


class Counting(HuggingFaceTokenizer):
    """Counts the characters that are rendered and encoded."""

    rendered = encoded = 0

    def encode(self, text: str) -> list[int]:
        self.encoded += len(text)
        return super().encode(text)

    def render(self, messages: object, add_generation_prompt: bool, tools: object = ()) -> str:
        text = super().render(messages, add_generation_prompt, tools)  # type: ignore[arg-type]
        self.rendered += len(text)
        return text


def make_tokenizer(folder: Path, family: str) -> Counting:
    """The family's tokenizer, through a folder as a model has one."""
    template, eos = FAMILIES[family]
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in NOT_SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return Counting(folder)


def bytewise(tokenizer: HuggingFaceTokenizer, text: str) -> list[int]:
    """The text in another tokenisation than ``encode``'s: the merge is not used."""
    ids: list[int] = []
    for i in tokenizer.encode(text):
        ids += [tokenizer.encode("a")[0], tokenizer.encode("b")[0]] if tokenizer.decode([i]) == "ab" else [i]
    return ids
