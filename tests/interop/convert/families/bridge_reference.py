"""Digests of the tiny models as Megatron-Bridge converts them, in both directions: tests/data/bridge_models, written by bridge_models.py."""
import json

import torch_dist_raw as raw
from support import DATA, iteration_folder
from weight_mapping import describe

LANGUAGE_MODEL = "language_model."


def of_bridge(name, side):
    """{tensor: dtype, shape and digest} of a side, "megatron" or "exported"; of a model that also sees its language model alone."""
    found = json.loads((DATA / "bridge_models" / f"{name}.json").read_text())[side]
    if side == "megatron" and any(key.startswith(LANGUAGE_MODEL) for key in found):
        return {key.removeprefix(LANGUAGE_MODEL): digest for key, digest in found.items() if key.startswith(LANGUAGE_MODEL)}
    return found


def stored(folder):
    """{key: torch tensor} of a checkpoint"""
    import torch
    checkpoint = raw.Checkpoint(str(iteration_folder(folder)))
    found = {}
    for key in checkpoint.tensors:
        dtype, shape, data = checkpoint.tensor(key)
        found[key] = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)
    return found


def as_bridge(tensors, wanted):
    """Digests of tensors in Megatron-Bridge's dtypes: it holds everything in the dtype of the model, ferry what is fp32 in fp32."""
    import torch
    return describe({k: t.to(getattr(torch, wanted[k]["dtype"])) if k in wanted else t for k, t in tensors.items()})
