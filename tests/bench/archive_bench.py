#!/usr/bin/env python3
"""Measures the archive beside safetensors, torch.save, HDF5's own filters and ZipNN, in one run. Prints Markdown tables.

    archive_bench.py --ferry build/cli/ferry --codec build/tests/codec_bench --folder FOLDER [--gb 1] [--repeat 3]

Needs torch, safetensors, h5py, hdf5plugin and zipnn; an arm whose package is missing is left out and named. The weights are
synthetic: N(0, 0.02) in bf16, rows scaled by a log-normal factor. Every arm writes the same tensors to FOLDER, reads them back and
compares; arms alternate, and the fastest round counts. A FOLDER in memory (/dev/shm) shows the cost of the codecs, a FOLDER on a disk
their gain: pages are dropped before each read, and a write ends on the disk.
"""
import argparse
import datetime
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy

HIDDEN, FFN = 2048, 8192


def tensors_of(layers):
    """Names and shapes of a Llama model without a vocabulary to speak of."""
    yield "model.embed_tokens.weight", (2048, HIDDEN)
    for i in range(layers):
        p = f"model.layers.{i}."
        for name in ("q", "k", "v", "o"):
            yield f"{p}self_attn.{name}_proj.weight", (HIDDEN, HIDDEN)
        for name, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
            yield f"{p}mlp.{name}_proj.weight", shape
        for name in ("input", "post_attention"):
            yield f"{p}{name}_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (2048, HIDDEN)


def weights(shape, generator):
    """bf16 as uint16."""
    rows = shape if len(shape) == 2 else (1, *shape)
    values = generator.standard_normal(rows, numpy.float32)
    values *= 0.02 * numpy.exp(0.3 * generator.standard_normal((rows[0], 1), numpy.float32))
    bits = values.view(numpy.uint32)
    bits += 0x7fff + ((bits >> 16) & 1)
    return (bits >> 16).astype(numpy.uint16).reshape(shape)


def make_checkpoint(folder, gigabytes):
    layer = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
    layers = max(1, round(gigabytes * 1e9 / layer))
    generator = numpy.random.default_rng(1)
    arrays = {name: weights(shape, generator) for name, shape in tensors_of(layers)}
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN, "num_hidden_layers": layers,
              "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": FFN, "vocab_size": 2048,
              "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "max_position_embeddings": 32768,
              "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_safetensors(arrays, folder / "model.safetensors")
    return arrays


# ---------------------------------------------------------------------------------------------------------- the arms


def as_torch(arrays):
    import torch
    return {n: torch.from_numpy(a).view(torch.bfloat16) for n, a in arrays.items()}


def from_torch(tensors):
    import torch
    return {n: t.view(torch.uint16).numpy() for n, t in tensors.items()}


def save_safetensors(arrays, path):
    from safetensors.torch import save_file
    save_file(as_torch(arrays), path, metadata={"format": "pt"})


def load_safetensors(path):
    from safetensors.torch import load_file
    return {n: a.copy() for n, a in from_torch(load_file(path)).items()}  # load_file maps the file


def save_torch(arrays, path):
    import torch
    torch.save(as_torch(arrays), path)


def load_torch(path):
    import torch
    return from_torch(torch.load(path, weights_only=True))


def h5py_arm(**options):
    def save(arrays, path):
        import h5py
        with h5py.File(path, "w") as file:
            for name, array in arrays.items():
                chunks = (min(256, array.shape[0]), HIDDEN) if array.ndim == 2 else None
                extra = {**options, "chunks": chunks or array.shape} if options else {}
                file.create_dataset(name, data=array, **{k: v() if callable(v) else v for k, v in extra.items()})

    def load(path):
        import h5py
        if options:
            importlib.import_module("hdf5plugin")
        with h5py.File(path) as file:
            return {name: dataset[()] for name, dataset in file.items()}
    return save, load


def blosc():
    import hdf5plugin
    return hdf5plugin.Blosc(cname="zstd", clevel=1, shuffle=hdf5plugin.Blosc.SHUFFLE)


def zstandard():
    import hdf5plugin
    return hdf5plugin.Zstd(clevel=1)


def save_zipnn(arrays, path):
    from zipnn import ZipNN
    codec = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=os.cpu_count())
    with open(path, "wb") as file:
        for name, array in arrays.items():
            data = codec.compress(bytearray(array.tobytes()))
            file.write(json.dumps([name, array.shape, len(data)]).encode() + b"\n")
            file.write(data)


def load_zipnn(path):
    from zipnn import ZipNN
    codec = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=os.cpu_count())
    arrays = {}
    with open(path, "rb") as file:
        while line := file.readline():
            name, shape, size = json.loads(line)
            arrays[name] = numpy.frombuffer(codec.decompress(bytearray(file.read(size))), numpy.uint16).reshape(shape)
    return arrays


ARMS = {  # name: needs, (save, load)
    "safetensors": ("safetensors", (save_safetensors, load_safetensors)),
    "torch.save": ("torch", (save_torch, load_torch)),
    "h5py, no filter": ("h5py", h5py_arm()),
    "h5py, fletcher32": ("h5py", h5py_arm(fletcher32=True)),
    "h5py, lzf, shuffle": ("h5py", h5py_arm(compression="lzf", shuffle=True, fletcher32=True)),
    "h5py, gzip-1, shuffle": ("h5py", h5py_arm(compression="gzip", compression_opts=1, shuffle=True, fletcher32=True)),
    "h5py, blosc zstd-1, shuffle": ("hdf5plugin", h5py_arm(compression=blosc)),
    "h5py, zstd-1": ("hdf5plugin", h5py_arm(compression=zstandard)),
    "ZipNN": ("zipnn", (save_zipnn, load_zipnn)),
}


