"""Builds megatron-core's GPTModel for one of the tiny models, in every rank, on the CPU; fills it, gathers it, runs it."""
import argparse
import functools
import math
import os
import signal
import time
from pathlib import Path

from cpu_stand_ins import patch_dist
from forks import start


def import_megatron():
    """All of megatron-core that a model and its checkpoint take: seconds, which ranks that fork_ranks() starts afterwards share."""
    import torch
    import torch.distributed.checkpoint
    from megatron.core import dist_checkpointing, optimizer, parallel_state, tensor_parallel
    from megatron.core.extensions import transformer_engine
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model
    torch.set_num_threads(1)


def fork_ranks(world, folder, body):
    """Calls body(rank) in so many forks of this process, with the environment of torchrun; what they say on stderr goes to files in `folder`.
    -> (the largest exit status, what a rank said that failed: "" where none did). The others end with the first that raises."""
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "WORLD_SIZE": str(world),
                   # Gloo would look up the host's own name for each of the many groups: seconds each, where nobody knows that name.
                   "GLOO_SOCKET_IFNAME": "lo"}
    ranks = {}
    for rank in range(world):
        with open(f"{folder}/stderr{rank}", "wb") as said:
            ranks[start(functools.partial(run_rank, rank, body), said.fileno(), (2,), failed=2)] = rank
    statuses, stopping = {}, False
    while len(statuses) < world:
        process, status = os.wait()
        status = os.waitstatus_to_exitcode(status)
        statuses[ranks.pop(process)] = abs(status)
        if status not in (0, 1) and not stopping:  # 1: it found a difference; the others go on
            stopping = True
            time.sleep(1)  # they may fail of themselves, and say more
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    said = {rank: Path(f"{folder}/stderr{rank}").read_text() for rank in statuses if statuses[rank]}  # in the order in which they ended
    first = [rank for rank, text in said.items() if "Traceback" in text and "closed by peer" not in text] or list(said)
    return max(statuses.values()), f"{said[first[0]]}\nrank {first[0]} ended with {statuses[first[0]]}\n" if first else ""


def run_rank(rank, body):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return body(rank)


def init_dist(rank, world, store):
    import torch, torch.distributed as dist
    torch.set_num_threads(1)
    patch_dist()
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(store, world))


