#!/usr/bin/env python3
"""Counts log-probabilities of generated tokens that differ from those of a full forward of the finished sequence, alone: of `ferry
generate`, beside the transformers' forward; and of transformers' own generate, beside its own forward. bf16 on the host, eager attention.

    generate_beside_transformers.py CHECKPOINT [--prompts 16] [--prompt-tokens 5,24] [--max-tokens 32] [--temperature 1]
"""
import argparse
import json
import os
import subprocess
from pathlib import Path

import torch
import transformers

FERRY = Path(os.environ.get("FERRY", Path(__file__).resolve().parents[2] / "build/cli/ferry"))


def load(checkpoint, dtype=torch.bfloat16):
    transformers.logging.set_verbosity_error()
    sees = hasattr(transformers.AutoConfig.from_pretrained(checkpoint), "vision_config")
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None  # go on to the last token
    model.generation_config.pad_token_id = 0
    return model


def random_prompts(model, count, lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, model.config.get_text_config().vocab_size, (lengths[i % len(lengths)],), generator=generator).tolist() for i in range(count)]


@torch.no_grad()
def forward_log_probs(model, prompt, answer):
    """-> [answer, vocabulary], of the whole sequence in one forward; of GPT-OSS, filled up behind to a multiple of 16 tokens."""
    tokens = prompt + answer
    padding = -len(tokens) % 16 if model.config.model_type == "gpt_oss" else 0
    logits = model(torch.tensor([tokens + [0] * padding])).logits[0]
    return torch.log_softmax(logits[len(prompt) - 1:len(tokens) - 1].float(), -1)


def chosen(log_probs, answer):
    return log_probs.gather(1, torch.tensor(answer)[:, None])[:, 0]


def ours(checkpoint, prompts, *arguments):
    """-> [(answer, log-probabilities)] of ferry generate, all prompts in one batch."""
    lines = "".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in prompts)
    done = subprocess.run([FERRY, "generate", checkpoint, "--input", "-", "--json", "-q", "--ignore-eos", *map(str, arguments)], input=lines,
                          stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    outputs = [json.loads(line)["outputs"][0] for line in done.stdout.splitlines()]
    return [(o["token_ids"], torch.tensor(o["model_logprobs"], dtype=torch.float32)) for o in outputs]


@torch.no_grad()
def theirs(model, prompts, max_tokens, temperature, batched):
    """The same of transformers' generate: each prompt alone, or all in one batch, padded on the left."""
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {"do_sample": False}
    answers = []
    for group in [prompts] if batched else [[p] for p in prompts]:
        longest = max(map(len, group))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in group])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in group])
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, output_logits=True, return_dict_in_generate=True, **how)
        log_probs = torch.log_softmax(torch.stack(out.logits, 1).float(), -1)  # [prompts, tokens, vocabulary]
        for i in range(len(group)):
            answer = out.sequences[i, longest:].tolist()
            answers.append((answer, chosen(log_probs[i], answer)))
    return answers


def compare(model, prompts, answers):
    """-> tokens, how many differ in any bit, the largest difference."""
    tokens = unequal = 0
    largest = 0.0
    for prompt, (answer, log_probs) in zip(prompts, answers, strict=True):
        expected = chosen(forward_log_probs(model, prompt, answer), answer)
        tokens += len(answer)
        unequal += int((expected.view(torch.int32) != log_probs.view(torch.int32)).sum())
        largest = max(largest, (expected - log_probs).abs().max().item())
    return tokens, unequal, largest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", default="5,24")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    model = load(options.checkpoint)
    prompts = random_prompts(model, options.prompts, [int(n) for n in options.prompt_tokens.split(",")])
    torch.manual_seed(0)
    rows = {"ferry generate, one batch": ours(options.checkpoint, prompts, "--max-tokens", options.max_tokens, "--temperature", options.temperature),
            "transformers, one at a time": theirs(model, prompts, options.max_tokens, options.temperature, batched=False),
            "transformers, one batch": theirs(model, prompts, options.max_tokens, options.temperature, batched=True)}
    for name, answers in rows.items():
        tokens, unequal, largest = compare(model, prompts, answers)
        print(f"{name:<28} {unequal:>6} of {tokens} log-probabilities differ from the forward, by {largest:.3g} at most")


if __name__ == "__main__":
    main()
