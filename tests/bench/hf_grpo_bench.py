#!/usr/bin/env python3
"""Measures a step of GRPO in plain PyTorch and transformers, beside `ferry train grpo` (grpo_bench.py runs both):
hf_grpo_bench.py CHECKPOINT PROMPTS.json [--samples 8] [--response-length 512] [--steps 2]

PROMPTS.json is a list of prompts of one length, each a list of token ids. Weights and gradients are bf16, masters and moments fp32, for
AdamW(fused=True). If a batch does not fit, half of it is tried; gradient checkpointing comes last. The last line is the report in JSON."""
import argparse
import json
import sys
import time
import zlib
from contextlib import contextmanager

import torch
import transformers

CLIP_RATIO = 0.2


class Policy:
    def __init__(self, folder, device):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
        self.weights = list(self.model.parameters())
        self.masters = [weight.detach().float() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-6, fused=True)

    def generate(self, prompts, length):
        """prompts [rows, P] -> [rows, P + length]"""
        self.model.eval()
        self.model.config.use_cache = True
        config = transformers.GenerationConfig(max_new_tokens=length, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0)
        with torch.no_grad():
            return self.model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)

    def log_probs(self, tokens, length):
        """tokens [rows, P + length] -> of the answers [rows, length]; their logits alone are computed."""
        logits = self.model(tokens, use_cache=False, logits_to_keep=length + 1).logits[:, :-1].float()
        chosen = logits.gather(-1, tokens[:, -length:, None]).squeeze(-1)
        return chosen - logits.logsumexp(-1)

    def learn(self, tokens, old_log_probs, advantages, share):
        """Adds the gradient of a micro-batch, which is that share of the tokens."""
        ratio = (self.log_probs(tokens, old_log_probs.size(1)) - old_log_probs).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO) * advantages)
        (-gain.mean() * share).backward()

    @torch.no_grad()
    def step(self):
        for master, weight in zip(self.masters, self.weights):
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch._foreach_copy_(self.weights, self.masters)

    def forget_gradients(self):
        self.model.zero_grad(set_to_none=True)


def in_parts(rows, size, body):
    return torch.cat([body(slice(begin, begin + size)) for begin in range(0, rows, size)])


class Fitting:
    """Tries less at a time until memory is enough, and remembers what was."""

    def __init__(self, policy, rows, micro_batch):
        self.policy = policy
        self.sizes = {"gen": rows, "old_log_prob": micro_batch, "update_actor": micro_batch}
        self.checkpoints = False

    def run(self, phase, body):
        while True:
            try:
                return body(self.sizes[phase])
            except torch.OutOfMemoryError as error:
                print(f"{phase}: {self.sizes[phase]} at a time do not fit", file=sys.stderr)
                error.__traceback__ = None
            self.policy.forget_gradients()
            torch.cuda.empty_cache()
            if self.sizes[phase] > 1:
                self.sizes[phase] //= 2
            elif not self.checkpoints:
                self.policy.model.gradient_checkpointing_enable()
                self.checkpoints = True
            else:
                raise MemoryError(f"{phase}: one sequence does not fit")


def advantages_of(tokens, length, samples):
    """Each answer's score, a number out of its bytes, against those of its group: [rows, 1]"""
    scores = [zlib.crc32(row.numpy().tobytes()) % 1000 / 1000 for row in tokens[:, -length:].cpu()]
    groups = torch.tensor(scores).view(-1, samples)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)


def grpo_step(policy, fitting, prompts, samples, length, phase):
    rows = prompts.size(0)
    with phase("gen"):
        tokens = fitting.run("gen", lambda size: in_parts(rows, size, lambda part: policy.generate(prompts[part], length)))
    with phase("reward"):
        advantages = advantages_of(tokens, length, samples).to(tokens.device)
    policy.model.train()
    policy.model.config.use_cache = False
    with phase("old_log_prob"), torch.no_grad():
        old = fitting.run("old_log_prob", lambda size: in_parts(rows, size, lambda part: policy.log_probs(tokens[part], length)))

    def learn(size):
        for begin in range(0, rows, size):
            part = slice(begin, begin + size)
            policy.learn(tokens[part], old[part], advantages[part], len(tokens[part]) / rows)

    with phase("update_actor"):
        fitting.run("update_actor", learn)
        policy.step()
    return tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("prompts")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response-length", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=16, help="sequences, at most")
    parser.add_argument("--steps", type=int, default=2, help="the first one warms up")
    parser.add_argument("--device", default="cuda")
    flags = parser.parse_args()
    on_gpu = flags.device == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    with open(flags.prompts) as file:
        prompts = torch.tensor(json.load(file), device=flags.device).repeat_interleave(flags.samples, 0)
    torch.manual_seed(1)
    policy = Policy(flags.checkpoint, flags.device)
    fitting = Fitting(policy, prompts.size(0), flags.micro_batch)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    steps = []
    for _ in range(flags.steps):
        seconds = {}

        @contextmanager
        def phase(name):
            synchronize()
            start = time.perf_counter()
            yield
            synchronize()
            seconds[name] = time.perf_counter() - start

        start = time.perf_counter()
        tokens = grpo_step(policy, fitting, prompts, flags.samples, flags.response_length, phase)
        synchronize()
        steps.append({"phases": seconds, "seconds": time.perf_counter() - start, "tokens": tokens.numel()})
    print(json.dumps({
        "program": f"torch {torch.__version__}, transformers {transformers.__version__}", "steps": steps, "at_a_time": fitting.sizes,
        "gradient_checkpointing": fitting.checkpoints, "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu"}))


if __name__ == "__main__":
    main()
