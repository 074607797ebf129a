"""Deltas of a checkpoint with the layers' shapes of Llama 3.1 8B before and after a step of Adam: sizes and times of Ferry's and slime's
forms, of slime's publisher and of xdelta3. The load of the machine is printed with them.

    build/peers/bin/python tests/bench/storage/delta_bench.py --work FOLDER [--layers 5] [--lr 1e-6]

slime's publisher runs in a trainer with Ray and a GPU. Its work on the host is done here as it does it (slime/backends/megatron_utils/
update_weight/update_weight_from_disk_delta.py): numpy's XOR, zstandard at level 1 and XXH3-128, tensors in parallel in a pool of threads.
"""
import argparse
import json
import os
import shutil
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash
import zstandard

CONFIG = dict(architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, hidden_act="silu", hidden_size=4096,
              intermediate_size=14336, max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32, num_key_value_heads=8,
              head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False, vocab_size=128256, torch_dtype="bfloat16")


def shapes(layers):
    yield "model.embed_tokens.weight", (CONFIG["vocab_size"], 4096)
    for i in range(layers):
        for name, shape in {"self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096),
                            "self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096),
                            "mlp.down_proj": (4096, 14336), "input_layernorm": (4096,), "post_attention_layernorm": (4096,)}.items():
            yield f"model.layers.{i}.{name}.weight", shape
    yield "model.norm.weight", (4096,)
    yield "lm_head.weight", (CONFIG["vocab_size"], 4096)


def bf16(values):
    """Rounds to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write(folder, layers, lr):
    """`base` and `new`: fp32 masters of deviation 0.02 in bf16, before and after a step whose size is the learning rate times a number
    between -1 and 1, as Adam's first moment over the root of its second is."""
    listed = list(shapes(layers))
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in listed:
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    files = {}
    for end in ("base", "new"):
        (folder / end).mkdir(parents=True)
        (folder / end / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
        files[end] = open(folder / end / "model.safetensors", "wb")
        files[end].write(struct.pack("<Q", len(text)) + text)
    generator = np.random.default_rng(1)
    for _, shape in listed:
        count = int(np.prod(shape))
        while count:
            part = min(count, 1 << 24)
            master = generator.standard_normal(part, dtype=np.float32) * np.float32(0.02 if len(shape) > 1 else 1)
            step = (generator.random(part, dtype=np.float32) * 2 - 1) * np.float32(lr)
            files["base"].write(bf16(master).tobytes())
            files["new"].write(bf16(master - step).tobytes())
            count -= part
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
        file.close()
    return offset


def timed(*command):
    started = time.monotonic()
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return time.monotonic() - started


def mapped(folder):
    """-> {name: bytes}"""
    data = np.memmap(folder / "model.safetensors", np.uint8, "r")
    size = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:8 + size].tobytes())
    header.pop("__metadata__")
    return {name: data[8 + size + entry["data_offsets"][0]:8 + size + entry["data_offsets"][1]] for name, entry in header.items()}


def publish_as_slime(base, new, folder):
    """A version of slime's folder by slime's own steps. -> seconds"""
    started = time.monotonic()
    before, after = mapped(base), mapped(new)

    def encode(name):
        difference = after[name] ^ before[name]
        if not np.count_nonzero(difference):
            return name, b"", ""
        return name, zstandard.ZstdCompressor(level=1).compress(difference), xxhash.xxh3_128_hexdigest(after[name])

    header, checksums, frames, offset = {}, {}, [], 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, frame, checksum in pool.map(encode, after):
            if frame:
                header[name] = {"dtype": "U8", "shape": [len(frame)], "data_offsets": [offset, offset + len(frame)]}
                checksums[name] = checksum
                frames.append(frame)
                offset += len(frame)
    text = json.dumps({"__metadata__": checksums, **header}).encode()
    folder.mkdir(parents=True)
    with open(folder / "model-00000-of-00001.safetensors", "wb") as file:
        for part in (struct.pack("<Q", len(text)), text, *frames):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    (folder / "model.safetensors.index.json").write_text(json.dumps({
        "metadata": {"version": "000001", "base_version": "000000", "delta_encoding": "xor", "compression_format": "zstd",
                     "checksum_format": "xxh3-128"},
        "weight_map": dict.fromkeys(header, "model-00000-of-00001.safetensors")}))
    return time.monotonic() - started


def size_of(folder):
    return sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--ferry", default="build/cli/ferry")
    options = parser.parse_args()
    work = options.work / "delta_bench"
    shutil.rmtree(work, ignore_errors=True)
    total = write(work, options.layers, options.lr)
    base, new = work / "base", work / "new"
    rows = []
    for form, delta in (("ferry", work / "ferry"), ("slime", work / "slime")):
        made = timed(options.ferry, "delta", "make", base, new, delta, "--to", form, "-q")
        applied = timed(options.ferry, "delta", "apply", base, delta, work / "out", "-q")
        verified = timed(options.ferry, "delta", "verify", base, delta, "-q")
        rows.append((form, size_of(delta), made, applied, verified))
        same = subprocess.run(["cmp", work / "out/model.safetensors", new / "model.safetensors"]).returncode == 0
        assert same, form
        shutil.rmtree(work / "out")
    rows.append(("copy (cp, sync)", total, timed("sh", "-c", f"cp {new}/model.safetensors {work}/copy && sync {work}/copy"), None, None))
    os.remove(work / "copy")
    made = publish_as_slime(base, new, work / "numpy/weight_v000001")
    rows.append(("slime's publisher", size_of(work / "numpy"), made, None, timed(options.ferry, "delta", "verify", base, work / "numpy", "-q")))
    if shutil.which("xdelta3"):
        made = timed("xdelta3", "-e", "-f", "-S", "none", "-B", str(1 << 30), "-s", base / "model.safetensors",
                     new / "model.safetensors", work / "xdelta")
        applied = timed("xdelta3", "-d", "-f", "-B", str(1 << 30), "-s", base / "model.safetensors", work / "xdelta", work / "out")
        rows.append(("xdelta3", (work / "xdelta").stat().st_size, made, applied, None))
    print(f"{total / 1e9:.2f} GB each; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| form | size | times smaller | make s | apply s | verify s |\n|---|---|---|---|---|---|")
    for form, size, *seconds in rows:
        print(f"| {form} | {size / 1e6:.1f} MB | {total / size:.1f} | "
              + " | ".join("" if s is None else f"{s:.1f} ({total / s / 1e9:.2f} GB/s)" for s in seconds) + " |")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
