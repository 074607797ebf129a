#!/usr/bin/env python3
"""Megatron-Bridge's own loader and exporter on checkpoints of Ferry, on a host without a GPU. For Python 3.12 with what bridge_models.py names, and PyYAML.

    python3.12 tests/interop/python/load_with_bridge.py JOBS REPORT [--providers]

JOBS is JSON: {name: {"hf": folder, "checkpoint": Megatron root, "saved": folder}}. Of each, Megatron-Bridge loads the checkpoint, exports it, and saves
the model as a checkpoint of its own in `saved`. REPORT gets {name: dtype, shape and SHA-256 of each tensor that was exported}.

With --providers nothing is loaded, and REPORT (tests/data/bridge_models/providers.json) gets {name: the fields of the checkpoint's run_config.yaml, as they
are in the model that Megatron-Bridge makes of the Hugging Face folder}.
"""
import contextlib
import functools
import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from cpu_stand_ins import install_cpu_patches, install_empty_modules, install_te_stub
from weight_mapping import describe

FUSIONS = ("gradient_accumulation_fusion", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "moe_permute_fusion", "moe_router_fusion",
           "cross_entropy_loss_fusion", "apply_rope_fusion", "persist_layer_norm")


def start():
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", NVTE_ALLOW_NONDETERMINISTIC_ALGO="0")
    install_cpu_patches()
    install_te_stub("2.9.0")
    install_empty_modules("megatron.energon", "webdataset", "multistorageclient", "nvidia_resiliency_ext")  # of training on data of other kinds
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    parallel_state.initialize_model_parallel(1, 1)
    random.initialize_rng_tracker()
    random.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    import megatron.bridge.models.conversion.param_mapping as param_mapping
    import megatron.bridge.models.conversion.utils as utils
    import megatron.core.transformer.transformer_block as transformer_block
    from megatron.bridge.training import model_load_save
    transformer_block.get_cpu_offload_context = None
    for module in (utils, param_mapping):
        module.is_modelopt_dynamic_module = lambda _: False
    load = model_load_save.load_model_config

    def load_without_kernels(path):
        config, arguments = load(path)
        for name in FUSIONS:
            setattr(config, name, False)
        return config, arguments

    model_load_save.load_model_config = load_without_kernels


def plain(value):
    if isinstance(value, functools.partial):
        return plain(value.func)
    return value.__qualname__ if callable(value) and hasattr(value, "__qualname__") else str(value) if isinstance(value, torch.dtype) else value


def main():
    import yaml
    jobs, report = json.loads(Path(sys.argv[1]).read_text()), {}
    start()
    from megatron.bridge import AutoBridge
    for name, job in jobs.items():
        bridge = AutoBridge.from_hf_pretrained(job["hf"])
        if "--providers" not in sys.argv:
            model = bridge.load_megatron_model(job["checkpoint"])
            report[name] = describe(dict(bridge.export_hf_weights(model, cpu=True, show_progress=False)))
            bridge.save_megatron_model(model, job["saved"])
            continue
        config = yaml.safe_load((Path(job["checkpoint"]) / "iter_0000000/run_config.yaml").read_text())["model"]
        provider = bridge.to_megatron_provider(load_weights=False)
        of_hf = {field: plain(getattr(provider, field)) for field in config if field not in ("_target_", "hf_model_id")}
        report[name] = {"_target_": f"{type(provider).__module__}.{type(provider).__qualname__}", **of_hf}
    Path(sys.argv[2]).write_text("{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in report.items()) + "\n}\n")


if __name__ == "__main__":  # saving starts processes that import this file again
    main()
