#!/usr/bin/env python3
"""Writes a Hugging Face checkpoint of a known shape with random (or, with --sparse, absent) weights: for benchmarks.

    make_checkpoint.py qwen2.5-1.5b FOLDER
    make_checkpoint.py llama-3-70b FOLDER --sparse      # files with holes: right sizes, no disk space
"""
import argparse
import json
import os
from pathlib import Path

SHAPES = {  # model_type, hidden, layers, heads, key-value heads, head_dim, ffn, vocabulary, tied
    "qwen2.5-1.5b": ("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, True),
    "llama-3.2-1b": ("llama", 2048, 16, 32, 8, 64, 8192, 128256, True),
    "llama-3-8b": ("llama", 4096, 32, 32, 8, 128, 14336, 128256, False),
    "llama-3-70b": ("llama", 8192, 80, 64, 8, 128, 28672, 128256, False),
    "tiny": ("llama", 64, 2, 4, 2, 16, 96, 500, False),
}
SHARD_BYTES = 5_000_000_000
POOL_BYTES = 64 << 20


def tensors(shape):
    """[(name, shape)] in the order of the model."""
    family, hidden, layers, heads, groups, dim, ffn, vocab, tied = shape
    yield "model.embed_tokens.weight", [vocab, hidden]
    for i in range(layers):
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", [hidden]
        yield p + "mlp.down_proj.weight", [hidden, ffn]
        yield p + "mlp.gate_proj.weight", [ffn, hidden]
        yield p + "mlp.up_proj.weight", [ffn, hidden]
        yield p + "post_attention_layernorm.weight", [hidden]
        for name, rows in (("k", groups * dim), ("q", heads * dim), ("v", groups * dim)):
            if family == "qwen2":
                yield f"{p}self_attn.{name}_proj.bias", [rows]
            yield f"{p}self_attn.{name}_proj.weight", [rows, hidden]
        yield p + "self_attn.o_proj.weight", [hidden, heads * dim]
    yield "model.norm.weight", [hidden]
    if not tied:
        yield "lm_head.weight", [vocab, hidden]


def num_bytes(shape):
    n = 2
    for size in shape:
        n *= size
    return n


def write_file(path, entries, pool):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in entries:
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + num_bytes(shape)]}
        offset += num_bytes(shape)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if pool is None:
            file.truncate(8 + len(text) + offset)
            return
        written = 0
        while written < offset:  # the pool again and again, from another place each time
            start = (written // POOL_BYTES * 4099 * 2) % (POOL_BYTES // 2)
            part = memoryview(pool)[start:start + min(offset - written, POOL_BYTES // 2)]
            file.write(part)
            written += len(part)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sparse", action="store_true")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    family, hidden, layers, heads, groups, dim, ffn, vocab, tied = shape
    options.folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": family, "hidden_act": "silu", "hidden_size": hidden, "num_hidden_layers": layers,
              "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": dim, "intermediate_size": ffn,
              "vocab_size": vocab, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6, "rope_theta": 500000.0,
              "max_position_embeddings": 32768, "dtype": "bfloat16"}
    (options.folder / "config.json").write_text(json.dumps(config, indent=2))
    files, size = [[]], 0
    for name, dims in tensors(shape):
        if size + num_bytes(dims) > SHARD_BYTES:
            files.append([])
            size = 0
        files[-1].append((name, dims))
        size += num_bytes(dims)
    pool = None if options.sparse else os.urandom(POOL_BYTES)
    weight_map = {}
    for i, entries in enumerate(files):
        name = "model.safetensors" if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        write_file(options.folder / name, entries, pool)
        weight_map.update({tensor: name for tensor, _ in entries})
    if len(files) > 1:
        (options.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


if __name__ == "__main__":
    main()
