#!/usr/bin/env python3
"""Small models of many families on one and two GPUs of this machine: logits, fine-tuning on every mesh of two, reinforcement learning on some.

    FERRY=build/cli/ferry python3 tests/gpu/families.py FOLDER [--jobs 8] [--device cuda] [FAMILY ...]

Needs torch, transformers and Pillow, and two GPUs. FOLDER, which must not exist, gets models, runs and their logs. What has to hold, in bf16:

    logits      in `bitwise` those of transformers on the same GPU, in every bit (interop/hf_reference.py says how it computes them)
    sft         the loss and the gradients' norm of the first step are those of the host within 1 and 3 %, and the third loss is lower
    grpo        in `bitwise` the rollout's log-probabilities are the actor's; in `fast` their KL divergence is below 0.1

Logits of gated delta nets are not compared: their `bitwise` on a GPU is the rollout's and the trainer's alone (docs/numerics.md). Prints a line for each run; the last line is "N passed, N failed"."""
import argparse
import json
import subprocess
import sys
import threading

from runs import INTEROP, LONGEST, add_options, measure, train

import ppo_run
import seeing_model
import seeing_run
import sft_run
from ppo_run import ACTOR, ROLLOUT
from support import FERRY

SHAPE = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
             max_position_embeddings=512)
