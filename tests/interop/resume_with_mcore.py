#!/usr/bin/env python3
"""Resumes training states with real megatron-core on the CPU, at any TP, PP and EP: loads a checkpoint of any writer into a
model and its DistributedOptimizer, and compares every tensor of the optimizer with the digests in model space.

    source build/peers/env.sh
    build/peers/bin/python tests/interop/resume_with_mcore.py --mcore build/peers/mc0192 --jobs JOBS.json --report OUT.json

JOBS.json is a list of {"ckpt": FOLDER, "hf": FOLDER of config.json, "expect": sha256.json, "tp": 1, "pp": 2, "ep": 1,
"etp": 1, "vpad": 256}; OUT.json receives [{"bad": [...], "step": ..., "num_steps": ..., "consumed": ...}, ...].
The exit status is 0 only if all match.
"""
import argparse
import contextlib
import json
import os
import sys
import tempfile
import warnings

from cpu_stand_ins import install_cpu_patches, install_te_stub
from load_with_mcore import differences, resolve
from make_mcore_reference import make_optimizer
from megatron_model import assemble, build_model, forget_groups, fork_ranks, import_megatron, init_dist
from weight_mapping import arch_of, describe

warnings.filterwarnings("ignore")
WORLD = 4


def resume(job, rank):
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel import random
    forget_groups()
    parallel_state.initialize_model_parallel(job["tp"], job["pp"], expert_model_parallel_size=job["ep"],
                                             expert_tensor_parallel_size=job["etp"], create_gloo_process_groups=True)
    random.initialize_rng_tracker()
    random.get_cuda_rng_tracker().fork = lambda *a, **k: contextlib.nullcontext()
    folder = resolve(job["ckpt"])
    arch = arch_of(json.load(open(os.path.join(job["hf"], "config.json"))))
    uneven = {}
    if job["pp"] > 1 and arch["layers"] % job["pp"]:
        uneven = dict(num_layers_in_first_pipeline_stage=arch["layers"] // job["pp"])
    model = build_model(arch, job["tp"], job["pp"], job["ep"], job["etp"], torch.bfloat16, True, job["vpad"], uneven)
    for module in model.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
    optimizer = make_optimizer(model)   # has made a step of its own, which the load must undo
    common = dist_checkpointing.load_common_state_dict(folder)
    metadata = dict(common["content_metadata"])
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
    loaded = dist_checkpointing.load(state, folder)
    model.load_state_dict(loaded["model"], strict=False)
    optimizer.load_state_dict(loaded["optimizer"])
    again = {"model": model.sharded_state_dict(metadata=metadata)}
    full = assemble(optimizer.sharded_state_dict(again, metadata=metadata))
    if rank != 0:
        return None
    expected = {key.replace("fp32_param", "param"): want
                for key, want in json.load(open(job["expect"]))["optimizer_model_space"].items()}
    return {"bad": differences(describe(full), expected, "optimizer"),
            "step": [group.get("step") for one in optimizer.chained_optimizers for group in one.optimizer.param_groups],
            "num_steps": common["opt_param_scheduler"]["num_steps"],
            "consumed": common["args"].consumed_train_samples, "iteration": common["iteration"]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mcore", required=True)
    parser.add_argument("--jobs", required=True)
    parser.add_argument("--report", required=True)
    options = parser.parse_args()
    sys.path.insert(0, os.path.abspath(options.mcore))
    install_cpu_patches()
    install_te_stub()
    import_megatron()
    with tempfile.TemporaryDirectory() as folder:
        status, said = fork_ranks(WORLD, folder, lambda rank: worker(options, rank, folder + "/store"))
    sys.stderr.write(said[-4000:])
    return status


def worker(options, rank, store):
    init_dist(rank, WORLD, store)
    reports = []
    for job in json.load(open(options.jobs)):
        reports.append(resume(job, rank))
    if rank == 0:
        json.dump(reports, open(options.report, "w"), indent=1)
        return int(any(report["bad"] for report in reports))
    return 0


if __name__ == "__main__":
    sys.exit(main())
