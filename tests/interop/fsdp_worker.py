"""A run of torch.distributed (gloo, CPU) whose ranks load models of tests/data with transformers, shard them as FSDP trainers do
and save their state_dict() in each form that test_dcp.py and test_verl.py read. Usage: fsdp_worker.py WORLD OUT
"""
import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_model import fork_ranks
from sharded_runs import OF_MODULES
from weight_mapping import arch_of, hf_to_megatron

DATA = Path(__file__).resolve().parent.parent / "data"


def hf(model):
    return DATA / f"hf_{model}/hf"


def weights(model):
    return load_file(hf(model) / "model.safetensors")


def modules(folder):
    """transformers' own of a checkpoint, as a trainer has them."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder, dtype="auto")
    for parameter in model.parameters():  # also those that transformers keeps in fp32, as files have them
        parameter.data = parameter.data.to(model.dtype)
    return model


def as_verl(folder, state, rank, world):
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
    torch.save({"state": {}}, folder / f"optim_world_size_{world}_rank_{rank}.pt")


def megatron_modules(model):
    """Full tensors under the names of Megatron's modules."""
    config = json.loads((hf(model) / "config.json").read_text())
    arch = arch_of(config)
    named = {}
    for key, tensor in hf_to_megatron(arch, weights(model), arch["vocab"] + 6).items():
        before, experts, after = key.partition(".experts.experts.")
        if experts:
            expert, after = after.split(".", 1)
            key = f"{before}.experts.{after}{expert}"
        named[key] = tensor
    return arch, named


def main(rank, world, store, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(store, world))
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ddp", "fsdp"))

    # FSDP2, by rank: rows that do not divide evenly, and tensors of one row.
    for model in ("llama", *OF_MODULES):
        tree = modules(hf(model))
        fully_shard(tree, mesh=line)
        as_verl(out / f"fsdp2_{model}", tree.state_dict(), rank, world)
        dcp.save({"model": tree.state_dict()}, checkpoint_id=out / f"dcp_of_{model}")
    # HSDP: every second rank holds a copy.
    tree = modules(hf("llama"))
    fully_shard(tree, mesh=grid)
    as_verl(out / "hsdp_llama", tree.state_dict(), rank, world)
    # FSDP1 without a mesh: ShardedTensor; with one: DTensor.
    for name, mesh in (("fsdp1_llama", None), ("fsdp1_mesh_llama", line)):
        wrapped = FullyShardedDataParallel(modules(hf("llama")), device_id=torch.device("cpu"), device_mesh=mesh)
        with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT,
                                                      ShardedStateDictConfig(offload_to_cpu=True)):
            state = wrapped.state_dict()
            as_verl(out / name, state, rank, world)
            # accelerate's save_fsdp_model
            dcp.save({"model": state}, checkpoint_id=out / f"dcp_{name}")

    # torch.distributed.checkpoint, keys flattened from different depths.
    tree = modules(hf("llama"))
    fully_shard(tree, mesh=line)
    state = tree.state_dict()
    moments = {n: torch.zeros(3) for n in ("exp_avg", "exp_avg_sq")}
    dcp.save(dict(state), checkpoint_id=out / "dcp_flat")
    dcp.save({"model": state, "optimizer": {"state": {n: moments for n in list(state)[:3]}, "param_groups": [{"lr": 0.1}]},
              "train_state": torch.ones(2), "step": 3, "lr_scheduler": {"last_epoch": 3}}, checkpoint_id=out / "dcp_model")
    dcp.save({"state": {"model": {f"_orig_mod.{n}": t for n, t in state.items()}}}, checkpoint_id=out / "dcp_nested")
    columns = {n: distribute_tensor(t, grid, [Shard(0), Shard(t.ndim - 1)]) for n, t in modules(hf("qwen2_moe")).state_dict().items()}
    dcp.save({"model": columns}, checkpoint_id=out / "dcp_grid")

    # Megatron's torch_dcp and fsdp_dtensor.
    arch, named = megatron_modules("llama")
    args = argparse.Namespace(
        num_layers=arch["layers"], hidden_size=arch["hidden"], num_attention_heads=arch["heads"], num_query_groups=arch["groups"],
        group_query_attention=True, kv_channels=arch["head_dim"], ffn_hidden_size=arch["ffn"], add_bias_linear=False,
        add_qkv_bias=False, qk_layernorm=False, untie_embeddings_and_output_weights=True, norm_epsilon=arch["eps"],
        rotary_base=int(arch["rope_theta"]), vocab_size=arch["vocab"], num_experts=None, multi_latent_attention=False,
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, expert_model_parallel_size=1)
    sharded = {n: distribute_tensor(t, line, [Shard(0)]) for n, t in named.items()}
    sharded["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.empty(0, dtype=torch.uint8)
    dcp.save({"model": sharded, "args": args, "iteration": 10, "checkpoint_version": 3.0, "rng_state": [{"torch_rng_state": torch.zeros(5)}]},
             checkpoint_id=out / "torch_dcp/iter_0000010")
    for model in ("llama", "qwen2_moe"):
        split = {}
        for name, tensor in megatron_modules(model)[1].items():
            if ".linear_fc1.weight" in name:
                split[name + "_w"], split[name + "_v"] = tensor.chunk(2)
            else:
                split[name] = tensor
        split = {f"module.{n}": distribute_tensor(t.contiguous(), line, [Shard(0)]) for n, t in split.items()}
        dcp.save({"model": split, "optimizer": {"state": {"module.x": moments}}, "rng_state": {"(0, 0)": torch.zeros(3)}},
                 checkpoint_id=out / f"fsdp_dtensor_{model}")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    world, out = int(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        status, said = fork_ranks(world, folder, lambda rank: main(rank, world, folder + "/store", out))
    sys.stderr.write(said)
    sys.exit(status)
