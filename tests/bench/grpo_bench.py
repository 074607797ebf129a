#!/usr/bin/env python3
"""Measures a whole step of `ferry train grpo`, and the same step in plain PyTorch and transformers (hf_grpo_bench.py):

    python3 tests/bench/make_checkpoint.py qwen2.5-1.5b shape
    grpo_bench.py shape --ferry build/cli/ferry --folder build/bench/grpo

    grpo_bench.py shape --ferry build/cli/ferry --ranks 4 --only fast --token-budget auto --updates 4 \
        --set actor_rollout_ref.rollout.tensor_model_parallel_size=4

Prompts and answers have exactly the requested lengths: the tokenizer written beside the checkpoint makes each character a token, and
answers continue to their limit. The score of an answer is a number computed from its text. The fastest step but the first counts, with its
own phases. The last line is the report in JSON; --only leaves programs out."""
import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FIRST_CHARACTER = 0x10000  # of token 0: no surrogate, no space follows
PHASES = ["gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights"]
PROGRAMS = ["fast", "bitwise", "bitwise_recomputed", "transformers"]  # recomputed: old_log_prob, which bitwise has from the rollout
REWARD = """import json, sys, zlib
for line in sys.stdin:
    q = json.loads(line)
    print(json.dumps({"id": q["id"], "score": zlib.crc32(q["solution_str"].encode()) % 1000 / 1000}), flush=True)
"""
CONFIG = """[data]
train_files = ["prompts.jsonl"]
max_prompt_length = {prompt_length}
max_response_length = {response_length}
train_batch_size = {prompts}

[actor_rollout_ref.model]
path = {checkpoint}

[actor_rollout_ref.actor]
ppo_mini_batch_size = {mini_batch}
ppo_max_token_len_per_gpu = {token_budget}
recompute_old_log_prob = {recompute_old_log_prob}

[actor_rollout_ref.actor.megatron]
alignment = "{alignment}"

[actor_rollout_ref.rollout]
n = {samples}
ignore_eos = true
{engine_limits}

[reward_model]
command = {reward}

[trainer]
device = "{device}"
default_local_dir = "{program}"
total_training_steps = {steps}

[checkpoint]
resume_mode = "disable"
"""


