#!/usr/bin/env python3
"""Adapters of Ferry in Megatron-Bridge's own models, on a host without a GPU.

    PYTHONPATH=build/peers/mc0192:build/peers/mb062 build/peers/bin/python tests/interop/merge/load_adapter_with_bridge.py JOBS REPORT

JOBS is JSON: {name: {"hf": base, "adapter": folder of an iteration, "factors": file}}. The model and its weights are those that Megatron-Bridge makes of the base
in fp32, its LoRA is made by the adapter's run_config.yaml, and megatron-core loads the factors, all that the model and the checkpoint have. `factors` gets those
that Megatron-Bridge streams for Hugging Face. REPORT gets {name: {"logits": ..., "without": those of the model without the adapter}}.
"""
import json
import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # before torch is imported

import torch
import yaml

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("convert/families", ".")]
from bridge_models import begin, forget_attention_backend, has_prediction, set_up

IDS = [(37 * i + 11) % 90 for i in range(24)]


def model_of(folder):
    from megatron.bridge import AutoBridge
    from megatron.core.process_groups_config import ProcessGroupCollection
    forget_attention_backend()
    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider(load_weights=False)
    set_up(provider, torch.float32, pipeline_dtype=torch.float32, autocast_dtype=torch.float32, should_pad_vocab=False, make_vocab_size_divisible_by=1,
           moe_token_dispatcher_type="alltoall", mtp_num_layers=int(has_prediction(folder)) or None)
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    model = provider.provide(pre_process=True, post_process=True).float().eval()
    bridge.load_hf_weights([model])
    return bridge, model


def logits_of(model):
    mask = torch.triu(torch.ones(1, 1, len(IDS), len(IDS), dtype=torch.bool), 1)
    with torch.no_grad():
        return model(torch.tensor(IDS)[None], torch.arange(len(IDS))[None], mask)[0].float()


def adapt(model, folder):
    """Its factors are NaN until they are loaded."""
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.lora import LoRA
    from megatron.core import dist_checkpointing
    settings = yaml.safe_load((Path(folder) / "run_config.yaml").read_text())["peft"]
    kind = CanonicalLoRA if settings.pop("_target_").endswith("CanonicalLoRA") else LoRA
    model = kind(**settings)(model, training=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".adapter." in name:
                parameter.fill_(float("nan"))
    wanted = {key: value for key, value in model.sharded_state_dict().items() if ".adapter." in key and "_extra_state" not in key}
    loaded, unread, absent = dist_checkpointing.load({"model": wanted}, folder, strict="return_all")
    assert not absent and not [key for key in unread if ".adapter." in key], (unread, absent)
    model.load_state_dict(loaded["model"], strict=False)
    assert not [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    return model


def main():
    torch.set_num_threads(1)
    begin()
    from safetensors.torch import save_file
    report = {}
    for name, job in json.loads(Path(sys.argv[1]).read_text()).items():
        bridge, model = model_of(job["hf"])
        without = logits_of(model)
        model = adapt(model, job["adapter"])
        report[name] = {"logits": logits_of(model).tolist(), "without": without.tolist()}
        streamed = bridge._model_bridge.stream_adapter_weights_megatron_to_hf([model], show_progress=False)
        save_file({one.param_name: one.weight.clone().contiguous() for one in streamed}, job["factors"])
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
