#!/usr/bin/env python3
"""Computes the losses and gradients of routers, and updates of their biases, with Megatron-Core's own TopKRouter.

    build/peers/bin/python tests/interop/balance_with_mcore.py build/peers/mc0192 CASES.json OUT.json

CASES.json: what `trainer_tool balance` reads.
"""
import json
import os
import sys
import types


def make_router(experts, topk, score, types_, coeffs, z):
    import torch
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=experts, moe_router_topk=topk, moe_router_score_function=score,
        moe_router_load_balancing_type=types_, moe_aux_loss_coeff=coeffs, moe_z_loss_coeff=z or None, moe_router_pre_softmax=topk == 1,
        use_cpu_initialization=True, add_bias_linear=False, params_dtype=torch.float32)
    alone = torch.distributed.group.WORLD
    router = TopKRouter(config, types.SimpleNamespace(tp=alone, cp=alone, tp_cp=alone, tp_dp_cp=alone))
    router.set_layer_number(1)
    router.train()
    return router


def route(router, logits, scale, mask=None):
    """The gradient of logits [length, sequences, experts]."""
    import torch
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(scale))
    logits = logits.clone().requires_grad_()
    probs, _ = router.routing(logits, padding_mask=mask)
    (probs * 0).sum().backward()
    return logits.grad


def take_metrics():
    """Takes what was recorded, summed over the passes since."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    tracker = get_moe_metrics_tracker()
    values = {name: entry.values.sum().item() for name, entry in tracker.metrics.items()}
    tracker.clear()
    return values


def balance(case):
    import torch
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
    aux, seq, whole, z = case["coeffs"]
    batches = [(batch["lengths"], torch.tensor(batch["logits"])) for batch in case["micro_batches"]]
    experts, topk, score = batches[0][1].shape[1], case["topk"], case["score_function"]
    of_batch = make_router(experts, topk, score, ["aux_loss", "global_aux_loss"], [aux, whole], z)
    of_sequence = make_router(experts, topk, score, "seq_aux_loss", seq, 0)
    scale, gradients, metrics = 1 / len(batches), [], {}
    # Sequences of one length lie side by side in Megatron-Core's batches; others are given one after the other.
    side_by_side = len({(len(lengths), length) for lengths, _ in batches for length in lengths}) == 1

    def add_metrics(share):
        for name, value in take_metrics().items():
            metrics[name] = metrics.get(name, 0) + share * value

    for lengths, logits in batches:
        padding = case["padding"]
        rows = torch.cat([logits, torch.randn(padding, experts)])
        mask = torch.arange(len(rows)) >= len(logits) if padding else None
        gradient = route(of_batch, rows[:, None], scale, None if mask is None else mask[:, None])[:len(logits), 0]
        add_metrics(scale)
        if seq and side_by_side:
            beside = logits.view(len(lengths), lengths[0], experts).transpose(0, 1).contiguous()
            gradient += route(of_sequence, beside, scale).transpose(0, 1).reshape(-1, experts)
            add_metrics(scale)
        elif seq:
            share = 1 / sum(len(others) for others, _ in batches)
            gradient += torch.cat([route(of_sequence, one[:, None], share)[:, 0] for one in logits.split(lengths)])
            add_metrics(share)
        gradients.append(gradient.tolist())
    bias = get_updated_expert_bias(torch.tensor(case["tokens_per_expert"], dtype=torch.float32), torch.tensor(case["expert_bias"]),
                                   case["rate"], tp_dp_cp_group=torch.distributed.group.WORLD)
    return {"gradients": gradients, "metrics": metrics, "expert_bias": bias.tolist()}


if __name__ == "__main__":
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # no compiler is needed for so little
    sys.path.insert(0, sys.argv[1])
    from cpu_stand_ins import install_cpu_patches
    install_cpu_patches()
    import torch.distributed as dist
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with open(sys.argv[2]) as file:
        results = [balance(case) for case in json.load(file)]
    with open(sys.argv[3], "w") as file:
        json.dump(results, file)
