"""Advantages of turns beside their formulas, written here anew: gigpo as in verl-agent's gigpo/core_gigpo.py (episode_norm_reward with
compute_mean_std_cross_steps=False, which is the paper's equation 3; build_step_group; step_norm_reward), whose rows are turns; grpo_turns as in
4.1.3 of arXiv:2402.03300."""
import json
import random
import statistics
import subprocess

import pytest

from support import FERRY

LENGTH, EPSILON = 14, 1e-6


def ours(question):
    tool = [FERRY.parent.parent / "tests/algorithm_tool"]
    answer = json.loads(subprocess.run(tool, input=json.dumps(question) + "\n", capture_output=True, text=True, check=True).stdout)
    return answer["answer"]["advantages"] if "answer" in answer else answer["error"]


def some_batch(seed):
    """Answers of one to three turns; what is said between turns is one of three texts, of one or two tokens. An environment may begin sessions
    of a group with unlike prompts."""
    random.seed(seed)
    texts, rows = [[40], [41], [41, 42]], []
    for i in range(20):
        tokens, mask, rewards, turns = [], [], [], []
        prompt = [50] + [51] * (random.random() < .2)
        for turn in range(random.randint(1, 3)):
            said = random.choice(texts) if turn else []
            anchor = tuple(said or prompt)
            size = random.randint(1, 2)
            begin = len(tokens) + len(said)
            tokens += said + [random.randint(0, 9) for _ in range(size)]
            mask += [0] * len(said) + [1] * size
            rewards += [0.] * (len(said) + size)
            rewards[-1] = random.choice([0., 0., 1., -.5, random.random()])
            turns.append({"begin": begin, "end": len(tokens), "anchor": anchor, "reward": rewards[-1]})
        rest = LENGTH - len(tokens)
        rows.append({"index": min(i % 7, 4) if i else 9, "prompt": prompt, "tokens": tokens + [0] * rest, "mask": mask + [0] * rest,
                     "rewards": rewards + [0.] * rest, "turns": turns})
    return rows


def asked(rows, name, **config):
    return {"op": "advantage", "adv_estimator": name, "config": config, "index": [row["index"] for row in rows],
            "token_level_rewards": [row["rewards"] for row in rows], "response_mask": [row["mask"] for row in rows],
            "turn_mask": [row["mask"] for row in rows], "responses": [row["tokens"] for row in rows], "prompts": [row["prompt"] for row in rows]}


def norm(value, values, divides, alone):
    mean = statistics.fmean(values) if len(values) > 1 else alone
    deviation = statistics.stdev(values) if len(values) > 1 else 1
    return (value - mean) / (deviation + EPSILON) if divides else value - mean


def spread(rows, advantages):
    for row, of_turns in zip(rows, advantages):
        tokens = [0.] * LENGTH
        for turn, advantage in zip(row["turns"], of_turns):
            tokens[turn["begin"]:turn["end"]] = [advantage] * (turn["end"] - turn["begin"])
        yield tokens


@pytest.mark.parametrize("mode", ["mean_norm", "mean_std_norm"])
@pytest.mark.parametrize("gamma, weight", [(1., 1.), (.9, .5)])
@pytest.mark.parametrize("seed", [0, 1])
def test_gigpo(mode, gamma, weight, seed):
    rows, divides = some_batch(seed), mode == "mean_std_norm"
    episodes, steps = {}, {}
    for row in rows:
        episodes.setdefault(row["index"], []).append(sum(row["rewards"]))
        to_go = 0
        for turn in reversed(row["turns"]):
            turn["to_go"] = to_go = turn["reward"] + gamma * to_go
            steps.setdefault((row["index"], turn["anchor"]), []).append(to_go)
    assert max(map(len, steps.values())) > 3 and min(map(len, steps.values())) == 1
    expected = []
    for row in rows:
        episode = norm(sum(row["rewards"]), episodes[row["index"]], divides, 0)
        groups = [steps[row["index"], turn["anchor"]] for turn in row["turns"]]
        expected.append([episode + weight * norm(turn["to_go"], group, divides, group[0]) for turn, group in zip(row["turns"], groups)])
    mine = ours(asked(rows, "gigpo", mode=mode, gamma=gamma, step_advantage_w=weight))
    for got, wanted in zip(mine, spread(rows, expected), strict=True):
        assert got == pytest.approx(wanted, abs=2e-6)


def test_gigpo_by_hand():
    """Two answers begin at the same prompt, and come to the same anchor (40); equations 3 to 8 of the paper with gamma = 1/2, omega = 1.
    A_E = R - mean(R): R = 2 and 0, so 1 and -1. A_S(prompt): rewards to go 0 + 2/2 = 1 and 1 - 1/2 = 1/2, less 3/4. A_S(40): 2 and -1, less 1/2."""
    rows = [{"index": 0, "prompt": [7], "tokens": [1, 40, 2], "mask": [1, 0, 1], "rewards": [0., 0., 2.]},
            {"index": 0, "prompt": [7], "tokens": [3, 40, 4], "mask": [1, 0, 1], "rewards": [1., 0., -1.]}]
    assert ours(asked(rows, "gigpo", gamma=.5)) == [[1 + .25, 0, 1 + 1.5], [-1 - .25, 0, -1 - 1.5]]


@pytest.mark.parametrize("divides", [True, False])
def test_grpo_of_turns(divides):
    rows = some_batch(2)
    rewards = {}
    for row in rows:
        rewards.setdefault(row["index"], []).extend(turn["reward"] for turn in row["turns"])
    expected = []
    for row in rows:
        of_turns, later = [], 0
        for turn in reversed(row["turns"]):
            later += norm(turn["reward"], rewards[row["index"]], divides, 0)
            of_turns.insert(0, later)
        expected.append(of_turns)
    mine = ours(asked(rows, "grpo_turns", norm_adv_by_std_in_grpo=divides))
    for got, wanted in zip(mine, spread(rows, expected), strict=True):
        assert got == pytest.approx(wanted, abs=2e-6)


def test_rejected_tokens_cut_no_turn():
    """A correction takes tokens out of the response mask; the turn's others have the same advantage as before."""
    rows = some_batch(3)
    question = asked(rows, "gigpo")
    whole = ours(question)
    question["response_mask"] = [[m if i % 2 else 0 for i, m in enumerate(row["mask"])] for row in rows]
    assert ours(question) == [[value if i % 2 else 0 for i, value in enumerate(row)] for row in whole]


def test_turns_have_to_be_known():
    question = asked(some_batch(4), "gigpo")
    del question["turn_mask"]
    assert "need the turns and their tokens" in ours(question)
