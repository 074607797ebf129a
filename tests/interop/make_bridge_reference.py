#!/usr/bin/env python3
"""Writes name, shape and SHA-256 of every Megatron tensor that Megatron-Bridge makes of the tiny models of tests/data, by its own mappings.

The mappings of its registries run alone, without a model, on tensors that tensor parallelism does not split. So they need neither Transformer Engine,
whose classes are empty here, nor a provider that builds on a host; convert/families/bridge_models.py has whole models made where there is one. In an
environment with megatron-bridge 0.6.2, megatron-core 0.19.2 and what they need:

    PYTHONPATH=build/peers/mc0192:build/peers/mb062 build/peers/bin/python tests/interop/make_bridge_reference.py tests/data olmoe minimax_m2

writes tests/data/bridge/olmoe.json and so on. Where a tensor has several names in Megatron, all are written. --hf makes hf_bailing_moe_v2, whose
class Megatron-Bridge has and transformers has not.
"""
import hashlib
import importlib
import json
import re
import sys
import types
import typing
from pathlib import Path

import torch

from cpu_stand_ins import install_empty_modules

BRIDGES = {  # tiny model: module and class
    "bailing_moe_v2": ("bailing.bailing_moe2_bridge", "BailingMoeV2Bridge"),
    "deepseek_v3": ("deepseek.deepseek_v3_bridge", "DeepSeekV3Bridge"),
    "ernie4_5_moe": ("ernie.ernie_45_bridge", "Ernie45Bridge"),
    "gemma2": ("gemma.gemma2_bridge", "Gemma2Bridge"),
    "gemma3": ("gemma_vl.gemma3_vl_bridge", "Gemma3VLBridge"),
    "gemma3_text": ("gemma.gemma3_bridge", "Gemma3ModelBridge"),
    "glm4_moe": ("glm.glm45_bridge", "GLM45Bridge"),
    "glm4_moe_lite": ("glm.glm47_flash_bridge", "GLM47FlashBridge"),
    "glm_moe_dsa": ("glm_moe_dsa.glm5_bridge", "GLM5Bridge"),
    "kimi_k25": ("kimi_vl.kimi_k25_vl_bridge", "KimiK25VLBridge"),
    "minimax_m2": ("minimax_m2.minimax_m2_bridge", "MiniMaxM2Bridge"),
    "mistral3": ("ministral3.ministral3_bridge", "Ministral3Bridge"),
    "olmoe": ("olmoe.olmoe_bridge", "OlMoEBridge"),
    "qwen2_5_vl": ("qwen_vl.qwen25_vl_bridge", "Qwen25VLBridge"),
    "qwen3_vl": ("qwen_vl.qwen3_vl_bridge", "Qwen3VLBridge"),
}
LANGUAGE_MODEL = "language_model."
TOWERS = {"mistral3", "kimi_k25"}  # of which tests/data/bridge_models has none


def stub():
    typing.override = getattr(typing, "override", lambda method: method)  # Python 3.11 lacks it
    install_empty_modules()
    torch.cuda.Stream = type("Stream", (), {"__init__": lambda self, *a, **k: None})
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *a: None
    for name in ("utils", "param_mapping"):
        importlib.import_module("megatron.bridge.models.conversion." + name).is_modelopt_dynamic_module = lambda _: False


def module_for(config, weight):
    """A module of the kind that tensor parallelism leaves whole."""
    module = type("TopKRouter", (torch.nn.Module,), {})()
    module.config = config
    module.weight = torch.nn.Parameter(torch.zeros_like(weight))
    return module


def key_of(name):
    """The name of a module's tensor -> that of a checkpoint in which each layer and expert has its own tensors."""
    name = re.sub(r"\.experts\.(linear_fc[12])\.weight(\d+)$", r".experts.experts.\2.\1.weight", name)
    return name.replace(".mtp_model_layer.", ".transformer_layer.")


