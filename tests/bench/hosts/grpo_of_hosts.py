#!/usr/bin/env python3
"""`ferry train grpo` on several hosts that are network namespaces of this machine (hosts.py), started by torchrun on each, as root:

    PEERS/bin/python grpo_of_hosts.py --ferry build/cli/ferry-torch --torchrun PEERS/bin/torchrun --folder build/bench/hosts

Prints what the messages of each call cost: the mean of the steps but the first. With --lose a host's link is cut while the run is in a step,
and then all that runs there is killed: the others have to name the ranks that are missing, and the same command has to go on from the newest
checkpoint to the same metrics. The last line is the report in JSON."""
import argparse
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "interop"), str(HERE.parent.parent / "interop/train")]
ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ferry", required=True, help="the program ferry-torch")
    parser.add_argument("--torchrun", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=16, help="of each host")
    parser.add_argument("--milliseconds", type=float, default=1, help="one way, between hosts")
    parser.add_argument("--gbit", type=float, default=1, help="a second, of each host's link")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--answers", type=int, default=8, help="of each rank")
    parser.add_argument("--response", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--top-k", type=int, default=-1, help="a mask of the tokens that answers were drawn from goes with them")
    parser.add_argument("--lose", action="store_true", help="the last host, in the step behind the first checkpoint")
    return parser.parse_args()


def write_world(folder):
    """A model of two layers, and prompts that a rule scores."""
    from sft_run import WORDS, write_model, write_rows
    write_model(folder / "model", num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2,
                max_position_embeddings=4096)
    write_rows(folder / "train.jsonl", [
        {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": " ".join(WORDS[i % 5:i % 5 + 1 + i % 4])}],
         "reward_model": {"style": "rule", "ground_truth": str(i % 10)}, "extra_info": {"index": i}} for i in range(1024)])


def settings(options, run):
    prompts = options.hosts * options.ranks
    values = {"actor_rollout_ref.model.path": str(options.folder / "model"), "data.train_files": [str(options.folder / "train.jsonl")],
              "data.train_batch_size": prompts, "data.max_prompt_length": 64, "data.max_response_length": options.response,
              f"{ACTOR}.ppo_mini_batch_size": prompts, f"{ACTOR}.ppo_max_token_len_per_gpu": 4096, f"{ACTOR}.megatron.dtype": "float32",
              f"{ACTOR}.megatron.alignment": "bitwise", f"{ACTOR}.recompute_old_log_prob": True, f"{ACTOR}.use_kl_loss": True,
              f"{ACTOR}.megatron.make_vocab_size_divisible_by": 8, f"{ROLLOUT}.n": options.answers, f"{ROLLOUT}.kv_cache_bytes": 1 << 23,
              f"{ROLLOUT}.max_num_seqs": options.answers, f"{ROLLOUT}.max_num_batched_tokens": 512, f"{ROLLOUT}.ignore_eos": True,
              f"{ROLLOUT}.top_k": options.top_k, f"{ACTOR}.optim.lr": 5e-3,
              "reward_model.format_pattern": r"[\s\S]*e[\s\S]*", "trainer.total_training_steps": options.steps, "trainer.device": "cpu",
              "trainer.nccl_timeout": 30, "trainer.default_local_dir": str(run),
              "checkpoint.save_freq": 2 if options.lose else options.steps}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def start(hosts, options, run):
    """torchrun on each host."""
    agents = []
    for host in range(options.hosts):
        command = [options.torchrun, "--no-python", "--nnodes", options.hosts, "--nproc-per-node", options.ranks, "--rdzv-backend", "c10d",
                   "--rdzv-endpoint", f"{hosts.address(0)}:29500", "--rdzv-id", run.name, "--rdzv-conf", f"is_host={host == 0}", "--local-addr", hosts.address(host),
                   options.ferry, "train", "grpo", *settings(options, run)]
        with open(f"{run}.host{host}.log", "a") as log:
            agents.append(hosts.start(host, command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "uplink"}))
    return agents


def metrics(run):
    steps = {}
    path = run / "metrics.jsonl"
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        steps.setdefault(line["step"], {}).update(line["data"])
    return steps


def complete(hosts, options, run):
    """Runs to the end."""
    began = time.monotonic()
    agents = start(hosts, options, run)
    for host, agent in enumerate(agents):
        if agent.wait():
            sys.exit(f"host {host}: {Path(f'{run}.host{host}.log').read_text()[-3000:]}")
    return time.monotonic() - began


def learned(run):
    """Metrics that do not depend on the clock."""
    return {step: {name: value for name, value in of_step.items() if not name.startswith(("timing_", "perf/"))}
            for step, of_step in metrics(run).items()}


def measure(hosts, options):
    run = options.folder / "run"
    seconds = complete(hosts, options, run)
    steps = [of_step for step, of_step in sorted(metrics(run).items()) if step > 1]
    mean = {name: sum(step.get(name, 0) for step in steps) / len(steps) for name in steps[0]}
    prefix = "perf/messages_s/"
    calls = {name.removeprefix(prefix): (value, mean[f"perf/messages_mb/{name.removeprefix(prefix)}"])
             for name, value in mean.items() if name.startswith(prefix)}
    calls["all"] = tuple(sum(column) for column in zip(*calls.values()))
    print(f"{'call':28} {'messages, s':>12} {'rank 0, MB':>12}")
    for name, (value, megabytes) in calls.items():
        print(f"{name:28} {value:12.3f} {megabytes:12.3f}")
    return {"calls": calls, "step": mean["perf/time_per_step"], "run": seconds, "tokens": mean["perf/total_num_tokens"],
            "sent by the first host, MB": hosts.sent(0) / 1e6}


def lose(hosts, options):
    run, lost = options.folder / "lost", options.hosts - 1
    agents = start(hosts, options, run)
    while 3 not in metrics(run):  # behind the checkpoint of step 2
        if any(agent.poll() for agent in agents):
            sys.exit("the run ended before a host was lost")
        time.sleep(0.2)
    hosts.cut(lost)
    cut = time.monotonic()
    time.sleep(5)
    hosts.kill(lost)
    for agent in agents:
        agent.wait(timeout=300)
    seconds = time.monotonic() - cut
    said = Path(f"{run}.host0.log").read_text()
    missing = sorted({int(rank) for names in re.findall(r"missing: (.*)", said) for rank in re.findall(r"rank (\d+)", names)})
    hosts.mend(lost)
    resumed = complete(hosts, options, run)
    said = Path(f"{run}.host0.log").read_text()
    if "resumed    after step" not in said:
        sys.exit(f"the run did not go on: {said[-3000:]}")
    return {"seconds until all have ended": seconds, "missing": missing, "ranks of the host": list(range(lost * options.ranks, (lost + 1) * options.ranks)),
            "first words": re.findall(r"error: .*", said)[:3], "resumed in": resumed, "same metrics as a run that lost nothing": learned(run) == learned(options.folder / "run")}


def main():
    options = parse()
    options.folder = options.folder.resolve()
    options.ferry, options.torchrun = Path(options.ferry).resolve(), Path(options.torchrun).absolute()
    os.environ.setdefault("FERRY", str(options.ferry.parent / "ferry"))
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    write_world(options.folder)
    from hosts import Hosts
    with Hosts(options.hosts, options.milliseconds, options.gbit) as hosts:
        report = {"hosts": options.hosts, "ranks": options.hosts * options.ranks} | measure(hosts, options)
        if options.lose:
            report |= lose(hosts, options)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