def forget_groups():
    """Before the next model's: each has threads that look every few milliseconds, a thousand of which leave no time for anything else."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    parallel_state.destroy_model_parallel()
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def build_config(a, tp, pp, ep, etp, dtype, te, extra=None):
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    kw = dict(
        num_layers=a["layers"], hidden_size=a["hidden"], num_attention_heads=a["heads"], num_query_groups=a["groups"],
        kv_channels=a["head_dim"], ffn_hidden_size=a["ffn"], gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, add_qkv_bias=a["qkv_bias"], qk_layernorm=a["qk_norm"] or a["mla"], normalization="RMSNorm",
        rotary_interleaved=a.get("interleaved", False),
        layernorm_epsilon=a["eps"], attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True,
        params_dtype=dtype, bf16=dtype == torch.bfloat16, pipeline_dtype=dtype, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        persist_layer_norm=False, gradient_accumulation_fusion=False,
    )
    if a["experts"]:
        kw.update(num_moe_experts=a["experts"], moe_router_topk=a["topk"], moe_ffn_hidden_size=a["moe_ffn"],
                  moe_router_pre_softmax=a["pre_softmax"], moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0,
                  moe_token_dispatcher_type="alltoall", moe_grouped_gemm=bool(te), moe_permute_fusion=False,
                  moe_shared_expert_intermediate_size=a["shared"] or None)
        if a.get("shared_gate"):
            kw["moe_shared_expert_gate"] = True
        if a.get("dense_first"):
            kw["moe_layer_freq"] = [0] * a["dense_first"] + [1] * (a["layers"] - a["dense_first"])
        if a.get("score"):
            kw.update(moe_router_score_function=a["score"], moe_router_enable_expert_bias=a["expert_bias"],
                      moe_router_topk_scaling_factor=a["scaling"], moe_router_pre_softmax=a["score"] == "softmax")
            if a["n_group"] > 1:
                kw.update(moe_router_num_groups=a["n_group"], moe_router_group_topk=a["topk_group"])
    if a.get("no_rope"):
        kw["no_rope_freq"] = a["no_rope"]
    if a.get("linear"):  # deterministic: torch's implementation of the delta rule, not a kernel
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        kw.update(experimental_attention_variant="gated_delta_net", linear_attention_freq=a["linear"], linear_conv_kernel_dim=a["conv"],
                  linear_key_head_dim=a["key_dim"], linear_value_head_dim=a["value_dim"], linear_num_key_heads=a["key_heads"],
                  linear_num_value_heads=a["value_heads"], attention_output_gate=True, layernorm_zero_centered_gamma=True, deterministic_mode=True)
    if a["mtp"]:
        kw["mtp_num_layers"] = a["mtp"]
    if a.get("pattern"):
        from megatron.core.activations import squared_relu
        kw.update(is_hybrid_model=True, gated_linear_unit=False, activation_func=squared_relu, mamba_num_heads=a["mamba_heads"],
                  mamba_head_dim=a["mamba_head_dim"], mamba_num_groups=a["mamba_groups"], mamba_state_dim=a["mamba_state"],
                  moe_latent_size=a["latent"])
    if a.get("sinks"):
        from megatron.core.fusions.fused_bias_geglu import quick_gelu
        kw.update(add_bias_linear=True, add_qkv_bias=False, softmax_type="learnable", window_size=(a["window"] - 1, 0),
                  window_attn_skip_freq=[int(x) for x in a["sliding"]], activation_func=quick_gelu, activation_func_clamp_value=7.0,
                  glu_linear_offset=1.0)
    cls = TransformerConfig
    if a["mla"]:
        cls = MLATransformerConfig
        kw.update(multi_latent_attention=True, q_lora_rank=a["q_lora"], kv_lora_rank=a["kv_lora"], qk_head_dim=a["qk_nope"],
                  qk_pos_emb_head_dim=a["qk_rope"], v_head_dim=a["v_dim"], rope_type="rope", rotary_base=a["rope_theta"],
                  rotary_scaling_factor=1.0, mscale=1.0, mscale_all_dim=1.0)
        kw.pop("kv_channels"); kw.pop("num_query_groups")
    import dataclasses
    names = {f.name for f in dataclasses.fields(cls)}
    kw.update(extra or {})
    config = cls(**{k: v for k, v in kw.items() if k in names})
    if a.get("yarn"):  # not fields of the class, but what Megatron-LM sets from its arguments
        yarn = a["yarn"]
        for name, value in dict(rotary_scaling_factor=yarn["factor"], original_max_position_embeddings=yarn["original_max_position_embeddings"],
                                beta_fast=yarn["beta_fast"], beta_slow=yarn["beta_slow"], mscale=1.0, mscale_all_dim=0.0,
                                correction_range_round_to_int=yarn["truncate"]).items():
            setattr(config, "yarn_" + name, value)
    return config


def with_norms_after(spec):
    """The layer of a spec with GLM-4's norms of what attention and feed-forward give, under the names of slime's Megatron-LM, which has them."""
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.transformer.transformer_layer import TransformerLayer

    class NormsAfter(TransformerLayer):
        def __init__(self, config, *arguments, **options):
            super().__init__(config, *arguments, **options)
            for name, module in (("post_self_attn_layernorm", self.self_attention), ("post_mlp_layernorm", self.mlp)):
                norm = TENorm(config, config.hidden_size, config.layernorm_epsilon)
                setattr(self, name, norm)
                module.register_forward_hook(lambda _, inputs, outputs, norm=norm: (norm(outputs[0]), outputs[1]))

    spec.module = NormsAfter
    return spec


def with_norms_of_olmo(spec, a):
    """The same without norms of what they read, and with norms of queries and keys over all heads together, which one tensor parallel rank has."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    def over(heads):
        def make(config, hidden_size, eps):
            norm = TENorm(config, heads * hidden_size, eps)
            norm.register_forward_pre_hook(lambda _, inputs: (inputs[0].flatten(-2),))
            norm.register_forward_hook(lambda _, inputs, normed: normed.unflatten(-1, (heads, -1)))
            return norm
        return make

    attention = spec.submodules.self_attention.submodules
    attention.linear_qkv = spec.submodules.mlp.keywords["submodules"].linear_fc1 = TEColumnParallelLinear
    attention.q_layernorm, attention.k_layernorm = over(a["heads"]), over(a["groups"])
    return with_norms_after(spec)