def write_tokenizer(folder, vocabulary):
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
                 "post_processor": None, "decoder": {"type": "Fuse"},
                 "model": {"type": "BPE", "vocab": {chr(FIRST_CHARACTER + i): i for i in range(vocabulary)}, "merges": []}}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast",
                "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_prompts(folder, count, length, vocabulary):
    draw = random.Random(1)
    prompts = [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]
    with open(folder / "prompts.jsonl", "w") as file:
        for index, prompt in enumerate(prompts):
            text = "".join(chr(FIRST_CHARACTER + token) for token in prompt)
            record = {"data_source": "random", "prompt": [{"role": "user", "content": text}], "ability": "none",
                      "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"split": "train", "index": index}}
            file.write(json.dumps(record) + "\n")
    return prompts


def run_ferry(flags, folder, program):
    """(phases, seconds, peak) of the fastest step but the first, or nothing if it does not fit."""
    alignment, _, recomputed = program.partition("_")
    chosen = flags.token_budget == '"auto"'  # then the engine's limits are the defaults, too
    limits = "" if chosen else f"max_num_seqs = {flags.prompts * flags.samples}\nmax_num_batched_tokens = {flags.token_budget}"
    settings = vars(flags) | {"program": program, "alignment": alignment, "recompute_old_log_prob": "true" if recomputed else '"auto"',
                              "mini_batch": flags.prompts // flags.updates, "engine_limits": limits,
                              "checkpoint": json.dumps(str(flags.checkpoint.resolve())), "reward": json.dumps(f"{sys.executable} reward.py")}
    (folder / f"{program}.toml").write_text(CONFIG.format(**settings))
    metrics = folder / program / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    command = [flags.ferry.resolve(), "train", "grpo", "--config", f"{program}.toml", *flags.set]
    if flags.ranks > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", str(flags.ranks), "--", *command]
    subprocess.run(command, cwd=folder, check=True)
    steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    (folder / program / "steps.json").write_text(json.dumps(steps))
    for step in steps:
        expect(step["perf/total_num_tokens"], flags.tokens, "tokens of a step")
        expect(step["response_length/min"], flags.response_length, "tokens of the shortest answer")
        expect(step["prompt_length/min"], flags.prompt_length, "tokens of the shortest prompt")
    best = min(steps[1:] or steps, key=lambda step: step["perf/time_per_step"])
    # The last step of a run hands nothing over any more.
    handed_over = [step["timing_s/update_weights"] for step in steps if "timing_s/update_weights" in step]
    phases = {name: best.get(f"timing_s/{name}") for name in PHASES} | {"update_weights": min(handed_over, default=None)}
    return {"phases": phases, "seconds": best["perf/time_per_step"], "peak_gib": best["perf/max_memory_allocated_gb"] or None,
            "kl": best["rollout_corr/kl"], "ppo_kl": best["actor/ppo_kl"], "steps": [step["perf/time_per_step"] for step in steps],
            "mfu": {name: value for name, value in best.items() if name.startswith("perf/mfu/")}}


def run_transformers(flags, folder):
    command = [sys.executable, HERE / "hf_grpo_bench.py", flags.checkpoint, folder / "prompts.json", "--samples", flags.samples,
               "--response-length", flags.response_length, "--steps", flags.peer_steps, "--device", flags.device]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    text = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    report = json.loads(text.splitlines()[-1])
    for step in report["steps"]:
        expect(step["tokens"], flags.tokens, "tokens of a step")
    best = min(report["steps"][1:] or report["steps"], key=lambda step: step["seconds"])
    return report | best | {"steps": [step["seconds"] for step in report["steps"]]}


def token_budget(text):
    return '"auto"' if text == "auto" else int(text)


def expect(value, expected, what):
    if value != expected:
        sys.exit(f"{what}: {value}, expected {expected}")


def training_flops(config, sequences, length):
    """training_flops() of models/spec/costs.h, of a dense model or of one whose layers all have experts; None of others"""
    if "linear_attention" in config.get("layer_types", []):
        return None
    hidden, layers, heads, dim = (config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"))
    attention = hidden * dim * (2 * heads + 2 * config["num_key_value_heads"])
    mlp = 3 * hidden * config["intermediate_size"]
    if experts := config.get("num_experts"):
        mlp = 3 * hidden * config["moe_intermediate_size"] * config["num_experts_per_tok"] + hidden * experts
    weights = 2 * config["vocab_size"] * hidden + layers * (attention + mlp)
    return sequences * (6 * length * weights + 6 * length**2 * dim * heads * layers)


def table(results, flags, flops):
    """Rows are what took time; a column for each program. Shares are of the peak that --peak-tflops says."""
    answers = flags.prompts * flags.samples * flags.response_length
    peak = flags.peak_tflops * 1e12 * flags.ranks

    def row(name, value, form):
        cells = [value(result) for result in results.values()]
        return f"| {name} | " + " | ".join("" if cell is None else format(cell, form) for cell in cells) + " |"

    def share(phase, part):
        return lambda result: 100 * part * flops / result["phases"][phase] / peak if flops and result["phases"].get(phase) else None

    def rest(result):
        return result["seconds"] - sum(seconds or 0 for name, seconds in result["phases"].items())

    lines = ["| | " + " | ".join(results) + " |", "|---|" + "---:|" * len(results)]
    lines += [row(f"{name}, s", lambda result, name=name: result["phases"].get(name), ".3f") for name in PHASES]
    lines += [row("the rest, s", rest, ".3f"), row("step, s", lambda result: result["seconds"], ".2f"),
              row("tokens/s", lambda result: flags.tokens / result["seconds"], ",.0f"),
              row("tokens/s of each GPU", lambda result: flags.tokens / result["seconds"] / flags.ranks, ",.0f"),
              row("answers' tokens/s while generating", lambda result: answers / result["phases"]["gen"], ",.0f"),
              row("MFU of update_actor, %", share("update_actor", 1), ".1f"),
              row("MFU of old_log_prob, %", share("old_log_prob", 1 / 3), ".1f"),
              row("peak, GiB", lambda result: result["peak_gib"], ".1f")]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--ferry", type=Path, default=Path("build/cli/ferry"))
    parser.add_argument("--folder", type=Path, default=Path("build/bench/grpo"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-length", type=int, default=512)
    parser.add_argument("--response-length", type=int, default=512)
    parser.add_argument("--token-budget", type=token_budget, default=16384, help='of a micro-batch, and of a step that generates; "auto": the defaults')
    parser.add_argument("--updates", type=int, default=1, help="of a step")
    parser.add_argument("--ranks", type=int, default=1, help="processes, started by this Python's torchrun")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of ferry's runs")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peer-steps", type=int, default=2)
    parser.add_argument("--peak-tflops", type=float, default=989, help="of the GPU, dense and in bf16: by default an H100's or H200's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    flags = parser.parse_args()
    flags.tokens = flags.prompts * flags.samples * (flags.prompt_length + flags.response_length)
    config = json.loads((flags.checkpoint / "config.json").read_text())
    flags.folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(flags.checkpoint, config["vocab_size"])
    prompts = write_prompts(flags.folder, flags.prompts, flags.prompt_length, config["vocab_size"])
    (flags.folder / "prompts.json").write_text(json.dumps(prompts))
    (flags.folder / "reward.py").write_text(REWARD)
    flops = training_flops(config, flags.prompts * flags.samples, flags.prompt_length + flags.response_length)
    results, failed = {}, []
    for program in flags.only:
        try:
            results[program] = run_transformers(flags, flags.folder) if program == "transformers" else run_ferry(flags, flags.folder, program)
            print(program, json.dumps(results[program]), file=sys.stderr, flush=True)
        except subprocess.CalledProcessError as error:  # what the others say is worth having
            failed.append(f"{program} failed with status {error.returncode}")
    if results:
        print(table(results, flags, flops))
        print(json.dumps(results))
    if failed:
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
