#!/usr/bin/env python3
"""Writes the logits of transformers for a checkpoint: the reference of `ferry verify --logits CHECKPOINT --reference FILE`.

    hf_reference.py CHECKPOINT FILE [--dtype bfloat16] [--device cpu] [--lengths 24,100] [--seed 1] [--tokens FILE] [--layers] [--gradients]

FILE is a safetensors file, in the dtype of the model. For each sequence i it has

    tokens.i [tokens], logits.i [tokens, vocabulary]
    hidden.i.MODULE                       with --layers: the output of the embedding, of each layer's attention and feed-forward network,
                                          of each layer and of the last norm, under Megatron's names
    cotangent.i, gradient.PARAMETER       with --gradients

The metadata describes the run: one unpadded sequence at a time, eager attention on the host; on a GPU flash attention if it takes the head
sizes (GPT-OSS and soft caps: eager attention; sliding windows: torch's flash attention with a window, as transformers' flash_attention_2 calls
it), cuBLASLt without split-K, no TF32. --tokens names a safetensors file with the sequences (`tokens.i`); by default they are random, of the
given lengths.
"""
import argparse
import contextlib
import json
import os
import re
import sys


WINDOWED = "windowed"  # transformers asks for a package of its own where a name has "flash"


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("file")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float64"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", choices=("eager", "sdpa", WINDOWED), help="default: eager on the host, for GPT-OSS and soft caps; on a GPU sdpa, "
                        f"or {WINDOWED} for models with sliding windows or values that are narrower than keys")
    parser.add_argument("--lengths", default="24,100")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--gradients", action="store_true", help="also of the sum of logits * cotangent, over all sequences")
    return parser.parse_args(arguments)


def megatron_name(name):
    """-> Megatron's name of a module whose output is kept, or None"""
    name = name.replace("model.language_model.", "model.", 1)  # of a model that also sees
    if name == "model.embed_tokens":
        return "embedding"
    if name == "model.norm":
        return "decoder.final_layernorm"
    match = re.fullmatch(r"model\.layers\.(\d+)(?:\.(self_attn|linear_attn|mlp|block_sparse_moe))?", name)
    if not match:
        return None
    layer = f"decoder.layers.{match[1]}"
    return layer if match[2] is None else f"{layer}.{'self_attention' if match[2].endswith('attn') else 'mlp'}"


def load(options):
    import torch
    import transformers
    config = transformers.AutoConfig.from_pretrained(options.checkpoint)
    architecture = (config.architectures or ["ForCausalLM"])[0]
    heads = {"ForCausalLM": transformers.AutoModelForCausalLM,
             "ForTokenClassification": transformers.AutoModelForTokenClassification,
             "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
             "ForConditionalGeneration": transformers.AutoModelForImageTextToText}
    kind = next((auto for head, auto in heads.items() if architecture.endswith(head)), None)
    if kind is None:
        sys.exit(f"{options.checkpoint}: {architecture} ends in none of {', '.join(heads)}")
    text = config.get_text_config()
    eager = options.device == "cpu" or config.model_type == "gpt_oss" or getattr(text, "attn_logit_softcapping", None)
    windows = "sliding_attention" in (getattr(text, "layer_types", None) or ())
    narrow = getattr(text, "kv_lora_rank", None) and text.v_head_dim < text.qk_nope_head_dim + text.qk_rope_head_dim
    attention = options.attention or ("eager" if eager else WINDOWED if windows or narrow else "sdpa")
    if attention == WINDOWED:
        transformers.AttentionInterface.register(WINDOWED, windowed)
    experts = {"experts_implementation": "eager"} if options.dtype == "float64" else {}  # grouped_mm has no fp64
    model = kind.from_pretrained(options.checkpoint, dtype=getattr(torch, options.dtype), attn_implementation=attention, **experts)
    return model.eval().to(options.device), attention


def windowed(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **kwargs):
    """Attention of whole sequences [batch, heads, tokens, dim], causal, by torch's flash kernel, which sdpa gives no window and no values that
    are narrower than keys. These are padded as flash_attention_forward of transformers pads them."""
    import torch
    rows_first = [x.transpose(1, 2) for x in (query, key, value)]
    length, width = query.shape[2], value.shape[3]
    rows_first[2] = torch.nn.functional.pad(rows_first[2], [0, query.shape[3] - width])
    output, *_ = torch.ops.aten._flash_attention_forward(*rows_first, None, None, length, length, 0.0, True, False, scale=scaling,
                                                         window_size_left=None if sliding_window is None else sliding_window - 1,
                                                         window_size_right=None if sliding_window is None else 0)
    return output[..., :width], None


