"""`ferry train sft` beside an independent trainer: transformers with torch's AdamW, the same conversations in the same order."""
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from support import FERRY, ferry, run_ok

TORCH_PROGRAM = FERRY.parent / "ferry-torch"
pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")

TEMPLATE = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
BATCH, STEPS, RATE = 4, 6, 5e-3
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


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A small model with its tokenizer, and the conversations."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    folder = tmp_path_factory.mktemp("sft")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    tokenizer.train_from_iterator([" ".join(WORDS)] * 10, trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    model = folder / "model"
    fast.save_pretrained(model)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                                      head_dim=8, vocab_size=304, max_position_embeddings=128, tie_word_embeddings=False,
                                      bos_token_id=None, eos_token_id=0, dtype="float32")
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in conversations()))
    return folder


def settings(world, run, **more):
    values = {"model.path": str(world / "model"), "data.train_files": [str(world / "train.jsonl")], "data.shuffle": False,
              "data.global_batch_size": BATCH, "data.max_length": 96, "data.max_token_len_per_gpu": 96, "optim.lr": RATE,
              "optim.weight_decay": 0.1, "engine.dtype": "float32", "engine.make_vocab_size_divisible_by": 8,
              "trainer.device": "cpu", "trainer.default_local_dir": str(run)} | more
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def train(world, run, ranks=1, **more):
    arguments = ["train", "sft", *settings(world, run, **more)]
    if ranks == 1:
        run_ok(*arguments)
    else:
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone", f"--nproc-per-node={ranks}",
                               FERRY, *arguments], capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr[-3000:]
    return losses(run)


