#!/usr/bin/env python3
"""Ranks that die, hang or find no memory while two GPUs of this machine learn by GRPO.

    FERRY=build/cli/ferry python3 tests/gpu/faults.py FOLDER [--device cuda]

Needs torch and transformers, and two GPUs. FOLDER, which must not exist, gets models, runs and their logs. What has to hold:

    killed, stopped    the other rank ends with status 2 and names rank 1 within 15 s of trainer.nccl_timeout: a kernel that waits sees no connection break
    paused             rank 0, which keeps the store, stands still for 5 s: fewer than trainer.nccl_timeout, so that the run goes on
    N MiB left         another program holds the rest of the second GPU, from before the run or from its second step on. The run goes on, or both ranks end
                       with status 2 within 10 s of each other, and each of them says that memory is what lacks

Prints a line for each run; the last line is "N passed, N failed"."""
import argparse
import signal
import subprocess
import sys
import time

import runs
from families import Family, meshes, settings_of_reinforcing
from ppo_run import ACTOR, ROLLOUT
from ranks import start_program

TIMEOUT = 15  # seconds that a rank waits for another
SOON = 15  # from a loss to the end: the first rank keeps its store for 8 s, from which others read why
HOLD = """import sys, time, torch
free, _ = torch.cuda.mem_get_info(1)
held = torch.empty(free - int(sys.argv[1]) * 2**20 - 2**29, dtype=torch.uint8, device="cuda:1")  # the context comes out of what was free
free, _ = torch.cuda.mem_get_info(1)
more = torch.empty(max(0, free - int(sys.argv[1]) * 2**20), dtype=torch.uint8, device="cuda:1")
print("held", flush=True)
time.sleep(600)"""


class Run:
    def __init__(self, family, name, device, steps, values):
        self.folder = family.folder / name.replace(" ", "_")
        self.metrics = self.folder / "metrics.jsonl"
        arguments = settings_of_reinforcing(family, self.folder, device, "bitwise", **values | {
            "trainer.total_training_steps": steps, "trainer.nccl_timeout": TIMEOUT})
        with runs.STARTS:
            self.ranks = start_program(2, ["train", "grpo", *arguments])

    def steps(self):
        return len(self.metrics.read_text().splitlines()) if self.metrics.exists() else 0

    def wait(self, done, longest, what):
        until = time.monotonic() + longest
        while not done():
            if time.monotonic() > until:
                raise TimeoutError(f"{what}: not within {longest} s")
            time.sleep(0.05)

    def end(self):
        """-> (status, what it said) of each rank; none is left"""
        for rank in self.ranks:
            rank.kill()
        done = [(rank.wait(), rank.communicate()[1]) for rank in self.ranks]
        self.folder.with_suffix(".log").write_text("\n".join(f"status {status}\n{said}" for status, said in done))
        return done


def fault_of_losing(family, device, mesh, name, sent, seconds):
    run = Run(family, name, device, 100000, mesh)
    try:
        run.wait(lambda: run.steps() >= 2 or run.ranks[0].poll() is not None, 120, "two steps")
        run.ranks[1].send_signal(sent)
        run.wait(lambda: run.ranks[0].poll() is not None, seconds, f"the end of rank 0 after {sent.name}")
    finally:
        (status, said), _ = run.end()
    return "" if status == 2 and "rank 1" in said else f"status {status}: {said[-400:]}"


def fault_of_pausing(family, device, mesh, name):
    run = Run(family, name, device, 100000, mesh)
    ended = lambda: any(rank.poll() is not None for rank in run.ranks)
    try:
        run.wait(lambda: run.steps() >= 2 or ended(), 120, "two steps")
        run.ranks[0].send_signal(signal.SIGSTOP)
        time.sleep(5)
        before = run.steps()
        run.ranks[0].send_signal(signal.SIGCONT)
        run.wait(lambda: run.steps() >= before + 3 or ended(), SOON, "three more steps")
        lost = ended()
    finally:
        said = run.end()
    return "; ".join(f"status {status}: {words[-400:]}" for status, words in said) if lost else ""


def fault_of_memory(family, device, mesh, name, left, late):
    holder, run = None, None

    def hold():
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(left)], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "held\n"
        return process
    try:
        holder = None if late else hold()
        run = Run(family, name, device, 12, mesh)
        if late:
            run.wait(lambda: run.steps() >= 2 or run.ranks[0].poll() is not None, 120, "two steps")
            holder = hold()
        ended = lambda: [rank.poll() is not None for rank in run.ranks]
        run.wait(lambda: any(ended()), 120, "an end")
        run.wait(lambda: all(ended()), 10, "the end of the other rank")
    finally:
        if holder:
            holder.kill()
            holder.wait()
        done = run.end() if run else []
    if all(status == 0 for status, _ in done):
        return ""
    bad = [f"status {status}: {said[-400:]}" for status, said in done if status != 2 or "memory" not in said]
    return "; ".join(bad)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs.add_options(parser)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    jobs, alone = [], []
    for model, axis, size in (("llama", "tp2", "tensor_model_parallel_size"), ("qwen3_moe", "ep2", "expert_parallel_size")):
        family = Family(model, options.folder.resolve() / model)
        family.write()
        mesh = meshes(family, f"{ACTOR}.megatron")[axis] | {f"{ROLLOUT}.{size}": 2}
        for name, sent, seconds in (("killed", signal.SIGKILL, SOON + TIMEOUT), ("stopped", signal.SIGSTOP, TIMEOUT + SOON)):
            jobs.append((model, name, lambda *given, f=family, m=mesh, n=name, s=sent, t=seconds: fault_of_losing(f, options.device, m, n, s, t)))
        jobs.append((model, "paused", lambda *given, f=family, m=mesh: fault_of_pausing(f, options.device, m, "paused")))
        if options.device != "cuda":
            print("cpu: runs without memory are those of a GPU")
            continue
        for late in (False, True):
            for left in (10,) if late else (100, 600, 1200, 2000):
                name = f"{left} MiB left{' later' if late else ''}"
                alone.append((model, name, lambda f=family, m=mesh, n=name, k=left, w=late: fault_of_memory(f, options.device, m, n, k, w)))
    failed = runs.measure(jobs, options.jobs)
    return runs.measure(alone, 1) or failed if alone else failed  # one at a time: they share the memory


if __name__ == "__main__":
    sys.exit(main())
