#!/usr/bin/env python3
"""Writes a small model with layers wide enough for fp32 products to agree, as those of real models are: wide_model.py FAMILY FOLDER

A GPU's attention takes heads of 64 numbers or more, so that this is the size of all heads here."""
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import tiny_models

SIZES = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
LATENT = dict(kv_lora_rank=64, q_lora_rank=128, qk_rope_head_dim=64, qk_nope_head_dim=64, qk_head_dim=128, v_head_dim=64, head_dim=64,
              num_key_value_heads=4)
HYBRID = dict(linear_num_key_heads=4, linear_num_value_heads=16, linear_key_head_dim=32, linear_value_head_dim=48, linear_conv_kernel_dim=4,
              mtp_num_hidden_layers=0)


def widen(config, name):
    """Changes the sizes of a language model's configuration."""
    sizes = dict(SIZES)
    for field in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if getattr(config, field, None):
            sizes[field] = 256
    if getattr(config, "kv_lora_rank", None):
        sizes.update(LATENT)
    elif getattr(config, "head_dim", None):
        sizes["head_dim"] = 64
    if name in tiny_models.HYBRID:
        sizes.update(HYBRID)
    for field, value in sizes.items():
        setattr(config, field, value)


def main(name, folder):
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    wrapped = tiny_models.wrapped_configs()
    if name in wrapped:
        config = wrapped[name]()
        widen(config.text_config, name)
        if "mrope_section" in config.text_config.rope_parameters:
            config.text_config.rope_parameters["mrope_section"] = [16, 8, 8]
            config.vision_config.out_hidden_size = SIZES["hidden_size"]
        model = getattr(transformers, type(config).__name__.replace("Config", "ForConditionalGeneration"))(config)
    else:
        config = tiny_models.hf_configs()[name]()
        widen(config, name)
        model = transformers.AutoModelForCausalLM.from_config(config)
    torch.manual_seed(1)
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.2 * noise if "norm" in parameter_name else 0.05 * noise)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
