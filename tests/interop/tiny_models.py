"""Tiny Hugging Face models with random weights, one per family, made by transformers itself."""
import json
import os

BASE = dict(vocab_size=256, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48, max_position_embeddings=64, tie_word_embeddings=False)


def gemma4_text(**k):
    """A small Gemma 4 whose layers of global attention have heads of another size and keys that are values."""
    pattern = ["sliding_attention", "sliding_attention", "full_attention"]
    return {**dict(
        vocab_size=90, hidden_size=24, intermediate_size=28, num_hidden_layers=6, layer_types=2 * pattern, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, global_head_dim=12, num_global_key_value_heads=2, attention_k_eq_v=True, max_position_embeddings=64,
        sliding_window=9, final_logit_softcapping=8.0), **k}


def gemma4_shared(**k):
    """The same with a second embedding, and without keys and values of their own in its last three layers."""
    return gemma4_text(hidden_size_per_layer_input=10, vocab_size_per_layer_input=88, attention_k_eq_v=False, num_kv_shared_layers=3, **k)


def hf_configs():
    import transformers as T
    def c(**k): return {**BASE, **k}
    def odd(**k): return {**BASE, **dict(vocab_size=90, hidden_size=40, num_hidden_layers=2, num_attention_heads=8, head_dim=8, intermediate_size=56), **k}
    def latent(**k):
        return c(**{**dict(
            vocab_size=90, hidden_size=40, num_hidden_layers=2, num_key_value_heads=4, intermediate_size=44, moe_intermediate_size=16,
            n_shared_experts=2, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, routed_scaling_factor=1.8,
            q_lora_rank=28, kv_lora_rank=12, qk_rope_head_dim=8, qk_nope_head_dim=10, v_head_dim=14, num_nextn_predict_layers=1,
            rms_norm_eps=1e-5), **k})
    def hybrid(**k):
        return {**c(vocab_size=250, hidden_size=24, num_hidden_layers=3, num_attention_heads=6, head_dim=8, intermediate_size=28,
                    layer_types=["linear_attention", "linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=6,
                    linear_key_head_dim=5, linear_value_head_dim=7, linear_conv_kernel_dim=3, rms_norm_eps=1e-6,
                    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}), **k}
    rope = lambda t: dict(rope_parameters={"rope_type": "default", "rope_theta": t})
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)  # where those of the class are no tokens here
    return {
        "llama": lambda: T.LlamaConfig(**c(vocab_size=250, rms_norm_eps=1e-5, **rope(500000.0))),
        "qwen2": lambda: T.Qwen2Config(**c(rms_norm_eps=1e-6, **rope(1000000.0))),
        "qwen2_tied": lambda: T.Qwen2Config(**c(vocab_size=250, tie_word_embeddings=True, **rope(1000000.0))),
        "qwen3": lambda: T.Qwen3Config(**c(head_dim=16, rms_norm_eps=1e-6, **rope(1000000.0))),
        "mixtral": lambda: T.MixtralConfig(**c(num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, **rope(1e6))),
        "qwen2_moe": lambda: T.Qwen2MoeConfig(**c(num_hidden_layers=2, num_experts=4, num_experts_per_tok=2,
                                                 moe_intermediate_size=24, shared_expert_intermediate_size=40, **rope(1e6))),
        "qwen3_moe": lambda: T.Qwen3MoeConfig(**c(num_hidden_layers=2, num_experts=4, num_experts_per_tok=2,
                                                 norm_topk_prob=True, moe_intermediate_size=24, head_dim=16, **rope(1e6))),
        "deepseek_v3": lambda: T.DeepseekV3Config(
            **c(num_hidden_layers=3, num_key_value_heads=4, moe_intermediate_size=24, n_shared_experts=2,
                n_routed_experts=8, num_experts_per_tok=4, n_group=4, topk_group=2, first_k_dense_replace=1,
                q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
                num_nextn_predict_layers=1, **rope(10000.0))),
        # Moonlight = deepseek_v3 architecture without q_lora
        "moonlight": lambda: T.DeepseekV3Config(
            **c(num_hidden_layers=2, num_key_value_heads=4, moe_intermediate_size=24, n_shared_experts=1,
                n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
                q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
                num_nextn_predict_layers=0, **rope(50000.0))),
        "glm4_moe": lambda: T.Glm4MoeConfig(
            **c(num_hidden_layers=3, head_dim=16, attention_bias=True, use_qk_norm=True, moe_intermediate_size=24, n_shared_experts=1,
                n_routed_experts=8, num_experts_per_tok=3, n_group=1, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=1.5,
                num_nextn_predict_layers=1, rms_norm_eps=1e-5,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5})),
        # No two sizes are alike, so that a transpose or an exchange of tensors shows.
        "seed_oss": lambda: T.SeedOssConfig(**odd(attention_bias=True, **rope(1e7))),
        "glm4": lambda: T.Glm4Config(**odd(pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})),
        "phi3": lambda: T.Phi3Config(**odd(hidden_size=72, pad_token_id=None, eos_token_id=2, rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75})),
        "granite": lambda: T.GraniteConfig(**odd(tie_word_embeddings=True, embedding_multiplier=12.0, attention_multiplier=0.2, residual_multiplier=0.22,
                                                 logits_scaling=6.0, **rope(1e7))),
        "ernie4_5": lambda: T.Ernie4_5Config(**odd(tie_word_embeddings=True, **rope(5e5))),
        "ernie4_5_moe": lambda: T.Ernie4_5_MoeConfig(
            **odd(tie_word_embeddings=True, moe_num_experts=8, moe_k=2, moe_num_shared_experts=3,
                  moe_intermediate_size=24, moe_layer_start_index=1, **rope(5e5))),
        "gemma3_text": lambda: T.Gemma3TextConfig(
            **odd(tie_word_embeddings=True, query_pre_attn_scalar=8, sliding_window=16, sliding_window_pattern=2)),
        "gemma2": lambda: T.Gemma2Config(**odd(tie_word_embeddings=True, query_pre_attn_scalar=6, sliding_window=12, attn_logit_softcapping=5.0,
                                               final_logit_softcapping=8.0, num_hidden_layers=3)),
        "gemma4_text": lambda: T.Gemma4TextConfig(**gemma4_text(), hidden_size_per_layer_input=10, vocab_size_per_layer_input=88),
        "ministral3": lambda: T.Ministral3Config(
            **odd(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16,
                                   "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1})),
        "smollm3": lambda: T.SmolLM3Config(**odd(num_hidden_layers=4, no_rope_layers=[1, 0, 0, 1], tie_word_embeddings=True, **ends, **rope(2e6))),
        "olmo2": lambda: T.Olmo2Config(**odd(hidden_size=48, head_dim=6, num_key_value_heads=4, rms_norm_eps=1e-5, **ends, **rope(5e5))),
        "olmo3": lambda: T.Olmo3Config(
            **odd(hidden_size=48, head_dim=6, num_key_value_heads=4, rms_norm_eps=1e-5, num_hidden_layers=4, sliding_window=9, **ends,
                  layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                  rope_parameters={
                      "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                      "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 16,
                                         "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0}})),
        "olmoe": lambda: T.OlmoeConfig(
            **odd(hidden_size=48, head_dim=6, num_key_value_heads=4, num_experts=8, num_experts_per_tok=3, intermediate_size=40, **rope(1e4))),
        "minimax_m2": lambda: T.MiniMaxM2Config(
            **odd(num_local_experts=8, num_key_value_heads=4, num_experts_per_tok=3, intermediate_size=24,
                  rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5})),
        "glm4_moe_lite": lambda: T.Glm4MoeLiteConfig(**latent(**rope(1e6))),
        "glm_moe_dsa": lambda: T.GlmMoeDsaConfig(
            **latent(index_topk=8, index_head_dim=18, index_n_heads=2, mlp_layer_types=["dense", "sparse"], **rope(1e6))),
        "qwen3_next": lambda: T.Qwen3NextConfig(**hybrid(num_experts=4, num_experts_per_tok=3, moe_intermediate_size=32,
                                                         shared_expert_intermediate_size=20, norm_topk_prob=True)),
        "qwen3_5": lambda: T.Qwen3_5TextConfig(**hybrid(tie_word_embeddings=True)),
        "qwen3_5_moe": lambda: T.Qwen3_5MoeTextConfig(**hybrid(num_experts=4, num_experts_per_tok=3, moe_intermediate_size=32,
                                                               shared_expert_intermediate_size=20)),
        "nemotron_h": lambda: T.NemotronHConfig(
            **{k: v for k, v in c(vocab_size=90, hidden_size=40, num_attention_heads=8, intermediate_size=52).items() if k != "num_hidden_layers"},
            head_dim=6, layers_block_type=["linear_attention", "mlp", "full_attention", "moe", "linear_attention"], mamba_num_heads=6,
            mamba_head_dim=7, n_groups=2, ssm_state_size=9, conv_kernel=4, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=20,
            moe_shared_expert_intermediate_size=28, moe_latent_size=24, routed_scaling_factor=2.5, num_nextn_predict_layers=1,
            mtp_layers_block_type=["full_attention", "moe"]),
        "gpt_oss": lambda: T.GptOssConfig(
            **c(vocab_size=250, num_hidden_layers=3, head_dim=10, intermediate_size=64, num_local_experts=6, num_experts_per_tok=3,
                sliding_window=7, max_position_embeddings=131072,
                rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                 "truncate": False, "original_max_position_embeddings": 4096})),
        "deepseek_v2": lambda: T.DeepseekV2Config(
            **c(num_hidden_layers=3, num_key_value_heads=4, moe_intermediate_size=24, n_shared_experts=2,
                n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, topk_method="group_limited_greedy",
                first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
                **rope(10000.0))),
    }


def make_longrope(folder, original):
    """The committed Phi-3 with factors of angles for sequences of up to `original` tokens and for longer ones."""
    import shutil
    here = os.path.dirname(os.path.abspath(__file__))
    shutil.copytree(os.path.join(here, "../data/hf_phi3/hf"), folder)
    path = os.path.join(folder, "config.json")
    config = json.load(open(path))
    config["rope_parameters"] |= {"rope_type": "longrope", "short_factor": [1.0, 1.05, 1.7], "long_factor": [1.3, 2.2, 9.5]}
    json.dump(config | {"original_max_position_embeddings": original}, open(path, "w"))


HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


def add_prediction(folder, layers, hidden, model="model."):
    """The prediction layer of Qwen3-Next and Qwen3.5, of which transformers knows nothing, as checkpoints of the hub hold it. The layers lie below `model`."""
    import torch
    from safetensors.torch import load_file, save_file
    sd = load_file(folder + "/model.safetensors")
    generator = torch.Generator().manual_seed(7)
    random = lambda *shape: (0.2 * torch.randn(*shape, generator=generator)).to(torch.bfloat16)
    last = f"{model}layers.{layers - 1}."
    for k in [k for k in sd if k.startswith(last)]:
        sd["mtp.layers.0." + k[len(last):]] = random(*sd[k].shape)
    sd["mtp.fc.weight"] = random(hidden, 2 * hidden)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        sd[f"mtp.{norm}.weight"] = random(hidden)
    save_file({k: v.contiguous() for k, v in sd.items()}, folder + "/model.safetensors", metadata={"format": "pt"})


def add_nemotron_prediction(folder, main, kinds, hidden):
    """The prediction layer of Nemotron-3, of which transformers knows nothing: a layer of each kind, counted from 0."""
    import torch
    from safetensors.torch import load_file, save_file
    sd = load_file(folder + "/model.safetensors")
    generator = torch.Generator().manual_seed(7)
    random = lambda *shape: (0.2 * torch.randn(*shape, generator=generator)).to(torch.bfloat16)
    for i, kind in enumerate(kinds):
        alike = f"backbone.layers.{main.index(kind)}."
        for k in [k for k in sd if k.startswith(alike)]:
            sd[f"mtp.layers.{i}." + k[len(alike):]] = random(*sd[k].shape)
    sd["mtp.layers.0.eh_proj.weight"] = random(hidden, 2 * hidden)
    for norm in ("0.enorm", "0.hnorm", f"{len(kinds) - 1}.final_layernorm"):
        sd[f"mtp.layers.{norm}.weight"] = 1 + random(hidden)
    save_file({k: v.contiguous() for k, v in sd.items()}, folder + "/model.safetensors", metadata={"format": "pt"})


def pack_experts(folder, prefix):
    """Puts the experts of each layer below `prefix` into two tensors."""
    import re
    import torch
    from safetensors.torch import load_file, save_file
    sd = load_file(folder + "/model.safetensors")
    apart = re.compile(re.escape(prefix) + r".*\.mlp\.experts\.0\.gate_proj\.weight")
    for k in [k for k in sd if apart.fullmatch(k)]:
        experts = k.removesuffix("0.gate_proj.weight")
        number = sum(key.startswith(experts) and key.endswith(".gate_proj.weight") for key in sd)
        take = lambda what: torch.stack([sd.pop(f"{experts}{e}.{what}_proj.weight") for e in range(number)])
        gate, up, down = (take(what) for what in ("gate", "up", "down"))
        sd[experts + "gate_up_proj"], sd[experts + "down_proj"] = torch.cat([gate, up], 1), down
    save_file({k: v.contiguous() for k, v in sd.items()}, folder + "/model.safetensors", metadata={"format": "pt"})


def make_seeing(name, folder):
    """A tiny Qwen3.5 with a vision tower, qwen3_5 or qwen3_5_moe, as transformers saves it."""
    import torch
    import transformers as T
    T.logging.set_verbosity_error()
    text = dict(vocab_size=90, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=8, intermediate_size=28,
                max_position_embeddings=64, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=6,
                linear_key_head_dim=5, linear_value_head_dim=7, linear_conv_kernel_dim=3,
                rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1, 0, 0],
                                 "mrope_interleaved": True})
    if name == "qwen3_5_moe":
        text.pop("intermediate_size")
        text.update(num_experts=4, num_experts_per_tok=3, moe_intermediate_size=32, shared_expert_intermediate_size=20)
    vision = dict(depth=1, hidden_size=16, intermediate_size=20, num_heads=2, patch_size=2, spatial_merge_size=2, temporal_patch_size=2,
                  out_hidden_size=24, num_position_embeddings=9)
    family = "Qwen3_5" if name == "qwen3_5" else "Qwen3_5Moe"
    config = getattr(T, family + "Config")(text_config=text, vision_config=vision, tie_word_embeddings=name == "qwen3_5")
    torch.manual_seed(3)
    getattr(T, family + "ForConditionalGeneration")(config).to(torch.bfloat16).save_pretrained(folder)


