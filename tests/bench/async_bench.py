#!/usr/bin/env python3
"""Training that waits for answers beside training that does not, on answers of log-normal lengths: an actor and a rollout, each on cores or a GPU of its own.

    build/peers/bin/python tests/bench/async_bench.py [--ferry PROGRAM] [--cores 0:1] [--mean 250] [--cap 2048] [--steps 10] [--prompts 16] [--answers 4]
        [--layers 4] [--hidden 256] [--intermediate 768] [--groups 1] [--epochs 1] [--modes collocated synchronous 1 2 4 partial2 partial4] [--warm 3]
        [--rounds 1] [--seconds 0] [--rollouts 1] [--lr 1e-30]
    python3 tests/bench/async_bench.py --device cuda --mean 1000 --cap 8192 --prompts 32 --answers 8 --layers 28 --hidden 1536 --intermediate 8960 --groups 6

Both ranks have both roles in mode `collocated`. On GPUs the model is in bf16 with heads of 128 channels, `--groups` of them for one of keys, computes
`fast`, and rank R has GPU R. `--cores` names the cores of the actor and, behind a colon, those of the rollout ("0,1:2,3"), one of each of its `--rollouts` ranks ("0:1:2"); several of it are places in which modes run side by side.
`--seconds` ends a run that takes longer; its finished steps count.

The model's layers cost what layers cost and add nothing: its embeddings and head make each answer a walk through stages of a length class that the
prompt names, so that lengths are log-normal (sigma 1, Erlang of 8 stages about each of 32 quantiles). A stage has two tokens, and the reward is the share
of the first ones, so that `--lr 2e-4` learns a little of it; much would make answers longer. At 1e-30 nothing is learned. Prints, for each mode, tokens per second
of steps behind the first `--warm`, the shares of their time in which trainer and rollout idled, and the rewards of all steps over the seconds since the
first one began; then a table of the best.
"""
import argparse
import itertools
import json
import math
import os
import queue
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CLASSES, STAGES, EOS, FIRST = 32, 8, 0, 2
WALKS = CLASSES * STAGES  # tokens of one spelling
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def word(k, stage, spelling=0):
    return chr(0x4E00 + spelling * WALKS + k * STAGES + stage)


