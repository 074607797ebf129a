#!/usr/bin/env python3
"""Small models of many families on one and two GPUs of this machine: logits, fine-tuning on every mesh of two, reinforcement learning on some.

    FERRY=build/cli/ferry python3 tests/gpu/families.py FOLDER [--jobs 8] [--device cuda] [FAMILY ...]

Needs torch, transformers and Pillow, and two GPUs. FOLDER, which must not exist, gets models, runs and their logs. What has to hold, in bf16:

    logits      in `bitwise` those of transformers on the same GPU, in every bit (interop/hf_reference.py says how it computes them): on one GPU, with the
                sequences packed, and on every mesh of two
    sft         the loss and the gradients' norm of the first step are those of the host within 1 and 3 %, and the third loss is lower
    grpo        in `bitwise` the rollout's log-probabilities are the actor's; in `fast` their KL divergence is below 0.1

Logits of gated delta nets are not compared: their `bitwise` on a GPU is the rollout's and the trainer's alone (docs/numerics.md). Prints a line for each run; the last line is "N passed, N failed"."""
import argparse
import json
import subprocess
import sys
import threading

from runs import INTEROP, LONGEST, add_options, measure, train, verify

import ppo_run
import seeing_model
import seeing_run
import sft_run
from ppo_run import ACTOR, ROLLOUT

SHAPE = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
             max_position_embeddings=512)
QWEN_EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
ROUTED = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, n_shared_experts=1, first_k_dense_replace=1)
WINDOWS = dict(sliding_window=16, pad_token_id=None)
LATENT = dict(num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_group=2, topk_group=1)
FAMILIES = {  # name: (class of transformers, changes of SHAPE)
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "seed_oss": ("SeedOss", dict(attention_bias=True)),
    "smollm3": ("SmolLM3", dict(pad_token_id=None, tie_word_embeddings=True)),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", WINDOWS),
    "glm4": ("Glm4", dict(pad_token_id=None)),
    "phi3": ("Phi3", dict(pad_token_id=None)),
    "granite": ("Granite", dict(embedding_multiplier=12.0, attention_multiplier=0.015625, residual_multiplier=0.22, logits_scaling=8.0)),
    "gemma2": ("Gemma2", WINDOWS | dict(query_pre_attn_scalar=64, tie_word_embeddings=True)),
    "gemma3": ("Gemma3Text", WINDOWS | dict(query_pre_attn_scalar=64, tie_word_embeddings=True)),
    "ministral3": ("Ministral3", sft_run.MINISTRAL),
    "qwen3_moe": ("Qwen3Moe", QWEN_EXPERTS),
    "mixtral": ("Mixtral", dict(num_local_experts=8, num_experts_per_tok=2)),
    "minimax_m2": ("MiniMaxM2", dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=128)),
    "ernie4_5_moe": ("Ernie4_5_Moe", dict(moe_num_experts=8, moe_k=2, moe_intermediate_size=128, moe_num_shared_experts=1, moe_layer_start_index=1)),
    "olmoe": ("Olmoe", dict(num_experts=8, num_experts_per_tok=2)),
    "glm4_moe": ("Glm4Moe", ROUTED | dict(n_group=1, topk_group=1)),
    "glm4_moe_lite": ("Glm4MoeLite", {key: value for key, value in (ROUTED | LATENT).items() if key != "first_k_dense_replace"}),
    "deepseek_v3": ("DeepseekV3", ROUTED | LATENT),
    "gpt_oss": ("GptOss", WINDOWS | dict(num_local_experts=8, num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"] * 2)),
    "qwen3_next": ("Qwen3Next", sft_run.HYBRID | QWEN_EXPERTS | dict(linear_key_head_dim=128, linear_value_head_dim=128,
                                                                     shared_expert_intermediate_size=128)),
    "qwen3_5_moe": ("Qwen3_5MoeText", sft_run.HYBRID | QWEN_EXPERTS | dict(linear_key_head_dim=128, linear_value_head_dim=128,
                                                                           shared_expert_intermediate_size=128)),
    "qwen3_vl": ("Qwen3VL", {}),
    "qwen3_vl_moe": ("Qwen3VLMoe", QWEN_EXPERTS),
}
SEEING_TEXT = SHAPE | dict(rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [12, 10, 10], "mrope_interleaved": True})
SEEING_VISION = dict(hidden_size=288, intermediate_size=512, num_heads=4, out_hidden_size=256)  # heads of 72 channels, as those of the hub
OF_THEIR_OWN = {"qwen3_next", "qwen3_5_moe"}  # logits in `bitwise` that are not those of transformers
FAST_ALONE = {"gemma2"}  # on a GPU: no kernel of soft caps keeps its rows
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
            choose_by_chance(self.folder / "model/model.safetensors")
            sft_run.write_rows(self.folder / "sft.jsonl", sft_run.conversations())
            return ppo_run.write_prompts(self.folder / "train.jsonl", 12)
        (self.folder / "model").mkdir()
        seeing_model.write_model(self.folder / "model", self.kind, text=SEEING_TEXT | self.changes, vision=SEEING_VISION)
        prompts = seeing_run.prompts(self.folder, 0)
        sft_run.write_rows(self.folder / "train.jsonl", prompts)
        sft_run.write_rows(self.folder / "sft.jsonl", [{"messages": [*row["prompt"], {"role": "assistant", "content": "this is one"}],
                                                        "images": row["images"]} for row in prompts * 4])


