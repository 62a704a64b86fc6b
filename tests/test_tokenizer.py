"""The Tokenizer port over a small real tokenizer folder."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from asyncrl.config import RecipeError
from asyncrl.tokenizer import HuggingFaceTokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}"
    "{% endif %}<eot>{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %}<eot>assistant: {% endif %}"
)
SYMBOLS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<bos>", "<eos>", "<eot>"]
BOS, EOS, EOT = (SYMBOLS.index(s) for s in ("<bos>", "<eos>", "<eot>"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Bytes, three special tokens, and a post-processor that would add <bos>."""
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(SYMBOLS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<eot>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return tmp_path


def test_encode_adds_no_special_tokens_and_recognises_those_in_the_text(folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    plain = tokenizer.encode("ab")
    assert len(plain) == 2 and BOS not in plain
    assert tokenizer.encode("a<eot>b") == [plain[0], EOT, plain[1]]
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("text", ["plain", " spaces , kept .  ", "naïve 日本 🙂", "a\n\nb\t"])
def test_decode_gives_the_text_back_without_special_tokens(folder: Path, text: str) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([BOS, *ids, EOT, EOS]) == text
    assert tokenizer.decode([]) == ""


def test_render_is_the_template_s_text(folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert tokenizer.render(messages, False) == "<eot>user: hi<eot>assistant: ho"
    assert tokenizer.render(messages[:1], True) == "<eot>user: hi<eot>assistant: "


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([{"role": "robot", "content": ""}], "no role robot"),
        ([{"role": "user", "content": "ok"}, "text"], "refuses the messages"),
        ([{"content": "no role"}], "refuses the messages"),
        ([3], "refuses the messages"),
    ],
)
def test_messages_that_the_template_refuses_are_a_value_error(folder: Path, messages: Any, why: str) -> None:
    """So that they fail one episode, not the run."""
    with pytest.raises(ValueError, match=why) as error:
        HuggingFaceTokenizer(folder).render(messages, True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["\ud800", 5, None])
def test_what_is_no_text_is_a_value_error(folder: Path, text: Any) -> None:
    with pytest.raises(ValueError, match="text"):
        HuggingFaceTokenizer(folder).encode(text)


def bpe(folder: Path, *, normalizer: Any = None, byte_fallback: bool = False, **added: bool) -> HuggingFaceTokenizer:
    """Whose longest token has eight characters, the special one eleven."""
    if byte_fallback:
        letters, split = ["a", "\u2581", *(f"<0x{i:02X}>" for i in range(256))], None
        normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        letters, split = sorted(pre_tokenizers.ByteLevel.alphabet()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    merges = [("a" * n, "a" * n) for n in (1, 2, 4)]
    symbols = [*letters, "aa", "aaaa", "aaaaaaaa"]
    vocab = {s: i for i, s in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=byte_fallback))
    if split is not None:
        tokenizer.pre_tokenizer = split
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken("<|special|>", **added)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(folder)


LONG = ["a" * 4000, "<|special|>" * 400, "e\u0301" * 2000, "\u1f82" * 2000, "a \n" * 1500, "\u65e5\u672c" * 900]
LONG += [unicodedata.normalize("NFD", text) for text in LONG]


@pytest.mark.parametrize("text", LONG)
@pytest.mark.parametrize("settings", [{}, {"normalizer": normalizers.NFC()}, {"byte_fallback": True}])
def test_the_beginning_of_a_text_has_so_many_tokens(folder: Path, settings: Any, text: str) -> None:
    tokenizer = bpe(folder, **settings)
    for tokens in (1, 10, 100):
        beginning = tokenizer.beginning(text, tokens)
        assert len(beginning) <= 11 * tokens < len(text)
        assert len(tokenizer.encode(beginning)) >= tokens
        assert unicodedata.normalize("NFC", text).startswith(unicodedata.normalize("NFC", beginning)[:-1])
    assert tokenizer.beginning(text, 4000) == text


@pytest.mark.parametrize(
    "settings",
    [{"rstrip": True}, {"normalizer": normalizers.Strip()}, {"normalizer": normalizers.Replace("aa", "a")}],
)
def test_where_text_can_vanish_all_of_it_is_looked_at(folder: Path, settings: Any) -> None:
    tokenizer = bpe(folder, **settings)
    text = "<|special|>" + " " * 5000
    assert tokenizer.beginning(text, 3) == text


def test_words_that_stand_for_what_is_not_known_have_no_length(folder: Path) -> None:
    words = Tokenizer(models.WordLevel(vocab={"?": 0, "a": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    assert HuggingFaceTokenizer(folder).beginning("b" * 5000, 3) == "b" * 5000


def test_no_chat_template(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(ValueError, match="no chat template; observations must be plain text"):
        HuggingFaceTokenizer(folder).render([{"role": "user", "content": "hi"}], True)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, (EOS,)),
        ({}, {}, (EOS,)),
        ({"eos_token_id": None}, {"eos_token_id": EOT}, (EOS, EOT)),
        ({"eos_token_id": [EOT, EOS]}, {"eos_token_id": EOS}, (EOS, EOT)),
        ({"eos_token_id": 7}, {"eos_token_id": [8, 0]}, (EOS, 7, 8, 0)),
    ],
)
def test_generation_ends_at_the_ids_of_all_three_files(
    folder: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    assert HuggingFaceTokenizer(folder).eos_ids == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "no tokenizer.json in {folder}; give a folder saved by save_pretrained"),
        ("tokenizer.json", "{", "cannot load the tokenizer in {folder}: "),
        ("tokenizer.json", '{"version": "1.0"}', "cannot load the tokenizer in {folder}: "),
        ("generation_config.json", "{", "{folder}/generation_config.json is not a JSON object"),
        ("generation_config.json", "[]", "{folder}/generation_config.json is not a JSON object"),
    ],
)
def test_a_folder_without_a_usable_tokenizer_is_one_line(
    folder: Path, name: str, content: str | None, message: str
) -> None:
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(RecipeError) as error:
        HuggingFaceTokenizer(folder)
    assert str(error.value).startswith("model.path: " + message.format(folder=folder))
    assert "\n" not in str(error.value)


def test_it_loads_no_torch(folder: Path) -> None:
    code = (
        "import sys, pathlib; from asyncrl.tokenizer import HuggingFaceTokenizer\n"
        "t = HuggingFaceTokenizer(pathlib.Path(sys.argv[1]))\n"
        "t.decode(t.encode(t.render([{'role': 'user', 'content': 'x'}], True)))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
