"""Rewards of `ferry train grpo` that are scored while other answers are being written, by several workers of one program."""
import json
import re
import sys

import pytest

from ppo_run import ACTOR, PARTIAL, REWARD, ROLLOUT, samples, settings, train, write_world
from ranks import TORCH_PROGRAM, finish, start_training

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")
WORKERS = "reward_model.num_workers"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("early_rewards"))


def program(work, text):
    work.mkdir(exist_ok=True)
    (work / "reward.py").write_text(text)
    return {"reward_model.command": f"{sys.executable} {work / 'reward.py'}"}


MORE = {"data.val_files": ["VAL"], "trainer.test_freq": 2, "reward_model.format_pattern": "[a-z ]*", "reward_model.overlong_buffer.enable": True,
        "reward_model.overlong_buffer.len": 4}


@pytest.mark.parametrize("ranks, more", [(1, {}), (2, {}), (2, {f"{ROLLOUT}.tensor_model_parallel_size": 2, f"{ACTOR}.megatron.tensor_model_parallel_size": 2}),
                                         (1, {"algorithm.adv_estimator": "remax"}), (1, {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "characters"})],
                         ids=["one rank", "dp2", "tp2", "baselines", "filter"])
def test_several_workers_give_what_one_program_does(ranks, more, world, work):
    more = MORE | more | {"data.val_files": [str(world / "train.jsonl")]}
    one = train(world, work / "one", ranks, **more)
    assert train(world, work / "several", ranks, **more, **{WORKERS: 3}) == one
    for step in (1, 2):
        assert samples(work / "several", step) == samples(work / "one", step)
    assert samples(work / "several", 2, "validations") == samples(work / "one", 2, "validations")


@pytest.mark.parametrize("more", [{}, {f"{ROLLOUT}.ranks": [1, 2]}, {f"{ROLLOUT}.ranks": [1, 2], f"{ROLLOUT}.tensor_model_parallel_size": 2}],
                         ids=["one rank", "dp2", "tp2"])
def test_answers_of_partial_rollouts_are_scored_when_they_are_over(more, world, work):
    """Also those whose step comes later, because others of their prompt go on."""
    more = MORE | PARTIAL | more | {"data.val_files": [str(world / "train.jsonl")], "trainer.total_training_steps": 5, "checkpoint.save_freq": 4}
    ranks = 1 + len(more[f"{ROLLOUT}.ranks"])
    one = train(world, work / "one", ranks, **more)
    assert train(world, work / "several", ranks, **more, **{WORKERS: 3}) == one
    for step in one:
        assert samples(work / "several", step) == samples(work / "one", step)
    assert samples(work / "several", 2, "validations") == samples(work / "one", 2, "validations")
    spans = [json.loads(line) for line in (work / "several/timeline/timeline_rank1.jsonl").read_text().splitlines()]
    ends = sorted(span["end"] for span in spans if span["name"] == "gen")
    rewards = [span for span in spans if span["name"] == "reward/worker"]
    assert rewards and any(span["end"] < min(end for end in ends if end >= span["start"]) for span in rewards)


def test_a_worker_that_dies_once_is_started_again(world, work):
    once = f"import sys\ntry:\n    open({str(work / 'died')!r}, 'x')\n    sys.stdin.readline()\n    sys.exit(3)\nexcept FileExistsError: pass\n"
    got = train(world, work / "run", **program(work, once + REWARD), **{WORKERS: 2})
    expected = train(world, work / "whole")
    assert [step.pop("reward/num_restarts") for step in got.values()] == [1, 1]
    assert [step.pop("reward/num_restarts") for step in expected.values()] == [0, 0]
    assert got == expected


@pytest.mark.parametrize("text, said", [("import sys\nsys.stdin.readline()\nsys.exit(3)\n", "it ended (exit status 3), 3 times in a row"),
                                        ("import time\ntime.sleep(600)\n", "it said nothing for 1 s, 3 times in a row")], ids=["dies", "hangs"])
def test_a_worker_that_goes_on_failing_is_named(text, said, world, work):
    more = program(work, text) | {"reward_model.command_start_timeout": 1, WORKERS: 2}
    (status, told), = finish(start_training(1, "grpo", settings(world, work / "run", **more)), timeout=120)
    assert status == 2 and said in told and re.search("while scoring by reward worker [12] of 2", told) and "asking the reward command" in told, told


def test_answers_are_scored_while_others_are_written(world, work):
    """One sequence is computed at a time: the first answer is scored before the rollout is done."""
    train(world, work / "run", **{WORKERS: 2, f"{ROLLOUT}.max_num_seqs": 1, "data.max_response_length": 24, f"{ACTOR}.ppo_max_token_len_per_gpu": 96})
    spans = [json.loads(line) for line in (work / "run/timeline/timeline_rank0.jsonl").read_text().splitlines()]
    of_second_step = {name: [span for span in spans if span["name"] == name and span["step"] == 2] for name in ("gen", "reward/worker")}
    (gen,), rewards = of_second_step.values()
    assert len(rewards) == 8 and sum(span["end"] < gen["end"] for span in rewards) >= 4 and all(span["start"] >= gen["start"] for span in rewards)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_question_says_how_the_answer_came_about(workers, world, work):
    seen = work / "seen.jsonl"
    write = REWARD.replace("    text = ", f"    open({str(seen)!r}, 'a').write(line)\n    text = ")
    train(world, work / "run", **program(work, write), **{WORKERS: workers, "trainer.total_training_steps": 1})
    questions = [json.loads(line) for line in seen.read_text().splitlines()]
    assert sorted((q["prompt"], q["solution_str"]) for q in questions) == sorted((s["input"], s["output"]) for s in samples(work / "run", 1))
    for q in questions:
        assert q["prompt_ids"] and len(q["response_ids"]) <= 8 and q["num_turns"] == 2 and "messages" not in q
        assert q["finish_reason"] == "length" or len(q["response_ids"]) >= 1
        if len(q["response_ids"]) < 8: assert q["finish_reason"] == "stop"
    assert "length" in {q["finish_reason"] for q in questions}