def losses(run):
    return [line["data"]["train/loss"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]


@pytest.fixture(scope="module")
def theirs(world):
    """The losses of transformers and torch.optim.AdamW: each step the mean over the learned tokens of four conversations."""
    import torch
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(world / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(world / "model", attn_implementation="eager", dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=RATE, eps=1e-8)

    def example(messages):
        ids, learned, said = [], [], ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            for count, prompt in ((i, True), (i + 1, False)):
                text = tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)
                part = tokenizer(text[len(said):], add_special_tokens=False).input_ids
                ids, learned, said = ids + part, learned + [not prompt] * len(part), text
        return torch.tensor(ids), torch.tensor(learned)

    rows, result = conversations(), []
    for step in range(STEPS):
        examples = [example(row["messages"]) for row in rows[step * BATCH:(step + 1) * BATCH]]
        count = sum(int(learned[1:].sum()) for _, learned in examples)
        optimizer.zero_grad()
        total = 0.0
        for ids, learned in examples:
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            loss = -(log_probs * learned[1:]).sum() / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        result.append(total)
    return result


MESHES = [pytest.param(1, {}, id="alone"),
          pytest.param(1, {"data.use_dynamic_bsz": False, "data.micro_batch_size_per_gpu": 1, "data.max_token_len_per_gpu": None}, id="micro batches of one"),
          pytest.param(1, {"engine.alignment": "bitwise", "engine.recompute_granularity": "full", "engine.recompute_method": "uniform",
                           "engine.recompute_num_layers": 1}, id="bitwise, recomputed"),
          pytest.param(2, {}, id="dp2"),
          pytest.param(2, {"engine.tensor_model_parallel_size": 2}, id="tp2"),
          pytest.param(2, {"engine.pipeline_model_parallel_size": 2, "engine.virtual_pipeline_model_parallel_size": 2,
                           "data.max_token_len_per_gpu": 48, "data.max_length": 48}, id="pp2 vpp2"),
          pytest.param(2, {"engine.pipeline_model_parallel_size": 2, "engine.pipeline_model_parallel_layout": "Et|t|t|tL",
                           "data.max_token_len_per_gpu": 48, "data.max_length": 48}, id="pp2, interleaved by a layout"),
          pytest.param(2, {"engine.context_parallel_size": 2}, id="cp2"),
          pytest.param(4, {"engine.tensor_model_parallel_size": 2, "engine.optimizer_offload": True}, id="tp2 dp2")]


@pytest.mark.parametrize("ranks, more", MESHES)
def test_the_loss_curve_is_that_of_an_independent_trainer(ranks, more, world, theirs, tmp_path):
    more = {key: value for key, value in more.items() if value is not None}
    arguments = settings(world, tmp_path, **more)
    if more.get("data.use_dynamic_bsz") is False:
        arguments = [a for a in arguments if not a.startswith("data.max_token_len_per_gpu")]
    if ranks == 1:
        run_ok("train", "sft", *arguments)
        ours = losses(tmp_path)
    else:
        ours = train(world, tmp_path, ranks, **more)
    assert len(ours) == STEPS and theirs[-1] < 0.9 * theirs[0]
    # fp32 all the way; errors grow from step to step.
    assert ours == pytest.approx(theirs, rel=2e-4)


@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_goes_on_to_the_byte(background, world, tmp_path):
    saving = {"checkpoint.save_freq": 2, "checkpoint.async_save": background, "engine.dtype": "bfloat16"}
    whole = train(world, tmp_path / "whole", **saving)
    run = tmp_path / "cut"
    process = subprocess.Popen([FERRY, "train", "sft", *settings(world, run, **saving)], stderr=subprocess.DEVNULL)
    tracker = run / "latest_checkpointed_iteration.txt"
    deadline = time.monotonic() + 60
    while not tracker.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert tracker.exists()
    assert train(world, run, **saving) == whole
    run_ok("verify", run, tmp_path / "whole")


@pytest.mark.parametrize("background", [False, True])
def test_each_checkpoint_comes_out_as_hugging_face_files(background, world, tmp_path):
    import torch
    import transformers
    saving = {"checkpoint.save_freq": 2, "checkpoint.save_hf": True, "checkpoint.keep_last": 1, "checkpoint.async_save": background,
              "data.val_files": [str(world / "train.jsonl")], "trainer.test_freq": 3, "engine.grad_offload": True}
    train(world, tmp_path, **saving, **{"trainer.total_training_steps": STEPS - 2})
    train(world, tmp_path, **saving)
    assert [folder.name for folder in tmp_path.glob("iter_*")] == [f"iter_{STEPS:07}"]
    run_ok("verify", tmp_path, tmp_path / "hf_model")
    before = transformers.AutoModelForCausalLM.from_pretrained(world / "model")
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf_model")
    assert not torch.equal(before.model.embed_tokens.weight, after.model.embed_tokens.weight)
    validated = [json.loads(line)["data"].get("val/loss") for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert validated[2] > validated[-1] > 0
    assert (tmp_path / "config.toml").exists()
    run_ok("report", tmp_path, "--output", tmp_path / "run.html")


def test_contradictions_and_typos_are_refused(world, tmp_path):
    done = ferry("train", "sft", *settings(world, tmp_path), "optim.lrr=1")
    assert done.returncode == 2 and "optim.lr" in done.stderr
    done = ferry("train", "sft", *settings(world, tmp_path, **{"engine.tensor_model_parallel_size": 2}))
    assert done.returncode == 2 and "tp 2" in done.stderr.lower() or "tensor" in done.stderr, done.stderr
    import torch
    if not torch.cuda.is_available():
        done = ferry("train", "sft", *settings(world, tmp_path, **{"trainer.device": "cuda"}))
        assert done.returncode == 2 and "trainer.device=cpu" in done.stderr
    done = ferry("train", "sft", "--print-config", *settings(world, tmp_path))
    assert done.returncode == 0 and "[optim]" in done.stdout


def test_a_gradient_that_is_not_finite_is_skipped_named_and_fatal_at_last(world, tmp_path):
    done = ferry("train", "sft", *settings(world, tmp_path, **{"optim.lr": 1e30, "optim.clip_grad": 0, "trainer.total_training_steps": 40}))
    assert done.returncode == 2
    assert "is not finite; nothing was updated" in done.stderr and "in a row" in done.stderr
