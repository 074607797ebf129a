#!/usr/bin/env python3
"""Measures conversions beside cp, megatron-core and Megatron-Bridge, in one run. Prints a Markdown table.

    convert_bench.py --ferry build/cli/ferry --memory /dev/shm/bench --disk FOLDER [--peers build/peers] [--bridge PYTHON]
        [--repeat 5]

Arms alternate; that of Megatron-Bridge runs once. The table divides the median of each conversion by the fastest cp, because cp's times
vary most. A result is deleted as soon as no arm needs it, so that all write to memory freed a moment ago (a virtual machine may hand free
memory back to its host, and then pays for it again). `ferry verify` checks copies after they are timed; a difference ends the run. Peak memory is anonymous
memory (RssAnon), sampled every 5 ms. On disk the source's pages are dropped before each arm, and the arm ends when its bytes are on the
disk.
"""
import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
IN_FP32 = ("--exclude", "*.A_log", "--exclude", "*.linear_attn.norm.weight")  # Megatron-Bridge rounds them to the model's dtype


class Run:
    """One command: seconds, peak anonymous MiB, and ferry's own report if it printed one."""
    def __init__(self, *command, shell=False, env=None):
        self.peak, before = 0.0, os.times()
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:  # a pipe could fill up
            started = time.monotonic()
            process = subprocess.Popen(command[0] if shell else [str(c) for c in command], shell=shell, env=env,
                                       stdout=out, stderr=error, text=True)
            while process.poll() is None:
                try:
                    for line in open(f"/proc/{process.pid}/status"):
                        if line.startswith("RssAnon"):
                            self.peak = max(self.peak, int(line.split()[1]) / 1024)
                except OSError:
                    pass
                time.sleep(0.005)
            self.seconds, after = time.monotonic() - started, os.times()
            self.cpu = after.children_user + after.children_system - before.children_user - before.children_system
            out.seek(0)
            error.seek(0)
            if process.returncode != 0:
                sys.exit(f"exit {process.returncode}: {command}\n{error.read()}")
            text = out.read()
        self.report = json.loads(text) if text.startswith("{") else {}


def size_of(folder):
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def clear(*paths):
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def drop_cache(folder):
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def row(*cells):
    print("| " + " | ".join(str(c) for c in cells) + " |", flush=True)


def median(runs, of=lambda run: run.seconds):
    return statistics.median(of(run) for run in runs)


def arms_of(ferry, work, bridge):
    """[(name, label, command, folders that it writes)]: cp -r, conversions there and back, those of experts in MXFP4."""
    source, copy, there, back = work / "hf", work / "copy", work / "megatron", work / "back"
    convert, config = [ferry, "convert"], json.loads((source / "config.json").read_text())
    pp = 2 - config["num_hidden_layers"] % 2
    arms = [("cp", "", ["cp", "-r", source, copy], [copy]),
            ("there", f"HF to torch_dist TP2 PP{pp}", [*convert, source, there, "--tp", "2", "--pp", pp, "--json", "--quiet"], [there])]
    if config.get("quantization_config", {}).get("quant_method") == "mxfp4":
        arms += [("cp_there", "", ["cp", "-r", there, copy], [copy]),
                 ("kept", "HF to HF, MXFP4 kept", [*convert, source, back, "--to", "hf", "--keep-quantized", "--json", "--quiet"], [back])]
    else:
        arms += [("back", "torch_dist to HF", [*convert, there, back, "--json", "--quiet"], [back])]
    if bridge:
        arms += [("bridge", "", [bridge, HERE / "peers/megatron_bridge_arm.py", source, work / "bridge", work / "exported"], [work / "bridge", work / "exported"])]
    return arms


def directions(ferry, shape, folder, repeat, on_disk, bridge):
    """cp -r, there and back, alternating."""
    work = folder / "ferry-bench"
    clear(work)
    source = work / "hf"
    shape, _, experts = shape.partition(":")
    subprocess.run([sys.executable, HERE / "make_checkpoint.py", shape, source, *(["--experts", experts] if experts else [])], check=True)
    shape += f", {experts} experts" if experts else ""
    if on_disk:
        os.sync()
    arms = arms_of(ferry, work, bridge)
    runs, sizes = {name: [] for name, *_ in arms}, {"source": size_of(source)}
    where = "disk" if on_disk else "memory"
    try:
        for i in range(repeat + 1):  # the first round warms up
            for name, _, command, results in arms:
                if i != 1 and name == "bridge":  # it takes minutes: once
                    continue
                clear(*results, *([work / "megatron"] if name == "bridge" else []))
                if on_disk:
                    drop_cache(work)
                copies = name.startswith("cp")
                run = Run(f"cp -r {command[2]} {command[3]} && sync", shell=True) if on_disk and copies else Run(*command)
                if i > 0:
                    runs[name].append(run)
                elif not copies:
                    Run(ferry, "verify", source, results[0], "--quiet", "--weights-only")
                if name == "bridge":
                    Run(ferry, "verify", source, results[0], "--quiet", "--weights-only", "--hf-config", source,
                        *(IN_FP32 if "qwen3.5" in shape else ()))
                sizes[name] = size_of(results[0])
                if name != "there":
                    clear(*results)
        baseline = {}
        for name, label, *_ in arms:
            times = runs[name]
            cpu = f"{median(times, lambda run: run.cpu):.1f}"
            peak = f"{max(run.peak for run in times):.0f}"
            if name.startswith("cp"):
                of = "source" if name == "cp" else "there"
                baseline[of] = min(run.seconds for run in times)
                what = f"`cp -r`{' + `sync`' if on_disk else ''}{'' if name == 'cp' else ' of that'}, fastest; median {median(times):.2f}"
                row(where, shape, what, f"{baseline[of]:.2f}", f"{sizes[of] / baseline[of] / 1e9:.2f}", "1.00", "", "", cpu)
            elif name == "bridge":
                for part in times[0].report:
                    seconds = median(times, lambda run, part=part: run.report[part])
                    row(where, shape, f"Megatron-Bridge on the host: {part}", f"{seconds:.2f}", f"{sizes['source'] / seconds / 1e9:.2f}",
                        f"{seconds / baseline['source']:.2f}", "", peak, "")
                row(where, shape, "Megatron-Bridge: the whole program", f"{median(times):.2f}", "", "", "", peak, cpu)
            else:
                seconds = median(times, lambda run: run.report["copy_seconds"])
                proof = median(times, lambda run: run.report["proof_seconds"])
                row(where, shape, label, f"{seconds:.2f}", f"{sizes['source'] / seconds / 1e9:.2f}", f"{seconds / baseline['source']:.2f}",
                    f"{proof:.2f}", peak, cpu)
        print(f"\n{shape}: {sizes['source'] / 1e9:.2f} GB, Megatron {sizes['there'] / 1e9:.2f} GB; load {os.getloadavg()[0]:.1f} at the end\n", flush=True)
    finally:
        clear(work)


