"""`ferry train grpo` when something breaks, or answers are worth nothing: the tables of docs/training/grpo.md and docs/training/sft.md."""
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from ppo_run import ACTOR, ANSWERS, PROMPTS, REWARD, ROLLOUT, metrics, samples, settings, train, write_prompts, write_world
from ranks import TORCH_PROGRAM, address_spaces, finish, finish_soon, lose, memory_limit, start_training, wait_for
from support import Mounted, run_ok

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")
TP = f"{ACTOR}.megatron.tensor_model_parallel_size"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("ppo_faults"))


def program(work, text):
    """A reward program that the run starts."""
    path = work / "reward.py"
    path.write_text(text)
    return {"reward_model.command": f"{sys.executable} {path}"}


def fail(world, work, ranks=1, **more):
    done = finish(start_training(ranks, "grpo", settings(world, work / "run", **more)))
    assert {status for status, _ in done} == {2}, done
    return [said for _, said in done]


# ------------------------------------------------------------------------------------------------------------- rewards


def test_a_reward_program_that_crashes_once_is_started_again(world, work):
    """Nobody sees it in the numbers, but for the one that counts it."""
    died = work / "died"
    once = f"import os, sys\nif not os.path.exists({str(died)!r}):\n    open({str(died)!r}, 'w')\n    sys.stdin.readline()\n    sys.exit(3)\n"
    got = train(world, work / "run", **program(work, once + REWARD))
    expected = train(world, work / "whole")
    assert [step.pop("reward/num_restarts") for step in got.values()] == [1, 1]
    assert [step.pop("reward/num_restarts") for step in expected.values()] == [0, 0]
    assert got == expected