def choose_by_chance(path):
    """transformers begins ERNIE's routers with zeros. Experts that are alike are chosen in an order of the device's own."""
    import torch
    from safetensors.torch import load_file, save_file
    tensors = load_file(path)
    routers = [name for name, tensor in tensors.items() if name.endswith("mlp.gate.weight") and not tensor.any()]
    if routers:
        save_file(tensors | {name: 0.02 * torch.randn_like(tensors[name]) for name in routers}, path, metadata={"format": "pt"})


def meshes(family, prefix):
    """-> {name: settings}, of two GPUs"""
    axes = {"tp2": "tensor_model", "pp2": "pipeline_model", "cp2": "context"} | ({"ep2": "expert_model"} if family.routes else {})
    return {"dp2": {}} | {name: {f"{prefix}.{axis}_parallel_size": 2} for name, axis in axes.items()}


def settings_of(algorithm, family, folder, device, values):
    make = sft_run.settings if algorithm == "sft" else ppo_run.settings
    data = {"data.train_files": [str(family.folder / ("sft.jsonl" if algorithm == "sft" else "train.jsonl"))]}
    return make(family.folder, folder, **{"trainer.device": device, "checkpoint.save_freq": 0} | data | values)


def run(algorithm, family, ranks, label, arguments):
    """-> the metrics of each step, or a text that says what went wrong"""
    done = train(algorithm, ranks, arguments)
    folder = folder_of(algorithm, family, label)
    statuses, said = zip(*done)
    (folder.parent / f"{folder.name}.log").write_text("\n".join(said))
    if any(statuses):
        errors = [line for text in said for line in text.splitlines() if line.startswith("error")]
        return f"status {list(statuses)}: {errors[0] if errors else said[0][-300:]}"
    return [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def folder_of(algorithm, family, label):
    return family.folder / f"{algorithm} {label}".replace(" ", "_")


def fine_tune(family, ranks, label, device, **more):
    longest = 400 if family.sees else 96
    return run("sft", family, ranks, label, settings_of("sft", family, folder_of("sft", family, label), device, {
        "engine.dtype": "bfloat16", "data.max_length": longest, "data.max_token_len_per_gpu": 2 * longest, "optim.lr": 5e-4,
        "trainer.total_training_steps": 3} | more))


def settings_of_reinforcing(family, folder, device, alignment, **more):
    engine = {f"{ROLLOUT}.gpu_memory_utilization": 0.05, f"{ROLLOUT}.kv_cache_bytes": None} if device == "cuda" else {f"{ROLLOUT}.kv_cache_bytes": 64 << 20}
    return settings_of("grpo", family, folder, device, {
        f"{ACTOR}.megatron.dtype": "bfloat16", f"{ACTOR}.megatron.alignment": alignment, "data.train_batch_size": 4, f"{ACTOR}.ppo_mini_batch_size": 4,
        "data.max_prompt_length": 300 if family.sees else 32, f"{ACTOR}.ppo_max_token_len_per_gpu": 700 if family.sees else 96,
        f"{ROLLOUT}.max_num_batched_tokens": 512, f"{ACTOR}.optim.lr": 1e-3} | engine | more)


def reinforce(family, ranks, label, device, alignment, **more):
    return run("grpo", family, ranks, label, settings_of_reinforcing(family, folder_of("grpo", family, label), device, alignment, **more))


def reference_of(family, device):
    """-> the file with the logits of transformers, and what went wrong, or nothing"""
    reference = family.folder / "reference.safetensors"
    done = subprocess.run([sys.executable, INTEROP / "hf_reference.py", family.folder / "model", reference, "--device", device], capture_output=True,
                          text=True, timeout=LONGEST)
    return reference, f"transformers: {done.stderr[-300:]}" if done.returncode else ""


def compare_logits(family, device, reference, mesh):
    """mesh: flags of `ferry verify --logits`, of one rank or of two"""
    reference, fault = reference
    if fault:
        return fault
    command = [family.folder / "model", "--reference", reference, "--device", device, "--alignment", "bitwise", *mesh]
    done = verify(2 if mesh and mesh[0] != "--packed" else 1, command)
    (family.folder / f"logits{''.join(mesh)}.log").write_text("\n".join(said for _, said in done))
    return next((f"status {status}: {said[-300:]}" for status, said in done if status), "")


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


def checks_of(family, device, host, reference):
    """Names and calls that return what is wrong, or nothing. `host` and `reference` are calls that return the fine-tuning on the host and reference_of()."""
    alignments = ALIGNMENTS[:1] if device == "cuda" and family.name in FAST_ALONE else ALIGNMENTS
    if family.name not in OF_THEIR_OWN and "bitwise" in alignments:
        given = ([], ["--packed"], ["--tp=2"], ["--tp=2", "--sp"], ["--pp=2"], ["--cp=2"], *([["--ep=2"]] if family.routes else []))
        for mesh in given:
            yield " ".join(["logits", *mesh]).replace("--", ""), lambda m=mesh: compare_logits(family, device, reference(), m)
    tuned = [(1, "", alignment, {}) for alignment in alignments]
    tuned += [(2, f" {name}", "fast", more) for name, more in meshes(family, "engine").items()]
    tuned += [(2, " tp2", "bitwise", meshes(family, "engine")["tp2"])]
    tuned.append((1, " recomputed", "fast", {"engine.recompute_granularity": "full", "engine.recompute_method": "uniform", "engine.recompute_num_layers": 1}))
    for ranks, name, alignment, more in tuned:
        if alignment not in alignments:
            continue
        label = alignment + name
        yield f"sft {label}", lambda r=ranks, n=label, m={"engine.alignment": alignment} | more: fault_of_tuning(fine_tune(family, r, n, device, **m), host())
    actor = meshes(family, f"{ACTOR}.megatron")
    learned = [(1, "", alignment, {}) for alignment in alignments] + [(2, " pp2", "fast", actor["pp2"])]
    learned += [(2, " tp2", "bitwise", actor["tp2"] | {f"{ROLLOUT}.tensor_model_parallel_size": 2})]
    if family.routes:
        learned += [(2, " ep2", alignment, actor["ep2"] | {f"{ROLLOUT}.expert_parallel_size": 2}) for alignment in alignments]
    for ranks, name, alignment, more in learned:
        if alignment not in alignments:
            continue
        label = alignment + name
        yield f"grpo {label}", lambda r=ranks, n=label, a=alignment, m=more: fault_of_reinforcing(reinforce(family, r, n, device, a, **m), a)


def once(call):
    """-> a call that returns what `call` does, which the first to ask runs while others wait"""
    lock, known = threading.Lock(), []

    def ask():
        with lock:
            if not known:
                known.append(call())
            return known[0]
    return ask


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
        host = once(lambda family=family: fine_tune(family, 1, "host", "cpu", **{"engine.alignment": "fast"}))
        reference = once(lambda family=family: reference_of(family, options.device))
        jobs += [(name, check, call) for check, call in checks_of(family, options.device, host, reference)]
    return measure(jobs, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
