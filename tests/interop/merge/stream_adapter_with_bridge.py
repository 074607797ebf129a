#!/usr/bin/env python3
"""Loads an adapter into Megatron-Bridge's own LoRA modules by megatron-core, and compares the factors that Megatron-Bridge makes of them for
Hugging Face with those of an adapter of PEFT.

The model is the one of tests/interop/merge/test_convert_adapter.py, on local layers of megatron-core. In the environment that
make_bridge_reference.py describes:

    GLOO_SOCKET_IFNAME=lo LD_LIBRARY_PATH=/usr/local/cuda/lib64 python3.12 tests/interop/merge/stream_adapter_with_bridge.py PEFT MEGATRON TP

Exit status: 0 if all factors are equal. TP is the tensor parallel size of the model, which loads what was written for any TP; of CanonicalLoRA that of
`ferry convert --tp`.
"""
import contextlib
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cpu_stand_ins import install_cpu_patches
from make_bridge_reference import stub
from megatron_model import init_dist


def build_model(tp):
    import megatron.core.models.gpt.gpt_layer_specs as specs
    import megatron.core.transformer.transformer_block as block
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig
    # Transformer Engine is empty classes here.
    block.get_cpu_offload_context = lambda *_, **__: (contextlib.nullcontext(), None)
    block.LayerNormImpl = block.TENorm = WrappedTorchNorm
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16, ffn_hidden_size=176, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, normalization="RMSNorm", use_cpu_initialization=True,
        params_dtype=torch.float32, pipeline_dtype=torch.float32, tensor_model_parallel_size=tp, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
        gradient_accumulation_fusion=False)
    return GPTModel(config, specs.get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=300, max_sequence_length=64,
                    position_embedding_type="rope")


def compare(rank, tp, peft, folder, store):
    stub()
    install_cpu_patches()
    init_dist(rank, tp, store)
    import yaml
    from megatron.bridge.models.llama.llama_bridge import LlamaBridge
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.lora import LoRA
    from megatron.core import dist_checkpointing, parallel_state
    from safetensors.torch import load_file
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    settings = yaml.safe_load((Path(folder) / "run_config.yaml").read_text())["peft"]
    kind = CanonicalLoRA if settings.pop("_target_").endswith("CanonicalLoRA") else LoRA
    model = kind(**settings)(build_model(tp), training=False)
    wanted = {key: value for key, value in model.sharded_state_dict().items() if ".adapter." in key and "_extra_state" not in key}
    missing, surplus = model.load_state_dict(dist_checkpointing.load({"model": wanted}, folder)["model"], strict=False)
    assert not surplus and not [key for key in missing if ".adapter." in key and "_extra_state" not in key], (missing, surplus)
    found = {f"base_model.model.{one.param_name}": one.weight.clone()
             for one in LlamaBridge().stream_adapter_weights_megatron_to_hf([model], show_progress=False)}
    expected = load_file(Path(peft) / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    if rank == 0:
        print(f"{kind.__name__}, TP {tp}: {len(expected) - len(different)} factors equal, {len(different)} not: {different[:3]}")
    assert not different


def main():
    peft, folder, tp = sys.argv[1:]
    with tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.spawn(compare, (int(tp), peft, folder, os.path.join(store, "store")), nprocs=int(tp))


if __name__ == "__main__":
    main()
