"""Makes what the recipe starts from: games, demonstrations, a word tokenizer, and a small Qwen3 that has seen them.

The games are genuine ALFWorld games in rooms of moderate size, all six task types, half of the held-out ones in the
four rooms that ALFWorld keeps unseen. Each comes with demonstrations of an expert who reads what the model reads, and
searches in another order every time. A short supervised run on them is to leave the model able to write commands and
to solve some games; the rest it learns by playing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from asyncrl import Action, Task
from asyncrl.envs.alfworld import ALFWorld, rows
from asyncrl.envs.alfworld_engine import AlfredEngine
from asyncrl.envs.alfworld_expert import Expert
from asyncrl.envs.alfworld_games import Split, generate, plausible

GAMES: dict[Split, int] = {"train": 144, "valid_seen": 24, "valid_unseen": 24}
MAX_RECEPTACLES = 16
MAX_STEPS = 16
"""The expert's; a game that takes longer is left out. The model may take ``env.max_turns``."""
DEMONSTRATIONS = 3
"""Of each training game."""
BATCH = 16
STEPS = 200
MAX_LOSS = 0.8
"""The warm start fails if the mean loss of a command's words is above this at its end."""
IGNORE = -100
WORD = r", and a |, a |\w+|[^\w\s]|\n"

Turn = tuple[str, str]
"""What the game said, and the command that followed."""


class SetupError(Exception):
    """The warm start did not reach what the recipe needs; one line."""


def make_games(folder: Path, seed: int, shard: tuple[Split, range]) -> list[list[Turn]]:
    """Games of a shard, and for training games the demonstrations. Runs in a process of its own."""
    split, numbers = shard
    engine = AlfredEngine(folder / "cache")
    files = generate(engine, folder, split, numbers, seed=seed, max_steps=MAX_STEPS, max_receptacles=MAX_RECEPTACLES)
    engine.close()
    if split != "train":
        return []
    env = ALFWorld(data=str(folder), cache=str(folder / "cache"))
    found = [
        demonstrate(env, str(file.relative_to(folder)), random.Random(f"{seed}/{file.parent.name}/{i}"))
        for file in files
        for i in range(DEMONSTRATIONS)
    ]
    env.close()
    return [turns for turns in found if turns]


def demonstrate(env: ALFWorld, game: str, rng: random.Random) -> list[Turn]:
    """An episode of the expert as the model would live it; empty where it takes too long."""
    said = env.reset(Task(id=game, data={"game": game}))
    assert isinstance(said, str)
    play = Expert(said.removesuffix("\n>"), rng, plausible).play()
    turns: list[Turn] = []
    for _ in range(MAX_STEPS):
        try:
            command = play.send(said.strip().removesuffix("\n>")) if turns else next(play)
        except StopIteration:
            return []
        turns.append((said, command))
        step = env.step(Action(text=command, token_ids=[], finish_reason="stop"))
        if step.done:
            return turns
        assert isinstance(step.observation, str)
        said = step.observation
    return []