def make_hybrid_of_four_heads(model, folder):
    """The committed hybrid of this name with four key heads in place of two, random weights, and no prediction layer."""
    import torch
    import transformers as T
    T.logging.set_verbosity_error()
    here = os.path.dirname(os.path.abspath(__file__))
    config = T.AutoConfig.from_pretrained(os.path.join(here, f"../data/hf_{model}/hf"), linear_num_key_heads=4, linear_num_value_heads=8)
    config.mtp_num_hidden_layers = 0
    torch.manual_seed(5)
    network = T.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    network.save_pretrained(folder)


def wrapped_configs():
    """Models that also see, whose language model is a class of its own below: (class, configuration)."""
    import transformers as T
    text = dict(vocab_size=90, hidden_size=40, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=8, intermediate_size=56,
                max_position_embeddings=64)
    vision = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, patch_size=2)
    visual = dict(depth=1, hidden_size=16, intermediate_size=20, num_heads=2, patch_size=2, spatial_merge_size=2, temporal_patch_size=2,
                  out_hidden_size=40)
    deep = dict(visual, depth=3, hidden_size=24, intermediate_size=28, num_heads=3, patch_size=4, num_position_embeddings=16)
    hybrid = dict(text, num_attention_heads=6, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=6,
                  linear_key_head_dim=5, linear_value_head_dim=7, linear_conv_kernel_dim=3, mtp_num_hidden_layers=1,
                  rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1, 0, 0],
                                   "mrope_interleaved": True})
    eyes = dict(vision, num_key_value_heads=2, head_dim=8, position_embedding_size=6)
    audio = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, subsampling_conv_channels=[4, 2], output_proj_dims=12)
    sections = lambda theta, **k: {"rope_type": "default", "rope_theta": theta, "mrope_section": [2, 1, 1], **k}
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    latent = dict(model_type="deepseek_v3", vocab_size=90, hidden_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
                  intermediate_size=44, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1,
                  first_k_dense_replace=1, n_shared_experts=2, q_lora_rank=28, kv_lora_rank=12, qk_rope_head_dim=8, qk_nope_head_dim=10,
                  v_head_dim=14, max_position_embeddings=64, num_nextn_predict_layers=0)
    return {
        "mistral3": lambda: T.Mistral3Config(
            text_config=dict(text, model_type="ministral3", rope_parameters=yarn), vision_config=dict(vision, model_type="pixtral", image_size=8),
            tie_word_embeddings=False),
        "kimi_k25": lambda: T.Kimi_K25Config(text_config=latent, vision_config=vision, projection_hidden_size=16, tie_word_embeddings=False),
        "qwen3_vl": lambda: T.Qwen3VLConfig(
            text_config=dict(text, rope_parameters=sections(5e6, mrope_interleaved=True)),
            vision_config=dict(visual, num_position_embeddings=9, deepstack_visual_indexes=[0]), tie_word_embeddings=True),
        "qwen3_vl_deep": lambda: T.Qwen3VLConfig(  # a tower of three layers, two of which go on into the language model
            text_config=dict(text, rope_parameters=sections(5e6, mrope_interleaved=True)),
            vision_config=dict(deep, deepstack_visual_indexes=[0, 2]), tie_word_embeddings=False),
        "qwen3_5_vl": lambda: T.Qwen3_5Config(text_config=hybrid, vision_config=deep, tie_word_embeddings=False),
        "qwen3_5_moe_vl": lambda: T.Qwen3_5MoeConfig(
            text_config=dict(hybrid, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=32, shared_expert_intermediate_size=20),
            vision_config=deep, tie_word_embeddings=False),
        "qwen3_vl_moe": lambda: T.Qwen3VLMoeConfig(
            text_config=dict(text, rope_parameters=sections(5e6, mrope_interleaved=True), num_experts=6, num_experts_per_tok=3,
                             moe_intermediate_size=24),
            vision_config=dict(visual, num_position_embeddings=9, deepstack_visual_indexes=[0]), tie_word_embeddings=False),
        "qwen2_5_vl": lambda: T.Qwen2_5_VLConfig(
            text_config={**{k: v for k, v in text.items() if k != "head_dim"}, "hidden_size": 64, "rope_parameters": sections(1e6)},
            vision_config=dict(visual, out_hidden_size=64, fullatt_block_indexes=[0])),
        "qwen2_5_vl_deep": lambda: T.Qwen2_5_VLConfig(  # a tower of three layers, wider than it is high
            text_config={**{k: v for k, v in text.items() if k != "head_dim"}, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2,
                         "rope_parameters": sections(1e6)},
            vision_config=dict(visual, depth=3, hidden_size=24, intermediate_size=28, num_heads=3, out_hidden_size=48, fullatt_block_indexes=[1])),
        "gemma3": lambda: T.Gemma3Config(
            text_config=dict(text, query_pre_attn_scalar=8, sliding_window=16, sliding_window_pattern=2),
            vision_config=dict(vision, image_size=8), mm_tokens_per_image=4),
        "gemma4": lambda: T.Gemma4Config(  # with experts, a vision tower and one for audio
            text_config=gemma4_text(hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=4, top_k_experts=2,
                                    moe_intermediate_size=20),
            vision_config=eyes, audio_config=audio),
        "gemma4_e2b": lambda: T.Gemma4Config(  # the last layers have no keys and values, and wider feed-forwards
            text_config=gemma4_shared(use_double_wide_mlp=True), vision_config=eyes, audio_config=audio),
        "gemma4_e4b": lambda: T.Gemma4Config(text_config=gemma4_shared(), vision_config=eyes, audio_config=audio),
        "gemma4_unified": lambda: T.Gemma4UnifiedConfig(  # projectors in place of towers; one key, which is the value, for all heads of a global layer
            text_config=gemma4_text(num_global_key_value_heads=1),
            vision_config=dict(patch_size=1, pooling_kernel_size=3, mm_embed_dim=21, mm_posemb_size=5, output_proj_dims=21),
            audio_config=dict(audio_embed_dim=15)),
    }