def megatron_tensors(bridge, weights, config, tower=False):
    """{name: tensor} of every name that a mapping gives to some of the weights; of a model that also sees those of the language model, or of the tower"""
    sizes = types.SimpleNamespace(**{
        "num_attention_heads": config["num_attention_heads"], "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"], "hidden_size": config["hidden_size"],
        "gated_linear_unit": True})
    registry = bridge.mapping_registry()
    found = {}
    of_language = [mapping for mapping in registry.mappings if mapping.megatron_param.startswith(LANGUAGE_MODEL)]
    others = [mapping for mapping in registry.mappings if mapping not in of_language]
    for mapping in others if tower or not of_language else of_language:
        named = mapping.hf_param if isinstance(mapping.hf_param, dict) else {"": mapping.hf_param}
        pattern = re.compile("^" + registry._convert_pattern_to_regex(next(iter(named.values()))) + "$")
        for match in filter(None, map(pattern.match, weights)):
            resolved = registry.resolve_mapping(mapping, match.groups()) if match.groups() else mapping
            of = resolved.hf_param if isinstance(resolved.hf_param, dict) else {"": resolved.hf_param}
            if not all(name in weights for name in of.values()):
                continue
            given = {part: weights[name] for part, name in of.items()}
            module = module_for(sizes, next(iter(given.values())))
            found.setdefault(key_of(resolved.megatron_param), resolved.hf_to_megatron(given if "" not in given else given[""], module))
    return found


def make_bailing(folder):
    """Ling 2 with a prediction layer, of Megatron-Bridge's class."""
    import safetensors.torch
    module = importlib.import_module("megatron.bridge.models.bailing.modeling_bailing_moe_v2")
    config = module.BailingMoeV2Config(
        vocab_size=90, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=64, num_experts=8, num_shared_experts=2, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=20,
        first_k_dense_replace=1, num_nextn_predict_layers=1, routed_scaling_factor=2.5, pad_token_id=0, eos_token_id=1,
        partial_rotary_factor=0.5, architectures=["BailingMoeV2ForCausalLM"], torch_dtype="bfloat16")
    torch.manual_seed(5)
    model = module.BailingMoeV2ForCausalLM(config)
    weights = {name: (0.2 * torch.randn(t.shape) + (1 if t.ndim == 1 and "norm" in name else 0)).to(torch.bfloat16)
               for name, t in model.state_dict().items() if "inv_freq" not in name}
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    written = {**config.to_dict(), "model_type": "bailing_moe_v2"}
    (folder / "config.json").write_text(json.dumps(written, indent=1, sort_keys=True))


def lines_of(tensors):
    def digest(tensor):
        return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return ",\n".join(f"{json.dumps(key)}: {json.dumps([str(tensor.dtype)[6:], list(tensor.shape), digest(tensor)])}" for key, tensor in sorted(tensors.items()))


def main():
    stub()
    from safetensors.torch import load_file
    data = Path(sys.argv[1])
    if "--hf" in sys.argv:
        make_bailing(data / "hf_bailing_moe_v2/hf")
    (data / "bridge").mkdir(exist_ok=True)
    for name in [argument for argument in sys.argv[2:] if argument != "--hf"] or BRIDGES:
        module, class_name = BRIDGES[name]
        bridge = getattr(importlib.import_module("megatron.bridge.models." + module), class_name)()
        config = json.loads((data / f"hf_{name}/hf/config.json").read_text())
        bridge.hf_config = types.SimpleNamespace(**config)
        bridge.hf_pretrained = types.SimpleNamespace(state=None, config=bridge.hf_config)
        bridge.hf_config.text_config = types.SimpleNamespace(**config.get("text_config", {}))
        config = config.get("text_config", config)
        weights = load_file(data / f"hf_{name}/hf/model.safetensors")
        found = megatron_tensors(bridge, weights, config)
        lines = lines_of({key.removeprefix(LANGUAGE_MODEL): tensor for key, tensor in found.items()})
        tower = lines_of(megatron_tensors(bridge, weights, config, tower=True)) if name in TOWERS else ""
        (data / f"bridge/{name}.json").write_text('{"megatron-bridge": "0.6.2", "tensors": {\n' + lines + ('\n}, "tower": {\n' + tower if tower else "") + "\n}}\n")
        print(name, len(found))


if __name__ == "__main__":
    main()