# ------------------------------------------------------------------------------------------------------- measurements


def size_of(path):
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size


def clear(path):
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def to_disk(path):
    """Brings written pages to the disk and drops them from memory."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Arm:
    def __init__(self, path):
        self.path, self.write, self.read, self.size, self.notes = path, [], [], 0, []


def timed(action, *arguments):
    started = time.monotonic()
    result = action(*arguments)
    return time.monotonic() - started, result


def python_round(arm, save, load, arrays):
    clear(arm.path)
    seconds, _ = timed(save, arrays, arm.path)
    more, _ = timed(to_disk, arm.path)
    arm.write.append(seconds + more)
    arm.size = size_of(arm.path)
    seconds, found = timed(load, arm.path)
    arm.read.append(seconds)
    for name, array in arrays.items():
        if not numpy.array_equal(found[name], array):
            sys.exit(f"{arm.path}: {name} is not what was written")


def ferry_run(ferry, *arguments):
    done = subprocess.run([str(a) for a in (ferry, "convert", *arguments, "--json", "--quiet")], stdout=subprocess.PIPE, text=True,
                          check=True)
    return json.loads(done.stdout)


def ferry_round(arm, back, ferry, source, options):
    """Converts to an archive and back. ferry proves what it wrote, by reading it again; that time stands by itself."""
    clear(arm.path)
    clear(back)
    to_disk(source)
    report = ferry_run(ferry, source, arm.path, *options)
    arm.write.append(report["copy_seconds"])
    arm.notes.append(report["proof_seconds"])
    arm.size = size_of(arm.path)
    to_disk(arm.path)
    arm.read.append(ferry_run(ferry, arm.path, back, "--to", "hf")["copy_seconds"])
    subprocess.run(["cmp", source / "model.safetensors", back / "model.safetensors"], check=True)
    clear(back)


def row(*cells):
    print("| " + " | ".join(str(c) for c in cells) + " |", flush=True)


def codec_table(codec, source):
    print("\nMemory to memory, checksum included, per second that a core worked; 1 MiB chunks, the fastest of seven rounds:\n")
    row("weights", "ratio", "in, GB/s", "out, GB/s")
    row("---", "---:", "---:", "---:")
    for name, extra in (("synthetic, 128 MiB", []), ("of this run's model", [source / "model.safetensors"])):
        done = subprocess.run([codec, "codec", *extra], stdout=subprocess.PIPE, text=True, check=True)
        seen = json.loads(done.stdout)
        row(name, f"{seen['ratio']:.3f}", f"{seen['encode_gb_per_s']:.2f}", f"{seen['decode_gb_per_s']:.2f}")


def slices_table(codec, archive):
    seen = json.loads(subprocess.run([codec, "slices", archive], stdout=subprocess.PIPE, text=True, check=True).stdout)
    print(f"\nRandom reads of matrices ({seen['chunks']} chunks), verified, by one thread, the file in the page cache; the archive was "
          f"opened in {seen['open_ms']:.1f} ms:\n")
    row("slice", "median, ms", "99 %, ms", "chunks decoded, mean")
    row("---", "---:", "---:", "---:")
    for name, slice_ in seen.items():
        if isinstance(slice_, dict):
            row(name, f"{slice_['median_ms']:.3f}", f"{slice_['p99_ms']:.3f}", slice_["chunks"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ferry", type=Path, required=True)
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    work = options.folder / "archive-bench"
    clear(work)
    source = work / "hf"
    try:
        arrays = make_checkpoint(source, options.gb)
        size = sum(a.nbytes for a in arrays.values())
        print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.folder}; "
              f"{size / 1e9:.2f} GB in {len(arrays)} tensors")
        codec_table(options.codec, source)
        arms, missing = {}, []
        for name, (needs, _) in ARMS.items():
            try:
                importlib.import_module(needs)
                arms[name] = Arm(work / f"arm{len(arms)}")
            except ImportError:
                missing.append(name)
        threads = os.cpu_count()
        ours = {"ferry archive": Arm(work / "archive"), "ferry archive, 1 thread": Arm(work / "archive1"),
                "ferry, safetensors to safetensors": Arm(work / "plain")}
        flags = {"ferry archive": ["--to", "h5"], "ferry archive, 1 thread": ["--to", "h5", "--threads", 1],
                 "ferry, safetensors to safetensors": ["--to", "hf"]}
        for _ in range(options.repeat):
            for name, arm in arms.items():
                python_round(arm, *ARMS[name][1], arrays)
                if name != "safetensors":
                    clear(arm.path)
            for name, arm in ours.items():
                ferry_round(arm, work / "back", options.ferry, source, flags[name])
        print("\nEnd to end, files in FOLDER; GB/s of weights, the fastest round:\n")
        row("arm", "ratio", "write, GB/s", "read, GB/s", "proof, s")
        row("---", "---:", "---:", "---:", "---:")
        for name, arm in {**arms, **ours}.items():
            row(name, f"{size / arm.size:.3f}", f"{size / min(arm.write) / 1e9:.2f}", f"{size / min(arm.read) / 1e9:.2f}",
                f"{min(arm.notes):.2f}" if arm.notes else "")
        print(f"\nferry's read is a conversion to safetensors, which also digests and writes; its {threads} threads each encode or decode."
              + (f" Left out: {', '.join(missing)}." if missing else ""))
        slices_table(options.codec, work / "archive")
    finally:
        clear(work)


if __name__ == "__main__":
    main()
