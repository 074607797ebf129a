"""`ferry train sft` beside an independent trainer: transformers with torch's AdamW, the same conversations in the same order."""
import json
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

import seeing_model
from ranks import TORCH_PROGRAM, finish
from sft_run import (BATCH, GEMMA, HYBRID, MINISTRAL, RATE, STEPS, WORDS, assert_equal_states, conversations, losses, settings, start_ranks, train,
                     write_model, write_rows)
from support import FERRY, PEERS, ROOT, ferry, run_ok

TRAINER_TOOL = FERRY.parents[1] / "tests/trainer_tool"
pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A small model with its tokenizer, and the conversations."""
    folder = tmp_path_factory.mktemp("sft")
    write_model(folder / "model")
    write_rows(folder / "train.jsonl", conversations())
    return folder


def test_a_family_that_megatrons_arguments_tell_is_said(world, tmp_path):
    run_ok("convert", world / "model", tmp_path / "megatron")
    shutil.rmtree(tmp_path / "megatron/release/ferry")
    more = {"model.path": str(tmp_path / "megatron"), "model.tokenizer_path": str(world / "model"), "trainer.total_training_steps": 1}
    done = run_ok("train", "sft", *settings(world, tmp_path / "run", **more))
    assert "family     llama, by Megatron's arguments; hf_config_path names another\n" in done.stderr


@pytest.fixture(scope="module", params=[("Mixtral", {}), ("GptOss", {"sliding_window": 6}), ("Qwen3Next", HYBRID)],
                ids=["mixtral", "gpt_oss", "qwen3_next"])
def experts(request, tmp_path_factory):
    """The same with experts."""
    folder = tmp_path_factory.mktemp("sft_experts")
    family, more = request.param
    write_model(folder / "model", family=family, **{"num_local_experts": 4, "num_experts_per_tok": 2} | more)
    write_rows(folder / "train.jsonl", conversations())
    return folder


def transformers_losses(world):
    """The losses of transformers and torch.optim.AdamW: for each step the mean over the learned tokens of four conversations."""
    import torch
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(world / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(world / "model", attn_implementation="eager", dtype=torch.float32)
    decays = lambda name, p: p.dim() > 1 and not name.endswith("bias")  # those of all experts are one matrix
    matrices = [p for name, p in model.named_parameters() if decays(name, p)]
    others = [p for name, p in model.named_parameters() if not decays(name, p)]
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
    assert result[-1] < 0.9 * result[0]
    return result


@pytest.fixture(scope="module")
def theirs(world):
    return transformers_losses(world)


@pytest.fixture(scope="module")
def theirs_with_experts(experts):
    return transformers_losses(experts)


TP, PP, CP, VPP = (f"engine.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "virtual_pipeline_model"))
AGAIN = {"engine.recompute_granularity": "full", "engine.recompute_method": "uniform", "engine.recompute_num_layers": 1}
SHORT = {"data.max_token_len_per_gpu": 48, "data.max_length": 48}  # more micro-batches than stages
MESHES = {  # name: (processes, settings)
    "alone": (1, {}),
    "micro batches of one": (1, {"data.use_dynamic_bsz": False, "data.micro_batch_size_per_gpu": 1, "data.max_token_len_per_gpu": None}),
    "bitwise, recomputed": (1, {"engine.alignment": "bitwise", **AGAIN}),
    "dp2": (2, {}),
    "tp2": (2, {TP: 2}),
    "pp2 vpp2": (2, {PP: 2, VPP: 2, **SHORT}),
    "pp2, interleaved by a layout": (2, {PP: 2, "engine.pipeline_model_parallel_layout": "Et|t|t|tL", **SHORT}),
    "cp2": (2, {CP: 2}),
    "tp2 dp2": (4, {TP: 2, "engine.optimizer_offload": True}),
    "tp2 pp2 dp2": (8, {TP: 2, PP: 2, "data.max_token_len_per_gpu": 96}),
}
EP, ETP = "engine.expert_model_parallel_size", "engine.expert_tensor_parallel_size"
MESHES_OF_EXPERTS = {"alone": (1, {}), "cp2 ep2, recomputed": (2, {CP: 2, EP: 2, **AGAIN}), "tp2 pp2 ep2": (8, {TP: 2, PP: 2, EP: 2, ETP: 1})}


def assert_losses(ours, theirs):
    assert len(ours) == STEPS
    # fp32 all the way; errors grow from step to step.
    assert ours == pytest.approx(theirs, rel=2e-4)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_loss_curve_is_that_of_an_independent_trainer(mesh, world, theirs, tmp_path):
    processes, more = MESHES[mesh]
    assert_losses(train(world, tmp_path, processes, **more), theirs)


@pytest.mark.parametrize("mesh", MESHES_OF_EXPERTS)
def test_the_loss_curve_of_experts_too(mesh, experts, theirs_with_experts, tmp_path):
    processes, more = MESHES_OF_EXPERTS[mesh]
    assert_losses(train(experts, tmp_path, processes, **more), theirs_with_experts)


@pytest.mark.parametrize("family, shape", [("Gemma2", GEMMA), ("Gemma3Text", GEMMA | {"sliding_window_pattern": 2}), ("Ministral3", MINISTRAL)])
def test_the_loss_curve_of_other_dense_families_too(family, shape, tmp_path):
    write_model(tmp_path / "model", family=family, **shape)
    write_rows(tmp_path / "train.jsonl", conversations())
    assert_losses(train(tmp_path, tmp_path / "run", 4, **{TP: 2, PP: 2} | AGAIN), transformers_losses(tmp_path))


@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_goes_on_to_the_byte(background, world, tmp_path):
    saving = {"checkpoint.save_freq": 2, "checkpoint.async_save": background, "engine.optimizer_offload": background, "engine.dtype": "bfloat16"}
    whole = train(world, tmp_path / "whole", **saving)
    run = tmp_path / "cut"
    process = start_ranks(1, settings(world, run, **saving))[0]
    tracker = run / "latest_checkpointed_iteration.txt"
    deadline = time.monotonic() + 60
    while not tracker.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    finish([process])
    assert tracker.exists()
    assert train(world, run, **saving) == whole
    run_ok("verify", run, tmp_path / "whole")


def test_rows_without_a_token_to_learn_are_counted_and_teach_nothing(world, tmp_path):
    """Cut off before the answer: one row of the first step, all of the second."""
    long = {"messages": [{"role": "user", "content": "one " * 90}, {"role": "assistant", "content": "two"}]}
    rows = conversations()
    write_rows(tmp_path / "train.jsonl", rows[:3] + [long] * 5 + rows[3:7])
    more = {"data.train_files": [str(tmp_path / "train.jsonl")], "data.truncation": "right", "trainer.total_training_steps": 3}
    (status, said), = finish(start_ranks(1, settings(world, tmp_path / "run", **more)))
    assert status == 0 and "1 rows of step 1 have no token to learn" in said and "step 2: no row has a token to learn" in said, said
    steps = [line["data"] for line in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())]
    assert [step["train/unlearned_rows"] for step in steps] == [1, 4, 0]
    assert "train/loss" not in steps[1] and "train/grad_norm" not in steps[1] and steps[2]["train/loss"] > 0
    write_rows(tmp_path / "train.jsonl", [long] * 8)
    (status, said), = finish(start_ranks(1, settings(world, tmp_path / "none", **more | {"trainer.total_training_steps": 2})))
    assert status == 2 and "no row of 2 steps in a row has a token to learn" in said, said


def test_float16_finds_the_scale_of_its_loss_and_resumes(world, tmp_path):
    """The scale falls until gradients are finite, in more steps than a run may else have without, and the loss with it. A run that was cut on the way down,
    and one behind it, go on to the same bytes."""
    long = {"engine.dtype": "float16", "trainer.total_training_steps": 32, "checkpoint.save_freq": 8}
    whole = train(world, tmp_path / "whole", **long)
    steps = [line["data"] for line in map(json.loads, (tmp_path / "whole/metrics.jsonl").read_text().splitlines())]
    scales = [step["train/loss_scale"] for step in steps]
    skipped = int(steps[-1]["train/skipped"])
    assert scales[0] == 2 ** 32 and scales == sorted(scales, reverse=True) and 10 < skipped < 24
    assert scales[-1] == 2 ** (33 - skipped) and whole[-1] < 0.7 * whole[0]
    for behind in (8, 24):
        run = tmp_path / str(behind)
        train(world, run, **long | {"trainer.total_training_steps": behind})
        assert train(world, run, **long) == whole
        run_ok("verify", run, tmp_path / "whole")


# Layers of a kind each: the family, its shape, the mesh that saves, the layout of Megatron's that its state is converted to, and the mesh that goes on:
# processes and settings, and the same for trainer_tool (tp, pp, ep, etp, dp).
LATENT = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1,
              q_lora_rank=20, kv_lora_rank=12, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=14, num_key_value_heads=4)
RESUMED = {
    "a hybrid": ("Qwen3Next", HYBRID, {CP: 2, EP: 2}, ["--tp", 2, "--ep", 2], {PP: 2}, (1, 2, 1, 1, 1)),
    "latent attention": ("DeepseekV3", LATENT, {EP: 2}, ["--pp", 2], {TP: 2}, (2, 1, 2, 1, 2)),
    "sinks": ("GptOss", {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}, {PP: 2}, ["--tp", 2], {CP: 2, EP: 2}, (2, 1, 1, 2, 1)),
    "a tower": ("Qwen3VL", None, {TP: 2}, ["--pp", 2], {PP: 2}, None),  # which the tool does not carry
}


@pytest.mark.parametrize("kind", RESUMED)
def test_a_run_of_every_kind_of_layer_goes_on_to_the_byte(kind, tmp_path):
    """In bf16 with masters in fp32: the second half of a run again; and from its middle, converted, on another mesh."""
    family, shape, mesh, layout, other, of_tool = RESUMED[kind]
    if shape is None:
        (tmp_path / "model").mkdir()
        seeing_model.write_model(tmp_path / "model", family)
    else:
        write_model(tmp_path / "model", family=family, **shape)
        config = json.loads((tmp_path / "model/config.json").read_text())
        (tmp_path / "model/config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    write_rows(tmp_path / "train.jsonl", conversations())
    middle = tmp_path / "whole/iter_0000002"
    saving = {"checkpoint.save_freq": 2, "engine.dtype": "bfloat16", "engine.alignment": "bitwise", "trainer.total_training_steps": 4}
    from_middle = saving | {"checkpoint.resume_mode": "resume_path"}
    whole = train(tmp_path, tmp_path / "whole", 2, **saving, **mesh)
    assert train(tmp_path, tmp_path / "again", 2, **from_middle, **mesh, **{"checkpoint.resume_from_path": str(middle)}) == whole[2:]
    assert_equal_states(tmp_path / "again", tmp_path / "whole")

    run_ok("convert", middle, tmp_path / "relaid", "--to", "megatron", *layout)
    assert_equal_states(middle, tmp_path / "relaid")
    if of_tool:
        subprocess.run([TRAINER_TOOL, "resave", middle, tmp_path / "resaved", *map(str, of_tool), tmp_path / "model"], check=True, capture_output=True)
        assert_equal_states(middle, tmp_path / "resaved")
    elsewhere = train(tmp_path, tmp_path / "elsewhere", 2, **from_middle, **other, **{"checkpoint.resume_from_path": str(tmp_path / "relaid")})
    assert elsewhere[0] == pytest.approx(whole[2], rel=1e-6)  # a sum over ranks, in another order


def test_epochs_end_with_a_checkpoint_and_a_validation(world, tmp_path):
    """verl's save_freq and test_freq: its steps_per_epoch is that of whole batches, and both come behind the last step, too."""
    write_rows(tmp_path / "train.jsonl", conversations()[:3 * BATCH + 1])
    train(world, tmp_path / "run", **{"data.train_files": [str(tmp_path / "train.jsonl")], "data.val_files": [str(world / "train.jsonl")],
          "trainer.total_training_steps": 7, "checkpoint.save_freq": "after_each_epoch", "trainer.test_freq": "after_each_epoch"})
    assert sorted(path.name for path in (tmp_path / "run").glob("iter_*")) == ["iter_0000003", "iter_0000006", "iter_0000007"]
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if "val/loss" in step["data"]] == [3, 6, 7]


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

    def written():
        return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "hf_model").iterdir()}
    whole = written()
    train(world, tmp_path, **saving)
    assert written() == whole  # the run is over, and nothing is left to write
    weights = tmp_path / "hf_model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    train(world, tmp_path, **saving)
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
def thinking(tmp_path_factory):
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
def test_the_template_is_told_what_rows_and_the_run_say(default, thinking, tmp_path):
    """The first loss is that of transformers on the texts of its apply_chat_template. The row's word is the last, then the default's, then the run's."""
    import torch
    import transformers
    tokenizer = with_template(thinking, TEMPLATE)
    kwargs = {"name": "ten", "enable_thinking": True}
    more = {f"data.apply_chat_template_kwargs.{name}": value for name, value in kwargs.items()}
    loss = train(thinking, tmp_path, **more, **{"data.enable_thinking_default": default, "trainer.total_training_steps": 1, "checkpoint.save_freq": 0})[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(thinking / "model", attn_implementation="eager", dtype=torch.float32)
    total, count = 0.0, 0
    for row in map(json.loads, (thinking / "train.jsonl").read_text().splitlines()):
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
    """It does so with save_freq and test_freq of -1, as verl's; 0 saves nothing."""
    more = {"data.val_files": [str(world / "train.jsonl")], "trainer.total_training_steps": 2}
    train(world, tmp_path / "run", **more)
    assert [folder.name for folder in (tmp_path / "run").glob("iter_*")] == ["iter_0000002"]
    assert ["val/loss" in json.loads(line)["data"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [False, True]
    train(world, tmp_path / "none", **more, **{"checkpoint.save_freq": 0})
    assert not [*(tmp_path / "none").glob("iter_*")]


def test_a_row_whose_answer_is_cut_off_adds_nothing(world, tmp_path):
    """verl trains on with it, too. A batch of nothing else has no loss: its update is skipped."""
    rows = conversations()[:BATCH]
    long = {"messages": [{"role": "user", "content": " ".join(WORDS * 20)}, {"role": "assistant", "content": "one"}]}
    write_rows(tmp_path / "train.jsonl", [*rows[1:], long] + [long] * BATCH)
    cut = {"data.train_files": [str(tmp_path / "train.jsonl")], "data.truncation": "right", "checkpoint.save_freq": 0, "trainer.total_training_steps": 2}
    (status, said), = finish(start_ranks(1, settings(world, tmp_path / "cut", **cut)))
    assert status == 0, said
    steps = [json.loads(line)["data"] for line in (tmp_path / "cut/metrics.jsonl").read_text().splitlines()]
    first = steps[0]["train/loss"]
    assert first > 0 and "train/loss" not in steps[1] and [step["train/unlearned_rows"] for step in steps] == [1, BATCH]
    write_rows(tmp_path / "three.jsonl", rows[1:])
    three = {"data.train_files": [str(tmp_path / "three.jsonl")], "data.train_batch_size": 3, "trainer.total_training_steps": 1, "checkpoint.save_freq": 0}
    assert train(world, tmp_path / "three", **three)[0] == pytest.approx(first, rel=1e-6)


def test_settings_without_effect_are_said(world, tmp_path):
    more = {"trainer.total_training_steps": 1, "checkpoint.save_freq": 0, "data.micro_batch_size_per_gpu": 4}
    (status, said), = finish(start_ranks(1, settings(world, tmp_path, **more)))
    assert status == 0 and "note       data.micro_batch_size_per_gpu: no effect: use_dynamic_bsz packs by tokens" in said, said
    assert len(losses(tmp_path)) == 1
    refused = {"engine.recompute_granularity": "selective", "engine.recompute_modules": ["moe_act"]}
    done = ferry("train", "sft", *settings(world, tmp_path / "refused", **refused))
    assert done.returncode == 2 and "has no experts" in done.stderr, done.stderr


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("batching", ["tokens", "rows"])
def test_every_row_of_a_validation_counts_on_every_mesh(batching, rows, world, tmp_path):
    """Batches that data parallel ranks cannot share evenly, or that fill no group of an interleaved pipeline, are padded with rows of no weight."""
    write_rows(tmp_path / "val.jsonl", conversations()[:rows])
    cut = {"tokens": {}, "rows": {"data.use_dynamic_bsz": False, "data.micro_batch_size_per_gpu": 1, "data.max_token_len_per_gpu": None}}[batching]
    pipeline = {"engine.pipeline_model_parallel_size": 2, "engine.virtual_pipeline_model_parallel_size": 2}

    def validated(name, ranks, **more):
        train(world, tmp_path / name, ranks, **cut, **more, **{"trainer.total_training_steps": 1, "checkpoint.save_freq": 0,
              "data.val_files": [str(tmp_path / "val.jsonl")], "engine.alignment": "bitwise"})
        return json.loads((tmp_path / name / "metrics.jsonl").read_text())["data"]["val/loss"]
    alone = validated("alone", 1)
    assert alone > 1
    assert {name: validated(name, ranks, **more) for name, ranks, more in [
        ("dp2", 2, {}), ("dp4", 4, {}), ("pp2", 2, pipeline), ("dp2pp2", 4, pipeline)]} == pytest.approx(
            dict.fromkeys(["dp2", "dp4", "pp2", "dp2pp2"], alone), rel=1e-6)


def test_a_run_on_other_data_begins_anew_with_the_checkpoint_as_the_model(world, tmp_path):
    write_rows(tmp_path / "others.jsonl", conversations()[1:])
    other = {"data.train_files": [str(tmp_path / "others.jsonl")], "trainer.total_training_steps": 3}
    train(world, tmp_path / "run", **{"trainer.total_training_steps": 2})
    (status, said), = finish(start_ranks(1, settings(world, tmp_path / "run", **other)))
    assert status == 2 and "in another trainer.default_local_dir, with the checkpoint as the model" in said, said
    assert len(train(world, tmp_path / "anew", **other, **{"model.path": str(tmp_path / "run")})) == 3
