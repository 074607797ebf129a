"""`ferry split` of layers with the shapes of Llama 3.1 8B, each of whose weights changed by a matrix of rank 16 and by noise: seconds by the clock
and of the CPU, and memory. The load of the machine is printed with them.

    build/peers/bin/python tests/bench/storage/split_bench.py --work FOLDER [--layers 1 | --whole] [--rank 16] [--ferry build/cli/ferry]

--whole takes the whole model, whose weights before the update are zeros (holes of the files), so that 14 GB are written.
"""
import argparse
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import torch
from delta_bench import CONFIG, shapes
from safetensors.torch import save_file


def write(folder, layers):
    random = torch.Generator().manual_seed(1)

    def normal(*shape):
        return 0.02 * torch.randn(*shape, generator=random)
    base, tuned = {}, {}
    for name, shape in shapes(layers):
        before = normal(*shape)
        after = before
        if name.endswith("_proj.weight"):
            after = before + normal(shape[0], 16) @ normal(16, shape[1]) + 0.01 * normal(*shape)
        base[name], tuned[name] = before.to(torch.bfloat16), after.to(torch.bfloat16)
    for end, tensors in (("base", base), ("tuned", tuned)):
        (folder / end).mkdir(parents=True)
        (folder / end / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
        save_file(tensors, folder / end / "model.safetensors", metadata={"format": "pt"})


def write_whole(folder):
    for end in ("base", "tuned"):
        subprocess.run([sys.executable, Path(__file__).parent.parent / "make_checkpoint.py", "llama-3-8b", folder / end, "--sparse"], check=True)
    random = torch.Generator().manual_seed(1)
    noise = 0.01 * torch.randn(1 << 26, generator=random)
    for path in sorted((folder / "tuned").glob("*.safetensors")):
        with open(path, "r+b") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
            for name, one in header.items():
                if not name.endswith("_proj.weight"):
                    continue
                rows, columns = one["shape"]
                change = 0.02 * torch.randn(rows, 16, generator=random) @ (0.02 * torch.randn(16, columns, generator=random))
                change += noise[:rows * columns].roll(rows + int(torch.randint(1 << 20, (1,), generator=random))).view(rows, columns)
                file.seek(8 + size + one["data_offsets"][0])
                file.write(change.to(torch.bfloat16).view(torch.int16).numpy().tobytes())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--ferry", default="build/cli/ferry")
    options = parser.parse_args()
    work = options.work / "split"
    shutil.rmtree(work, ignore_errors=True)
    write_whole(work) if options.whole else write(work, options.layers)
    began = time.monotonic()
    subprocess.run([options.ferry, "split", work / "base", work / "tuned", work / "adapter", "--rank", str(options.rank)], check=True)
    seconds = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{'32' if options.whole else options.layers} layers, rank {options.rank}: {seconds:.1f} s, CPU {used.ru_utime:.1f} + {used.ru_stime:.1f} s, "
          f"{used.ru_maxrss / 1024:.0f} MiB, load {os.getloadavg()[0]:.0f}")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
