"""A run (gloo, CPU) whose ranks shard a model of transformers with a LoRA adapter of PEFT as verl's FSDP engine does, and save it by verl 0.9.1's own
FSDPCheckpointManager. Usage: save_lora_with_verl.py WORLD JOBS.json

A job is {"out", "peft", "base", "fsdp": 1 or 2, "lora": arguments of LoraConfig}, and may have "mesh": how ranks of FSDP1 are told of each other, "hsdp",
"lora_only" and "dtype". PEFT itself saves the adapter to "peft". verl's package front door, which imports ray, is not opened; wrapping policy, FSDP2 and the
checkpoint manager are verl's.
"""
import importlib
import json
import os
import sys
import tempfile
import types
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from megatron_model import fork_ranks

VERL = Path(os.environ["PEERS"]) / "verl091/verl"


def package(name, folder=None, **attributes):
    module = types.ModuleType(name)
    if folder:
        module.__path__ = [str(folder)]
    vars(module).update(attributes)
    sys.modules[name] = module


def import_verl():
    package("verl", VERL)
    package("verl.utils", VERL / "utils", hf_tokenizer=None, hf_processor=None)
    package("verl.utils.checkpoint", VERL / "utils/checkpoint")
    package("verl.utils.logger", log_with_rank=lambda *_, **__: None)
    package("verl.utils.model", check_exclude_modules=None, check_target_modules=None)
    package("verl.trainer.config", CheckpointConfig=dict)
    package("omegaconf", DictConfig=dict)
    return importlib.import_module("verl.utils.fsdp_utils"), importlib.import_module("verl.utils.checkpoint.fsdp_checkpoint_manager")


def adapted(job):
    """verl/workers/engine/fsdp/transformer_impl.py, _build_lora_module"""
    model = AutoModelForCausalLM.from_pretrained(job["base"], dtype=getattr(torch, job.get("dtype", "float32")))
    model = peft.get_peft_model(model, peft.LoraConfig(**{"task_type": peft.TaskType.CAUSAL_LM, "bias": "none", **job["lora"]}))
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (0.1 * torch.randn(parameter.shape)).to(next(model.parameters()).dtype)
    return model


def main(rank, world, store, jobs, utils, manager):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(store, world))
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ddp", "fsdp"))
    for job in jobs:
        model = adapted(job)
        if rank == 0:
            model.save_pretrained(job["peft"])
        policy = {"transformer_layer_cls_to_wrap": [type(model.get_base_model().model.layers[0]).__name__]}
        mesh = grid if job.get("hsdp") else line
        if job["fsdp"] == 1:
            wrap = utils.get_fsdp_wrap_policy(module=model, config=policy, is_lora=True)
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), auto_wrap_policy=wrap, use_orig_params=False,
                                             device_mesh=mesh if job.get("mesh") else None)
        else:
            utils.apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, {"wrap_policy": policy})
        config = {"save_contents": ["model"], "load_contents": ["model"], "save_lora_only": job.get("lora_only", False)}
        manager.FSDPCheckpointManager(model=model, checkpoint_config=config).save_checkpoint(job["out"])
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    world, jobs, verl = int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), import_verl()
    with tempfile.TemporaryDirectory() as folder:
        status, said = fork_ranks(world, folder, lambda rank: main(rank, world, folder + "/store", jobs, *verl))
    sys.stderr.write(said)
    sys.exit(status)
