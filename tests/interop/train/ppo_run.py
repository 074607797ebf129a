"""Helpers of the tests of `ferry train grpo|ppo`: a tiny model, prompts whose answers a rule or a small program scores, and runs of several ranks."""
import json
import signal
import sys
import time
from pathlib import Path

from ranks import finish, start_training
from sft_run import WORDS, write_model, write_rows

# A score that depends on every character, so that answers of a model that has learned nothing differ.
REWARD = """import json, sys
for line in sys.stdin:
    q = json.loads(line)
    text = q["solution_str"]
    print(json.dumps({"id": q["id"], "score": sum(map(ord, text)) % 7 / 6, "characters": len(text)}), flush=True)
"""
ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
PROMPTS, ANSWERS = 4, 2  # of a step
APART = {f"{ACTOR}.ranks": [0], f"{ROLLOUT}.ranks": [1]}
# Sequences take turns in the rollout, so that they are finished one by one.
PARTIAL = APART | {"async_training.staleness_threshold": 2, "async_training.partial_rollout": True, "data.gen_batch_size": PROMPTS + 2,
                   f"{ROLLOUT}.max_num_seqs": 5, "data.max_response_length": 16}
WITH_CRITIC = {"algorithm.adv_estimator": "gae", f"{ROLLOUT}.n": 1, "critic.optim.lr": 1e-2, "algorithm.use_kl_in_reward": True,
               "algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": 1e-4, "algorithm.kl_ctrl.horizon": 20}


def write_world(folder, family="Llama", prompts=12, **shape):
    """A model of two layers in fp32, prompts of unlike lengths, and a program that scores their answers."""
    write_model(folder / "model", family, **{"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
                                            "num_key_value_heads": 2} | shape)
    write_prompts(folder / "train.jsonl", prompts)
    (folder / "reward.py").write_text(REWARD)
    return folder


def write_prompts(path, count):
    write_rows(path, [{"data_source": "counting", "prompt": [{"role": "user", "content": " ".join(WORDS[i % 5:i % 5 + 1 + i % 4])}],
                       "reward_model": {"style": "rule", "ground_truth": WORDS[i % 10]}, "extra_info": {"index": i}} for i in range(count)])


def settings(world, run, **more):
    """On the host, in fp32 and bitwise, where the actor computes what the rollout has said, to be compared; None takes a setting away."""
    values = {"actor_rollout_ref.model.path": str(world / "model"), "data.train_files": [str(world / "train.jsonl")],
              "data.train_batch_size": PROMPTS, "data.max_prompt_length": 32, "data.max_response_length": 8,
              f"{ACTOR}.ppo_mini_batch_size": PROMPTS, f"{ACTOR}.ppo_max_token_len_per_gpu": 64, f"{ACTOR}.optim.lr": 5e-3,
              f"{ACTOR}.megatron.dtype": "float32", f"{ACTOR}.megatron.alignment": "bitwise",
              f"{ACTOR}.recompute_old_log_prob": True,
              f"{ACTOR}.megatron.make_vocab_size_divisible_by": 8, f"{ROLLOUT}.n": ANSWERS, f"{ROLLOUT}.kv_cache_bytes": 1 << 20,
              f"{ROLLOUT}.max_num_seqs": 8, f"{ROLLOUT}.max_num_batched_tokens": 64, "trainer.total_training_steps": 2,
              "trainer.device": "cpu", "trainer.default_local_dir": str(run),
              "reward_model.command": f"{sys.executable} {world / 'reward.py'}"} | more
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]


def train(world, run, ranks=1, algorithm="grpo", **more):
    """The metrics of each step of a whole run."""
    for rank, (status, said) in enumerate(finish(start_training(ranks, algorithm, settings(world, run, **more)), timeout=300)):
        assert status == 0, f"rank {rank}: {said[-3000:]}"
    return metrics(run)


def kill_behind(step, world, run, ranks, **more):
    """A run that is killed in a step behind the checkpoint of that one."""
    started = start_training(ranks, "grpo", settings(world, run, **more))
    until = time.monotonic() + 120
    log = run / "metrics.jsonl"
    while not ((run / f"actor/iter_{step:07}").is_dir() and log.exists() and log.read_text().count("\n") >= step) and time.monotonic() < until:
        time.sleep(0.005)
    for rank in started:
        rank.send_signal(signal.SIGKILL)
    finish(started)
    assert len(metrics(run)) < more["trainer.total_training_steps"]


def assert_same_weights(one, other, step):
    weights = {str(path.relative_to(one)): path.read_bytes() for path in (one / f"actor/iter_{step:07}").rglob("*") if path.is_file()}
    assert any(name.endswith(".distcp") for name in weights)
    for name, written in weights.items():
        assert (other / name).read_bytes() == written, name


def metrics(run):
    """{step: its metrics}, without what depends on the clock or the machine."""
    steps = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        step = steps.setdefault(line["step"], {})
        assert not step.keys() & line["data"].keys(), f"step {line['step']} is there twice"
        step |= {name: value for name, value in line["data"].items()
                 if not name.startswith(("timing_", "perf/")) or name == "perf/total_num_tokens"}
    return steps


def samples(run, step, folder="rollouts"):
    return [json.loads(line) for line in (Path(run) / folder / f"{step}.jsonl").read_text().splitlines()]
