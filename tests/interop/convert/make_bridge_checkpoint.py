#!/usr/bin/env python3
"""Makes a checkpoint of tests/data with the real Megatron-Bridge: its own conversion of a tiny Hugging Face model, saved by
the megatron-core 0.19.2 that it works with, on a host without a GPU. In the environment of make_bridge_reference.py, and with
transformers 5.12.1, accelerate, peft and what Megatron-Bridge imports:

    python3.12 tests/interop/convert/make_bridge_checkpoint.py gpt_oss tests/data

Modules that are missing there are empty classes, and megatron-core's local layers stand in for those of Transformer Engine.
It reads DATA/hf_MODEL/hf and writes DATA/MODEL_bridge, with a sha256.json as make_mcore_reference.py writes it.
"""
import importlib.metadata
import json
import os
import shutil
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from make_bridge_reference import stub  # noqa: E402


def convert(source, target):
    from megatron.core import dist_checkpointing, parallel_state
    parallel_state.initialize_model_parallel(1, 1)
    import megatron.core.transformer.transformer_block as transformer_block
    from megatron.bridge import AutoBridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    transformer_block.get_cpu_offload_context = transformer_block.te_checkpoint = None
    transformer_block.HAVE_TE, transformer_block.TENorm = False, WrappedTorchNorm
    bridge = AutoBridge.from_hf_pretrained(source)
    provider = bridge.to_megatron_provider(load_weights=False)
    fused = ("gradient_accumulation", "bias_activation", "bias_dropout", "masked_softmax", "moe_permute", "moe_router", "cross_entropy_loss",
             "apply_rope")
    settings = {"use_cpu_initialization": True, "params_dtype": torch.bfloat16, "bf16": True, "moe_grouped_gemm": False,
                "persist_layer_norm": False, **{f"{what}_fusion": False for what in fused}}
    for name, value in settings.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    provider.transformer_layer_spec = lambda config, **_: get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    provider.finalize()
    model = provider.provide(pre_process=True, post_process=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    bridge.load_hf_weights([model])
    os.makedirs(target)
    dist_checkpointing.save(model.sharded_state_dict(), target)


def main():
    name, data = sys.argv[1:3]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29617"))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    stub()
    os.chdir(data)  # megatron records the folder's name: keep it free of local paths
    source, target = f"hf_{name}/hf", f"{name}_bridge"
    shutil.rmtree(target, ignore_errors=True)
    convert(source, target)
    import torch_dist_raw
    from tiny_models import load_hf_sd
    from weight_mapping import arch_of, describe, sha
    checkpoint = torch_dist_raw.Checkpoint(target)
    stored = {key: checkpoint.tensor(key) for key in sorted(checkpoint.tensors)}
    megatron = {key: {"dtype": dtype, "shape": list(shape), "sha256": sha(torch.frombuffer(bytearray(data), dtype=torch.uint8))}
                for key, (dtype, shape, data) in stored.items()}
    arch = arch_of(json.load(open(source + "/config.json")))
    json.dump({"case": target, "megatron_bridge": importlib.metadata.version("megatron-bridge"),
               "megatron_core": importlib.metadata.version("megatron-core"), "torch": torch.__version__, "arch": arch,
               "padded_vocab": megatron["embedding.word_embeddings.weight"]["shape"][0], "hf_dir": source, "hf": describe(load_hf_sd(source)),
               "megatron": megatron}, open(target + "/sha256.json", "w"), indent=0, sort_keys=True)
    print(f"[ok] {target}: {len(megatron)} tensors")


if __name__ == "__main__":  # saving starts processes that import this file again
    main()
