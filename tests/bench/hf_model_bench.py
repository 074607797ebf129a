#!/usr/bin/env python3
"""Measures with transformers what tests/bench/model_bench.cc measures: hf_model_bench.py CHECKPOINT TOKENS SEQUENCES [cpu|cuda] [ROUNDS]"""
import json
import sys
import time


def main(folder, tokens, sequences, device="cpu", rounds=5):
    import torch
    import transformers
    torch.manual_seed(1)
    attention = "eager" if transformers.AutoConfig.from_pretrained(folder).model_type == "gpt_oss" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16,
                                                              attn_implementation=attention).to(device)
    config = model.config
    model.train()
    ids = torch.randint(config.vocab_size, (sequences, tokens // sequences), device=device)
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
            model(ids, use_cache=False)

    def both():
        model.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(ids, use_cache=False).logits.view(tokens, -1).float(), labels).backward()
    seconds = measure(forward)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    whole = measure(both)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device != "cpu" else 0
    print(json.dumps({"program": f"transformers {transformers.__version__}", "forward_ms": 1e3 * seconds, "forward_backward_ms": 1e3 * whole,
                      "tokens_per_second": tokens / whole, "peak_gib": peak}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:5], *map(int, sys.argv[5:6]))
