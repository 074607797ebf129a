"""Settings of `ferry train sft` beside verl's, and what verl's trainer does without being told: it saves and validates behind the last step."""
import json
import re
import subprocess
import sys

import pytest

from ranks import TORCH_PROGRAM, finish
from sft_run import BATCH, WORDS, conversations, losses, settings, start_ranks, train, write_model, write_rows
from support import PEERS, ROOT, ferry, run_ok

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")

# Keys that verl has elsewhere.
MOVED = {"checkpoint.save_freq": "trainer.save_freq", "checkpoint.keep_last": "trainer.max_ckpt_to_keep", "checkpoint.resume_mode": "trainer.resume_mode",
         "checkpoint.resume_from_path": "trainer.resume_from_path", "global_profiler.tool": "profiler.tool", "global_profiler.save_path": "profiler.save_path",
         **{f"engine.{name}": f"engine.override_transformer_config.{name}"
            for name in ("recompute_granularity", "recompute_method", "recompute_num_layers")}}
# The configuration of verl's trainer with Megatron's engine: each key with its value.
FLATTEN = """import json, sys
from omegaconf import OmegaConf
load = lambda name: OmegaConf.load(f"{sys.argv[1]}/{name}.yaml")
run = load("sft_trainer_engine")
run.pop("defaults")
config = OmegaConf.merge({"model": load("model/hf_model"), "engine": load("engine/megatron"), "optim": load("optim/megatron"),
                          "profiler": load("profiler/profiler")}, run)
def flatten(node, prefix=""):
    for key in node:
        if OmegaConf.is_missing(node, key):
            continue
        try:
            value = node[key]
        except Exception:  # an interpolation of a run of reinforcement learning
            continue
        if OmegaConf.is_dict(value) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
print(json.dumps(dict(flatten(config))))
"""
LEAST = {"model.path": "hf", "data.train_files": ["train.jsonl"]}


def printed(settings=LEAST):
    """{key: its text in a configuration that ferry prints}, "not set" where it has no value"""
    keys, section = {}, ""
    for line in run_ok("train", "sft", "--print-config", *(f"{key}={json.dumps(value)}" for key, value in settings.items())).stdout.splitlines():
        if named := re.fullmatch(r"\[(.*)\]", line):
            section = named[1]
        elif key := re.match(r"(# )?(\w+) =(.*?) +# ", line):
            keys[f"{section}.{key[2]}"] = "not set" if key[1] else key[3].strip()
    return keys


