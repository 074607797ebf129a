"""Helpers of the tests that learn from prompts with images: a tiny Qwen3-VL in bf16, images, and prompts in verl's form."""
import ppo_run
import seeing_model
from ppo_run import ACTOR, ROLLOUT
from sft_run import write_rows

SIZES = [(40, 56), (33, 90), (61, 44), (64, 64)]


def write_world(folder, family="Qwen3VL"):
    """A model in bf16, and prompts about two images, about one and about none."""
    (folder / "model").mkdir()
    seeing_model.write_model(folder / "model", family)
    (folder / "reward.py").write_text(ppo_run.REWARD)
    write_rows(folder / "train.jsonl", prompts(folder, 0))
    return folder


def prompts(folder, seed):
    """The seed changes the pixels of images, not their sizes."""
    import numpy as np
    from PIL import Image
    random = np.random.default_rng(seed)
    rows = []
    for i, (height, width) in enumerate(SIZES):
        name = str(folder / f"{seed}.{i}.png")
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(name)
        rows.append(row("<image> what is this" if i % 2 else "<image> and <image> in that", [{"path": name}] * (1 if i % 2 else 2)))
    return [*rows, row("what is this", None)]


def row(content, images):
    return {"data_source": "seeing", "prompt": [{"role": "user", "content": content}], "images": images,
            "reward_model": {"style": "rule", "ground_truth": "one"}}


def rl_settings(**more):
    return {"data.max_prompt_length": 300, f"{ACTOR}.ppo_max_token_len_per_gpu": 700, f"{ACTOR}.megatron.dtype": "bfloat16",
            f"{ROLLOUT}.max_num_batched_tokens": 512, f"{ROLLOUT}.kv_cache_bytes": 8 << 20, f"{ACTOR}.optim.lr": 1e-2, "data.shuffle": False,
            "data.train_batch_size": 5, f"{ACTOR}.ppo_mini_batch_size": 5} | more
