"""Reads a checkpoint without Ferry: an independent judge of whether a damaged checkpoint still has the same content.
Hugging Face folders are read by the safetensors library and json, torch_dist folders by torch_dist_raw. Unreadable input
raises; two checkpoints are the same if their states are equal.

The module also maps dense Megatron tensors to Hugging Face ones, on bytes.
"""
import functools
import hashlib
import json
import re
from pathlib import Path

import safetensors

import torch_dist_raw as raw
from support import iteration_folder


class Unreadable(Exception):
    pass


def digest(data):
    return hashlib.blake2b(data, digest_size=16).digest()


@functools.lru_cache(maxsize=4096)
def json_value(data):
    """Parsed JSON; a key that occurs twice is an error, as no two readers agree on its value."""
    def unique(pairs):
        if len({k for k, _ in pairs}) != len(pairs):
            raise Unreadable("duplicate key")
        return dict(pairs)
    return json.loads(data.decode("utf-8"), object_pairs_hook=unique)


# ------------------------------------------------------------------------------------------------ Hugging Face folder


@functools.lru_cache(maxsize=64)
def safetensors_file(data):
    size = int.from_bytes(data[:8], "little")
    if size > len(data):
        raise Unreadable("header longer than the file")
    json_value(data[8:8 + size])
    return {name: (t["dtype"], tuple(t["shape"]), digest(t["data"])) for name, t in safetensors.deserialize(data)}


def hf_state(folder):
    folder = Path(folder)
    files = {p.name: p.read_bytes() for p in sorted(folder.iterdir())}
    state = {}
    index = files.get("model.safetensors.index.json")
    if index is None:
        state["tensors"] = safetensors_file(files["model.safetensors"])
    else:
        weight_map = json_value(index)["weight_map"]
        stored = {}
        for file in sorted(set(weight_map.values())):
            for name, tensor in safetensors_file(files[file]).items():
                if name in stored:
                    raise Unreadable(f"{name} in two files")
                stored[name] = (file, tensor)
        if {n: f for n, (f, _) in stored.items()} != weight_map:
            raise Unreadable("the index disagrees with the files")
        state["tensors"] = {name: tensor for name, (_, tensor) in stored.items()}
    state["config"] = json_value(files["config.json"])
    state["files"] = {n: digest(d) for n, d in files.items()
                      if not n.endswith(".safetensors") and n not in ("config.json", "model.safetensors.index.json")}
    return state


# ------------------------------------------------------------------------------------------------- torch_dist folder


def plain(value):
    """-> an unpickled object as nested tuples of plain values, which can be compared"""
    if isinstance(value, raw.Obj):
        return (value.g, plain(value.args), plain(value.state), plain(value.items), plain(value.appended))
    if isinstance(value, raw.Global):
        return ("global", value.name)
    if isinstance(value, raw.Pers):
        return ("persistent", plain(value.pid))
    if isinstance(value, dict):
        return ("dict", tuple(sorted(((repr(plain(k)), plain(v)) for k, v in value.items()))))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, tuple(plain(v) for v in value))
    return (type(value).__name__, repr(value))


@functools.lru_cache(maxsize=4096)
def saved_object(data):
    """A torch.save archive: its pickle and the bytes of its storages."""
    entries = raw.zip_entries(data)
    record = lambda name: data[entries[name][0]:sum(entries[name])]
    for offset, size in entries.values():
        if offset + size > len(data):
            raise Unreadable("record past the end")
    storages = tuple(sorted((n, digest(record(n))) for n in entries if n.startswith("data/")))
    return plain(raw.unpickle(record("data.pkl"))), storages


@functools.lru_cache(maxsize=4096)
def saved_tensor(data):
    dtype, shape, content = raw.tensor_from_zip(data)
    items = 1
    for size in shape:
        items *= size
    if len(content) != items * raw.DTYPES[dtype][1]:
        raise Unreadable("tensor record too short")
    return dtype, shape, digest(content)


@functools.lru_cache(maxsize=64)
def layout(metadata):
    checkpoint = raw.Checkpoint("", metadata)
    for key, (dtype, shape, chunks) in checkpoint.tensors.items():
        if any(size < 0 for size in shape):
            raise Unreadable(f"{key}: negative size")
        covered = 0
        for i, (offsets, sizes) in enumerate(chunks):
            if len(offsets) != len(shape) or any(o < 0 or n < 0 or o + n > s for o, n, s in zip(offsets, sizes, shape)):
                raise Unreadable(f"{key}: chunk outside the tensor")
            for other, lengths in chunks[:i]:
                if all(o < p + m and p < o + n for o, n, p, m in zip(offsets, sizes, other, lengths)):
                    raise Unreadable(f"{key}: chunks overlap")
            covered += volume(sizes)
        if covered != volume(shape):
            raise Unreadable(f"{key}: chunks leave a gap")
    return checkpoint


def volume(sizes):
    n = 1
    for size in sizes:
        n *= size
    return n