def make_wrapped(name, folder, vision=None, **text):
    """A tiny model that also sees, with random weights, named as on the hub; `vision` changes its tower, `text` its language model."""
    import torch
    import transformers as T
    from safetensors.torch import load_file, save_file
    T.logging.set_verbosity_error()
    config = wrapped_configs()[name]()
    for part, changes in ((config.text_config, text), (config.vision_config, vision or {})):
        for key, value in changes.items():
            setattr(part, key, value)
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(T, config.__class__.__name__.replace("Config", "ForConditionalGeneration"))(config).to(torch.bfloat16)
    with torch.no_grad():
        for n, p in [*model.named_parameters(), *(b for b in model.named_buffers() if b[0].endswith(("correction_bias", "layer_scalar")))]:
            p.copy_(0.2 * torch.randn(p.shape) + (1 if p.ndim == 1 and "norm" in n else 0))
    model.save_pretrained(folder)
    if name in ("qwen3_5_vl", "qwen3_5_moe_vl"):
        add_prediction(folder, config.text_config.num_hidden_layers, config.text_config.hidden_size, "model.language_model.")
        pack_experts(folder, "model.")
    if name == "qwen3_vl_moe":  # transformers 5.17 saves experts as it holds them
        weights = {n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in load_file(folder + "/model.safetensors").items()}
        save_file(weights, folder + "/model.safetensors", metadata={"format": "pt"})
    if name == "gemma4_e4b":  # as on the hub: layers have the weights that others' keys and values are used for
        weights = load_file(folder + "/model.safetensors")
        for layer in (3, 4, 5):
            for part in ("k_proj", "v_proj", "k_norm"):
                of = weights[f"model.language_model.layers.{layer - 3}.self_attn.{part}.weight"]
                weights[f"model.language_model.layers.{layer}.self_attn.{part}.weight"] = (0.2 * torch.randn(of.shape) + (of.ndim == 1)).to(of.dtype)
        save_file(weights, folder + "/model.safetensors", metadata={"format": "pt"})
    if name == "kimi_k25":  # transformers 5.17 renames the vision tower's names back in the other parts, too
        weights = {n.replace("language_model.model.blocks.", "language_model.model.layers.").replace("model.mm_projector.", "mm_projector."): t
                   for n, t in load_file(folder + "/model.safetensors").items()}
        save_file(weights, folder + "/model.safetensors", metadata={"format": "pt"})


