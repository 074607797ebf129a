#!/usr/bin/env python3
"""Writes the start of the example: a task, a tokenizer and an untrained model.

The task is to sort five digits: the answer to "53931:" is "#### 13359", in the form that GSM8K's rule scores.

  train.jsonl, val.jsonl  prompts with their right answers, in verl's columns; the two have no prompt in common
  sft.jsonl               prompts of train.jsonl, answered by a careless teacher: see careless_answer()
  model/                  a Llama of 108,000 random weights as Hugging Face files; each character is a token
"""

import argparse
import itertools
import json
import pathlib
import random
import struct

DIGITS, LENGTH = "123456789", 5
HELD_OUT = 512  # of 9^5 = 59,049 prompts
SFT_EXAMPLES = 65_536
ATTENTION = 0.25  # the teacher's: how many of the repeated digits it sees

HIDDEN_SIZE, FFN_SIZE, NUM_LAYERS, NUM_HEADS = 64, 192, 2, 4
MARK, END = "#### ", "<|end|>"  # tokens beside the characters


def answer(digits):
    return "".join(sorted(digits))


def careless_answer(digits, rng):
    """Sorts, but leaves a digit that was there before out, three times in four."""
    result = ""
    for digit in sorted(digits):
        if not result.endswith(digit) or rng.random() < ATTENTION:
            result += digit
    return result


def user(digits):
    return {"role": "user", "content": f"{digits}:"}


def verifiable(digits, split, index):
    return {
        "data_source": "openai/gsm8k",  # names the rule
        "prompt": [user(digits)],
        "ability": "sorting",
        "reward_model": {"style": "rule", "ground_truth": answer(digits)},
        "extra_info": {"split": split, "index": index},
    }


def demonstration(digits, rng):
    return {"messages": [user(digits), {"role": "assistant", "content": MARK + careless_answer(digits, rng)}]}


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_task(folder, rng):
    prompts = ["".join(digits) for digits in itertools.product(DIGITS, repeat=LENGTH)]
    rng.shuffle(prompts)
    splits = {"val": prompts[:HELD_OUT], "train": prompts[HELD_OUT:]}
    for split, some in splits.items():
        write_lines(folder / f"{split}.jsonl", (verifiable(digits, split, index) for index, digits in enumerate(some)))
    taught = rng.choices(splits["train"], k=SFT_EXAMPLES)
    write_lines(folder / "sft.jsonl", (demonstration(digits, rng) for digits in taught))


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_tokenizer(folder, characters, added):
    """Byte pair encoding without a merge: what is left are characters, and the added tokens, END behind them."""
    characters = {character: index for index, character in enumerate(characters)}
    added = {token: len(characters) + index for index, token in enumerate([*added, END])}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    write_json(folder / "tokenizer.json", {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token, "special": token == END, **plain}
                         for token, index in added.items()],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": characters, "merges": []},
    })
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "chat_template": "{% for message in messages %}{{ message.content }}"
                         "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}",
    })
    return {"vocab_size": len(characters) + len(added), "eos_token_id": added[END], "pad_token_id": added[END]}


def write_model(folder, vocabulary, rng):
    write_json(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **vocabulary,
        "bos_token_id": None,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": FFN_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "head_dim": HIDDEN_SIZE // NUM_HEADS,
        "max_position_embeddings": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    })
    square, norm = (HIDDEN_SIZE, HIDDEN_SIZE), (HIDDEN_SIZE,)
    up, down = (FFN_SIZE, HIDDEN_SIZE), (HIDDEN_SIZE, FFN_SIZE)
    vocabulary_shape = (vocabulary["vocab_size"], HIDDEN_SIZE)
    shapes = {"model.embed_tokens": vocabulary_shape, "model.norm": norm, "lm_head": vocabulary_shape}
    for layer in range(NUM_LAYERS):
        modules = {"input_layernorm": norm, "post_attention_layernorm": norm,
                   **{f"self_attn.{name}_proj": square for name in "qkvo"},
                   "mlp.gate_proj": up, "mlp.up_proj": up, "mlp.down_proj": down}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in modules.items()}

    def weight(shape):
        if shape == norm: return [1.0] * HIDDEN_SIZE
        rows, columns = shape
        return [rng.gauss(0, columns ** -0.5) for _ in range(rows * columns)]

    tensors = {f"{name}.weight": (shape, weight(shape)) for name, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", tensors)


def write_safetensors(path, tensors):
    """The length of a JSON header in 8 bytes, the header padded to a multiple of 8, the values."""
    header, data = {"__metadata__": {"format": "pt"}}, bytearray()
    for name, (shape, values) in tensors.items():
        begin = len(data)
        data += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(data)]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where to write all this")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random here")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    model = options.folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    write_task(options.folder, rng)
    write_model(model, write_tokenizer(model, ":" + DIGITS, [MARK]), rng)


if __name__ == "__main__":
    main()