def megatron_state(root):
    """State of the checkpoint that the tracker file in `root` points at, or of the iteration folder `root`."""
    root = Path(root)
    folder = iteration_folder(root)
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    checkpoint = layout(files[".metadata"])

    def item(key, offsets=None):
        path, offset, length, transforms = checkpoint.store[(key, offsets)]
        if transforms or offset < 0 or offset + length > len(files[path]):
            raise Unreadable(f"{key}: no such bytes")
        return files[path][offset:offset + length]

    tensors = {}
    for key, (dtype, shape, chunks) in checkpoint.tensors.items():
        parts = {}
        for offsets, sizes in chunks:
            chunk_dtype, chunk_shape, content = saved_tensor(item(key, offsets))
            if (chunk_dtype, chunk_shape) != (dtype, tuple(sizes)):
                raise Unreadable(f"{key}: chunk has another shape or dtype")
            parts[offsets] = (sizes, content)
        tensors[key] = (dtype, shape, tuple(sorted(parts.items())))
    state = {"name": folder.name, "tensors": tensors,
             "objects": {key: saved_object(item(key)) for key in checkpoint.objects},
             "common": saved_object(files["common.pt"]) if "common.pt" in files else None,
             "backend": json_value(files["metadata.json"])}
    own = {".metadata", "common.pt", "metadata.json", "run_config.yaml"}  # the last is no content: it follows from the configuration
    carried = {n: d for n, d in files.items() if n not in own and not n.endswith(".distcp")}
    state["files"] = {n: json_value(d) if Path(n).name == "config.json" else digest(d) for n, d in carried.items()}
    return state


def state_or_error(read, folder):
    """The state; the error where there is none, which is equal to nothing."""
    try:
        return read(folder)
    except (Exception, MemoryError) as error:
        return error


# ------------------------------------------------------------------------------------------- Megatron to Hugging Face


def rows(data, count):
    """The bytes of a row-major tensor as `count` equal slices of its first dimension."""
    step = len(data) // count
    return [data[i * step:(i + 1) * step] for i in range(count)]


def split_qkv(data, config):
    """[groups x (query heads per group + 2) x head_dim, ...] -> q, k, v"""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    per_group = heads // groups
    blocks = rows(data, groups * (per_group + 2))  # one block is one head
    q = [blocks[g * (per_group + 2) + r] for g in range(groups) for r in range(per_group)]
    k = [blocks[g * (per_group + 2) + per_group] for g in range(groups)]
    v = [blocks[g * (per_group + 2) + per_group + 1] for g in range(groups)]
    return b"".join(q), b"".join(k), b"".join(v)


def unstacked(tensors, layers):
    """Tensors with a leading layer axis become one per layer; gate and up of singleton_local_shards become one tensor."""
    out = {}
    for key, (dtype, shape, data) in tensors.items():
        stacked = re.fullmatch(r"decoder\.layers\.([a-z].*)", key)
        if stacked:
            for i, part in enumerate(rows(data, layers)):
                out[f"decoder.layers.{i}.{stacked[1]}"] = (dtype, shape[1:], part)
        else:
            out[key] = (dtype, shape, data)
    for key in [k for k in out if k.endswith("linear_fc1.weight_w")]:
        dtype, (ffn, hidden), gate = out.pop(key)
        up = out.pop(key[:-1] + "v")[2]
        out[key[:-2]] = (dtype, (2 * ffn, hidden), gate + up)
    return out


def megatron_to_hf(tensors, config):
    """{Megatron key: (dtype, shape, bytes)} of a dense model -> {Hugging Face name: (dtype, shape, bytes)}."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    model = unstacked({k: t for k, t in tensors.items() if not k.startswith("optimizer.")}, config["num_hidden_layers"])
    out = {}
    for key, name in (("embedding.word_embeddings.weight", "model.embed_tokens.weight"), ("output_layer.weight", "lm_head.weight")):
        if key in model:
            dtype, (padded, _), data = model.pop(key)
            out[name] = (dtype, (vocab, hidden), data[:len(data) // padded * vocab])
    out["model.norm.weight"] = model.pop("decoder.final_layernorm.weight")
    copies = {"self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
              "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
              "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
              "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
              "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
              "mlp.linear_fc2.weight": "mlp.down_proj.weight"}
    for key, (dtype, shape, data) in model.items():
        _, _, layer, rest = key.split(".", 3)
        prefix = f"model.layers.{layer}."
        if rest in copies:
            out[prefix + copies[rest]] = (dtype, shape, data)
        elif rest.startswith("self_attention.linear_qkv."):
            kind = rest.rsplit(".", 1)[1]
            for letter, part in zip("qkv", split_qkv(data, config)):
                size = shape[0] * len(part) // len(data)
                out[f"{prefix}self_attn.{letter}_proj.{kind}"] = (dtype, (size, *shape[1:]), part)
        elif rest == "mlp.linear_fc1.weight":
            for half, part in zip(("gate", "up"), rows(data, 2)):
                out[f"{prefix}mlp.{half}_proj.weight"] = (dtype, (shape[0] // 2, hidden), part)
        else:
            raise KeyError(key)
    return out
