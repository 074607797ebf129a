"""Deltas of a checkpoint with the layers' shapes of Llama 3.1 8B before and after a step of Adam: sizes and times of Ferry's and slime's
forms and of xdelta3. The load of the machine is printed with them.

    tests/bench/storage/delta_bench.py --work FOLDER [--layers 5] [--lr 1e-6]
"""
import argparse
import json
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

import numpy as np

CONFIG = dict(architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, hidden_act="silu", hidden_size=4096,
              intermediate_size=14336, max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32, num_key_value_heads=8,
              head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False, vocab_size=32000, torch_dtype="bfloat16")


def shapes(layers):
    yield "model.embed_tokens.weight", (32000, 4096)
    for i in range(layers):
        for name, shape in {"self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096),
                            "self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096),
                            "mlp.down_proj": (4096, 14336), "input_layernorm": (4096,), "post_attention_layernorm": (4096,)}.items():
            yield f"model.layers.{i}.{name}.weight", shape
    yield "model.norm.weight", (4096,)
    yield "lm_head.weight", (32000, 4096)


def bf16(values):
    """To nearest even."""
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
