"""The metrics of a step of PPO and of a validation beside verl's own functions, names and numbers."""
import ast
import functools
import json
import math
import os
import random
import subprocess
import types

import pytest
import torch

from support import FERRY
from verl_core import ROOT, debug_metrics, metric_utils


@functools.cache
def tool():
    return subprocess.Popen([FERRY.parent.parent / "tests/ppo_metric_tool"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ours(**question):
    print(json.dumps(question, default=lambda t: t.tolist()), file=tool().stdin, flush=True)
    return json.loads(tool().stdout.readline())


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    tool().stdin.close()
    assert tool().wait(timeout=60) == 0


def agree(mine, theirs, bound=1e-6):
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        if math.isnan(value):
            assert mine[name] is None, name
        else:
            assert abs(mine[name] - value) <= bound * max(abs(value), 1e-3), f"{name}: {mine[name]}, verl has {value}"


ROWS, PROMPT, RESPONSE = 13, 7, 11


def batch(generator, aborted=0.2):
    """Prompts padded on the left, responses on the right; some responses are empty, some have holes where a tool spoke. Behind a response nothing is scored."""
    def normal():
        return torch.randn(ROWS, RESPONSE, generator=generator)

    prompt_length = torch.randint(1, PROMPT + 1, (ROWS, 1), generator=generator)
    length = torch.randint(1, RESPONSE + 4, (ROWS, 1), generator=generator).clamp(max=RESPONSE)
    length[torch.rand(ROWS, generator=generator) < aborted] = 0
    response = (torch.arange(RESPONSE) < length).long()
    prompt = (torch.arange(PROMPT) >= PROMPT - prompt_length).long()
    holes = (torch.rand(ROWS, RESPONSE, generator=generator) < 0.9).long()
    actor = -normal().abs()
    return {"prompts": torch.zeros(ROWS, PROMPT), "responses": torch.zeros(ROWS, RESPONSE), "attention_mask": torch.cat([prompt, response], 1),
            "response_mask": response * holes, "token_level_scores": normal() * response, "token_level_rewards": normal() * response, "advantages": normal(),
            "returns": normal(), "values": normal(), "old_log_probs": actor, "rollout_log_probs": actor + 0.01 * normal()}


def verl_batch(columns):
    return types.SimpleNamespace(batch=columns, non_tensor_batch={}, meta_info={})


CASES = [(seed, aborted) for seed in range(4) for aborted in (0, 0.3)] + [(9, 1.1)]


@pytest.mark.parametrize("seed,aborted", CASES)
@pytest.mark.parametrize("use_critic", [True, False])
def test_data_metrics(seed, aborted, use_critic):
    columns = batch(torch.Generator().manual_seed(seed), aborted)
    theirs = metric_utils.compute_data_metrics(verl_batch(columns), use_critic)
    if not use_critic:
        del columns["values"]
    agree(ours(op="data", batch=columns), theirs)


@pytest.mark.parametrize("seed,aborted", CASES)
def test_differences_of_rollout_and_trainer(seed, aborted):
    columns = batch(torch.Generator().manual_seed(seed), aborted)
    agree(ours(op="debug", batch=columns), debug_metrics.calculate_debug_metrics(verl_batch(columns)))


@pytest.mark.parametrize("aborted", [0.2, 1.1])
def test_times_and_throughput(aborted):
    columns = batch(torch.Generator().manual_seed(3), aborted)
    parts = ["step", "gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights", "testing", "save_checkpoint"]
    timing = {part: 0.5 + 0.1 * i for i, part in enumerate(parts)}
    data = verl_batch(columns)
    data.meta_info["global_token_num"] = columns["attention_mask"].sum(-1).tolist()
    theirs = metric_utils.compute_timing_metrics(data, timing) | metric_utils.compute_throughout_metrics(data, timing, 3)
    mine = ours(op="cost", batch=columns, timing_raw=timing, n_gpus=3)
    agree({name: value for name, value in mine.items() if "memory" not in name}, theirs)


def method_of(path, cls, name, **globals):
    """A method out of a file of verl's that cannot be imported without ray."""
    tree = ast.parse((ROOT / path).read_text())
    (found,) = (f for c in tree.body if isinstance(c, ast.ClassDef) and c.name == cls for f in c.body if isinstance(f, ast.FunctionDef) and f.name == name)
    exec(compile(ast.Module([found], []), path, "exec"), globals)
    return globals[name]


val_metrics_update = method_of("verl/trainer/ppo/ray_trainer.py", "RayPPOTrainer", "_val_metrics_update",
                               process_validation_metrics=metric_utils.process_validation_metrics)


def validation(rows):
    """The same rows, a dictionary each, for verl and for us."""
    rows = [{"data_source": "s", "uid": "u"} | row for row in rows]
    names = {name: None for row in rows for name in row if name not in ("data_source", "uid")}
    sources, uids = ([row[name] for row in rows] for name in ("data_source", "uid"))
    infos = {name: [row.get(name) for row in rows] for name in names}
    theirs = val_metrics_update(None, sources, uids, infos, [])
    mine = ours(op="validation", data_sources=sources, sample_uids=uids, infos_dict=infos)
    agree(mine, theirs, 1e-12)
    return mine


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 17])
@pytest.mark.parametrize("accurate", [True, False])
def test_validation(n, accurate):
    """Two sources; answers to a prompt are not next to each other; votes with ties."""
    choose = random.Random(n)
    rows = []
    for source, prompts in (("openai/gsm8k", 5), ("math", 3)):
        for uid in range(prompts):
            for _ in range(n):
                row = {"data_source": source, "uid": f"{uid}", "reward": choose.choice([0.0, 0.5, 1.0, choose.gauss(0, 1)]),
                       "pred": choose.choice(["7", "12", "x y", ""]), "length": choose.randrange(100)}
                rows.append(row | ({"acc": float(choose.random() < 0.4)} if accurate and source == "math" else {}))
    choose.shuffle(rows)
    mine = validation(rows)
    assert f"val-core/math/{'acc' if accurate else 'reward'}/mean@{n}" in mine and f"val-core/openai/gsm8k/reward/mean@{n}" in mine
    if n > 1:
        assert 0 < mine[f"val-core/math/{'acc' if accurate else 'reward'}/maj@{n}/std"]


def test_validation_of_uneven_prompts():
    """Numbers of answers that differ, values and votes that are lacking, numbers as votes."""
    validation([{"uid": "a", "reward": value, "pred": value % 3} for value in range(6)] +
               [{"uid": "b", "reward": value, "pred": None if value == 2 else "z"} for value in range(3)] +
               [{"uid": "c", "reward": 0.25}, {"uid": "c", "reward": None, "extra": 4.0}])


def test_logged_samples(work):
    question = {"inputs": ["2+2=", "größer?\n"], "outputs": ["4", ""], "gts": ["4", None], "scores": [1.0, -0.5],
                "reward_extra_infos_dict": {"acc": [1.0, 0.0], "pred": ["4", None]}, "global_steps": 12}
    ours(op="dump_generations", dump_path=str(work / "ours"), **question)
    method_of("verl/trainer/ppo/ray_trainer.py", "RayPPOTrainer", "_write_generations", os=os, json=json, print=lambda *_: None)(**question, dump_path=work / "theirs")
    mine, theirs = ([json.loads(line, object_pairs_hook=list) for line in (work / folder / "12.jsonl").read_text().splitlines()] for folder in ("ours", "theirs"))
    assert len(mine) == 2 and mine == theirs