def build_model(a, tp, pp, ep, etp, dtype, te, vpad, extra=None, vp_stage=None):
    """The model of this rank's pipeline stage, or of one of its chunks, vp_stage, where `extra` sets virtual_pipeline_model_parallel_size."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import gpt_layer_specs as S
    from megatron.core.models.gpt.gpt_model import GPTModel
    import inspect
    cfg = build_config(a, tp, pp, ep, etp, dtype, te, extra)
    chunk = {} if vp_stage is None else {"vp_stage": vp_stage}
    ends = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    if a.get("pattern"):
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel
        return HybridModel(cfg, hybrid_stack_spec, vocab_size=vpad, max_sequence_length=a["max_pos"],
                           hybrid_layer_pattern="/".join([a["pattern"], *a["mtp"] * [a["mtp_pattern"]]]),
                           share_embeddings_and_output_weights=a["tied"], pre_process=ps.is_pipeline_first_stage(),
                           post_process=ps.is_pipeline_last_stage()).eval()
    if a.get("linear"):
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
        spec = variants.get_transformer_block_with_experimental_attention_variant_spec(cfg)
    elif a["experts"] or a["mtp"]:
        kw = dict(use_transformer_engine=bool(te), normalization="RMSNorm", **chunk)
        kw = {k: v for k, v in kw.items() if k in inspect.signature(S.get_gpt_decoder_block_spec).parameters}
        spec = S.get_gpt_decoder_block_spec(cfg, **kw)
    elif te:
        spec = S.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=cfg.qk_layernorm)
        if a["arch"] == "olmo2":
            spec = with_norms_of_olmo(spec, a)
        elif a["post_norms"]:
            spec = with_norms_after(spec)
    else:
        spec = S.get_gpt_layer_local_spec(qk_layernorm=cfg.qk_layernorm, normalization="RMSNorm")
    if te and a.get("sinks"):  # the stand-in has them, whatever release it says it is
        import megatron.core.extensions.transformer_engine as extension
        extension.is_te_min_version = lambda *_, **__: True
    mtp = S.get_gpt_mtp_block_spec(cfg, spec, use_transformer_engine=bool(te)) if a["mtp"] else None
    m = GPTModel(cfg, spec, vocab_size=vpad, max_sequence_length=a["max_pos"], position_embedding_type="yarn" if a.get("yarn") else "rope",
                 rotary_base=a["rope_theta"], rotary_percent=a.get("rotary", 1.0), share_embeddings_and_output_weights=a["tied"],
                 pre_process=ps.is_pipeline_first_stage(**ends), post_process=ps.is_pipeline_last_stage(**ends),
                 **({"mtp_block_spec": mtp} if mtp else {}), **chunk)
    return m.eval()


def sharded_tensors(sd):
    """All ShardedTensors of a sharded state dict (factories applied)."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    apply_factories(sd)
    return [x for x in nested_values(sd) if isinstance(x, ShardedTensor)]


