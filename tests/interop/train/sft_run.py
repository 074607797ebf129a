"""Helpers of the tests of `ferry train sft`: a tiny model with its tokenizer, conversations that can be learned, and runs of several ranks."""
import json

from ranks import finish, start_training
from support import run_ok

TEMPLATE = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
BATCH, STEPS, RATE = 4, 6, 5e-3
# The shape of a Qwen3Next of four layers, which transformers makes without the prediction layer that config.json would promise.
HYBRID = dict(layer_types=["linear_attention"] * 3 + ["full_attention"], linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
              linear_value_head_dim=12, linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
              shared_expert_intermediate_size=20, mtp_num_hidden_layers=0)
# Gemma's and Ministral's own parts, on sequences of a few dozen tokens; their embeddings take the pad token for any other.
GEMMA = dict(sliding_window=6, query_pre_attn_scalar=6, tie_word_embeddings=True, pad_token_id=None)
MINISTRAL = dict(pad_token_id=None, rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=8,
                                                         mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1))
WORDS = "one two three four five six seven eight nine ten".split()


def conversations():
    """Counting on: what follows is a function of what was said, so there is something to learn."""
    rows = []
    for i in range(BATCH * STEPS):
        turns = []
        for turn in range(1 + i % 2):
            begin = (3 * i + turn) % 7
            said = " ".join(WORDS[begin:begin + 2 + i % 3])
            turns += [{"role": "user", "content": said}, {"role": "assistant", "content": WORDS[(begin + 2 + i % 3) % 10]}]
        rows.append({"messages": turns})
    return rows


def write_tokenizer(folder):
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([" ".join(WORDS)] * 10, trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>", "<|user|>", "<|assistant|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_model(folder, family="Llama", **changes):
    """4 layers, or another shape, in fp32."""
    import torch
    import transformers
    torch.manual_seed(1)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                 vocab_size=304, max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=None, eos_token_id=0, dtype="float32")
    config = getattr(transformers, f"{family}Config")(**shape | changes)
    getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).save_pretrained(folder)
    write_tokenizer(folder)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(world, run, **more):
    """On the host, in fp32; None takes a setting away."""
    values = {"model.path": str(world / "model"), "data.train_files": [str(world / "train.jsonl")], "data.shuffle": False,
              "data.train_batch_size": BATCH, "data.max_length": 96, "data.max_token_len_per_gpu": 96, "optim.lr": RATE,
              "optim.weight_decay": 0.1, "engine.dtype": "float32", "engine.make_vocab_size_divisible_by": 8,
              "trainer.device": "cpu", "trainer.default_local_dir": str(run)} | more
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]


def start_ranks(count, arguments, limits={}, **environment):
    return start_training(count, "sft", arguments, limits, **environment)


def train(world, run, ranks=1, **more):
    """The losses of a whole run."""
    for rank, (status, said) in enumerate(finish(start_ranks(ranks, settings(world, run, **more)), timeout=120)):
        assert status == 0, f"rank {rank}: {said[-3000:]}"
    return losses(run)


def losses(run):
    return [line["data"]["train/loss"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]


def assert_equal_states(*runs):
    """Masters and moments, too."""
    assert "entries of training state" not in run_ok("verify", *runs).stdout
