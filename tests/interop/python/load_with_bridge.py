#!/usr/bin/env python3
"""Megatron-Bridge's own loader and exporter on checkpoints of Ferry, on a host without a GPU.

    PYTHONPATH=build/peers/mc0192:build/peers/mb062 build/peers/bin/python tests/interop/python/load_with_bridge.py JOBS REPORT

JOBS is JSON: {name: {"hf": folder, "checkpoint": folder of an iteration, "saved": folder}}. Of each, Megatron-Bridge loads the checkpoint, exports it, and
saves the model as a checkpoint of its own in `saved`; where that is missing it does none of it. REPORT gets {name: {"exported": dtype, shape and SHA-256 of each tensor that was exported,
"differences": {field: [of run_config.yaml, of the model that Megatron-Bridge makes of the Hugging Face folder]}}}.
"""
import dataclasses
import functools
import json
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("convert/families", ".")]
from bridge_models import FUSIONS, begin, forget_attention_backend, name_heads_of_global_layers
from weight_mapping import describe

KERNELS = (*(f"{name}_fusion" for name in FUSIONS), "persist_layer_norm")


def start():
    begin()
    from megatron.bridge.training import model_load_save
    load = model_load_save.load_model_config

    def load_without_kernels(path):
        config, arguments = load(path)
        for name in KERNELS:
            setattr(config, name, False)
        config.deterministic_mode = True  # torch's gated delta rule
        forget_attention_backend()
        return config, arguments

    model_load_save.load_model_config = load_without_kernels
    return load


def plain(value):
    if isinstance(value, functools.partial):
        return plain(value.func)
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def differences(ours, theirs):
    fields = {"_target_": [type(one).__qualname__ for one in (ours, theirs)]}
    for field in dataclasses.fields(theirs):
        if not hasattr(ours, field.name):
            continue
        both = [getattr(one, field.name) for one in (ours, theirs)]
        if all(map(dataclasses.is_dataclass, both)):  # a projector's configuration
            fields |= {f"{field.name}.{name}": values for name, values in differences(*both).items()}
        else:
            fields[field.name] = [plain(one) for one in both]
    return {name: values for name, values in fields.items() if values[0] != values[1]}


def main():
    jobs, report = json.loads(Path(sys.argv[1]).read_text()), {}
    load = start()
    from megatron.bridge import AutoBridge
    for name, job in jobs.items():
        bridge = AutoBridge.from_hf_pretrained(job["hf"])
        name_heads_of_global_layers(bridge.hf_pretrained.config)
        report[name] = {"differences": differences(load(job["checkpoint"])[0], bridge.to_megatron_provider(load_weights=False))}
        if "saved" not in job:
            continue
        model = bridge.load_megatron_model(job["checkpoint"])
        report[name]["exported"] = describe(dict(bridge.export_hf_weights(model, cpu=True, show_progress=False)))
        bridge.save_megatron_model(model, job["saved"])
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":  # saving starts processes that import this file again
    main()
