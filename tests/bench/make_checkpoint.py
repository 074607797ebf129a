#!/usr/bin/env python3
"""Writes a Hugging Face checkpoint of a known shape with random (or, with --sparse, absent) weights: for benchmarks.

    make_checkpoint.py qwen2.5-1.5b FOLDER
    make_checkpoint.py llama-3-70b FOLDER --sparse      # files with holes: right sizes, no disk space
"""
import argparse
import itertools
import json
import os
from pathlib import Path

SHAPES = {  # model_type, hidden, layers, heads, key-value heads, head_dim, ffn, vocabulary, tied
    "qwen2.5-0.5b": ("qwen2", 896, 24, 14, 2, 64, 4864, 151936, True),
    "qwen2.5-1.5b": ("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, True),
    "llama-3.2-1b": ("llama", 2048, 16, 32, 8, 64, 8192, 128256, True),
    "llama-3-8b": ("llama", 4096, 32, 32, 8, 128, 14336, 128256, False),
    "llama-3-70b": ("llama", 8192, 80, 64, 8, 128, 28672, 128256, False),
    "qwen3-0.6b": ("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True),
    "qwen3-8b": ("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False),
    "qwen3-vl-8b": ("qwen3_vl", 4096, 36, 32, 8, 128, 12288, 151936, False),  # with its vision tower: 18 GB
    "qwen3-32b": ("qwen3", 5120, 64, 64, 8, 128, 25600, 151936, False),
    "qwen3-32b-16": ("qwen3", 5120, 16, 64, 8, 128, 25600, 151936, False),  # its first quarter: 19 GB
    "qwen3-30b-a3b": ("qwen3_moe", 2048, 48, 32, 4, 128, 768, 151936, False),  # ffn: of one of 128 experts
    "qwen3-30b-a3b-24": ("qwen3_moe", 2048, 24, 32, 4, 128, 768, 151936, False),  # its first half
    "qwen3-30b-a3b-4": ("qwen3_moe", 2048, 4, 32, 4, 128, 768, 151936, False),  # its first four
    "qwen3-30b-a3b-2": ("qwen3_moe", 2048, 2, 32, 4, 128, 768, 151936, False),  # its first two layers: 3.7 GB
    "gpt-oss-20b": ("gpt_oss", 2880, 24, 64, 8, 64, 2880, 201088, False),  # ffn: of one of 32 experts
    "gpt-oss-20b-4": ("gpt_oss", 2880, 4, 64, 8, 64, 2880, 201088, False),  # its first four layers: 8.9 GB
    "gpt-oss-120b": ("gpt_oss_mxfp4", 2880, 36, 64, 8, 64, 2880, 201088, False),  # ffn: of one of 128 experts, in MXFP4 as on the hub
    "gpt-oss-120b-4": ("gpt_oss_mxfp4", 2880, 4, 64, 8, 64, 2880, 201088, False),  # its first four layers: 9.1 GB, 28 GB of bf16
    "gpt-oss-120b-1": ("gpt_oss_mxfp4", 2880, 1, 64, 8, 64, 2880, 201088, False),  # its first layer: 4.0 GB, 8.8 GB of bf16
    "gemma-3-4b": ("gemma3_text", 2560, 34, 8, 4, 256, 10240, 262208, True),
    "qwen3.5-35b-a3b": ("qwen3_5_moe_text", 2048, 40, 16, 2, 256, 512, 248320, False),  # ffn: of one of 256 experts
    "qwen3.5-35b-a3b-8": ("qwen3_5_moe_text", 2048, 8, 16, 2, 256, 512, 248320, False),  # its first eight layers: 15 GB
    "qwen3.5-35b-a3b-4": ("qwen3_5_moe_text", 2048, 4, 16, 2, 256, 512, 248320, False),  # its first four: 8.7 GB
    "deepseek-v3-671b": ("deepseek_v3", 7168, 61, 128, 128, 192, 18432, 129280, False),
    "deepseek-v3-671b-4": ("deepseek_v3", 7168, 4, 128, 128, 192, 18432, 129280, False),  # three dense layers, one with experts
    "moonlight-16b-a3b": ("moonlight", 2048, 27, 16, 16, 192, 11264, 163840, False),  # DeepSeek-V3's layers in bf16, without a low rank for queries
    "tiny-qwen3-vl": ("qwen3_vl", 256, 4, 4, 2, 64, 512, 2000, False),
    "tiny-gemma-3": ("gemma3_text", 128, 6, 4, 2, 64, 256, 500, True),
    "tiny-gpt-oss": ("gpt_oss_mxfp4", 64, 2, 4, 2, 16, 32, 2000, False),
    "tiny": ("llama", 64, 2, 4, 2, 16, 96, 500, False),
    "tiny-qwen3.5": ("qwen3_5_moe_text", 256, 4, 4, 2, 64, 128, 2000, False),
    "tiny-moe": ("qwen3_moe", 64, 2, 4, 2, 16, 32, 500, False),
}
QWEN3_EXPERTS = 128
GPT_OSS_EXPERTS = {"gpt_oss": 32, "gpt_oss_mxfp4": 128}
QWEN3_5 = dict(num_experts=256, num_experts_per_tok=8, shared_expert_intermediate_size=512, linear_conv_kernel_dim=4,
               linear_key_head_dim=128, linear_num_key_heads=16, linear_value_head_dim=128, linear_num_value_heads=32)
LATENT = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, norm_topk_prob=True, scoring_func="sigmoid",
              topk_method="noaux_tc", moe_layer_freq=1)
DEEPSEEK = {
    "deepseek_v3": dict(LATENT, q_lora_rank=1536, n_routed_experts=256, n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3,
                        num_experts_per_tok=8, n_group=8, topk_group=4, routed_scaling_factor=2.5),
    "moonlight": dict(LATENT, q_lora_rank=None, n_routed_experts=64, n_shared_experts=2, moe_intermediate_size=1408, first_k_dense_replace=1,
                      num_experts_per_tok=6, n_group=1, topk_group=1, routed_scaling_factor=2.446)}
VISION = dict(depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, in_channels=3, patch_size=16, temporal_patch_size=2,
              spatial_merge_size=2, num_position_embeddings=2304, deepstack_visual_indexes=[8, 16, 24])
SHARD_BYTES = 5_000_000_000
POOL_BYTES = 64 << 20


def tensors(shape):
    """[(name, shape)] in the order of the model."""
    family, hidden, layers, heads, groups, dim, ffn, vocab, tied = shape
    if family in DEEPSEEK:
        yield from deepseek_tensors(shape)
        return
    root = "model."
    if family == "qwen3_vl":
        yield from vision_tensors(hidden)
        root = "model.language_model."
    yield root + "embed_tokens.weight", [vocab, hidden]
    for i in range(layers):
        p = f"{root}layers.{i}."
        yield p + "input_layernorm.weight", [hidden]
        if family == "qwen3_5_moe_text":
            yield from qwen3_5_layer(p, shape, attends=i % 4 == 3)
            continue
        if family in GPT_OSS_EXPERTS:
            experts = GPT_OSS_EXPERTS[family]
            for name, rows, columns in (("down_proj", hidden, ffn), ("gate_up_proj", 2 * ffn, hidden)):
                if family == "gpt_oss":
                    yield f"{p}mlp.experts.{name}", [experts, columns, rows]
                else:
                    yield f"{p}mlp.experts.{name}_blocks", [experts, rows, columns // 32, 16], "U8"
                    yield f"{p}mlp.experts.{name}_scales", [experts, rows, columns // 32], "E8M0"
                yield f"{p}mlp.experts.{name}_bias", [experts, rows]
            yield p + "mlp.router.bias", [experts]
            yield p + "mlp.router.weight", [experts, hidden]
            yield p + "self_attn.sinks", [heads]
            yield p + "self_attn.o_proj.bias", [hidden]
        elif family == "qwen3_moe":
            yield p + "mlp.gate.weight", [QWEN3_EXPERTS, hidden]
            yield from gated_mlps([f"{p}mlp.experts.{e}." for e in range(QWEN3_EXPERTS)], hidden, ffn)
        else:
            yield from gated_mlps([p + "mlp."], hidden, ffn)
        yield p + "post_attention_layernorm.weight", [hidden]
        if family == "gemma3_text":
            yield p + "pre_feedforward_layernorm.weight", [hidden]
            yield p + "post_feedforward_layernorm.weight", [hidden]
        if family.startswith(("qwen3", "gemma3")):
            yield p + "self_attn.q_norm.weight", [dim]
            yield p + "self_attn.k_norm.weight", [dim]
        for name, rows in (("k", groups * dim), ("q", heads * dim), ("v", groups * dim)):
            if family == "qwen2" or family in GPT_OSS_EXPERTS:
                yield f"{p}self_attn.{name}_proj.bias", [rows]
            yield f"{p}self_attn.{name}_proj.weight", [rows, hidden]
        yield p + "self_attn.o_proj.weight", [hidden, heads * dim]
    yield root + "norm.weight", [hidden]
    if not tied:
        yield "lm_head.weight", [vocab, hidden]


def vision_tensors(out_hidden):
    def linear(name, rows, columns):
        yield f"{name}.weight", [rows, *columns]
        yield f"{name}.bias", [rows]

    hidden, ffn, patch = VISION["hidden_size"], VISION["intermediate_size"], VISION["patch_size"]
    p, merged = "model.visual.", hidden * VISION["spatial_merge_size"]**2
    yield from linear(p + "patch_embed.proj", hidden, [VISION["in_channels"], VISION["temporal_patch_size"], patch, patch])
    yield p + "pos_embed.weight", [VISION["num_position_embeddings"], hidden]
    for i in range(VISION["depth"]):
        for name, rows, columns in (("norm1", hidden, []), ("norm2", hidden, []), ("attn.qkv", 3 * hidden, [hidden]), ("attn.proj", hidden, [hidden]),
                                    ("mlp.linear_fc1", ffn, [hidden]), ("mlp.linear_fc2", hidden, [ffn])):
            yield from linear(f"{p}blocks.{i}.{name}", rows, columns)
    mergers = [("merger", hidden)] + [(f"deepstack_merger_list.{i}", merged) for i in range(len(VISION["deepstack_visual_indexes"]))]
    for name, normed in mergers:
        yield from linear(f"{p}{name}.norm", normed, [])
        yield from linear(f"{p}{name}.linear_fc1", merged, [merged])
        yield from linear(f"{p}{name}.linear_fc2", out_hidden, [merged])


def qwen3_5_layer(p, shape, attends):
    _, hidden, _, heads, groups, dim, ffn, _, _ = shape
    d = QWEN3_5
    values = d["linear_num_value_heads"] * d["linear_value_head_dim"]
    mixed = 2 * d["linear_num_key_heads"] * d["linear_key_head_dim"] + values
    if attends:  # queries beside their gates
        yield p + "self_attn.k_norm.weight", [dim]
        yield p + "self_attn.q_norm.weight", [dim]
        for name, rows in (("k", groups * dim), ("q", 2 * heads * dim), ("v", groups * dim)):
            yield f"{p}self_attn.{name}_proj.weight", [rows, hidden]
        yield p + "self_attn.o_proj.weight", [hidden, heads * dim]
    else:
        yield p + "linear_attn.A_log", [d["linear_num_value_heads"]], "F32"
        yield p + "linear_attn.conv1d.weight", [mixed, 1, d["linear_conv_kernel_dim"]]
        yield p + "linear_attn.dt_bias", [d["linear_num_value_heads"]]
        yield p + "linear_attn.in_proj_a.weight", [d["linear_num_value_heads"], hidden]
        yield p + "linear_attn.in_proj_b.weight", [d["linear_num_value_heads"], hidden]
        yield p + "linear_attn.in_proj_qkv.weight", [mixed, hidden]
        yield p + "linear_attn.in_proj_z.weight", [values, hidden]
        yield p + "linear_attn.norm.weight", [d["linear_value_head_dim"]], "F32"
        yield p + "linear_attn.out_proj.weight", [hidden, values]
    yield p + "mlp.experts.down_proj", [d["num_experts"], hidden, ffn]
    yield p + "mlp.experts.gate_up_proj", [d["num_experts"], 2 * ffn, hidden]
    yield p + "mlp.gate.weight", [d["num_experts"], hidden]
    yield from gated_mlps([p + "mlp.shared_expert."], hidden, d["shared_expert_intermediate_size"])
    yield p + "mlp.shared_expert_gate.weight", [1, hidden]
    yield p + "post_attention_layernorm.weight", [hidden]


def gated_mlps(prefixes, hidden, ffn):
    for p in prefixes:
        yield p + "down_proj.weight", [hidden, ffn]
        yield p + "gate_proj.weight", [ffn, hidden]
        yield p + "up_proj.weight", [ffn, hidden]


def deepseek_tensors(shape):
    """Tensors as they lie on the hub: DeepSeek-V3's in FP8 blocks with their scales, and a prediction layer: 91,991 tensors."""
    family, hidden, layers, heads, _, _, ffn, vocab, _ = shape
    d = DEEPSEEK[family]

    def quantised(entries):
        if family != "deepseek_v3":
            yield from entries
            return
        for name, (rows, columns) in entries:
            yield name, [rows, columns], "F8_E4M3"
            yield name + "_scale_inv", [-(-rows // 128), -(-columns // 128)], "F32"

    yield "model.embed_tokens.weight", [vocab, hidden]
    for i in range(layers + (1 if layers == 61 else 0)):
        p = f"model.layers.{i}."
        if i == layers:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                yield f"{p}{name}.weight", [hidden]
            yield p + "embed_tokens.weight", [vocab, hidden]
            yield p + "eh_proj.weight", [hidden, 2 * hidden]
            yield p + "shared_head.head.weight", [vocab, hidden]
        yield p + "input_layernorm.weight", [hidden]
        yield p + "post_attention_layernorm.weight", [hidden]
        queries = heads * (d["qk_nope_head_dim"] + d["qk_rope_head_dim"])
        yield p + "self_attn.kv_a_layernorm.weight", [d["kv_lora_rank"]]
        if d["q_lora_rank"]:
            yield p + "self_attn.q_a_layernorm.weight", [d["q_lora_rank"]]
            yield from quantised([(p + "self_attn.q_a_proj.weight", (d["q_lora_rank"], hidden)),
                                  (p + "self_attn.q_b_proj.weight", (queries, d["q_lora_rank"]))])
        else:
            yield from quantised([(p + "self_attn.q_proj.weight", (queries, hidden))])
        yield from quantised([
            (p + "self_attn.kv_a_proj_with_mqa.weight", (d["kv_lora_rank"] + d["qk_rope_head_dim"], hidden)),
            (p + "self_attn.kv_b_proj.weight", (heads * (d["qk_nope_head_dim"] + d["v_head_dim"]), d["kv_lora_rank"])),
            (p + "self_attn.o_proj.weight", (hidden, heads * d["v_head_dim"]))])
        if i < d["first_k_dense_replace"]:
            yield from quantised(gated_mlps([p + "mlp."], hidden, ffn))
            continue
        yield p + "mlp.gate.weight", [d["n_routed_experts"], hidden]
        yield p + "mlp.gate.e_score_correction_bias", [d["n_routed_experts"]], "F32"
        prefixes = [f"{p}mlp.experts.{e}." for e in range(d["n_routed_experts"])]
        yield from quantised(gated_mlps(prefixes, hidden, d["moe_intermediate_size"]))
        yield from quantised(gated_mlps([p + "mlp.shared_experts."], hidden, d["n_shared_experts"] * d["moe_intermediate_size"]))
    yield "model.norm.weight", [hidden]
    yield "lm_head.weight", [vocab, hidden]


def num_bytes(shape, dtype="BF16"):
    n = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "U8": 1, "E8M0": 1}[dtype]
    for size in shape:
        n *= size
    return n


def write_file(path, entries, pool):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, *dtype in entries:
        size = num_bytes(shape, *dtype)
        stored = "U8" if dtype == ["E8M0"] else (*dtype, "BF16")[0]
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if pool is None:
            file.truncate(8 + len(text) + offset)
            return
        written = 0
        for kind, group in itertools.groupby(entries, lambda entry: kind_of(*entry)):
            end = written + sum(num_bytes(*entry[1:]) for entry in group)
            while written < end:  # the pool again and again, from another place each time
                start = (written // POOL_BYTES * 4099 * 2) % (POOL_BYTES // 2)
                part = memoryview(pool[kind])[start:start + min(end - written, POOL_BYTES // 2)]
                file.write(part)
                written += len(part)


def kind_of(name, shape, dtype="BF16"):
    """-> the pool that a tensor is cut from"""
    if dtype == "E8M0":
        return "exponents"
    if name.endswith("embed_tokens.weight"):
        return "embeddings"
    return "attention" if name.endswith(("attn.o_proj.weight", "attn.out_proj.weight")) else "weights"


def weights(size, exponent=-7):
    """Random bf16: any sign and mantissa, exponents from the given one, a multiple of four and one, to three more; -7 is a model's scale."""
    def repeated(word):
        return int.from_bytes(word * (size // 2), "little")
    bits = int.from_bytes(os.urandom(size), "little") & repeated(b"\xff\x81") | repeated((exponent + 127 << 7).to_bytes(2, "little"))
    return bits.to_bytes(size, "little")


def pools(experts):
    """-> kind: its bytes. Attention that adds as much as embeddings are makes all tokens of a deep random model alike, so that all choose the
    same eight of 128 experts. With larger embeddings and attention that adds little, experts are chosen 1.6 times as often as the mean at most."""
    plain = weights(POOL_BYTES)
    return {"weights": plain, "exponents": exponents(POOL_BYTES), "embeddings": weights(POOL_BYTES, -3) if experts else plain,
            "attention": weights(POOL_BYTES, -15) if experts else plain}


def exponents(size):
    """Random scales of blocks, 2^-10 to 2^-7."""
    return os.urandom(size).translate(bytes(117 + byte % 4 for byte in range(256)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--experts", type=int, help="of a layer of Qwen3.5 or GPT-OSS, instead of the shape's own")
    options = parser.parse_args()
    if options.experts:
        QWEN3_5.update(num_experts=options.experts)
        GPT_OSS_EXPERTS.update(dict.fromkeys(GPT_OSS_EXPERTS, options.experts))
    shape = SHAPES[options.shape]
    family, hidden, layers, heads, groups, dim, ffn, vocab, tied = shape
    options.folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": family.removesuffix("_mxfp4"), "hidden_act": "silu", "hidden_size": hidden, "num_hidden_layers": layers,
              "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": dim, "intermediate_size": ffn,
              "vocab_size": vocab, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6, "rope_theta": 500000.0,
              "max_position_embeddings": 32768, "dtype": "bfloat16"}
    if family == "qwen3_moe":
        config.update(num_experts=QWEN3_EXPERTS, moe_intermediate_size=ffn, num_experts_per_tok=8, norm_topk_prob=True,
                      decoder_sparse_step=1, mlp_only_layers=[], intermediate_size=6144)
    if family in GPT_OSS_EXPERTS:
        config.update(architectures=["GptOssForCausalLM"], num_local_experts=GPT_OSS_EXPERTS[family], num_experts_per_tok=4, attention_bias=True,
                      sliding_window=128, layer_types=[("full" if i % 2 else "sliding") + "_attention" for i in range(layers)], rms_norm_eps=1e-5,
                      max_position_embeddings=131072, swiglu_limit=7.0, rope_theta=150000.0,
                      rope_scaling={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                                    "original_max_position_embeddings": 4096})
    if family == "gpt_oss_mxfp4":
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    if family == "gemma3_text":
        del config["hidden_act"], config["rope_theta"]
        turns = {"rope_type": "default", "rope_theta": 1000000.0}
        config.update(architectures=["Gemma3ForCausalLM"], hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=dim,
                      sliding_window=1024, layer_types=[("full" if i % 6 == 5 else "sliding") + "_attention" for i in range(layers)],
                      rope_parameters={"full_attention": turns, "sliding_attention": {**turns, "rope_theta": 10000.0}})
    if family == "qwen3_5_moe_text":
        config.update(QWEN3_5, architectures=["Qwen3_5MoeForCausalLM"], moe_intermediate_size=ffn, mtp_num_hidden_layers=0,
                      layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (layers // 4), partial_rotary_factor=0.25,
                      rope_theta=10000000.0, rope_parameters={"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25})
        del config["intermediate_size"]
    if family == "qwen3_vl":
        turns = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20] if dim == 128 else [12, 10, 10], "mrope_interleaved": True}
        config.update(model_type="qwen3_vl_text", rope_theta=5e6, rope_parameters=turns)
        if vocab == 2000:
            VISION.update(depth=2, hidden_size=288, intermediate_size=512, num_heads=4, num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
        config = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "dtype": "bfloat16", "tie_word_embeddings": tied,
                  "image_token_id": vocab - 3, "video_token_id": vocab - 2, "vision_start_token_id": vocab - 5, "vision_end_token_id": vocab - 4,
                  "text_config": config, "vision_config": dict(VISION, model_type="qwen3_vl", hidden_act="gelu_pytorch_tanh", out_hidden_size=hidden)}
    if family in DEEPSEEK:
        config.update(DEEPSEEK[family], model_type="deepseek_v3", num_nextn_predict_layers=1 if layers == 61 else 0, rope_theta=10000.0)
        del config["head_dim"]
    if family == "deepseek_v3":
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (options.folder / "config.json").write_text(json.dumps(config, indent=2))
    files, size = [[]], 0
    for entry in tensors(shape):
        if size + num_bytes(*entry[1:]) > SHARD_BYTES:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += num_bytes(*entry[1:])
    pool = None if options.sparse else pools(any("experts" in name for name, *_ in itertools.chain(*files)))
    weight_map = {}
    for i, entries in enumerate(files):
        name = "model.safetensors" if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        write_file(options.folder / name, entries, pool)
        weight_map.update({tensor: name for tensor, *_ in entries})
    if len(files) > 1:
        (options.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


if __name__ == "__main__":
    main()
