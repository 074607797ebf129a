#!/usr/bin/env python3
"""A Qwen2.5-VL folder's tensors as mbridge 0.15.1, which verl trains with, lays them out for Megatron: by its own tables and functions, without a model.

    v312/bin/pip download --no-deps mbridge==0.15.1 -d wheels && unzip wheels/mbridge-0.15.1-*.whl -d mbridge
    v312/bin/python tests/interop/convert/families/mbridge_tower.py mbridge tests/data/hf_qwen2_5_vl_deep/hf tests/data/bridge_models/qwen2_5_vl_mbridge.json

v312 is bridge_models.py's environment. The layers of a block are one stack each, as TransformerBlock of megatron-core saves them. The file holds
dtype, shape and SHA-256 of every tensor; `exported` are those that mbridge's functions make of them again.
"""
import importlib.metadata
import json
import os
import re
import sys
import types

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import bridge_models
from weight_mapping import describe

LAYER = "{layer_number}"


def attributes(value):
    return types.SimpleNamespace(**{key: attributes(one) for key, one in value.items()}) if isinstance(value, dict) else value


def main():
    mbridge, folder, out = sys.argv[1:]
    sys.path.insert(0, mbridge)
    bridge_models.install_cpu_patches()
    bridge_models.install_te_stub("2.9.0")
    sys.meta_path.insert(0, bridge_models.Finder())
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "2.9.0" if name.startswith("transformer") and "engine" in name else version(name)
    from mbridge.models.qwen2_5_vl import Qwen2_5VLBridge
    from safetensors.torch import load_file
    weights = load_file(folder + "/model.safetensors")
    config = json.load(open(folder + "/config.json"))
    bridge = Qwen2_5VLBridge.__new__(Qwen2_5VLBridge)
    bridge.hf_config = attributes({**config, **config["text_config"], "vision_config": config["vision_config"]})  # mbridge reads it flat
    tables = {name: [of] for name, of in bridge._DIRECT_MAPPING.items()}
    for table in (bridge._ATTENTION_MAPPING, bridge._MLP_MAPPING):
        tables.update(table)
    stacks, exported = {}, {}
    for name, of in tables.items():
        layers = 1
        if LAYER in name:
            pattern = re.compile(re.escape(of[0]).replace(re.escape(LAYER), r"\d+") + "$")
            layers = sum(map(bool, map(pattern.match, weights)))
        for layer in range(layers):
            one, hf = name.format(layer_number=layer), [text.format(layer_number=layer) for text in of]
            if any(text not in weights for text in hf):
                continue
            made = bridge._weight_to_mcore_format(one, [weights[text] for text in hf])
            stacks.setdefault(name.replace(LAYER + ".", ""), []).append(made)
            if len(hf) == 1 and not one.endswith(("linear_qkv.weight", "linear_qkv.bias")):
                exported[hf[0]] = made
            else:
                exported.update(zip(*bridge._weight_to_hf_format(one, made)))
    megatron = {key: torch.stack(made) if LAYER + "." in next(name for name in tables if name.replace(LAYER + ".", "") == key) else made[0]
                for key, made in stacks.items()}
    with open(out, "w") as file:
        json.dump({"megatron": describe(megatron), "exported": describe(exported)}, file, indent=0, sort_keys=True)


if __name__ == "__main__":
    main()
