"""Makes what the recipe starts from: games, demonstrations, a word tokenizer, and a small Qwen3 that has seen them.

The games are genuine ALFWorld games in rooms of moderate size, of three task types, half of the held-out ones in the
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from asyncrl import Action, Task, tiny
from asyncrl.envs.alfworld import ALFWorld, renamed, rows
from asyncrl.envs.alfworld_engine import AlfredEngine
from asyncrl.envs.alfworld_expert import Expert, things
from asyncrl.envs.alfworld_games import Split, generate, plausible
from asyncrl.tiny import IGNORE

GAMES: dict[Split, int] = {"train": 480, "valid_seen": 24, "valid_unseen": 24}
TYPES = ("pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep")
MAX_RECEPTACLES = 16
MAX_STEPS = 16
"""The expert's; a game that takes longer is left out. The model may take ``env.max_turns``."""
DEMONSTRATIONS = 3
"""Of each training game."""
WANDERS = 0.4
"""How likely the expert, whenever it goes to a place, goes to any other one first. Not to wander is left to learn."""
VARIANTS = 4
"""Of each training game in ``train.jsonl``, each with names of its own."""
BATCH = 16
STEPS = 1000
EXCHANGED = 0.7
"""Of the episodes, shown or played in training, have other kinds of things and places."""
MISTAKES = 0.08
"""Of the turns come after a command that fails."""
MAX_LOSS = 0.8
"""The warm start fails if the mean loss of a command's words is above this at its end."""
PHRASES = (
    "You are in the middle of a room|Your task is to|You (?:arrive at|open|pick up|move|clean|heat|cool|turn on|close)"
    "|Nothing happens|is closed|is open|see nothing|go to"
)
UNREAD = r"\b(?:a|the|The|and|you|see|On|In|it|Looking|quickly|around|of|has|have)\b"
WORD = rf"{PHRASES}|\w+ \d+|(?!{UNREAD})\b\w+|>"
"""What is a token; the rest, articles and marks, the model does not see. That halves the episodes."""
THING = re.compile(r"\w+ \d+")
TOOLS = {"sinkbasin", "microwave", "fridge"}
"""The places whose names say what they are for."""

Turn = tuple[str, str]
"""What the game said, and the command that followed."""
Mistakes = Callable[[], str]


class SetupError(Exception):
    """The warm start did not reach what the recipe needs; one line."""


def make_games(folder: Path, seed: int, shard: tuple[Split, range]) -> list[list[Turn]]:
    """Games of a shard, and for training games the demonstrations. Runs in a process of its own."""
    split, numbers = shard
    engine = AlfredEngine(folder / "cache")
    files = generate(
        engine,
        folder,
        split,
        numbers,
        seed=seed,
        max_steps=MAX_STEPS,
        max_receptacles=MAX_RECEPTACLES,
        task_types=TYPES,
    )
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
    """An episode of the expert as the model would live it, detours and all; empty where it takes too long."""
    said = env.reset(Task(id=game, data={"game": game}))
    assert isinstance(said, str)
    places = things(said)
    play = Expert(said.removesuffix("\n>"), rng, plausible).play()
    turns: list[Turn] = []
    here, meant = "", next(play)
    while len(turns) < 2 * MAX_STEPS:
        command = meant
        if meant.startswith("go to"):
            detours = [place for place in places if place != here and f"go to {place}" != meant]
            if detours and rng.random() < WANDERS:
                command = f"go to {rng.choice(detours)}"
            here = command.removeprefix("go to ")
        turns.append((said, command))
        step = env.step(Action(text=command, token_ids=[], finish_reason="stop"))
        if step.done:
            return turns
        assert isinstance(step.observation, str)
        said = step.observation
        if command == meant:
            try:
                meant = play.send(said.strip().removesuffix("\n>"))
            except StopIteration:
                break
    return []


