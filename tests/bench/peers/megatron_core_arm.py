"""Runs the peer's arm of convert_bench.py: safetensors -> stacked Megatron tensors in Python -> megatron-core's own save."""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "interop"))
sys.path.insert(0, sys.argv[1])


def main(hf, out):
    import cpu_stand_ins
    cpu_stand_ins.install_cpu_patches()
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file
    out.mkdir(parents=True)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(out) + ".store", 1))
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    parallel_state.initialize_model_parallel()
    config = json.loads((hf / "config.json").read_text())
    weights = {}
    for path in sorted(hf.glob("*.safetensors")):
        weights.update(load_file(path))
    layers, groups = config["num_hidden_layers"], config["num_key_value_heads"]

    def qkv(prefix, kind):
        parts = [weights[f"{prefix}self_attn.{n}_proj.{kind}"] for n in "qkv"]
        return torch.cat([p.view(groups, -1, *p.shape[1:]) for p in parts], 1).flatten(0, 1)

    def layer(i):
        p = f"model.layers.{i}."
        tensors = {"self_attention.linear_qkv.weight": qkv(p, "weight"),
                   "self_attention.linear_qkv.layer_norm_weight": weights[p + "input_layernorm.weight"],
                   "self_attention.linear_proj.weight": weights[p + "self_attn.o_proj.weight"],
                   "mlp.linear_fc1.layer_norm_weight": weights[p + "post_attention_layernorm.weight"],
                   "mlp.linear_fc1.weight": torch.cat([weights[p + "mlp.gate_proj.weight"], weights[p + "mlp.up_proj.weight"]]),
                   "mlp.linear_fc2.weight": weights[p + "mlp.down_proj.weight"]}
        if p + "self_attn.q_proj.bias" in weights:
            tensors["self_attention.linear_qkv.bias"] = qkv(p, "bias")
        return tensors

    state = {"embedding": ShardedTensor.from_rank_offsets("embedding.word_embeddings.weight", weights["model.embed_tokens.weight"]),
             "norm": ShardedTensor.from_rank_offsets("decoder.final_layernorm.weight", weights["model.norm.weight"])}
    for i in range(layers):
        for name, tensor in layer(i).items():
            state[f"{i}.{name}"] = ShardedTensor.from_rank_offsets("decoder.layers." + name, tensor, (0, i, layers), prepend_axis_num=1)
    dist_checkpointing.save(state, str(out))


if __name__ == "__main__":  # its writer starts a process that imports this file again
    main(Path(sys.argv[2]), Path(sys.argv[3]))