def test_defaults_that_differ_stand_in_the_documents():
    """The table has both values; all others mean the same. None of verl's is refused, apart from the text that YAML makes of `none`."""
    config = PEERS / "verl091/verl/trainer/config"
    theirs = json.loads(subprocess.run([sys.executable, "-c", FLATTEN, config], stdout=subprocess.PIPE, text=True, check=True).stdout)
    usual = printed({})
    both = {key: theirs[name] for key in usual if (name := MOVED.get(key, key)) in theirs}
    assert set(MOVED) < set(both) and len(both) >= 60
    thinks = both.pop("data.enable_thinking_default")
    assert thinks == "none" and bool(thinks)
    ours, with_theirs = printed(), printed(LEAST | both)
    differ = {key: (json.dumps(value), usual[key]) for key, value in both.items()
              if key in LEAST or with_theirs[key] != ours[key] or value is None and ours[key] == '"auto"'}
    differ["data.enable_thinking_default"] = (json.dumps(thinks), usual["data.enable_thinking_default"])
    text = (ROOT / "docs/training/sft.md").read_text().partition("### Defaults\n")[2].partition("\n## ")[0]
    documented = {key: (theirs.replace("`", ""), ours.replace("`", ""))
                  for keys, theirs, ours in re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \| .+ \|$", text, re.MULTILINE) for key in re.findall(r"`(.*?)`", keys)}
    assert documented == differ


TEMPLATE = ("{{ name }}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and enable_thinking is defined %}"
            "{{ 'one ' if enable_thinking else 'two two ' }}{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft_beside_verl")
    write_model(folder / "model")
    rows = [row | thinks for row, thinks in zip(conversations()[:BATCH], ({"enable_thinking": True}, {"enable_thinking": False}, {}, {"enable_thinking": None}))]
    write_rows(folder / "train.jsonl", rows)
    return folder


def with_template(folder, text):
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = text
    tokenizer.save_pretrained(folder / "model")
    return tokenizer


@pytest.mark.parametrize("default", [None, False])
def test_the_template_is_told_what_rows_and_the_run_say(default, world, tmp_path):
    """The first loss is that of transformers on the texts of its apply_chat_template. The row's word is the last, then the default's, then the run's."""
    import torch
    import transformers
    tokenizer = with_template(world, TEMPLATE)
    kwargs = {"name": "ten", "enable_thinking": True}
    more = {f"data.apply_chat_template_kwargs.{name}": value for name, value in kwargs.items()}
    loss = train(world, tmp_path, **more, **{"data.enable_thinking_default": default, "trainer.total_training_steps": 1, "checkpoint.save_freq": 0})[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(world / "model", attn_implementation="eager", dtype=torch.float32)
    total, count = 0.0, 0
    for row in map(json.loads, (world / "train.jsonl").read_text().splitlines()):
        thinks = row.get("enable_thinking")
        if thinks is None:
            thinks = default
        said, ids, learned = "", [], []
        variables = kwargs | ({} if thinks is None else {"enable_thinking": thinks})
        for i, message in enumerate(row["messages"]):
            if message["role"] != "assistant":
                continue
            for messages, prompt in ((row["messages"][:i], True), (row["messages"][:i + 1], False)):
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **variables)
                part = tokenizer(text[len(said):], add_special_tokens=False).input_ids
                ids, learned, said = ids + part, learned + [not prompt] * len(part), text
        ids, learned = torch.tensor(ids), torch.tensor(learned)
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total, count = total - (log_probs * learned[1:]).sum().item(), count + int(learned[1:].sum())
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_a_run_saves_and_validates_behind_its_last_step(world, tmp_path):
    """As verl's does with save_freq and test_freq of -1; 0 saves nothing."""
    more = {"data.val_files": [str(world / "train.jsonl")], "trainer.total_training_steps": 2}
    train(world, tmp_path / "run", **more)
    assert [folder.name for folder in (tmp_path / "run").glob("iter_*")] == ["iter_0000002"]
    assert ["val/loss" in json.loads(line)["data"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [False, True]
    train(world, tmp_path / "none", **more, **{"checkpoint.save_freq": 0})
    assert not [*(tmp_path / "none").glob("iter_*")]


def test_a_row_whose_answer_is_cut_off_adds_nothing(world, tmp_path):
    """verl trains on with it, too. A batch of nothing else has a loss and a gradient of 0."""
    rows = conversations()[:BATCH]
    long = {"messages": [{"role": "user", "content": " ".join(WORDS * 20)}, {"role": "assistant", "content": "one"}]}
    write_rows(tmp_path / "train.jsonl", [*rows[1:], long] + [long] * BATCH)
    cut = {"data.train_files": [str(tmp_path / "train.jsonl")], "data.truncation": "right", "checkpoint.save_freq": 0, "trainer.total_training_steps": 2}
    first, second = train(world, tmp_path / "cut", **cut)
    steps = [json.loads(line)["data"] for line in (tmp_path / "cut/metrics.jsonl").read_text().splitlines()]
    assert first > 0 and second == 0 == steps[1]["train/grad_norm"]
    write_rows(tmp_path / "three.jsonl", rows[1:])
    three = {"data.train_files": [str(tmp_path / "three.jsonl")], "data.train_batch_size": 3, "trainer.total_training_steps": 1, "checkpoint.save_freq": 0}
    assert train(world, tmp_path / "three", **three)[0] == pytest.approx(first, rel=1e-6)


def test_settings_without_effect_are_said(world, tmp_path):
    more = {"trainer.total_training_steps": 1, "checkpoint.save_freq": 0, "data.micro_batch_size_per_gpu": 4}
    (status, said), = finish(start_ranks(1, settings(world, tmp_path, **more)))
    assert status == 0 and "note       data.micro_batch_size_per_gpu: no effect: use_dynamic_bsz packs by tokens" in said, said
    assert len(losses(tmp_path)) == 1
    for refused, why in (({"engine.freeze_vision_tower": True}, "no vision tower"),
                         ({"engine.recompute_granularity": "selective", "engine.recompute_modules": ["moe_act"]}, "has no experts")):
        done = ferry("train", "sft", *settings(world, tmp_path / "refused", **refused))
        assert done.returncode == 2 and why in done.stderr, done.stderr
