#!/usr/bin/env python3
"""A seeing model's tensors as mbridge, which verl trains with, lays them out for Megatron: by its own tables and functions, without a model.

    git clone https://github.com/ISEEKYAN/mbridge && git -C mbridge checkout 10cb17f59dd082ef1dd9d5a36f8b1b5b3a5ecc3e
    PYTHONPATH=build/peers/mc0192:build/peers/mb062 build/peers/bin/python tests/interop/convert/families/mbridge_tower.py mbridge \\
        tests/data/hf_qwen3_vl_deep/hf tests/data/bridge_models/qwen3_vl_mbridge.json

The wheel of 0.15.1 has Qwen2.5-VL alone; the source of that commit calls itself 0.15.1 and has Qwen3-VL and Qwen3.5, too. The layers of a block are one
stack each, as TransformerBlock of megatron-core saves them, and so are Qwen3-VL's mergers; parts of a delta net have keys of their own there. The file
holds dtype, shape and SHA-256 of every tensor; `exported` are those that mbridge's functions make of them again.
"""
import importlib
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
EXPERTS = ".mlp.experts.linear_fc"  # mbridge knows them as they lie on the hub alone, not as transformers 5 saves them
CLASSES = {"qwen2_5_vl": "qwen2_5_vl.Qwen2_5VLBridge", "qwen3_vl": "qwen3_vl.Qwen3VLBridge", "qwen3_vl_moe": "qwen3_vl.Qwen3VLMoEBridge",
           "qwen3_5": "qwen3_5.qwen3_5_vl_bridge.Qwen3_5VlBridge"}
ONE_OF_EACH_LAYER = re.compile(r"vision_model\.blocks\.")  # transformers' own modules, which are no stack
DIRECT = "qwen3_5"  # whose language model mbridge and Megatron-Bridge make alike


def attributes(value):
    return types.SimpleNamespace(**{key: attributes(one) for key, one in value.items()}) if isinstance(value, dict) else value


def bridge_of(config):
    module, _, name = CLASSES[config["model_type"]].rpartition(".")
    made = getattr(importlib.import_module("mbridge.models." + module), name)
    bridge = made.__new__(made)
    bridge.hf_config = attributes({**config, **config["text_config"], "vision_config": config["vision_config"], "text_config": config["text_config"]})
    bridge.hf_text_config = bridge.hf_config.text_config
    bridge.config = types.SimpleNamespace(num_moe_experts=config["text_config"].get("num_local_experts"))
    bridge.mpu = types.SimpleNamespace(ep_size=1, ep_rank=0)
    bridge.make_vocab_size_divisible_by, bridge.export_weights_buff = None, {}
    return bridge


def key_of(name):
    """The key under which megatron-core saves a parameter of that name: layers are stacked, and so are experts."""
    return name if ONE_OF_EACH_LAYER.match(name) else name.replace(LAYER + ".", "").replace(EXPERTS, ".mlp.experts.experts.linear_fc")


def main():
    mbridge, folder, out = sys.argv[1:]
    sys.path.insert(0, mbridge)
    bridge_models.begin()
    from safetensors.torch import load_file
    weights = load_file(folder + "/model.safetensors")
    config = json.load(open(folder + "/config.json"))
    bridge = bridge_of(config)
    tables = {name: [of] for name, of in bridge._DIRECT_MAPPING.items()}
    for table in ("_ATTENTION_MAPPING", "_MLP_MAPPING", "_OTHER_MAPPING", "_VISUAL_MAPPING"):
        tables.update(getattr(bridge, table, {}))
    if config["model_type"] == DIRECT:
        tables = {name: of for name, of in tables.items() if name.startswith("vision_model.")}
    megatron, exported = {}, {}
    for name, of in tables.items():
        stack = []
        for layer in range(max(config["text_config"]["num_hidden_layers"], config["vision_config"]["depth"]) if LAYER in name else 1):
            one, hf = name.format(layer_number=layer), [text.format(layer_number=layer) for text in of]
            if any(text not in weights for text in hf):
                continue
            experts = range(bridge.config.num_moe_experts) if EXPERTS in one else [""]
            made = [bridge._weight_to_mcore_format(f"{one}{expert}", [weights[text] for text in hf]) for expert in experts]
            for expert, tensor in zip(experts, made):
                exported.update(zip(*bridge._weight_to_hf_format(f"{one}{expert}", tensor)))
            stack.append(torch.stack(made) if EXPERTS in one else made[0])
            if ONE_OF_EACH_LAYER.match(name):
                megatron[one] = made[0]
        if stack and not ONE_OF_EACH_LAYER.match(name):
            megatron[key_of(name)] = torch.stack(stack) if LAYER in name else stack[0]
    with open(out, "w") as file:
        json.dump({"megatron": describe(megatron), "exported": describe(exported)}, file, indent=0, sort_keys=True)


if __name__ == "__main__":
    main()
