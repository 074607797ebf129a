#!/usr/bin/env python3
"""Measures generation by transformers, beside rollout_bench: hf_generate_bench.py CHECKPOINT [BATCH] [INPUT] [OUTPUT] [--continuous]

Requests of one length, all present from the beginning, drawn at temperature 1; the faster of two rounds. --continuous runs its continuous
batching (generate_batch); the default is generate. --load-format dummy gives a model random weights, and needs config.json alone."""
import argparse
import json
import time


def main():
    import torch
    import transformers
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("batch", type=int, nargs="?", default=1)
    parser.add_argument("input", type=int, nargs="?", default=128)
    parser.add_argument("output", type=int, nargs="?", default=128)
    parser.add_argument("--continuous", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    flags = parser.parse_args()
    config = transformers.AutoConfig.from_pretrained(flags.checkpoint)
    attention = "eager" if config.model_type == "gpt_oss" else "paged|sdpa" if flags.continuous else "sdpa"
    kind, options = transformers.AutoModelForCausalLM, {"dtype": torch.bfloat16, "attn_implementation": attention}
    if flags.load_format == "dummy":
        with torch.device(flags.device):
            model = kind.from_config(config, **options)
    else:
        model = kind.from_pretrained(flags.checkpoint, **options)
    model = model.to(flags.device).eval()
    ids = torch.randint(1000, model.config.vocab_size - 1, (flags.batch, flags.input), device=flags.device)
    config = transformers.GenerationConfig(max_new_tokens=flags.output, min_new_tokens=None if flags.continuous else flags.output, do_sample=True,
                                           top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0, eos_token_id=-1 if flags.continuous else None)
    synchronize = torch.cuda.synchronize if flags.device == "cuda" else lambda: None

    def generate():
        if flags.continuous:
            outputs = model.generate_batch(inputs=ids.tolist(), generation_config=config)
            return sum(len(one.generated_tokens) for one in outputs.values())
        return model.generate(ids, generation_config=config).shape[1] * flags.batch - ids.numel()

    best, tokens = 1e30, 0
    with torch.no_grad():
        for _ in range(2):
            synchronize()
            start = time.perf_counter()
            tokens = generate()
            synchronize()
            best = min(best, time.perf_counter() - start)
    report = {"program": f"transformers {transformers.__version__}", "call": "generate_batch" if flags.continuous else "generate", "batch": flags.batch,
              "output_tokens_per_second": tokens / best, "seconds": best, "output_tokens": tokens}
    if flags.device == "cuda":
        report["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(report))


if __name__ == "__main__":
    main()