def pin_gpu(latent):
    """Products that do not split K and one attention kernel: what a row's bits depend on is then the row alone. Called before torch
    is imported. The fp32 router of models with latent attention has no workspace to split K in."""
    if latent:
        os.environ.update(CUBLAS_WORKSPACE_CONFIG=":16:8", CUBLASLT_WORKSPACE_SIZE="1")
    import torch
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_tf32 = False
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def copies(model, tokens, device):
    """-> the number of copies of a sequence in one batch at which flash does not split the keys: splitting gives other bits. Of eager
    attention with sinks that at which cuBLAS adds up values 8 keys at a time at every length from 64 on."""
    import torch
    heads = model.config.get_text_config().num_attention_heads
    if model.config.model_type == "gpt_oss":
        return -(-256 // heads)
    blocks = heads * -(-len(tokens) // 64)
    enough = -(-int(1.6 * torch.cuda.get_device_properties(device).multi_processor_count + 1) // blocks)
    return max(1, enough)


def sequences(options, vocabulary):
    import torch
    if options.tokens:
        from safetensors.torch import load_file
        stored = load_file(options.tokens)
        return [stored[f"tokens.{i}"] for i in range(sum(name.startswith("tokens.") for name in stored))]
    generator = torch.Generator().manual_seed(options.seed)
    return [torch.randint(vocabulary, (int(length),), generator=generator) for length in options.lengths.split(",")]


def as_stored(checkpoint, model, gradients):
    """{parameter: gradient} -> the same under the names and of the shapes that the checkpoint has, by transformers' own rules for saving. transformers
    5.17 renames layers of Kimi K2.5 like blocks of its tower, and does not transpose Qwen3-VL's experts back."""
    from safetensors import safe_open
    from transformers.core_model_loading import revert_weight_conversion
    shapes = {}
    for path in sorted(os.listdir(checkpoint)):
        if path.endswith(".safetensors"):
            with safe_open(os.path.join(checkpoint, path), "pt") as file:
                shapes.update((name, file.get_slice(name).get_shape()) for name in file.keys())
    reverted = {name.replace("language_model.model.blocks.", "language_model.model.layers."): gradient
                for name, gradient in revert_weight_conversion(model, gradients).items()}
    return {name: (gradient if list(gradient.shape) == list(shapes[name]) else gradient.transpose(1, 2)).contiguous()
            for name, gradient in {**reverted, **gradients}.items() if name in shapes}


def main(arguments=None):
    """Runs the command with these arguments. A test that makes many references calls it and imports transformers once."""
    options = parse(arguments)
    pinned = contextlib.nullcontext()
    if options.device != "cpu":
        with open(os.path.join(options.checkpoint, "config.json")) as file:
            latent = "kv_lora_rank" in json.load(file)
        pinned = pin_gpu(latent)
    import torch
    import transformers
    from safetensors.torch import save_file
    model, attention = load(options)
    if options.gradients:  # nothing is padded here: a pad token is one like others
        model.get_input_embeddings().padding_idx = None
    kept = {}
    hooks = []
    prefix = ""

    # Granite's model multiplies what its embedding gives.
    multiplier = getattr(model.config.get_text_config(), "embedding_multiplier", 1)

    def keep(name):
        def hook(module, inputs, output):
            of_module = (output[0] if isinstance(output, tuple) else output).detach()[0]
            kept[f"hidden.{prefix}.{name}"] = (of_module * multiplier if name == "embedding" else of_module).cpu().contiguous()
        return hook
    if options.layers:
        for name, module in model.named_modules():
            if kept_name := megatron_name(name):
                hooks.append(module.register_forward_hook(keep(kept_name)))
    tensors = {}
    with torch.set_grad_enabled(options.gradients), pinned:
        for i, tokens in enumerate(sequences(options, model.config.get_text_config().vocab_size)):
            prefix = str(i)
            batch = tokens[None].expand(1 if options.device == "cpu" else copies(model, tokens, options.device), -1).to(options.device)
            # Every token's scores: a classifier of sequences would keep the last token's alone.
            if hasattr(model, "score"):
                output = model.score(model.model(batch, use_cache=False).last_hidden_state)
            else:
                output = model(batch, use_cache=False).logits
            if options.gradients:
                generator = torch.Generator().manual_seed(options.seed + i)
                cotangent = torch.randn(output[0].shape, generator=generator).to(torch.bfloat16)
                tensors[f"cotangent.{i}"] = cotangent
                output[0].backward(cotangent.to(options.device, output.dtype))
            tensors[f"tokens.{i}"] = tokens.contiguous()
            tensors[f"logits.{i}"] = output[0].detach().cpu().contiguous()
    tensors.update(kept)
    if options.gradients:
        gradients = {name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None}
        tensors.update((f"gradient.{name}", gradient) for name, gradient in as_stored(options.checkpoint, model, gradients).items())
    regime = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": options.dtype, "device": options.device,
              "attention": attention, "experts": getattr(model.config, "_experts_implementation", None) or "none",
              "checkpoint": os.path.abspath(options.checkpoint), "threads": torch.get_num_threads()}
    if options.device != "cpu":
        regime["gpu"] = torch.cuda.get_device_name()
    save_file(tensors, options.file, metadata={"ferry_reference": "1", "regime": json.dumps(regime)})
    print(f"{options.file}: {len([t for t in tensors if t.startswith('logits.')])} sequences, {json.dumps(regime)}", file=sys.stderr)


if __name__ == "__main__":
    main()