def peer(peers, shape, folder):
    """megatron-core's own save of the same weights, from safetensors, in one process."""
    work = folder / "ferry-bench"
    clear(work)
    subprocess.run([sys.executable, HERE / "make_checkpoint.py", shape, work / "hf"], check=True)
    size = size_of(work / "hf")
    try:
        command = f"source {peers}/env.sh && {peers}/bin/python {HERE}/peers/megatron_core_arm.py {peers}/mc0161 {work}/hf {work}/megatron"
        run = Run("bash", "-c", "exec " + "env bash -c '" + command + "'")
        row("memory", shape, "megatron-core 0.16.1, plain Python", f"{run.seconds:.2f}", f"{size / run.seconds / 1e9:.2f}", "", "", "", "")
    finally:
        clear(work)


def large(ferry, folder):
    work = folder / "ferry-bench-70b"
    clear(work)
    try:
        subprocess.run([sys.executable, HERE / "make_checkpoint.py", "llama-3-70b", work / "hf", "--sparse"], check=True)
        inspect = [Run(ferry, "inspect", work / "hf").seconds for _ in range(10)]
        helps = []
        for _ in range(20):
            started = time.monotonic()
            subprocess.run([ferry, "--help"], stdout=subprocess.DEVNULL, check=True)
            helps.append(time.monotonic() - started)
        read = Run(ferry, "convert", work / "hf", work / "out", "--tp", "8", "--pp", "4", "--dry-run=read", "--json", "--quiet")
        convert = Run(ferry, "convert", work / "hf", work / "out", "--tp", "8", "--pp", "4", "--json", "--quiet")
        blocks = sum(p.stat().st_blocks * 512 for p in (work / "out").rglob("*") if p.is_file())
        print()
        print(f"- 70B shape ({size_of(work / 'hf') / 1e9:.0f} GB of sparse files), `ferry inspect`: {statistics.median(inspect) * 1000:.0f} ms (goal < 200)")
        print(f"- `ferry --help`: {statistics.median(helps) * 1000:.1f} ms (goal < 20)")
        print(f"- 70B shape, `convert --dry-run=read` TP8 PP4: {read.seconds:.0f} s, peak anonymous memory {read.peak:.0f} MiB (goal <= 256)")
        print(f"- 70B shape, `convert` TP8 PP4 with proof: {convert.seconds:.0f} s, peak anonymous memory {convert.peak:.0f} MiB "
              f"(goal <= 256); holes stay holes: the target occupies {blocks / 1e6:.1f} MB")
    finally:
        clear(work)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ferry", default="build/cli/ferry", type=lambda p: Path(p).resolve())
    parser.add_argument("--memory", type=Path, help="a folder in memory")
    parser.add_argument("--disk", type=Path, help="a folder on disk")
    parser.add_argument("--peers", type=lambda p: Path(p).resolve(), help="the peers' virtual environment")
    parser.add_argument("--bridge", help="a Python with Megatron-Bridge (tests/interop/convert/families/bridge_models.py says what else), as an arm")
    parser.add_argument("--shapes", nargs="*", default=["qwen2.5-1.5b", "llama-3.2-1b"], help="qwen3.5-35b-a3b-4:64 is one with 64 experts a layer")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-large", action="store_true", help="leave the 70B shape out, which takes minutes")
    options = parser.parse_args()
    cpu = next(line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    print(f"{datetime.date.today()}, {os.cpu_count()} cores of {cpu}, Linux {platform.release().split('-')[0]}, "
          f"load {os.getloadavg()[0]:.1f} at the start, median of {options.repeat}\n")
    row("where", "shape", "what", "seconds", "GB/s", "of cp", "proof, seconds", "peak anonymous MiB", "CPU seconds")
    row(*["---"] * 9)
    for shape in options.shapes:
        if options.memory:
            directions(options.ferry, shape, options.memory, options.repeat, False, options.bridge)
        if options.disk:
            directions(options.ferry, shape, options.disk, options.repeat, True, options.bridge)
    if options.peers and options.memory:
        peer(options.peers, options.shapes[0], options.memory)
    if options.disk and not options.no_large:
        large(options.ferry, options.disk)


if __name__ == "__main__":
    main()
