#!/usr/bin/env python3
"""Megatron-Bridge's training code with ferry.compat.megatron_bridge_manager as its checkpoint manager, on a host without a GPU.

    PYTHONPATH=build/python:build/peers/mc0192:build/peers/mb062 build/peers/bin/python tests/interop/python/manage_with_bridge.py JOB REPORT

JOB is JSON: {"hf": folder, "checkpoint": iteration that gives the model its first weights, "sources": {name: path or address}, "saved": folder}. REPORT gets
for each source and for "resumed" dtype, shape and SHA-256 of each tensor that Megatron-Bridge exports then, and what load() returned.
"""
import json
import sys
from pathlib import Path

from load_with_bridge import describe, start


def main():
    job, report = json.loads(Path(sys.argv[1]).read_text()), {}
    start()
    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.training import checkpointing
    from megatron.bridge.training.config import CheckpointConfig, ConfigContainer, DistributedDataParallelConfig, LoggerConfig, OptimizerConfig, RNGConfig
    from megatron.bridge.training.setup import _should_load_checkpoint
    from megatron.bridge.training.state import GlobalState
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.utils import get_model_config

    from ferry.compat.megatron_bridge_manager import begin_from
    init_num_microbatches_calculator(0, None, 1, 1, 1)  # setup() does before it loads
    bridge = AutoBridge.from_hf_pretrained(job["hf"])
    model = bridge.load_megatron_model(job["checkpoint"])

    def run(source, load):
        """-> the state of a run that begins with the source, and its manager"""
        state = GlobalState()
        checkpoint = CheckpointConfig(save=job["saved"], load=load, save_optim=False, save_rng=False, load_optim=False, load_rng=False, ckpt_format="torch_dist")
        begin_from(checkpoint, source)
        checkpoint.finalize()
        state.cfg = ConfigContainer(model=get_model_config(model[0]), train=None, optimizer=OptimizerConfig(use_distributed_optimizer=False),
                                    ddp=DistributedDataParallelConfig(), scheduler=None, dataset=None, logger=LoggerConfig(), tokenizer=None, rng=RNGConfig(),
                                    checkpoint=checkpoint, dist=None)
        return state, checkpointing.create_checkpoint_manager(checkpoint)

    def load(name, source, resumed=None):
        with torch.no_grad():
            for parameter in model[0].parameters():
                parameter.zero_()
        state, manager = run(source, resumed)
        assert isinstance(manager, checkpointing.CheckpointManager) and _should_load_checkpoint(state.cfg, manager)
        returned = manager.load(checkpointing.CheckpointLoadContext(state=state, model=model, optimizer=None, opt_param_scheduler=None))
        report[name] = {"returned": returned, "exported": describe(dict(bridge.export_hf_weights(model, cpu=True, show_progress=False)))}

    for name, source in job["sources"].items():
        load(name, source)
    state, manager = run(next(iter(job["sources"].values())), None)
    state.train_state.step = 7
    manager.save(checkpointing.CheckpointSaveContext(state=state, model=model, optimizer=None, opt_param_scheduler=None,
                                                     num_floating_point_operations_so_far=11), None)
    manager.finalize_async_saves(state, blocking=True, terminate=True)
    load("resumed", "/nowhere", job["saved"])
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":  # saving starts processes that import this file again
    main()
