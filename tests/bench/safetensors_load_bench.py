#!/usr/bin/env python3
"""Measures with safetensors' own loader what tests/bench/device_load_bench.cc measures: safetensors_load_bench.py CHECKPOINT [cpu|cuda] [ROUNDS]"""
import json
import sys
import time
from pathlib import Path


def main(folder, device="cpu", rounds=2):
    import torch
    from safetensors.torch import load_file
    files = sorted(Path(folder).glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    for _ in range(rounds):
        start = time.perf_counter()
        tensors = [load_file(file, device=device) for file in files]
        if device != "cpu":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        del tensors
    print(json.dumps({"program": "safetensors", "gb": total / 1e9, "load_s": seconds, "load_gb_per_s": total / seconds / 1e9}))


if __name__ == "__main__":
    main(sys.argv[1], *sys.argv[2:3], *map(int, sys.argv[3:4]))