QWEN_EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
ROUTED = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, n_shared_experts=1, first_k_dense_replace=1)
WINDOWS = dict(sliding_window=16, pad_token_id=None)
LATENT = dict(num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=64, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_group=2, topk_group=1)
FAMILIES = {  # name: (class of transformers, changes of SHAPE)
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma3": ("Gemma3Text", WINDOWS | dict(query_pre_attn_scalar=64, tie_word_embeddings=True)),
    "ministral3": ("Ministral3", sft_run.MINISTRAL),
    "qwen3_moe": ("Qwen3Moe", QWEN_EXPERTS),
    "olmoe": ("Olmoe", dict(num_experts=8, num_experts_per_tok=2)),
    "glm4_moe": ("Glm4Moe", ROUTED | dict(n_group=1, topk_group=1)),
    "deepseek_v3": ("DeepseekV3", ROUTED | LATENT),
    "gpt_oss": ("GptOss", WINDOWS | dict(num_local_experts=8, num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"] * 2)),
    "qwen3_next": ("Qwen3Next", sft_run.HYBRID | QWEN_EXPERTS | dict(linear_key_head_dim=128, linear_value_head_dim=128,
                                                                     shared_expert_intermediate_size=128)),
    "qwen3_vl": ("Qwen3VL", {}),
    "qwen3_vl_moe": ("Qwen3VLMoe", QWEN_EXPERTS),
}
SEEING_TEXT = SHAPE | dict(rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [12, 10, 10], "mrope_interleaved": True})
SEEING_VISION = dict(hidden_size=288, intermediate_size=512, num_heads=4, out_hidden_size=256)  # heads of 72 channels, as those of the hub
OF_THEIR_OWN = {"qwen3_next"}  # logits in `bitwise` that are not those of transformers
ALIGNMENTS = ("fast", "bitwise")


class Family:
    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        self.kind, self.changes = FAMILIES[name]
        self.sees, self.routes = "VL" in self.kind, any("experts" in key for key in self.changes)

    def write(self):
        self.folder.mkdir()
        (self.folder / "reward.py").write_text(ppo_run.REWARD)
        if not self.sees:
            sft_run.write_model(self.folder / "model", self.kind, **SHAPE | self.changes)
            sft_run.write_rows(self.folder / "sft.jsonl", sft_run.conversations())
            return ppo_run.write_prompts(self.folder / "train.jsonl", 12)
        (self.folder / "model").mkdir()
        seeing_model.write_model(self.folder / "model", self.kind, text=SEEING_TEXT | self.changes, vision=SEEING_VISION)
        prompts = seeing_run.prompts(self.folder, 0)
        sft_run.write_rows(self.folder / "train.jsonl", prompts)
        sft_run.write_rows(self.folder / "sft.jsonl", [{"messages": [*row["prompt"], {"role": "assistant", "content": "this is one"}],
                                                        "images": row["images"]} for row in prompts * 4])


def meshes(family, prefix):
    """-> {name: settings}, of two GPUs"""
    axes = {"tp2": "tensor_model", "pp2": "pipeline_model", "cp2": "context"} | ({"ep2": "expert_model"} if family.routes else {})
    return {"dp2": {}} | {name: {f"{prefix}.{axis}_parallel_size": 2} for name, axis in axes.items()}


def run(algorithm, family, ranks, label, device, values):
    """-> the metrics of each step, or a text that says what went wrong"""
    folder = family.folder / f"{algorithm} {label}".replace(" ", "_")
    make = sft_run.settings if algorithm == "sft" else ppo_run.settings
    data = {"data.train_files": [str(family.folder / ("sft.jsonl" if algorithm == "sft" else "train.jsonl"))]}
    done = train(algorithm, ranks, make(family.folder, folder, **{"trainer.device": device, "checkpoint.save_freq": -1} | data | values))
    statuses, said = zip(*done)
    (folder.parent / f"{folder.name}.log").write_text("\n".join(said))
    if any(statuses):
        errors = [line for text in said for line in text.splitlines() if line.startswith("error")]
        return f"status {list(statuses)}: {errors[0] if errors else said[0][-300:]}"
    return [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def fine_tune(family, ranks, label, device, **more):
    longest = 400 if family.sees else 96
    return run("sft", family, ranks, label, device, {
        "engine.dtype": "bfloat16", "data.max_length": longest, "data.max_token_len_per_gpu": 2 * longest, "optim.lr": 5e-4,
        "trainer.total_training_steps": 3} | more)


def reinforce(family, ranks, label, device, alignment, **more):
    engine = {f"{ROLLOUT}.gpu_memory_utilization": 0.05, f"{ROLLOUT}.kv_cache_bytes": None} if device == "cuda" else {f"{ROLLOUT}.kv_cache_bytes": 64 << 20}
    return run("grpo", family, ranks, label, device, {
        f"{ACTOR}.megatron.dtype": "bfloat16", f"{ACTOR}.megatron.alignment": alignment, "data.train_batch_size": 4, f"{ACTOR}.ppo_mini_batch_size": 4,
        "data.max_prompt_length": 300 if family.sees else 32, f"{ACTOR}.ppo_max_token_len_per_gpu": 700 if family.sees else 96,
        f"{ROLLOUT}.max_num_batched_tokens": 512, f"{ACTOR}.optim.lr": 1e-3} | engine | more)


def compare_logits(family, device):
    reference = family.folder / "reference.safetensors"
    model = family.folder / "model"
    for command in ([sys.executable, INTEROP / "hf_reference.py", model, reference, "--device", device],
                    [FERRY, "verify", "--logits", model, "--reference", reference, "--device", device, "--alignment", "bitwise"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
        if done.returncode != 0:
            return f"status {done.returncode}: {(done.stderr or done.stdout)[-300:]}"
    return ""


def fault_of_tuning(found, host):
    if isinstance(found, str) or isinstance(host, str):
        return found if isinstance(found, str) else f"on the host: {host}"
    losses, norm = [step["train/loss"] for step in found], found[0]["train/grad_norm"]
    near = abs(losses[0] - host[0]["train/loss"]) < 0.01 * losses[0] and abs(norm - host[0]["train/grad_norm"]) < 0.03 * norm
    return "" if near and losses[2] < losses[0] else f"losses {losses}, norm {norm}; the host's {host[0]['train/loss']}, {host[0]['train/grad_norm']}"


def fault_of_reinforcing(found, alignment):
    if isinstance(found, str):
        return found
    divergence = [step["rollout_corr/kl"] for step in found]
    exact = all(step["training/rollout_probs_diff_max"] == 0 for step in found) and not any(divergence)
    good = exact if alignment == "bitwise" else all(abs(kl) < 0.1 for kl in divergence)
    return "" if good and len(found) == 2 else f"rollout_corr/kl {divergence}"


def checks_of(family, device, host):
    """Names and calls that return what is wrong, or nothing. `host` is a call that returns the fine-tuning on the host."""
    if family.name not in OF_THEIR_OWN:
        yield "logits", lambda: compare_logits(family, device)
    tuned = [(1, "", alignment, {}) for alignment in ALIGNMENTS]
    tuned += [(2, f" {name}", "fast", more) for name, more in meshes(family, "engine").items()]
    tuned += [(2, " tp2", "bitwise", meshes(family, "engine")["tp2"])]
    tuned.append((1, " recomputed", "fast", {"engine.recompute_granularity": "full", "engine.recompute_method": "uniform", "engine.recompute_num_layers": 1}))
    for ranks, name, alignment, more in tuned:
        label = alignment + name
        yield f"sft {label}", lambda r=ranks, n=label, m={"engine.alignment": alignment} | more: fault_of_tuning(fine_tune(family, r, n, device, **m), host())
    actor = meshes(family, f"{ACTOR}.megatron")
    learned = [(1, "", alignment, {}) for alignment in ALIGNMENTS] + [(2, " pp2", "fast", actor["pp2"])]
    learned += [(2, " tp2", "bitwise", actor["tp2"] | {f"{ROLLOUT}.tensor_model_parallel_size": 2})]
    for ranks, name, alignment, more in learned:
        label = alignment + name
        yield f"grpo {label}", lambda r=ranks, n=label, a=alignment, m=more: fault_of_reinforcing(reinforce(family, r, n, device, a, **m), a)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: " + ", ".join(FAMILIES))
    options = parser.parse_intermixed_args()
    options.folder.mkdir(parents=True)
    jobs = []
    for name in options.families or FAMILIES:
        family = Family(name, options.folder.resolve() / name)
        family.write()
        lock, known = threading.Lock(), []

        def host(family=family, lock=lock, known=known):
            with lock:
                if not known:
                    known.append(fine_tune(family, 1, "host", "cpu", **{"engine.alignment": "fast"}))
                return known[0]
        jobs += [(name, check, call) for check, call in checks_of(family, options.device, host)]
    return measure(jobs, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