def fill_from_full(model, stacked, meta=None):
    """Copy slices of the full stacked tensors into the model's own parameters, driven by megatron's ShardedTensor
    metadata (so TP/PP/EP/SwiGLU splitting is megatron's, not ours)."""
    import torch
    seen = set()
    for st in sharded_tensors(model.sharded_state_dict(metadata=meta)):
        full = stacked[st.key]
        assert tuple(full.shape) == tuple(st.global_shape), (st.key, tuple(full.shape), tuple(st.global_shape))
        loc = (1,) * st.prepend_axis_num + tuple(st.local_shape)
        sl = tuple(slice(o, o + n) for o, n in zip(st.global_offset, loc))
        with torch.no_grad():
            st.data.copy_(full[sl].reshape(st.local_shape).to(st.data.dtype))
        seen.add(st.key)
    return seen


def assemble_full(model, meta=None):
    """Inverse: gather this model's shards from all ranks into full stacked tensors."""
    return assemble(model.sharded_state_dict(metadata=meta))


def assemble(sharded_sd):
    import torch, torch.distributed as dist
    from megatron.core.dist_checkpointing.mapping import is_main_replica
    mine = [(s.key, tuple(s.global_shape), tuple(s.global_offset), s.prepend_axis_num, s.data.detach().clone(),
             tuple(s.local_shape), s.flattened_range)
            for s in sharded_tensors(sharded_sd) if is_main_replica(s.replica_id)]
    allr = [None] * dist.get_world_size()
    dist.all_gather_object(allr, mine)
    full, flat = {}, {}
    for part in allr:
        for key, gs, off, pre, t, lsh, fr in part:
            f = full.setdefault(key, torch.zeros(gs, dtype=t.dtype))
            loc = (1,) * pre + tuple(lsh)
            if fr is not None:   # megatron-core <= 0.15: a slice of the flattened local shard
                b = flat.setdefault((key, off), torch.zeros(math.prod(lsh), dtype=t.dtype))
                b[fr] = t
                t = b
            f[tuple(slice(o, o + n) for o, n in zip(off, loc))] = t.reshape(loc)
    return full


def forward_logits(model, ids, a):
    """fp32 logits of the prompt on the last PP stage (rank of last stage), else None. Works for PP<=2."""
    import torch
    t = torch.tensor(ids)[None]
    pos = torch.arange(t.shape[1])[None]
    mask = torch.triu(torch.ones(1, 1, t.shape[1], t.shape[1], dtype=torch.bool), 1)
    model = model.float() if next(model.parameters()).dtype != torch.float32 else model
    # old releases insist on labels when an MTP block exists; it does not feed these logits: hide it for the moment
    saved = getattr(model, "mtp_process", None), model.config.mtp_num_layers
    model.mtp_process, model.config.mtp_num_layers = False, None
    try:
        return _forward_logits(model, t, pos, mask, a)
    finally:
        model.mtp_process, model.config.mtp_num_layers = saved


