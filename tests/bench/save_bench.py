#!/usr/bin/env python3
"""Measures saving a training run by Ferry, torch.distributed.checkpoint and `cp`, beside the limits, in turn in one run.

    build/peers/bin/python tests/bench/save_bench.py --program build/tests/save_bench --folder DISK [--device cuda] [--shape 1.5b]

The state is that of one rank: the Qwen2.5 shape's parameters in bf16, masters and moments in fp32. A stall is the time that training stands
still. The stall of a background save is that of the second one, when host memory for the copy exists (on a GPU torch's stager keeps it,
too). Every save ends with fsync. Prints a table for docs/benchmarks.md: medians and the best.
"""
import argparse
import json
import shutil
import statistics
import subprocess
import time
from pathlib import Path

LAYERS = {"0.5b": (24, 896, 4864, 2 * 64), "1.5b": (28, 1536, 8960, 2 * 128)}


def state_of(shape, layers, device):
    """Tensors of the same number and sizes, whatever their names."""
    import torch
    number, hidden, ffn, kv = LAYERS[shape]
    shapes = {"embedding": (151936, hidden), "norm": (hidden,)}
    for i in range(layers or number):
        shapes |= {f"{i}.qkv": (hidden + 2 * kv, hidden), f"{i}.qkv_bias": (hidden + 2 * kv,), f"{i}.proj": (hidden, hidden), f"{i}.norm1": (hidden,),
                   f"{i}.norm2": (hidden,), f"{i}.fc1": (2 * ffn, hidden), f"{i}.fc2": (hidden, ffn)}
    kinds = {"param": torch.bfloat16, "master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    return {f"{kind}.{name}": torch.full(size, 0.37, dtype=dtype, device=device) for kind, dtype in kinds.items() for name, size in shapes.items()}


def torch_arms(state, folder, device, threads, pause):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    def synchronize():
        if device == "cuda":
            torch.cuda.synchronize()

    def writer(name):
        return dcp.FileSystemWriter(folder / name, thread_count=threads, single_file_per_rank=False, sync_files=True)
    time.sleep(pause)
    start = time.perf_counter()
    dcp.save(state, storage_writer=writer("sync"))
    result = {"save_s": time.perf_counter() - start}
    shutil.rmtree(folder / "sync")
    stager = BlockingAsyncStager(cache_staged_state_dict=device == "cuda")  # it pins what it caches
    for round in range(2):
        synchronize()
        time.sleep(pause)
        start = time.perf_counter()
        future = dcp.async_save(state, storage_writer=writer(f"async{round}"), async_stager=stager)
        synchronize()
        result["stall_s"] = time.perf_counter() - start
        future.result()
        result["background_s"] = time.perf_counter() - start
        shutil.rmtree(folder / f"async{round}")
    return result


def copied(folder, bytes, pause):
    """`cp` of a file of the same bytes, which the page cache holds, and sync."""
    with open(folder / "file", "wb") as file:
        piece = b"\x3e" * (64 << 20)
        for at in range(0, bytes, len(piece)):
            file.write(piece[:bytes - at])
    subprocess.run(["sync", folder / "file"], check=True)
    time.sleep(pause)
    start = time.perf_counter()
    subprocess.run(["cp", folder / "file", folder / "copy"], check=True)
    subprocess.run(["sync", folder / "copy"], check=True)
    seconds = time.perf_counter() - start
    (folder / "file").unlink()
    (folder / "copy").unlink()
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="0.5b", choices=LAYERS)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pause", type=int, default=0, help="seconds before everything that writes: a disk that owes a burst is slower for a while")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    import os

    import torch.distributed
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if arguments.device == "cuda" else "gloo")
    times = {}
    for _ in range(arguments.rounds):
        command = [arguments.program, arguments.folder / "ferry", "--device", arguments.device, "--shape", arguments.shape,
                   "--layers", arguments.layers, "--rounds", 1, "--threads", arguments.threads, "--pause", arguments.pause]
        ours = json.loads(subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True).stdout)
        state = state_of(arguments.shape, arguments.layers, arguments.device)
        theirs = torch_arms(state, arguments.folder, arguments.device, arguments.threads, arguments.pause)
        gigabytes = sum(t.nbytes for t in state.values()) / 1e9
        del state
        rows = {("copy off the device, into memory that is there", "limit"): ours["copy_s"][0],
                ("one file from memory, fsync", "limit"): ours["plain_write_s"][0],
                ("`cp` and sync of one file", "limit"): copied(arguments.folder, ours["bytes"], arguments.pause),
                ("save", "ferry"): ours["save_s"][0], ("save", "torch.distributed.checkpoint"): theirs["save_s"],
                ("stall of a background save", "ferry"): ours["stall_s"][0],
                ("stall of a background save", "torch.distributed.checkpoint"): theirs["stall_s"],
                ("background save, stall included", "ferry"): ours["background_s"][0],
                ("background save, stall included", "torch.distributed.checkpoint"): theirs["background_s"]}
        for key, seconds in rows.items():
            times.setdefault(key, []).append(seconds)
    torch.distributed.destroy_process_group()
    print(f"{ours['bytes'] / 1e9:.2f} GB (torch: {gigabytes:.2f} GB), {arguments.device}, {arguments.threads} threads, {arguments.rounds} rounds\n")
    print("| what | by | seconds, median | fastest | GB/s, median |\n|---|---|---:|---:|---:|")
    for (what, by), seconds in times.items():
        median = statistics.median(seconds)
        print(f"| {what} | {by} | {median:.2f} | {min(seconds):.2f} | {ours['bytes'] / median / 1e9:.2f} |")


if __name__ == "__main__":
    main()
