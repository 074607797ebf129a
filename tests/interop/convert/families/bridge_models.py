#!/usr/bin/env python3
"""A Megatron checkpoint that Megatron-Bridge makes of a tiny Hugging Face folder by its own conversion, on a host without a GPU.

    PYTHONPATH=build/peers/mc0192:build/peers/mb062 build/peers/bin/python tests/interop/convert/families/bridge_models.py \\
        tests/data/hf_qwen3_next/hf tests/data/bridge_models/qwen3_next.json

The file holds dtype, shape and SHA-256 of every tensor: `megatron` as Megatron-Bridge's model saves them (TP1, vocabulary not padded), `exported` as
Megatron-Bridge exports that model again. No checkpoint is kept.

Gemma 4 12B (gemma4_unified), which Megatron-Bridge 0.6.2 does not know, is given to it as the model of the same tensors and computation that it knows.

Modules that Megatron-Bridge imports and does not need here are empty, and so are those of Transformer Engine that cpu_stand_ins has none for.
"""
import argparse
import contextlib
import glob
import hashlib
import json
import os
import queue
import sys
import tempfile
import typing

import torch
from safetensors.torch import save_file

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
import torch_dist_raw as raw
from cpu_stand_ins import install_cpu_patches, install_empty_modules, install_mamba_stub, install_te_stub
from tiny_models import load_hf_sd
from weight_mapping import describe


def has_prediction(folder):
    from safetensors import safe_open
    for path in glob.glob(folder + "/*.safetensors"):
        with safe_open(path, "pt") as file:
            if any(name.startswith("mtp.") for name in file.keys()):
                return True
    return False


def name_heads_of_global_layers(config):
    """The names that Megatron-Bridge reads of Gemma 4: transformers keeps what single layers have of their own."""
    text = getattr(config, "text_config", config)
    if getattr(text, "model_type", "") == "gemma4_text":
        text.allow_global_per_layer_attribute_access = True
        layer = text.per_layer_config["full_attention"]
        text.global_head_dim, text.num_global_key_value_heads = layer.head_dim, layer.num_key_value_heads


def known(folder, temporary):
    """-> the folder; of Gemma 4 12B one of its language model as a Gemma 4 without experts and second embedding, in `temporary`"""
    with open(f"{folder}/config.json") as file:
        config = json.load(file)
    if config["model_type"] != "gemma4_unified":
        return folder
    config = {**config["text_config"], "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "dtype": config["dtype"],
              "hidden_size_per_layer_input": 0}
    with open(f"{temporary}/config.json", "w") as file:
        json.dump(config, file)
    part = "language_model."
    weights = {name.replace(part, ""): tensor for name, tensor in load_hf_sd(folder).items() if part in name}
    save_file(weights, f"{temporary}/model.safetensors", metadata={"format": "pt"})
    return temporary


# Megatron-Bridge imports them for command lines, logs, and data of other kinds.
UNNEEDED = ("hydra", "torch.utils.tensorboard", "megatron.energon", "webdataset", "multistorageclient", "nvidia_resiliency_ext")
FUSIONS = ("gradient_accumulation", "bias_activation", "bias_dropout", "masked_softmax", "moe_permute", "moe_router", "cross_entropy_loss", "apply_rope")


def begin():
    """Readies this process, of one rank, for Megatron-Bridge, before it is imported."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", NVTE_ALLOW_NONDETERMINISTIC_ALGO="0")
    typing.override = getattr(typing, "override", lambda method: method)  # Python 3.11 lacks it
    install_cpu_patches()
    install_te_stub("2.9.0")
    install_mamba_stub()
    install_empty_modules(*UNNEEDED)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import attention
    from megatron.core.transformer.moe import moe_utils
    for module in (extension, attention, moe_utils):
        module.SplitAlongDim = module.te_general_gemm = None  # torch's own do
    filesystem_async._results_queue = queue.Queue()  # in place of one in a process of its own, which would import all this again
    parallel_state.initialize_model_parallel(1, 1)
    random.initialize_rng_tracker()
    random.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    import megatron.bridge.models.conversion.param_mapping as param_mapping
    import megatron.bridge.models.conversion.utils as utils
    import megatron.core.transformer.transformer_block as transformer_block
    transformer_block.get_cpu_offload_context = None
    for module in (utils, param_mapping):
        if hasattr(module, "is_modelopt_dynamic_module"):
            module.is_modelopt_dynamic_module = lambda _: False


def set_up(provider, dtype, **settings):
    """Lets a model of Megatron-Bridge be made on the CPU, in one dtype, without fused kernels and with `settings`, as far as it has them."""
    plain = {"use_cpu_initialization": True, "params_dtype": dtype, "bf16": dtype == torch.bfloat16, "persist_layer_norm": False, "deterministic_mode": True}
    for name, value in {**plain, **{f"{what}_fusion": False for what in FUSIONS}, **settings}.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    provider.finalize()


def forget_attention_backend():
    """megatron-core keeps it in the environment, of the model before."""
    for name in [name for name in os.environ if name.startswith("NVTE_") and name.endswith("_ATTN")]:
        del os.environ[name]


def empty_model(folder):
    from megatron.bridge import AutoBridge
    bridge = AutoBridge.from_hf_pretrained(folder)
    name_heads_of_global_layers(bridge.hf_pretrained.config)
    provider = bridge.to_megatron_provider(load_weights=False)
    set_up(provider, torch.bfloat16, mtp_num_layers=int(has_prediction(folder)) or None, should_pad_vocab=False, make_vocab_size_divisible_by=1)
    model = provider.provide(pre_process=True, post_process=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return bridge, model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hf")
    parser.add_argument("out")
    options = parser.parse_args()
    begin()
    from megatron.core import dist_checkpointing
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as hf:
        bridge, model = empty_model(known(options.hf, hf))
        bridge.load_hf_weights([model])
        dist_checkpointing.save(model.sharded_state_dict(), folder)
        checkpoint = raw.Checkpoint(folder)
        megatron = {key: checkpoint.tensor(key) for key in checkpoint.tensors}
        exported = describe(dict(bridge.export_hf_weights([model], cpu=True)))
    with open(options.out, "w") as file:
        json.dump({"megatron": {key: {"dtype": dtype, "shape": list(shape), "sha256": hashlib.sha256(data).hexdigest()}
                                for key, (dtype, shape, data) in megatron.items()},
                   "exported": exported}, file, indent=0, sort_keys=True)


if __name__ == "__main__":  # saving starts processes that import this file again
    main()
