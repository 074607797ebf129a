#!/usr/bin/env python3
"""Writes a small model with layers wide enough for fp32 products to agree, as those of real models are: wide_model.py FAMILY FOLDER"""
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import tiny_models


def main(name, folder):
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    tiny_models.BASE.update(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
                            max_position_embeddings=2048)
    config = tiny_models.hf_configs()[name]()
    for field in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if getattr(config, field, None):
            setattr(config, field, 256)
    if name.startswith("deepseek"):
        for field, value in dict(kv_lora_rank=64, q_lora_rank=128, qk_rope_head_dim=64, qk_nope_head_dim=64, qk_head_dim=128,
                                 v_head_dim=64, head_dim=64, num_key_value_heads=4).items():
            setattr(config, field, value)
    elif getattr(config, "head_dim", None):
        config.head_dim = 64
    if name in tiny_models.HYBRID:
        for field, value in dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, linear_num_key_heads=4, linear_num_value_heads=16,
                                 linear_key_head_dim=32, linear_value_head_dim=48, linear_conv_kernel_dim=4, mtp_num_hidden_layers=0).items():
            setattr(config, field, value)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.2 * noise if "norm" in parameter_name else 0.05 * noise)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