def _forward_logits(model, t, pos, mask, a):
    import torch, torch.distributed as dist
    from megatron.core import parallel_state as ps
    with torch.no_grad():
        if ps.get_pipeline_model_parallel_world_size() == 1:
            out = model(t, pos, mask)
        else:
            n = t.shape[1] // (ps.get_tensor_model_parallel_world_size() if model.config.sequence_parallel else 1)
            shape = (n, 1, a["hidden"])
            if ps.is_pipeline_first_stage():
                h = model(t, pos, mask).contiguous()
                dist.send(h, ps.get_pipeline_model_parallel_next_rank())
                return None
            buf = torch.empty(shape)
            dist.recv(buf, ps.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(buf)
            out = model(t, pos, mask)
    out = out[0].float()  # [s, vocab/tp]
    tp = ps.get_tensor_model_parallel_world_size()
    if tp > 1:
        parts = [torch.empty_like(out) for _ in range(tp)]
        dist.all_gather(parts, out.contiguous(), group=ps.get_tensor_model_parallel_group())
        out = torch.cat(parts, -1)
    return out[:, : a["vocab"]]


def training_args(a, tp, pp, ep, vpad, iteration, **kw):
    """Subset of Megatron-LM's argparse.Namespace that its loader reads (check_checkpoint_args, load_args_from_checkpoint)."""
    hybrid = dict(apply_layernorm_1p=True, experimental_attention_variant="gated_delta_net", linear_attention_freq=a["linear"],
                  linear_conv_kernel_dim=a["conv"], linear_key_head_dim=a["key_dim"], linear_value_head_dim=a["value_dim"],
                  linear_num_key_heads=a["key_heads"], linear_num_value_heads=a["value_heads"], attention_output_gate=True,
                  moe_shared_expert_gate=bool(a["experts"])) if a.get("linear") else dict(apply_layernorm_1p=False)
    ns = argparse.Namespace(**hybrid,
        num_layers=a["layers"], hidden_size=a["hidden"], ffn_hidden_size=a["ffn"], num_attention_heads=a["heads"],
        num_query_groups=a["groups"], group_query_attention=a["groups"] != a["heads"], kv_channels=a["head_dim"],
        seq_length=a["max_pos"], max_position_embeddings=a["max_pos"], position_embedding_type="rope",
        add_position_embedding=True, use_rotary_position_embeddings=True, rotary_base=int(a["rope_theta"]), rotary_percent=a.get("rotary", 1.0),
        rotary_interleaved=a.get("interleaved", False), add_bias_linear=False, add_qkv_bias=a["qkv_bias"], swiglu=True, squared_relu=False,
        untie_embeddings_and_output_weights=not a["tied"], normalization="RMSNorm",
        norm_epsilon=a["eps"], qk_layernorm=a["qk_norm"] or a["mla"], multi_latent_attention=a["mla"],
        apply_query_key_layer_scaling=False, attention_dropout=0.0, hidden_dropout=0.0,
        num_experts=a["experts"] or None, moe_layer_freq=1 if not a.get("dense_first") else
        [0] * a["dense_first"] + [1] * (a["layers"] - a["dense_first"]), moe_ffn_hidden_size=a.get("moe_ffn"),
        moe_router_topk=a.get("topk", 2), moe_grouped_gemm=bool(a["experts"]),
        moe_shared_expert_intermediate_size=a.get("shared") or None, mtp_num_layers=a["mtp"] or None,
        tokenizer_type="NullTokenizer", tokenizer_model=None, vocab_size=a["vocab"], padded_vocab_size=vpad,
        make_vocab_size_divisible_by=kw.get("div", 128), ckpt_format="torch_dist", use_dist_ckpt=True,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=None,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=kw.get("etp", tp),
        decoder_first_pipeline_num_layers=kw.get("pp_first"), context_parallel_size=1, world_size=kw.get("world", 1),
        data_parallel_size=kw.get("dp", 1), data_parallel_random_init=False, phase_transition_iterations=None,
        use_distributed_optimizer=kw.get("optim", False), no_save_optim=not kw.get("optim", False), no_save_rng=not kw.get("rng", False), bf16=True, fp16=False, vocab_file=None,
        consumed_train_samples=0, skipped_train_samples=0, consumed_valid_samples=0, global_batch_size=1, iteration=iteration,
        async_save=False, ckpt_fully_parallel_save=True)
    if a.get("sinks"):
        yarn = a["yarn"]
        vars(ns).update(
            add_bias_linear=True, add_qkv_bias=False, swiglu=False, quick_geglu=True, glu_linear_offset=1.0, activation_func_clamp_value=7.0,
            softmax_type="learnable", window_size=(a["window"] - 1, 0), window_attn_skip_freq=2, position_embedding_type="yarn",
            rotary_scaling_factor=yarn["factor"], yarn_original_max_position_embeddings=yarn["original_max_position_embeddings"],
            yarn_beta_fast=yarn["beta_fast"], yarn_beta_slow=yarn["beta_slow"], yarn_correction_range_round_to_int=yarn["truncate"],
            mscale=1.0, mscale_all_dim=0.0)
    return ns
