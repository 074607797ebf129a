#!/usr/bin/env python3
"""Answers of several turns on GPUs of this machine: tools and environments, in step with the trainer and ahead of it, played again.

    FERRY=build/cli/ferry python3 tests/gpu/agents.py FOLDER [--jobs 8] [--device cuda]

Needs torch and transformers, and two GPUs. FOLDER, which must not exist, gets models and runs. What has to hold, in bf16 and `bitwise`, for a dense
model and one with gated delta nets and experts:

    exact     the rollout's log-probabilities are the trainer's in every turn, of runs in step
    again     the run is played again by its journal, with tools that would fail: same metrics, sessions and rollouts

Prints a line for each run; the last line is "N passed, N failed"."""
import argparse
import sys

import runs

from agent_world import CALLS, ENVIRONMENT, PARTIAL, with_tools, write_tools, write_world
from ppo_run import ACTOR, ROLLOUT, metrics, settings
from sft_run import HYBRID
from support import tree

SHAPE = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
MODELS = {"dense": ("Llama", SHAPE),
          "hybrid": ("Qwen3Next", SHAPE | HYBRID | dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, linear_key_head_dim=128,
                                                        linear_value_head_dim=128, shared_expert_intermediate_size=128))}
TWO = {f"{ACTOR}.megatron.tensor_model_parallel_size": 2, f"{ROLLOUT}.tensor_model_parallel_size": 2}
AHEAD = {key: value for key, value in PARTIAL.items() if "partial" not in key and "gen_batch" not in key}
EXACT = ("training/rollout_probs_diff_max", "rollout_corr/kl")


def train(world, run, number, device, **more):
    """The metrics of each step; raises with what a rank said."""
    memory = {f"{ROLLOUT}.gpu_memory_utilization": 0.05, f"{ROLLOUT}.kv_cache_bytes": None} if device == "cuda" else {f"{ROLLOUT}.kv_cache_bytes": 64 << 20}
    done = runs.train("grpo", number, settings(world, run, **{"trainer.device": device, f"{ACTOR}.megatron.dtype": "bfloat16",
                                                              f"{ACTOR}.optim.lr": 1e-3} | memory | more))
    for status, said in done:
        if status != 0:
            raise RuntimeError(f"status {status}: {said[-300:]}")
    return metrics(run)


def fault_of(world, folder, number, device, more, asks_tools):
    folder.mkdir()
    first = train(world, folder / "first", number, device, **more)
    if not all(step["num_turns/max"] >= 4 for step in first.values()):
        return "nobody was asked"
    moved = {name: step[name] for step in first.values() for name in EXACT if step[name] != 0}
    if moved and "async_training.staleness_threshold" not in more:  # there the weights are older than the trainer's
        return f"not exact: {moved}"
    again = more | {f"{ROLLOUT}.agent.replay_dir": str(folder / "first/sessions")}
    if asks_tools:
        again[f"{ROLLOUT}.multi_turn.tool_config_path"] = str(write_tools(folder, "exit 1") / "tools.json")
    if train(world, folder / "again", number, device, **again) != first:
        return "other metrics in the run that is played again"
    other = [name for name in ("sessions", "rollouts") if tree(folder / "again" / name) != tree(folder / "first" / name)]
    return f"other {', '.join(other)}" if other else ""


def cases(world, device):
    tools = with_tools(world)
    environment = {f"{ROLLOUT}.agent.default_agent_loop": "env_agent", f"{ROLLOUT}.agent.env_command": f"{sys.executable} {world / 'environment.py'}",
                   "reward_model.command": None, "data.max_prompt_length": 64, "data.max_response_length": 48, f"{ACTOR}.ppo_max_token_len_per_gpu": 256}
    for name, number, more in (("tools", 1, tools), ("environment", 1, environment), ("tools, tp2", 2, tools | TWO),
                               ("tools, two steps off", 2, tools | AHEAD), ("tools, partial", 2, tools | PARTIAL)):
        yield name, lambda f=world / name.replace(", ", "_").replace(" ", "_"), n=number, m=more: fault_of(world, f, n, device, m, m is not environment)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs.add_options(parser)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    jobs = []
    for name, (family, shape) in MODELS.items():
        world = write_tools(write_world(options.folder.resolve() / name, CALLS, family, **shape))
        (world / "environment.py").write_text(ENVIRONMENT)
        jobs += [(name, case, call) for case, call in cases(world, options.device)]
    return runs.measure(jobs, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