def make_hf(name, out, **changes):
    """Random tiny HF model, of a configuration with `changes` -> out/hf (bf16 safetensors) ; logits of a fixed prompt -> out/logits.json"""
    import torch, transformers as T
    T.logging.set_verbosity_error()
    cfg = hf_configs()[name]()
    for key, value in changes.items():
        setattr(cfg, key, value)
    torch.manual_seed(sum(map(ord, name)))
    m = T.AutoModelForCausalLM.from_config(cfg).float()
    with torch.no_grad():
        for n, p in list(m.named_parameters()) + list(m.named_buffers()):
            if not p.is_floating_point() or "inv_freq" in n or "embed_scale" in n:
                continue
            if n.endswith("linear_attn.norm.weight"):  # less one, many of these are not numbers of bf16
                p.copy_(0.05 + 1.5 * torch.rand_like(p))
            elif name in HYBRID and p.ndim == 1:
                p.copy_(0.2 * torch.randn_like(p))
            elif p.ndim == 1 and "norm" in n:
                p.copy_(1 + 0.2 * torch.randn_like(p))
            elif p.ndim == 1:
                p.copy_(0.2 * torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) * 0.2)
        # Qwen3.5 and Nemotron-H hold these in fp32.
        wide = {n: p.clone() for n, p in m.named_parameters()
                if name.startswith("qwen3_5") and n.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))
                or name == "nemotron_h" and n.endswith(("mixer.A_log", "mixer.D", "mixer.dt_bias"))}
        for n, p in m.named_parameters():
            if n not in wide:
                p.copy_(p.to(torch.bfloat16).float())
        for n, b in m.named_buffers():
            if "inv_freq" not in n and "embed_scale" not in n and b.is_floating_point():
                b.copy_(b.to(torch.bfloat16).float())
    m.eval()
    ids = (torch.arange(24) * 37 + 11) % cfg.vocab_size
    with torch.no_grad():
        lg = m(ids[None]).logits[0].float()
    hf = os.path.join(out, "hf")
    m.to(torch.bfloat16)
    for n, p in m.named_parameters():
        if n in wide:
            p.data = wide[n]
    m.save_pretrained(hf)
    if name in HYBRID:
        add_prediction(hf, cfg.num_hidden_layers, cfg.hidden_size)
    if name == "nemotron_h":
        add_nemotron_prediction(hf, cfg.layers_block_type, cfg.mtp_layers_block_type, cfg.hidden_size)
    if name == "qwen3_5_moe":  # but those of the prediction layer, as on the hub
        pack_experts(hf, "model.")
    if name in ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"):  # HF code has no MTP layer; add one as the hub checkpoint stores it (layer index = L)
        from safetensors.torch import load_file, save_file
        sd = load_file(hf + "/model.safetensors")
        L, h = cfg.num_hidden_layers, cfg.hidden_size
        g = torch.Generator().manual_seed(7)
        R = lambda *s: (0.2 * torch.randn(*s, generator=g)).to(torch.bfloat16)
        for k in [k for k in sd if k.startswith(f"model.layers.{L-1}.")]:
            t = sd[k]
            sd[k.replace(f"layers.{L-1}.", f"layers.{L}.")] = (1 + R(*t.shape)) if t.ndim == 1 and "norm" in k else R(*t.shape)
        p = f"model.layers.{L}."
        sd[p + "enorm.weight"], sd[p + "hnorm.weight"], sd[p + "shared_head.norm.weight"] = 1 + R(h), 1 + R(h), 1 + R(h)
        sd[p + "eh_proj.weight"] = R(h, 2 * h)
        sd[p + "embed_tokens.weight"] = sd["model.embed_tokens.weight"].clone()   # hub file duplicates both
        sd[p + "shared_head.head.weight"] = sd["lm_head.weight"].clone()
        save_file({k: v.contiguous() for k, v in sd.items()}, hf + "/model.safetensors", metadata={"format": "pt"})
    cj = json.load(open(hf + "/config.json"))
    if "rope_theta" in getattr(cfg, "rope_parameters", {}):
        cj["rope_theta"] = cfg.rope_parameters["rope_theta"]    # what hub configs of transformers 4.x carry
    if name == "nemotron_h":  # the hub's words
        cj.update(hybrid_override_pattern=cfg.hybrid_override_pattern, num_hidden_layers=len(cj.pop("layers_block_type")),
                  mtp_hybrid_override_pattern=cfg.mtp_hybrid_override_pattern)
        cj.pop("mtp_layers_block_type")
    cj["torch_dtype"] = "bfloat16"
    json.dump(cj, open(hf + "/config.json", "w"), indent=1, sort_keys=True)
    json.dump({"ids": ids.tolist(), "logits_last": lg[-1].tolist(), "logits_sum": lg.sum(-1).tolist()},
              open(os.path.join(out, "hf_logits.json"), "w"))


def load_hf_sd(hf):
    from safetensors.torch import load_file
    sd = {}
    for f in sorted(os.listdir(hf)):
        if f.endswith(".safetensors"):
            sd.update(load_file(os.path.join(hf, f)))
    return sd