def shards(games: dict[Split, int], size: int = 12) -> Iterator[tuple[Split, range]]:
    for split, count in games.items():
        for start in range(0, count, size):
            yield split, range(start, min(count, start + size))


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token a word, a phrase, or a name with its number."""
    splitter = pre_tokenizers.Split(Regex(WORD), "removed", invert=True)
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(text)}
    kinds = {word.split()[0] for word in words if THING.fullmatch(word)}
    words |= kinds | {str(n) for n in range(1, 50)} | {f"{kind} {n}" for kind in kinds for n in range(1, 13)}
    vocab = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = splitter
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    model = tiny.qwen3(tokenizer, max_tokens=1024, layers=3)
    # "mug 2" begins near "mug": the task names the kind, the room its copies.
    embeddings = model.get_input_embeddings().weight.data
    vocab = tokenizer.get_vocab()
    for word, i in vocab.items():
        if THING.fullmatch(word):
            kind, number = word.split()
            embeddings[i] = 0.7 * (embeddings[vocab[kind]] + embeddings[vocab[number]]) + 0.3 * embeddings[i]
    return model


def encoded(tokenizer: PreTrainedTokenizerFast, turns: list[Turn], mistakes: Mistakes) -> tuple[list[int], list[int]]:
    """Ids of a whole episode, and labels: the commands, each with the end of its turn. ``mistakes`` draws commands that
    fail, or none; these are read and not learned."""
    ids: list[int] = []
    labels: list[int] = []
    end = int(tokenizer.eos_token_id)
    for said, command in turns:
        seen = tokenizer.encode(said)
        if mistake := mistakes():
            seen += [*tokenizer.encode(mistake), end, *tokenizer.encode("\nNothing happens.\n>")]
        written = [*tokenizer.encode(command), end]
        ids += seen + written
        labels += [IGNORE] * len(seen) + written
    return ids, labels


class Names:
    """The names in a set of demonstrations, and their exchange within an episode: so few games would be learned by
    heart; this way the model has to read what the game says."""

    def __init__(self, episodes: list[list[Turn]]) -> None:
        rooms = {name for turns in episodes for name in THING.findall(turns[0][0].partition("Your task")[0])}
        self.places = sorted({name.split()[0] for name in rooms})
        found = {name for turns in episodes for turn in turns for part in turn for name in THING.findall(part)}
        self.objects = sorted({name.split()[0] for name in found} - set(self.places))

    def drawn(self, numbered: Iterable[str], rng: random.Random) -> dict[str, str]:
        """Other names, one to one: new numbers for the given places and things (``shelf 2``), and in most episodes
        other kinds. Tools keep their names."""
        words = {kind: kind for kind in (*self.objects, *self.places)}
        if rng.random() < EXCHANGED:
            for kinds in (self.objects, [place for place in self.places if place not in TOOLS]):
                words.update(zip(kinds, rng.sample(kinds, len(kinds)), strict=True))
        new = dict(words)
        by_kind: dict[str, list[str]] = {}
        for kind, number in sorted(name.split() for name in set(numbered)):
            by_kind.setdefault(kind, []).append(number)
        for kind, numbers in by_kind.items():
            # Of things there may be more than were seen, of places not.
            others = numbers if kind in self.places else [str(n) for n in range(1, max(5, len(numbers)) + 1)]
            for old, number in zip(numbers, rng.sample(others, len(numbers)), strict=True):
                new[f"{kind} {old}"] = f"{words.get(kind, kind)} {number}"
        return new

    def renamed(self, turns: list[Turn], rng: random.Random) -> list[Turn]:
        """The same episode under other names."""
        names = self.drawn((name for turn in turns for part in turn for name in THING.findall(part)), rng)
        return [(renamed(said, names), renamed(command, names)) for said, command in turns]

    def variants(self, row: dict[str, Any], env: ALFWorld, rng: random.Random) -> list[dict[str, Any]]:
        """Rows of one game, each under other names."""
        intro = env.reset(Task(id=row["game"], data=row))
        assert isinstance(intro, str)
        return [row | {"names": self.drawn(THING.findall(intro), rng)} for _ in range(VARIANTS)]

    def mistake(self, rng: random.Random) -> str:
        """A command about things that are hardly there, or nothing."""
        if rng.random() >= MISTAKES:
            return ""
        return f"take {rng.choice(self.objects)} {rng.randint(1, 5)} from {rng.choice(self.places)} {rng.randint(1, 5)}"


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    episodes: list[list[Turn]],
    rng: random.Random,
    steps: int,
) -> float:
    """Train on the demonstrations; the mean loss over the last 25 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.05)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 30) * (1 - 0.9 * n / steps))
    losses: list[float] = []
    names = Names(episodes)
    for step in range(1, steps + 1):
        batch = [
            encoded(tokenizer, names.renamed(turns, rng), partial(names.mistake, rng))
            for turns in rng.sample(episodes, BATCH)
        ]
        ids, labels = tiny.batch(batch, int(tokenizer.pad_token_id))
        hidden = model.model(ids).last_hidden_state
        written = labels != IGNORE
        loss = functional.cross_entropy(model.lm_head(hidden[written]), labels[written])
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
    env = ALFWorld(data=str(folder), cache=str(folder / "cache"))
    names = Names(episodes)
    played = [variant for row in train for variant in names.variants(row, env, rng)]
    env.close()
    tiny.save(args.out, model, tokenizer, {"train": played, "heldout": heldout})
    return 0


if __name__ == "__main__":
    sys.exit(main())