def shards(games: dict[Split, int], size: int = 12) -> Iterator[tuple[Split, range]]:
    for split, count in games.items():
        for start in range(0, count, size):
            yield split, range(start, min(count, start + size))


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token a word, a number, a mark, and the joints of a list."""
    splitter = pre_tokenizers.Split(Regex(WORD), "removed", invert=True)
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(text)} | {str(n) for n in range(1, 50)}
    vocab = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = splitter
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.1,  # about 1/sqrt(hidden): with the usual 0.02 so small a model learns several times slower
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def encoded(tokenizer: PreTrainedTokenizerFast, turns: list[Turn]) -> tuple[list[int], list[int]]:
    """Ids of a whole episode, and labels: the commands, each with the end of its turn."""
    ids: list[int] = []
    labels: list[int] = []
    for said, command in turns:
        seen = tokenizer.encode(said)
        written = [*tokenizer.encode(command), int(tokenizer.eos_token_id)]
        ids += seen + written
        labels += [IGNORE] * len(seen) + written
    return ids, labels


def renamed(turns: list[Turn], rng: random.Random) -> list[Turn]:
    """The same episode with other names: the things and places that have numbers exchange these within their kind, and
    in half of the episodes the kinds of things exchange their names. So few demonstrations would be learned by heart;
    this way the model has to read what the game says."""
    text = "\n".join(part for turn in turns for part in turn)
    numbered = sorted(set(re.findall(r"\w+ \d+", text)))
    kinds = sorted({name.split()[0] for name in numbered})
    places = {name.split()[0] for name in re.findall(r"go to (\w+) \d", text)} | set(
        re.findall(r"a (\w+) \d", turns[0][0])
    )
    others = [kind for kind in kinds if kind not in places]
    shuffled = rng.sample(others, len(others)) if rng.random() < 0.5 else others
    words = dict(zip(others, shuffled, strict=True))
    names = dict(words)
    for kind in kinds:
        own = [name for name in numbered if name.split()[0] == kind]
        for old, new in zip(own, rng.sample(own, len(own)), strict=True):
            names[old] = f"{words.get(kind, kind)} {new.split()[1]}"
    pattern = re.compile(r"\b(?:\w+ \d+|\w+)\b")

    def rename(part: str) -> str:
        return pattern.sub(lambda found: names.get(found[0], found[0]), part)

    return [(rename(said), rename(command)) for said, command in turns]


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    episodes: list[list[Turn]],
    rng: random.Random,
    steps: int,
) -> float:
    """Train on the demonstrations; the mean loss over the last 25 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 30) * (1 - 0.9 * n / steps))
    losses: list[float] = []
    for step in range(1, steps + 1):
        batch = [encoded(tokenizer, renamed(turns, rng)) for turns in rng.sample(episodes, BATCH)]
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [int(tokenizer.pad_token_id)] * (width - len(ids)) for ids, _ in batch])
        labels = torch.tensor([labels + [IGNORE] * (width - len(labels)) for _, labels in batch])
        hidden = model.model(ids[:, :-1]).last_hidden_state
        written = labels[:, 1:] != IGNORE
        loss = functional.cross_entropy(model.lm_head(hidden[written]), labels[:, 1:][written])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps:
            print(
                f"setup: warm start, step {step} of {steps}: loss {sum(losses[-25:]) / len(losses[-25:]):.3f}",
                flush=True,
            )
    return sum(losses[-25:]) / len(losses[-25:])


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the games and the warm-started model of alfworld.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--games", type=int, nargs=3, default=list(GAMES.values()), metavar="N", help="of each split")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the warm start")
    parser.add_argument("--max-loss", type=float, default=MAX_LOSS)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the same floats on every machine
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    folder = args.out / "games"
    work = list(shards(dict(zip(GAMES, args.games, strict=True))))
    episodes: list[list[Turn]] = []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("fork")) as processes:
        for done, found in enumerate(processes.map(partial(make_games, folder, args.seed), work), 1):
            episodes += found
            print(f"setup: games, part {done} of {len(work)}; {len(episodes)} demonstrations", flush=True)
    train = list(rows(folder, "train"))
    heldout = [row for split in ("valid_seen", "valid_unseen") for row in rows(folder, split)]
    texts = [text for turns in episodes for turn in turns for text in turn]
    texts += [(folder / "logic" / "alfred.twl2").read_text()]
    for row in train + heldout:
        texts += json.loads((folder / row["game"]).read_text())["walkthrough"]
    tokenizer = make_tokenizer(texts)
    model = make_model(tokenizer)
    loss = warm_start(model, tokenizer, episodes, rng, args.steps)
    if loss > args.max_loss:
        print(f"setup: the warm start ended at a loss of {loss:.2f}, above {args.max_loss}", file=sys.stderr)
        return 1
    for name, part in (("train", train), ("heldout", heldout)):
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