def write_model(folder, options):
    import torch
    from safetensors.torch import save_file
    mu = math.log(options.mean) - 0.5
    means = [math.exp(mu + statistics.NormalDist().inv_cdf((k + 0.5) / CLASSES)) for k in range(CLASSES)]
    ends = [min(STAGES / mean, 0.999) for mean in means]  # the probability that a token ends its stage
    hidden, vocabulary, gpu = options.hidden, FIRST + 2 * WALKS, options.device == "cuda"
    dtype, channels = (torch.bfloat16, 128) if gpu else (torch.float32, 64)
    queries, keys = hidden, hidden // options.groups
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": options.intermediate,
              "num_hidden_layers": options.layers, "num_attention_heads": queries // channels, "num_key_value_heads": keys // channels, "head_dim": channels,
              "max_position_embeddings": options.cap + 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": vocabulary, "hidden_act": "silu",
              "tie_word_embeddings": False, "torch_dtype": "bfloat16" if gpu else "float32", "bos_token_id": 1, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    names = ["<eos>", "<bos>"] + [word(k, stage, spelling) for spelling in range(2) for k in range(CLASSES) for stage in range(STAGES)]
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None, "post_processor": None,
        "decoder": None, "added_tokens": [{"id": i, "content": names[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                                           "special": True} for i in range(FIRST)],
        "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": [], "unk_token": None, "byte_fallback": False}}))
    embed, head = torch.zeros(vocabulary, hidden), torch.full((vocabulary, hidden), 0.0)
    scale = math.sqrt(hidden / 2)  # of the two channels of a token, behind the norm
    head[:, :CLASSES + STAGES] = -30 / scale
    for k in range(CLASSES):
        for stage in range(STAGES):
            for spelling in range(2):
                row = FIRST + spelling * WALKS + k * STAGES + stage
                embed[row, k] = embed[row, CLASSES + stage] = 1
                head[row, k] = 0
                head[row, CLASSES + stage] = math.log((1 - ends[k]) / 2) / scale
                if stage > 0:
                    head[row, CLASSES + stage - 1] = math.log(ends[k] / 2) / scale
        head[EOS, k] = math.log(ends[k]) / scale
    head[EOS, CLASSES + STAGES - 1] = 0
    embed[:FIRST, CLASSES] = 1
    weights = {"model.embed_tokens.weight": embed, "lm_head.weight": head, "model.norm.weight": torch.ones(hidden)}
    torch.manual_seed(0)
    for layer in range(options.layers):
        name = f"model.layers.{layer}."
        # Factors of what a layer adds are both zeros, and so are their gradients: the layer goes on adding nothing.
        for projection, rows, columns, used in (("self_attn.q", queries, hidden, 1), ("self_attn.k", keys, hidden, 1), ("self_attn.v", keys, hidden, 0),
                                                    ("self_attn.o", hidden, queries, 0), ("mlp.gate", options.intermediate, hidden, 1),
                                                    ("mlp.up", options.intermediate, hidden, 0), ("mlp.down", hidden, options.intermediate, 0)):
            weights[f"{name}{projection}_proj.weight"] = 0.02 * used * torch.randn(rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}{norm}.weight"] = torch.ones(hidden)
    save_file({name: weight.to(dtype) for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def write_data(path, options):
    """Each batch has the quantiles of lengths evenly, which hundreds of independent prompts would have about so: scaled down, batches cost the same."""
    draw = random.Random(1)
    with path.open("w") as file:
        for batch in range(4 * options.steps):
            offset = draw.random()
            for i, place in enumerate(draw.sample(range(options.prompts), options.prompts)):
                kind = int((place + offset) * CLASSES / options.prompts)
                file.write(json.dumps({"data_source": "lengths", "prompt": [{"role": "user", "content": word(kind, 0)}],
                                       "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": batch * options.prompts + i}}) + "\n")


def write_reward(path):
    path.write_text("import json, sys\nfor line in sys.stdin:\n    q = json.loads(line)\n"
                    f"    ids = [id for id in q['response_ids'] if id >= {FIRST}]\n"
                    f"    score = sum(id < {FIRST + WALKS} for id in ids) / max(1, len(ids))\n"
                    "    print(json.dumps({'id': q['id'], 'score': score}), flush=True)\n")


def mode_settings(mode, options):
    if mode == "collocated":
        return {}
    apart = {f"{ACTOR}.ranks": [0], f"{ROLLOUT}.ranks": list(range(1, 1 + options.rollouts))}
    if mode == "synchronous":
        return apart
    partial = mode.startswith("partial")
    settings = apart | {"async_training.staleness_threshold": int(mode.removeprefix("partial"))}
    return settings | ({"async_training.partial_rollout": True, "data.gen_batch_size": 2 * options.prompts} if partial else {})


def read_lines(path):
    """The whole lines: the last of a run that was ended may be none."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def run(mode, options, place, folder):
    out = folder / f"run_{mode}"
    settings = {"actor_rollout_ref.model.path": str(folder), "data.train_files": [str(folder / "train.jsonl")], "data.shuffle": False, "data.train_batch_size": options.prompts,
                "data.max_prompt_length": 8, "data.max_response_length": options.cap, f"{ACTOR}.ppo_mini_batch_size": options.prompts,
                f"{ACTOR}.optim.lr": options.lr, f"{ACTOR}.optim.weight_decay": 0.0, f"{ACTOR}.ppo_epochs": options.epochs, f"{ROLLOUT}.n": options.answers,
                f"{ROLLOUT}.max_num_seqs": options.prompts * options.answers, "trainer.total_training_steps": options.steps, "trainer.device": options.device,
                "trainer.default_local_dir": str(out), "trainer.log_samples": False, "trainer.logger": ["file"], "checkpoint.save_freq": -1,
                "reward_model.command": f"{sys.executable} {folder / 'reward.py'}"}
    settings |= {f"{ACTOR}.megatron.alignment": "fast"} if options.device == "cuda" else {
        f"{ACTOR}.ppo_max_token_len_per_gpu": 2 * options.cap, f"{ACTOR}.megatron.dtype": "float32", f"{ROLLOUT}.kv_cache_bytes": 1 << 30}
    settings |= mode_settings(mode, options)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [subprocess.Popen([options.ferry, "train", "grpo", "-q", *(f"{key}={json.dumps(value)}" for key, value in settings.items())],
                              stderr=subprocess.PIPE, text=True, preexec_fn=(lambda cores=cores: os.sched_setaffinity(0, cores)) if cores else None,
                              env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(place)), "LOCAL_WORLD_SIZE": str(len(place)),
                                                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | ({"OMP_NUM_THREADS": "1"} if cores else {})) for rank, cores in enumerate(place)]
    said = []
    try:
        deadline = time.monotonic() + options.seconds if options.seconds else None
        said = [rank.communicate(timeout=deadline and max(1, deadline - time.monotonic()))[1] for rank in ranks]
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert not said or all(rank.returncode == 0 for rank in ranks), said
    steps = [line["data"] for line in read_lines(out / "metrics.jsonl")]
    steps = [step for step in steps if "timing_s/step" in step]
    assert len(steps) > options.warm, f"{mode}: {len(steps)} steps, of {[step['timing_s/step'] for step in steps]} seconds"
    ends = list(itertools.accumulate(step["timing_s/step"] for step in steps))
    curve = [(end, step["critic/score/mean"]) for end, step in zip(ends, steps)]
    steps = steps[options.warm:]
    seconds = sum(step["timing_s/step"] for step in steps)
    spans = read_lines(out / "timeline/timeline_rank1.jsonl")
    first = min((span["start"] for span in spans if span["name"] == "gen" and span["step"] > options.warm), default=math.inf)  # inf: ended before
    last = max(span["end"] for span in read_lines(out / "timeline/timeline_rank0.jsonl"))
    busy = sum(span["end"] - span["start"] for span in spans if span["name"] == "gen" and span["start"] >= first)
    return {"curve": curve, "rate": sum(step["perf/total_num_tokens"] for step in steps) / seconds,
            "trainer": sum(step["timing_s/gen"] for step in steps) / seconds, "rollout": max(0.0, 1 - busy / (last - first)) if last > first else math.nan,
            "gen": busy / len(steps), "learn": sum(step["timing_s/step"] - step["timing_s/gen"] for step in steps) / len(steps),
            "steps": len(steps), "mean": sum(step["response_length/mean"] for step in steps) / len(steps), "max": max(step["response_length/max"] for step in steps)}


def measure(turn, mode, options, places):
    place = places.get()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_model(folder, options)
            write_data(folder / "train.jsonl", options)
            write_reward(folder / "reward.py")
            one = run(mode, options, place, folder)
    finally:
        places.put(place)
    print(f"round {turn + 1}: {mode:12} {one['rate']:7.0f} tokens/s, idle: trainer {one['trainer']:.0%}, rollout {one['rollout']:.0%}; "
          f"answers {one['gen']:.2f} s, the rest of a step {one['learn']:.2f} s; lengths {one['mean']:.0f}, at most {one['max']:.0f}; {one['steps']} steps\n  seconds: reward " + ", ".join(f"{end:.0f}: {score:.4f}" for end, score in one["curve"]), flush=True)
    return mode, one


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ferry", default="build/cli/ferry")
    parser.add_argument("--cores", nargs="+", default=["0:1"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--modes", nargs="+", default=["collocated", "synchronous", "1", "2", "4", "partial2", "partial4"])
    for name, value in {"mean": 250, "cap": 2048, "steps": 10, "prompts": 16, "answers": 4, "layers": 4, "hidden": 256, "intermediate": 768, "groups": 1, "epochs": 1, "warm": 3, "rounds": 1, "seconds": 0,
                        "rollouts": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-30)
    options = parser.parse_args()
    places = queue.Queue()
    for place in options.cores if options.device == "cpu" else [":" * options.rollouts]:
        places.put([[int(core) for core in rank.split(",") if core] for rank in place.split(":")])
    with ThreadPoolExecutor(places.qsize()) as pool:
        runs = list(pool.map(lambda job: measure(*job, options, places), [(turn, mode) for turn in range(options.rounds) for mode in options.modes]))
    best = {}
    for mode, one in runs:
        if mode not in best or one["rate"] > best[mode]["rate"]:
            best[mode] = one
    print("\n| | tokens/s | of the synchronous run | trainer idle | rollout idle |\n|---|---:|---:|---:|---:|")
    for mode, one in best.items():
        ratio = f"{one['rate'] / best['synchronous']['rate']:.2f} x" if "synchronous" in best else ""
        print(f"| {mode} | {one['rate']:.0f} | {ratio} | {one['trainer']:.0%} | {one['rollout']:.0%} |")


if __name__ == "__main__":
    main()
