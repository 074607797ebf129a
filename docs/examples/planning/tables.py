#!/usr/bin/env python3
"""Writes the table of docs/training/planning.md: tables.py FERRY MODELS. MODELS holds a folder with a config.json for each model."""
import json
import subprocess
import sys
from pathlib import Path

ACTOR, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
TP, PP, EP = (f"{ACTOR}.{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "expert"))
ROLLOUT_TP, ROLLOUT_EP = f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.expert_parallel_size"
SHARED = {TP: 4, ROLLOUT_TP: 4, f"{ACTOR}.sequence_parallel": "false"}
EXPERTS = {EP: 4, ROLLOUT_EP: 4}


def stages(count, first, last):
    return {PP: count, f"{ACTOR}.num_layers_in_first_pipeline_stage": first, f"{ACTOR}.num_layers_in_last_pipeline_stage": last}


def large(prompts):
    return {"data.train_batch_size": prompts, "actor_rollout_ref.actor.ppo_mini_batch_size": prompts // 4}


RUNS = [
    ("Llama-3-8B", 4, "H200", {}),
    ("Qwen3-32B", 4, "H200", SHARED),
    ("Qwen3-30B-A3B", 4, "H200", EXPERTS),
    ("Qwen3-235B-A22B", 64, "H200", {PP: 2, EP: 16, ROLLOUT_TP: 4, ROLLOUT_EP: 16} | large(128)),
    ("DeepSeek-V3", 96, "H200", {EP: 16, ROLLOUT_TP: 8, ROLLOUT_EP: 4} | stages(6, 10, 11) | large(96)),
    ("DeepSeek-V3", 256, "H200", {EP: 32, ROLLOUT_TP: 8, ROLLOUT_EP: 32} | stages(8, 6, 7) | large(128)),
    ("DeepSeek-V3", 256, "H100", {EP: 32, ROLLOUT_TP: 8, ROLLOUT_EP: 32} | stages(8, 6, 7) | large(128)),
]


def main():
    ferry, models = sys.argv[1:]
    run = Path(__file__).parent / "grpo.toml"
    print("| model | ranks | `update_actor`, GiB | `gen`, GiB | host, GiB | offloaded | micro-batch | recomputed | cache share | step, s | tokens/s/GPU | fits |")
    print("|---|---|---:|---:|---:|---|---:|---|---:|---:|---:|---|")
    commands = []
    for model, ranks, device, settings in RUNS:
        arguments = [f"{key}={value}" for key, value in settings.items()]
        command = ["plan", str(run), "--ranks", str(ranks), "--device", device, f"actor_rollout_ref.model.path={models}/{model}", *arguments]
        commands.append(" ".join(["ferry", "plan", "grpo.toml", *command[2:]]).replace(f"{models}/", ""))
        done = subprocess.run([ferry, *command, "--json"], capture_output=True, text=True)
        plan = json.loads(done.stdout)
        phases = [phase for group in plan["ranks"] for phase in group["phases"]]
        chosen = {key.rpartition(".")[2]: value for key, value in (setting.split("=") for setting in plan["chosen"])}
        again = chosen["recompute_granularity"]
        if again == "full":
            again = f"{chosen['recompute_num_layers']} a stage" if chosen["recompute_method"] == "block" else "all"

        rests = ", ".join(key.removesuffix("_offload") for key, value in chosen.items() if key.endswith("_offload")) or "none"

        def most(name, part="total"):
            return f"{max(phase[part] for phase in phases if phase['name'] == name) / 2**30:.1f}"

        times = f"{plan['step_seconds']:.1f} | {plan['tokens_per_second_per_device']:,.0f} | yes" if plan["fits"] else "- | - | no"
        print(f"| {model} | {ranks} {device} | {most('update_actor')} | {most('gen')} | {most('gen', 'host')} | {rests} | {chosen['ppo_max_token_len_per_gpu']} "
              f"| {again} | {chosen['gpu_memory_utilization']} | {times} |")
    print()
    print("```console")
    for command in commands:
        print(f"$ {command}")
    print("```")


if __name__ == "__main__":
    main()
