#!/usr/bin/env python3
"""Reads torch_dist checkpoints of any writer and any model with megatron-core's own reader, and prints {folder: {key: [dtype, shape, sha256]}} with
one key for each layer and expert, without rows of padding. A tensor in fp32 that bf16 holds without loss is given as bf16: Megatron widens some.

    build/peers/bin/python tests/interop/read_with_mcore.py build/peers/mc0192 FOLDER..."""
import hashlib
import json
import os
import re
import sys
import tempfile

from cpu_stand_ins import install_cpu_patches
from megatron_model import init_dist


def apart(tensors):
    """{key: tensor} -> the same with one for each layer and expert"""
    for key, tensor in tensors.items():
        stacked = re.fullmatch(r"decoder\.layers\.([a-z].*)", key)
        for layer in range(len(tensor) if stacked else 1):
            of_layer = f"decoder.layers.{layer}.{stacked[1]}" if stacked else key
            part = tensor[layer] if stacked else tensor
            experts = ".experts.experts." in of_layer
            for expert in range(len(part) if experts else 1):
                yield of_layer.replace(".experts.experts.", f".experts.experts.{expert}."), part[expert] if experts else part


def describe(key, tensor):
    import torch
    if key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tensor = tensor[:int(tensor.any(1).nonzero().max()) + 1]
    narrow = tensor.to(torch.bfloat16)
    if tensor.dtype == torch.float32 and torch.equal(narrow.float(), tensor):
        tensor = narrow
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype)[6:], list(tensor.shape), hashlib.sha256(data).hexdigest()]


def main():
    sys.path.insert(0, os.path.abspath(sys.argv[1]))
    install_cpu_patches()
    with tempfile.TemporaryDirectory() as store:
        init_dist(0, 1, store + "/store")
        import torch
        from megatron.core import dist_checkpointing
        read = {}
        for folder in sys.argv[2:]:
            tensors = {k: t for k, t in dist_checkpointing.load_plain_tensors(folder).items() if isinstance(t, torch.Tensor)}
            read[folder] = {key: describe(key, tensor) for key, tensor in apart(tensors)}
        print(json.dumps(read))
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
