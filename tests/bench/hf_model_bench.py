#!/usr/bin/env python3
"""Measures with transformers what tests/bench/model_bench.cc measures: hf_model_bench.py CHECKPOINT TOKENS SEQUENCES [cpu|cuda] [ROUNDS] [HEIGHT WIDTH]

HEIGHT and WIDTH are the patches of an image with which each sequence begins."""
import json
import sys
import time


def main(folder, tokens, sequences, device="cpu", rounds=5, height=0, width=0):
    import torch
    import transformers
    torch.manual_seed(1)
    attention = "eager" if transformers.AutoConfig.from_pretrained(folder).model_type == "gpt_oss" else "sdpa"
    kind = transformers.AutoModelForImageTextToText if height else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=attention).to(device)
    config = model.config.get_text_config()
    model.train()
    ids = torch.randint(config.vocab_size, (sequences, tokens // sequences), device=device)
    seen = {}
    if height:
        image, vision = model.config.image_token_id, model.config.vision_config
        of_image = height * width // vision.spatial_merge_size**2
        ids[ids == image] = image + 1
        ids[:, :of_image] = image
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        seen = {"pixel_values": torch.randn(sequences * height * width, patch, device=device, dtype=torch.bfloat16),
                "image_grid_thw": torch.tensor([[1, height, width]] * sequences, device=device),
                "mm_token_type_ids": (ids == image).int()}
    labels = torch.randint(config.vocab_size, (tokens,), device=device)
    sync = torch.cuda.synchronize if device != "cpu" else (lambda: None)

    def measure(body):
        best = 1e30
        for round_ in range(rounds + 1):
            sync()
            start = time.perf_counter()
            body()
            sync()
            if round_:
                best = min(best, time.perf_counter() - start)
        return best

    def forward():
        with torch.inference_mode():
            model(ids, use_cache=False, **seen)

    def both():
        model.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(ids, use_cache=False, **seen).logits.view(tokens, -1).float(), labels).backward()
    seconds = measure(forward)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    whole = measure(both)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device != "cpu" else 0
    print(json.dumps({"program": f"transformers {transformers.__version__}", "forward_ms": 1e3 * seconds, "forward_backward_ms": 1e3 * whole,
                      "tokens_per_second": tokens / whole, "peak_gib": peak}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:5], *map(int, sys.argv[5:8]))
