#!/usr/bin/env python3
"""Measures a training step of transformers with torch.optim.AdamW(fused=True), beside `ferry train sft`:
hf_train_bench.py CHECKPOINT [MICRO_BATCHES] [SEQUENCES] [LENGTH] [STEPS]

Weights, gradients and the optimizer's moments are bf16: there are no fp32 masters, which Ferry has."""
import json
import sys
import time


def main(folder, micro_batches=4, sequences=4, length=2048, steps=6):
    import torch
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").cuda()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(model.config.vocab_size, (micro_batches, sequences, length), device="cuda")
    best = 1e30
    for step in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for batch in ids:
            logits = model(batch, use_cache=False).logits[:, :-1].float()
            (torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / micro_batches).backward()
            del logits
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step:
            best = min(best, time.perf_counter() - start)
    print(json.dumps({"program": f"transformers {transformers.__version__}", "step_ms": 1e3 * best, "tokens_per_second": ids.numel() / best,
                      "peak_gib": torch.cuda.max_memory_allocated() / 2**30}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
