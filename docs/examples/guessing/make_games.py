#!/usr/bin/env python3
"""Writes the start of the example: games, a tokenizer and an untrained model.

A game is to guess a number below 52 in at most seven turns; the environment says "+" (it is larger) or "-" (smaller).

  train.jsonl, val.jsonl  games and their secret numbers, in verl's columns; the two have no game in common
  sft.jsonl               games that a timid player plays: see play()
  model/                  a Llama of random weights as Hugging Face files; each number is a token
"""

import argparse
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "sorting"))
from make_task import write_lines, write_model, write_tokenizer  # noqa: E402

NUMBERS, TURNS = 52, 7
HELD_OUT = 256  # of 52^2 = 2,704 games
SFT_EXAMPLES = 65_536
COURAGE = 0.4  # the player's: how often it guesses the middle of what is left


def name(number):
    return f"{number:02}"


def user(game):
    """A game has a number, which says nothing of its secret."""
    return {"role": "user", "content": name(game // NUMBERS) + name(game % NUMBERS)}


def record(game, secret, split, index):
    return {
        "data_source": "guessing",
        "prompt": [user(game)],
        "ability": "search",
        "reward_model": {"style": "rule", "ground_truth": name(secret)},
        "extra_info": {"split": split, "index": index},
    }


def play(game, secret, rng):
    """Begins in the middle, then goes one step into the right direction, three times in five."""
    messages, low, high, guess = [user(game)], 0, NUMBERS - 1, None
    for _ in range(TURNS):
        if guess is None or rng.random() < COURAGE: guess = (low + high) // 2
        else: guess += 1 if guess < secret else -1
        messages.append({"role": "assistant", "content": name(guess)})
        if guess == secret: break
        messages.append({"role": "user", "content": "+" if guess < secret else "-"})
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    if messages[-1]["role"] == "user": messages.pop()
    return {"messages": messages}


def write_games(folder, rng):
    games = [(game, rng.randrange(NUMBERS)) for game in range(NUMBERS ** 2)]
    rng.shuffle(games)
    splits = {"val": games[:HELD_OUT], "train": games[HELD_OUT:]}
    for split, some in splits.items():
        write_lines(folder / f"{split}.jsonl", (record(*one, split, index) for index, one in enumerate(some)))
    write_lines(folder / "sft.jsonl", (play(*rng.choice(splits["train"]), rng) for _ in range(SFT_EXAMPLES)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where to write all this")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random here")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    model = options.folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    write_games(options.folder, rng)
    write_model(model, write_tokenizer(model, "+-", [name(number) for number in range(NUMBERS)]), rng)


if __name__ == "__main__":
    main()
