#!/usr/bin/env python3
"""Megatron-Bridge's models on checkpoints of Ferry, beside transformers, in fp32, on a host without a GPU.

    PYTHONPATH=build/peers/mc0192:build/peers/mb062 build/peers/bin/python tests/interop/convert/families/logits_with_bridge.py JOBS REPORT

JOBS is JSON: {name: {"hf": folder, "source": that of which the checkpoint was made, "checkpoint": folder of an iteration, "bridge": module and class, "settings": {...}, "of_config": {...}}}. The provider,
layers and GPTModel are those that Megatron-Bridge makes of the checkpoint's run_config.yaml, or else of config.json; `bridge` names its class where the folder
does not, `settings` are set on the provider, `of_config` on the configuration before it is read. megatron-core loads the language model. REPORT gets {name:
{"provider": its class, "run_config": is there one, "error": the largest difference of logits, relative to the largest logit, "left": tensors of the model or
of the checkpoint that were not loaded, "export": how what Megatron-Bridge exports of the model differs from the source}}.
"""
import importlib
import json
import os
import sys
import types
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # before torch is imported

import torch

from bridge_models import begin, forget_attention_backend, name_heads_of_global_layers, set_up

BAILING = "megatron.bridge.models.bailing.modeling_bailing_moe_v2"


ONE_RANK = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1,
            "pipeline_model_parallel_layout": None}


def configuration(folder, changes):
    """-> the configuration, and that of its language model"""
    from transformers import AutoConfig
    try:
        config = AutoConfig.from_pretrained(folder)
    except ValueError:  # Ling 2, whose class Megatron-Bridge has
        config = importlib.import_module(BAILING).BailingMoeV2Config.from_pretrained(folder)
    name_heads_of_global_layers(config)
    for name, value in changes.items():
        setattr(config, name, value)
    return config, config.get_text_config()


def has_run_config(job):
    return (Path(job["checkpoint"]) / "run_config.yaml").exists()


def provider_of(job, config):
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import load_model_config
    if has_run_config(job):
        return load_model_config(job["checkpoint"])[0]
    if "bridge" not in job:
        bridge = AutoBridge.from_hf_pretrained(job["hf"])
        bridge.hf_pretrained.config = config
        return bridge.to_megatron_provider(load_weights=False)
    module, name = job["bridge"]
    provider = getattr(importlib.import_module("megatron.bridge.models." + module), name)().provider_bridge(types.SimpleNamespace(config=config.get_text_config()))
    if hasattr(provider, "hf_config"):
        provider.hf_config = types.SimpleNamespace(text_config=config.get_text_config())
    return provider


def language_model(job, config):
    """-> Megatron-Bridge's GPTModel of the language model, every parameter a NaN"""
    from megatron.core.process_groups_config import ProcessGroupCollection
    forget_attention_backend()
    provider = provider_of(job, config)
    set_up(provider, torch.float32, **{"pipeline_dtype": torch.float32, "autocast_dtype": torch.float32, "should_pad_vocab": True,
                                      "make_vocab_size_divisible_by": 128, "moe_token_dispatcher_type": "alltoall", **ONE_RANK, **job.get("settings", {})})
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    model = getattr(provider, "provide_language_model", provider.provide)(pre_process=True, post_process=True).eval()
    model = getattr(model, "language_model", model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return provider, model


def load(model, checkpoint):
    """megatron-core loads the checkpoint. -> what only one of both has, but states of kernels that a module here does not keep"""
    from megatron.core import dist_checkpointing, parallel_state
    metadata = dict(dist_checkpointing.load_common_state_dict(checkpoint).get("content_metadata") or {})
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    loaded, unread, absent = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, checkpoint, strict="return_all")
    model.load_state_dict(loaded["model"], strict=False)
    nothing = [name for name, tensor in model.named_parameters() if tensor.isnan().any()]
    return sorted({name for name in unread if "._extra_state" not in name} | {*absent, *nothing})


def default_rotary(config, device=None):
    """transformers 4's, which the class of Ling 2 was written for: in its place Megatron-Bridge turns whole heads, by another base."""
    turned = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    return config.rope_parameters["rope_theta"] ** (-torch.arange(0, turned, 2) / turned), 1.0


def logits_of_transformers(folder, config, ids):
    import transformers
    if config.model_type == "bailing_moe_v2":
        from safetensors.torch import load_file
        module = importlib.import_module(BAILING)
        module._default_rope_init_fn = default_rotary
        model = module.BailingMoeV2ForCausalLM(config)
        model.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)
    else:
        kind = transformers.AutoModelForImageTextToText if hasattr(config, "vision_config") else transformers.AutoModelForCausalLM
        model = kind.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor(ids)[None]).logits[0].float()


def logits_of_megatron(model, ids, provider):
    positions = torch.arange(len(ids))[None]
    if provider.position_embedding_type == "mrope":
        positions = positions.expand(3, 1, -1)  # of text: height and width are the time
    mask = torch.triu(torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool), 1)
    with torch.no_grad():
        return model(torch.tensor(ids)[None], positions, mask)[0].float()


def source_tensors(folder):
    from safetensors.torch import load_file
    return {name: tensor for path in Path(folder).glob("*.safetensors") for name, tensor in load_file(path).items()}


class Seeing(torch.nn.Module):
    """A model that also sees, as far as Megatron-Bridge's mapping asks: its language model."""
    def __init__(self, model):
        super().__init__()
        self.language_model, self.config, self.pg_collection = model, model.config, model.pg_collection


def export(job, config, model):
    """-> how Megatron-Bridge's export of the language model differs from the folder that the checkpoint was made of: names of tensors that are others, or that
    only one of both has. Rows that pad the vocabulary are left aside. None where it has no bridge for the folder."""
    from megatron.bridge import AutoBridge
    if "bridge" in job:
        return None
    bridge = AutoBridge.from_hf_pretrained(job["hf"])
    bridge.hf_pretrained.config = config
    found = dict(bridge.export_hf_weights([Seeing(model) if hasattr(config, "vision_config") else model], cpu=True, show_progress=False))
    source = source_tensors(job["source"])
    for name, tensor in found.items():
        if name in source and len(tensor) == model.vocab_size:
            found[name] = tensor[:len(source[name])]
    return {"others": sorted(name for name in found if name in source and not torch.equal(found[name].float(), source[name].float())),
            "missing": sorted(set(source) - set(found)), "invented": sorted(set(found) - set(source))}


def run(job):
    config, text = configuration(job["hf"], job.get("of_config", {}))
    provider, model = language_model(job, config)
    left = load(model, job["checkpoint"])
    ids = [(37 * i + 11) % text.vocab_size for i in range(24)]
    expected = logits_of_transformers(job["hf"], config, ids)
    found = logits_of_megatron(model, ids, provider)[:, :text.vocab_size]
    return {"provider": type(provider).__name__, "run_config": has_run_config(job), "error": ((found - expected).abs().max() / expected.abs().max()).item(), "left": left,
            "export": export(job, config, model)}


def main():
    torch.set_num_threads(1)
    begin()
    report = {name: run(job) for name, job in json.loads(Path(sys.argv[1]).read_text()).items()}
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