FAILURES = {  # name: (the program, what is said)
    "crashes": ("import sys\nsys.stdin.readline()\nsys.exit(3)\n", "it ended (exit status 3), 3 times in a row, and left 8 of 8 answers unscored"),
    "hangs": ("import time\ntime.sleep(600)\n", "it said nothing for 1 s, 3 times in a row"),
    "says nonsense": ("import sys\nfor line in sys.stdin:\n    print('good', flush=True)\n", "no JSON object: good"),
    "says no number": ("import json, sys\nfor line in sys.stdin:\n    print(json.dumps({'id': json.loads(line)['id'], 'score': 'high'}), flush=True)\n",
                       "no number is the score"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_reward_program_that_fails_ends_the_run(name, world, work):
    text, said = FAILURES[name]
    done = fail(world, work, 2, **program(work, text), **{"reward_model.command_start_timeout": 1})
    assert said in done[0] and "asking the reward command" in done[0], done
    assert "rank 0, which failed: " in done[1] and said in done[1], done


def test_a_reward_program_may_take_longer_than_collectives(world, work):
    """Its first answer takes five seconds, of ranks that wait for each other for three."""
    slow = "import time\ntime.sleep(5)\n" + REWARD
    assert len(train(world, work / "run", 2, **program(work, slow), **{"trainer.nccl_timeout": 3})) == 2


def test_data_that_no_rule_scores(world, work):
    done = fail(world, work, **{"reward_model.command": None})
    assert "counting" in done[0] and "reward" in done[0], done


# ------------------------------------------------------------------------------------------------------------- answers


def test_answers_that_are_all_worth_the_same_teach_nothing(world, work):
    same = REWARD.replace("sum(map(ord, text)) % 7 / 6", "0.25")
    for algorithm in ("grpo", "rloo", "opo"):
        steps = train(world, work / algorithm, **program(work, same), **{"algorithm.adv_estimator": algorithm})
        for step in steps.values():
            assert step["critic/advantages/max"] == step["critic/advantages/min"] == step["actor/pg_loss"] == step["actor/grad_norm"] == 0
            assert None not in step.values()


def test_answers_that_are_empty_or_cut_off_are_scored(world, work):
    """A model that ends each answer at once: text "", one token. One that cannot end: each is as long as may be."""
    from safetensors.torch import load_file, save_file
    for name, size, length, ratio in (("ends", 40.0, 1, 0), ("goes_on", -40.0, 8, 1)):
        shutil.copytree(world / "model", work / name / "model")
        for file in ("train.jsonl", "reward.py"):
            shutil.copy(world / file, work / name)
        tensors = load_file(work / name / "model/model.safetensors")
        # The first hidden unit is the same everywhere, and speaks for the token that ends an answer.
        for key, tensor in tensors.items():
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        tensors["model.embed_tokens.weight"][:] = 0
        tensors["model.embed_tokens.weight"][:, 0] = 1
        tensors["lm_head.weight"][:, 0] = 0
        tensors["lm_head.weight"][0, 0] = size
        save_file(tensors, work / name / "model/model.safetensors", {"format": "pt"})
        steps = train(work / name, work / name / "run", **{"trainer.total_training_steps": 1})
        assert steps[1]["response_length/mean"] == length and steps[1]["response_length/clip_ratio"] == ratio
        assert steps[1]["response/aborted_ratio"] == 0
        # All probabilities are 1, or the same: they correlate with nothing.
        assert {name for name, value in steps[1].items() if value is None} <= {"training/rollout_actor_probs_pearson_corr"}
        rows = samples(work / name / "run", 1)
        assert len(rows) == 8
        for row in rows:
            assert row["score"] == pytest.approx(sum(map(ord, row["output"])) % 7 / 6) and (row["output"] == "") == (name == "ends")


def test_a_few_rows_run_through_an_interleaved_pipeline(work):
    """One answer is validated, which fills no group of micro-batches: a reward model scores it as without a pipeline."""
    import torch
    import transformers
    world = write_world(work)
    torch.manual_seed(5)
    config = transformers.AutoConfig.from_pretrained(world / "model", num_labels=1)
    transformers.LlamaForSequenceClassification(config).save_pretrained(world / "judge")
    write_prompts(world / "val.jsonl", 1)
    judged = {"reward_model.enable": True, "reward_model.model.path": str(world / "judge"), "reward_model.command": None,
              "data.val_files": [str(world / "val.jsonl")], "trainer.test_freq": 1, "trainer.total_training_steps": 1}
    interleaved = {f"{ACTOR}.megatron.pipeline_model_parallel_size": 2, f"{ACTOR}.megatron.pipeline_model_parallel_layout": "E|t|t|L"}
    alone, piped = train(world, work / "alone", **judged)[1], train(world, work / "piped", 2, **judged, **interleaved)[1]
    scores = {name: value for name, value in alone.items() if name.startswith("val-")}
    assert scores and {name: piped[name] for name in scores} == pytest.approx(scores, rel=1e-4)
    assert piped["critic/score/mean"] == alone["critic/score/mean"]


def test_float16_learns_of_the_kept_tokens_alone(world, work):
    step = train(world, work / "run", **{f"{ACTOR}.megatron.dtype": "float16", f"{ROLLOUT}.top_p": 0.9, "trainer.total_training_steps": 1})[1]
    assert math.isfinite(step["actor/entropy"]) and step["training/rollout_probs_diff_max"] < 1e-3


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Answers of many tokens by a model with many words."""
    return write_world(tmp_path_factory.mktemp("large"), hidden_size=128, intermediate_size=512, vocab_size=16384, max_position_embeddings=4096)


def test_memory_that_is_not_there(large, work):
    """One of two ranks has less and less address space. It names what does not fit, the phase and settings of the role; the other repeats it."""
    more = {"data.max_response_length": 512, f"{ROLLOUT}.ignore_eos": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 4096,
            f"{ROLLOUT}.kv_cache_bytes": 64 << 20, f"{ROLLOUT}.max_num_batched_tokens": 512, f"{ACTOR}.megatron.alignment": "fast",
            f"{ACTOR}.megatron.recompute_granularity": "none", "trainer.total_training_steps": 1}
    start = lambda run, limits={}: start_training(2, "grpo", settings(large, run, **more), limits)
    began = time.monotonic()
    peak = max(address_spaces(start(work / "peak")))
    longest = 2 * (time.monotonic() - began) + 10
    seen = []
    for limit in range(peak - 100, peak - 2200, -150):
        (other_status, other), (status, said) = finish_soon(start(work / f"run{limit}", {1: memory_limit(limit)}), 1, longest)
        if status == other_status == 0 or "while running as rank 1 of 2" not in said:
            continue
        cause = said.partition("error: ")[2].splitlines()[0]
        assert status == other_status == 2 and "out of memory" in cause, (limit, said, other)
        assert f"rank 1, which failed: {cause}" in other, (limit, said, other)
        seen.append(said)
        if "what would fit: " in said.partition("hint: ")[2]:
            break
    else:
        pytest.fail(f"the actor never lacks memory: {seen}")
    assert "while in update_actor" in said or "while in compute_log_prob" in said, said
    assert "memory     rank 1: actor: micro-batches of up to" in other, other
    for text in (said, other):
        advice = text.partition("out of memory for ")[2].partition("what would fit: ")[2]
        assert (f"{ACTOR}." in advice or f"{ROLLOUT}.log_prob_" in advice) and f"{ROLLOUT}.kv_cache_bytes below" in advice, text


# --------------------------------------------------------------------------------------------------------------- ranks


APART = {f"{ACTOR}.ranks": [0, 1], f"{ROLLOUT}.ranks": [2, 3], TP: 2, "trainer.nccl_timeout": 5, "trainer.total_training_steps": 1000,
         "checkpoint.save_freq": 1}


LOSSES = {  # name: (the signal, the rank)
    "a rollout is killed while it answers": (signal.SIGKILL, 3),
    "an actor is killed": (signal.SIGKILL, 1),
    "a rollout hangs": (signal.SIGSTOP, 2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_that_is_lost_is_named_by_all_others(name, world, work):
    """The run goes on from its last checkpoint, on fewer ranks, too."""
    what, lost = LOSSES[name]
    run = work / "run"
    more = {"data.max_response_length": 64, f"{ROLLOUT}.ignore_eos": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 128} if "answers" in name else {}
    ranks = start_training(4, "grpo", settings(world, run, **APART | more))

    def trouble():
        wait_for((run / "actor/iter_0000002").exists, ranks[0])
        # The weights go to the rollout after a checkpoint, and answers follow.
        ranks[lost].send_signal(what)

    done = lose(ranks, lost, trouble)
    meshes = "actor      ranks 0-1  TP 2  PP 1  CP 1  EP 1  DP 1\nrollout    ranks 2-3  TP 1  PP 1  CP 1  EP 1  DP 2\n"
    assert meshes in done[0], done
    run_ok("digest", run / "actor")
    last = max(metrics(run))
    again = train(world, run, **more, **{"trainer.total_training_steps": last + 1})
    assert sorted(again) == list(range(1, last + 2))


PLACEMENTS = {
    "apart": {f"{ACTOR}.ranks": [0, 1], f"{ROLLOUT}.ranks": [2, 3], TP: 2},
    "together": {TP: 2, f"{ACTOR}.megatron.pipeline_model_parallel_size": 2, f"{ROLLOUT}.tensor_model_parallel_size": 1},
}


@pytest.fixture(scope="module")
def reshards(tmp_path_factory):
    """Weights that go to the rollout in many rounds. {placement: the metrics of a run that nothing happens to}."""
    world = write_world(tmp_path_factory.mktemp("reshards"), prompts=16, vocab_size=16384, hidden_size=64)
    settings = {name: placement | {f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 1, "trainer.nccl_timeout": 20,
                                   "trainer.total_training_steps": 4, "checkpoint.save_freq": 2} for name, placement in PLACEMENTS.items()}
    return world, settings, {name: train(world, world / name, 4, **settings[name]) for name in PLACEMENTS}


def silence(process):
    """Its next word waits until somebody reads what it has said: the pipe is full."""
    pipe = os.open(f"/proc/{process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(pipe, b"\n" * size)
    os.close(pipe)


@pytest.mark.parametrize("placement, lost", [("apart", 1), ("apart", 2), ("together", 2)])
def test_a_rank_that_is_lost_while_weights_are_resharded(placement, lost, reshards, work):
    """Rank 0 is held up at the end of the third step. Behind it the weights go to the rollout: the last rank is held up, so that no other one
    gets out of it."""
    world, more, whole = reshards
    run, asked, leave, held = work / "run", work / "asked", work / "leave", 3
    pause = f"""    number += 1
    if number == 2 * {PROMPTS * ANSWERS} + 1 and not os.path.exists({str(asked)!r}):
        open({str(asked)!r}, "w")
        while not os.path.exists({str(leave)!r}):
            time.sleep(0.001)
"""
    pausing = program(work, "import os, time\nnumber = 0\n" + REWARD.replace("    q = ", pause + "    q = "))
    ranks = start_training(4, "grpo", settings(world, run, **more[placement], **pausing))

    def trouble():
        wait_for(asked.exists, ranks[0])
        silence(ranks[0])
        leave.touch()
        wait_for(lambda: 3 in metrics(run), ranks[0])
        ranks[held].send_signal(signal.SIGSTOP)
        os.read(ranks[0].stderr.fileno(), 1 << 20)
        time.sleep(1)
        ranks[lost].kill()
        ranks[held].send_signal(signal.SIGCONT)

    done = lose(ranks, lost, trouble)
    assert all("while resharding the actor's weights into the rollout's\n  while in update_weights" in said for said in done.values()), done
    run_ok("digest", run / "actor")
    assert train(world, run, 4, **more[placement]) == whole[placement]


# ---------------------------------------------------------------------------------------------------------------- disk


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk(background, world, work):
    """A file system of two and a half checkpoints: the last whole one stays, and the run goes on when there is room."""
    saving = {"checkpoint.save_freq": 1, "trainer.total_training_steps": 4, "trainer.log_samples": False, "checkpoint.async_save": background}
    expected = train(world, work / "whole", **saving)
    size = sum(path.stat().st_size for path in (work / "whole/actor/iter_0000001").iterdir())
    with Mounted(work / "disk", f"size={5 * size // 2}") as disk:
        (status, said), = finish(start_training(1, "grpo", settings(world, disk / "run", **saving)))
        assert status == 2 and "No space left on device" in said and str(disk) in said, said
        run_ok("digest", disk / "run/actor")
        assert {path.name for path in (disk / "run/actor").glob("iter_*")} == {"iter_0000001", "iter_0000002"}
        subprocess.run(["mount", "-o", f"remount,size={20 * size}", disk], check=True)
        assert train(world, disk / "run", **saving) == expected
