"""Models that also see: trained as language models, beside which their towers go along as they were; Qwen3-VL also on conversations with images, with its
tower or beside it, beside transformers and torch's AdamW, and by reinforcement learning from prompts with images: what the actor computes is what the
rollout has said, and both what transformers computes (the regime of rollout/test_images.py)."""
import json
import shutil

import pytest

import ppo_run
import seeing_model
from ppo_run import ACTOR, REF, ROLLOUT, samples
from ranks import TORCH_PROGRAM, finish, start_training
from seeing_run import prompts, rl_settings, row, write_world
from sft_run import BATCH, STEPS, assert_equal_states, conversations, settings, start_ranks, train, write_rows, write_tokenizer
from support import run_ok
from tiny_models import make_wrapped

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")
LEARNED_STEPS, RATE = 3, 2e-3
FREEZE = "engine.freeze_vision_tower"


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "mistral3", "qwen2_5_vl"])
def test_a_trained_model_keeps_its_vision_tower(family, tmp_path):
    import torch
    import transformers
    (tmp_path / "model").mkdir()
    if family == "qwen3_vl":
        seeing_model.write_model(tmp_path / "model", "Qwen3VL")
    else:
        make_wrapped(family, tmp_path / "model", vocab_size=304, max_position_embeddings=512, pad_token_id=None)
        write_tokenizer(tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", conversations())
    found = train(tmp_path, tmp_path / "run", ranks=2, **{"engine.tensor_model_parallel_size": 2, "checkpoint.save_freq": STEPS - 3,
                                                          "checkpoint.save_hf": True, FREEZE: True})
    assert found[-1] < found[0]
    run_ok("verify", tmp_path / "run", tmp_path / "run/hf_model")
    before, after = ({name: p for name, p in transformers.AutoModelForImageTextToText.from_pretrained(folder).state_dict().items()}
                     for folder in (tmp_path / "model", tmp_path / "run/hf_model"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    assert changed and not [name for name in changed if "language_model" not in name and name != "lm_head.weight"]
    run_ok("convert", tmp_path / "run", tmp_path / "relaid", "--to", "megatron", "--pp", 2)
    run_ok("verify", tmp_path / "run", tmp_path / "relaid")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model in fp32, images, and conversations about some of them, others of text alone."""
    import numpy as np
    import transformers
    from PIL import Image
    folder = tmp_path_factory.mktemp("seeing")
    (folder / "model").mkdir()
    seeing_model.write_model(folder / "model", "Qwen3VL")
    transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder / "model", dtype="float32").save_pretrained(folder / "model")
    random = np.random.default_rng(3)
    for i, (height, width) in enumerate([(40, 56), (33, 90), (61, 44), (64, 64), (47, 120)]):
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    write_rows(folder / "train.jsonl", rows_of(folder))
    return folder


def rows_of(folder):
    """Images in parts of a content, at any turn; several of one conversation; and conversations without one."""
    show = lambda *parts: [{"type": "image", "image": str(folder / f"{p}.png")} if isinstance(p, int) else {"type": "text", "text": p} for p in parts]
    rows = []
    for i in range(BATCH * LEARNED_STEPS):
        turns = [{"role": "user", "content": [show(i % 5, "what is this"), show("what is", i % 3, "and", i % 2, "that"), "what is that",
                                              show(i % 5, "one")][i % 4]},
                 {"role": "assistant", "content": "this is one" if i % 2 else "that"}]
        if i % 4 == 3:
            turns += [{"role": "user", "content": show("and that", (i + 1) % 5)}, {"role": "assistant", "content": "is in that"}]
        rows.append({"messages": turns})
    return rows


@pytest.mark.parametrize("data", ["train_files", "val_files"])
def test_images_for_a_blind_model_are_refused_before_it_is_loaded(data, world, tmp_path):
    write_rows(tmp_path / "blind.jsonl", conversations())
    files = {"data.train_files": [str(tmp_path / "blind.jsonl")], f"data.{data}": [str(world / "train.jsonl")], "trainer.total_training_steps": 1}
    shutil.copytree(world / "model", tmp_path / "blind", ignore=shutil.ignore_patterns("preprocessor_config.json", "processor_config.json"))
    (status, said), = finish(start_ranks(1, settings(world, tmp_path / "run", **{"model.path": str(tmp_path / "blind")}, **files)))
    assert status == 2 and "train.jsonl: line 1" in said and "data.image_key" in said and "loaded" not in said, said


def theirs(folder, steps, dtype="float32", frozen=False, **optimizer):
    """transformers and torch.optim.AdamW -> the losses, the first gradients' norm, the first gradients."""
    import torch
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    processor = transformers.Qwen2VLImageProcessor.from_pretrained(folder / "model")
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder / "model", attn_implementation="eager", dtype=dtype)
    model.model.visual.requires_grad_(not frozen)
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decays = [p for p in learned.values() if p.dim() > 1]
    adam = torch.optim.AdamW([{"params": decays, "weight_decay": 0.1}, {"params": [p for p in learned.values() if p.dim() < 2], "weight_decay": 0.0}],
                             **{"lr": RATE, "eps": 1e-8} | optimizer)

    def loss_of(messages):
        files = [part["image"] for message in messages if isinstance(message["content"], list) for part in message["content"] if "image" in part]
        seen = processor(images=files, return_tensors="pt") if files else {}
        counts = [int(grid.prod()) // 4 for grid in seen["image_grid_thw"]] if files else []
        ids, says, said = [], [], ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            for count, prompt in ((i, True), (i + 1, False)):
                text = tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)
                new, said = text[len(said):], text
                first, *others = new.split("<|image_pad|>")
                new = first + "".join("<|image_pad|>" * counts.pop(0) + other for other in others)
                part = tokenizer(new, add_special_tokens=False).input_ids
                ids, says = ids + part, says + [not prompt] * len(part)
        ids, says = torch.tensor(ids), torch.tensor(says)
        logits = model(ids[None], mm_token_type_ids=(ids == 5).long()[None], **seen).logits[0, :-1]
        return -(logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0] * says[1:]).sum(), int(says[1:].sum())
    losses, norm, rows = [], None, rows_of(folder)
    for step in range(steps):
        parts = [loss_of(row["messages"]) for row in rows[step * BATCH:(step + 1) * BATCH]]
        loss = sum(loss for loss, _ in parts) / sum(count for _, count in parts)
        adam.zero_grad()
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in learned.items()} if norm is None else gradients
        norm = norm or float(torch.nn.utils.clip_grad_norm_(learned.values(), 1.0 if not optimizer else 1e9))
        if step:
            torch.nn.utils.clip_grad_norm_(learned.values(), 1.0)
        adam.step()
        losses.append(loss.item())
    return losses, norm, gradients


@pytest.fixture(scope="module")
def expected(world):
    return {frozen: theirs(world, LEARNED_STEPS, frozen=frozen) for frozen in (False, True)}


LONG = {"data.max_length": 400, "data.max_token_len_per_gpu": 800, "optim.lr": RATE}
TP, PP, CP = (f"engine.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context"))
AGAIN = {"engine.recompute_granularity": "full", "engine.recompute_method": "uniform", "engine.recompute_num_layers": 1}
MESHES = {  # name: (processes, settings); of the four layers the first two take what the tower gives
    "alone": (1, {}),
    "bitwise, recomputed": (1, {"engine.alignment": "bitwise", **AGAIN}),
    "tp2 dp2": (4, {TP: 2}),
    "tp2, whole rows between layers": (2, {TP: 2, "engine.sequence_parallel": False, "engine.recompute_granularity": "selective"}),
    "pp2, recomputed": (2, {PP: 2, "data.max_token_len_per_gpu": 400, **AGAIN}),
    "cp2 tp2": (4, {CP: 2, TP: 2}),
    "frozen, tp2": (2, {TP: 2, FREEZE: True}),
    "frozen, pp4, recomputed": (4, {PP: 4, "data.max_token_len_per_gpu": 400, FREEZE: True, **AGAIN}),
    "frozen, pp2 vpp2": (2, {PP: 2, "engine.virtual_pipeline_model_parallel_size": 2, "data.max_token_len_per_gpu": 400, FREEZE: True}),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_the_loss_curve_with_images_is_that_of_an_independent_trainer(mesh, world, expected, tmp_path):
    processes, more = MESHES[mesh]
    found = train(world, tmp_path, processes, **LONG | more)
    losses, norm, _ = expected[FREEZE in more]
    assert found == pytest.approx(losses, rel=2e-4)
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["data"]
    assert first["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_tower_is_trained_where_the_layers_are_that_take_what_it_gives(world, tmp_path):
    ((status, said), *_) = finish(start_ranks(4, settings(world, tmp_path, **LONG | {PP: 4})))
    assert status == 2
    assert "has 1 of the 2 layers that add what it gives" in said and "freeze_vision_tower=true" in said


def test_the_loss_of_a_pack_in_bf16_is_that_of_the_logits_of_transformers(world, tmp_path):
    """A bit of a logit that differed would be 1e-3 of it; what is left is the order in which fp32 adds up."""
    found = train(world, tmp_path, **LONG | {"engine.dtype": "bfloat16", "engine.alignment": "bitwise", "data.max_token_len_per_gpu": 1600,
                                             "trainer.total_training_steps": 1})
    assert found == pytest.approx(theirs(world, 1, dtype="bfloat16")[0], rel=1e-6)


def test_an_image_of_many_patches_attends_in_parts(world, tmp_path):
    """1,564 patches: six parts of the queries, not alike. As above."""
    import numpy as np
    import transformers
    from PIL import Image
    shutil.copytree(world, tmp_path / "world")
    folder = tmp_path / "world"
    transformers.Qwen2VLImageProcessor.from_pretrained(folder / "model", size={"shortest_edge": 32 * 32, "longest_edge": 200 * 200}).save_pretrained(
        folder / "model")
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (136, 184, 3), dtype=np.uint8)).save(folder / "0.png")
    write_rows(folder / "train.jsonl", rows_of(folder))
    found = train(folder, tmp_path / "run", **LONG | {"engine.dtype": "bfloat16", "engine.alignment": "bitwise", "data.max_length": 900,
                                                      "data.max_token_len_per_gpu": 3600, "trainer.total_training_steps": 1})
    assert found == pytest.approx(theirs(folder, 1, dtype="bfloat16")[0], rel=1e-6)


GRADIENT_MESHES = {
    "alone": (1, {}),
    "frozen": (1, {FREEZE: True}),
    "tp2, shared rows, recomputed": (2, {TP: 2, **AGAIN}),
    "pp2 dp2": (4, {PP: 2}),
    "cp2": (2, {CP: 2}),
}


@pytest.mark.parametrize("mesh", GRADIENT_MESHES)
def test_every_gradient_with_images_is_that_of_transformers(mesh, world, expected, tmp_path):
    from safetensors.torch import load_file
    processes, more = GRADIENT_MESHES[mesh]
    # Adam's first step is - lr g / (|g| + eps), of which g follows.
    train(world, tmp_path / "run", processes, **LONG | more | {
        "optim.lr": 1.0, "optim.adam_eps": 1.0, "optim.weight_decay": 0.0, "optim.clip_grad": 0,
        "trainer.total_training_steps": 1, "checkpoint.save_freq": 1, "checkpoint.save_hf": True})
    gradients = expected[mesh == "frozen"][2]
    before, after = load_file(world / "model/model.safetensors"), load_file(tmp_path / "run/hf_model/model.safetensors")
    assert before.keys() == after.keys()
    largest = max(float(g.abs().max()) for g in gradients.values())
    assert largest > 1e-2
    for name, p in before.items():
        moved = (p.double() - after[name].double())
        if name not in gradients:
            assert mesh == "frozen" and "visual" in name and not moved.any()
            continue
        assert gradients[name].any(), name
        g = moved / (1 - moved.abs())
        assert float((g - gradients[name]).abs().max()) < 1e-5 * max(1.0, largest), name


def test_a_run_that_trains_the_tower_goes_on_to_the_byte(world, tmp_path):
    """Weights, masters and moments of the tower, too: on the mesh that saved, and laid out for another one, where sums have another order."""
    saving = LONG | {"checkpoint.save_freq": 1, "trainer.total_training_steps": 2, TP: 2, "engine.dtype": "bfloat16", "engine.alignment": "bitwise"}
    whole = train(world, tmp_path / "whole", 2, **saving)
    middle = tmp_path / "whole/iter_0000001"
    from_middle = saving | {"checkpoint.resume_mode": "resume_path", "checkpoint.resume_from_path": str(middle)}
    assert train(world, tmp_path / "again", 2, **from_middle) == whole[1:]
    assert_equal_states(tmp_path / "again", tmp_path / "whole")
    run_ok("convert", middle, tmp_path / "relaid", "--to", "megatron", "--pp", 2)
    assert_equal_states(middle, tmp_path / "relaid")
    elsewhere = train(world, tmp_path / "elsewhere", 2, **from_middle | {TP: 1, PP: 2, "checkpoint.resume_from_path": str(tmp_path / "relaid")})
    assert elsewhere == pytest.approx(whole[1:], rel=1e-6)
    for frozen, said in ((True, "was trained, and would not be now"), (False, "was not trained, and would be now")):
        if not frozen:
            train(world, tmp_path / "frozen", 2, **saving | {FREEZE: True, "trainer.total_training_steps": 1})
            from_middle["checkpoint.resume_from_path"] = str(tmp_path / "frozen/iter_0000001")
        (trouble, *_) = finish(start_ranks(2, settings(world, tmp_path / "other", **from_middle | {FREEZE: frozen})))
        assert trouble[0] == 2 and said in trouble[1], trouble


def test_images_of_a_column_are_those_of_the_messages(world, tmp_path):
    """verl's column of images beside "<image>" in texts, as bytes, paths and data: URLs; transformers' parts without a path."""
    import base64
    import pyarrow
    import pyarrow.parquet
    rows, jsonl = [], []
    for row in rows_of(world):
        images, messages, parts = [], [], []
        for message in row["messages"]:
            content = message["content"]
            if isinstance(content, list):
                images += [part["image"] for part in content if "image" in part]
                parts.append(message | {"content": [{"type": "image"} if "image" in part else part for part in content]})
                content = "".join(part.get("text", "<image>") for part in content)
            else:
                parts.append(message)
            messages.append({"role": message["role"], "content": content})
        as_bytes = [{"bytes": open(path, "rb").read(), "path": None} for path in images]
        rows.append({"messages": messages, "images": as_bytes or None})
        urls = ["data:image/png;base64," + base64.b64encode(open(path, "rb").read()).decode() for path in images]
        jsonl.append({"messages": parts, "images": urls} if images else row)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    write_rows(tmp_path / "columns.jsonl", jsonl)
    plain = train(world, tmp_path / "plain", **LONG)
    assert train(world, tmp_path / "parquet", **LONG | {"data.train_files": [str(tmp_path / "train.parquet")]}) == plain
    assert train(world, tmp_path / "jsonl", **LONG | {"data.train_files": [str(tmp_path / "columns.jsonl")]}) == plain


def test_images_that_do_not_fit_are_named(world, tmp_path):
    def trouble(rows, **more):
        write_rows(tmp_path / "bad.jsonl", rows * BATCH)
        said = finish(start_ranks(1, settings(world, tmp_path / "run", **LONG | {"data.train_files": [str(tmp_path / "bad.jsonl")],
                                                                                 "data.malformed_rows": "fail"} | more)))[0]
        assert said[0] == 2
        return said[1]
    row = lambda content, **more: {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "one"}], **more}
    image = {"type": "image", "image": str(world / "0.png")}
    assert "images: there are 2, and the messages have places for 1" in trouble([row("<image> what", images=[str(world / "0.png")] * 2)])
    assert "the column of images has only 0" in trouble([row([{"type": "image"}])])
    assert 'a part of type "video" is not read' in trouble([row([{"type": "video", "video": "a.mp4"}])])
    assert "max_pixels" in trouble([row([image | {"image": {"path": "a.png", "max_pixels": 9}}])])
    assert "none.png" in trouble([row([image | {"image": str(tmp_path / "none.png")}])])
    assert "is an address" in trouble([row([image | {"image": "https://example.org/a.png"}])])
    assert "image 1 has" in trouble([row([image, {"type": "text", "text": "what"}])], **{"data.max_length": 12, "data.truncation": "left"})


# ----------------------------------------------------------------------------------------------- reinforcement learning


RL_TP, RL_PP, RL_CP = (f"{ACTOR}.megatron.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))


@pytest.fixture(scope="module")
def rl_world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("seeing_rl"))


@pytest.fixture(scope="module")
def alone(rl_world):
    return ppo_run.train(rl_world, rl_world / "alone", **rl_settings())


RL_MESHES = {
    "tp2": (2, {RL_TP: 2, f"{ROLLOUT}.enable_chunked_prefill": True, f"{ROLLOUT}.max_num_batched_tokens": 48}),
    "dp2": (2, {f"{ACTOR}.use_dynamic_bsz": True}),
    "pp2 to dp2, with a reference": (2, {RL_PP: 2, f"{ACTOR}.use_kl_loss": True}),
    "cp2": (2, {RL_CP: 2}),
    "roles on ranks of their own": (3, {f"{ACTOR}.ranks": [0], f"{ROLLOUT}.ranks": [1], f"{REF}.ranks": [2], f"{ACTOR}.use_kl_loss": True}),
}


@pytest.mark.parametrize("mesh", RL_MESHES)
def test_actors_on_any_mesh_say_exactly_what_the_rollout_said(mesh, rl_world, alone, tmp_path):
    ranks, more = RL_MESHES[mesh]
    if mesh != "dp2":
        found = ppo_run.train(rl_world, tmp_path / "run", ranks, **rl_settings(**more))
    else:
        found = ppo_run.train(rl_world, tmp_path / "run", ranks, **rl_settings(**more | {"data.train_batch_size": 4, f"{ACTOR}.ppo_mini_batch_size": 4}))
    assert len(found) == 2
    for step in (*found.values(), *alone.values()):
        assert step["training/rollout_probs_diff_max"] == step["rollout_corr/kl"] == step["actor/ppo_kl"] == 0
    expected = samples(rl_world / "alone", 1)
    assert samples(tmp_path / "run", 1) == (expected if mesh != "dp2" else expected[:8])


def test_the_actor_s_log_probabilities_are_those_of_transformers(rl_world, tmp_path):
    """A prompt and two answers of a token a step, at a rate of nothing: the logarithm of a step's perplexity is the mean of two log-probabilities."""
    one = rl_settings(**{"data.train_batch_size": 1, f"{ACTOR}.ppo_mini_batch_size": 1, "data.max_response_length": 1,
                      "data.max_prompt_length": 300, "trainer.total_training_steps": 50, f"{ACTOR}.optim.lr": 1e-30, f"{ACTOR}.optim.weight_decay": 0.0,
                      "trainer.total_epochs": 10})
    found = ppo_run.train(rl_world, tmp_path / "run", **one)
    peer = seeing_model.load_peer(rl_world / "model")
    texts = peer[1].tokenizer.batch_decode([[i] for i in range(304)], skip_special_tokens=False)
    compared = set()
    for step, metrics in found.items():
        found_tokens = [[i for i, text in enumerate(texts) if text == sample["output"]] for sample in samples(tmp_path / "run", step)]
        if {len(tokens) for tokens in found_tokens} != {1} or [5] in found_tokens:  # parts of characters, and those of images
            continue
        number = (step - 1) % 5
        given = json.loads((rl_world / "train.jsonl").read_text().splitlines()[number])
        text = given["prompt"][0]["content"].split("<image>")
        parts = [{"type": "text", "text": text[0]}] if text[0] else []
        for image, words in zip(given["images"] or [], text[1:], strict=True):
            parts += [{"type": "image", "image": image["path"]}, {"type": "text", "text": words}]
        log_probs = seeing_model.answer_log_probs(peer, [{"role": "user", "content": parts}], found_tokens[0])[0]
        expected = sum(float(log_probs[tokens[0]]) for tokens in found_tokens) / 2
        assert -metrics["rollout_corr/training_log_ppl"] == pytest.approx(expected, rel=1e-6), step
        compared.add(number)
    assert len(compared) > 2


def test_a_critic_sees_as_the_actor_does_on_any_mesh(rl_world, tmp_path):
    """The actor stays as it is: updates on 1 and 2 ranks differ by roundings, and so may answers after them."""
    ppo = rl_settings(**ppo_run.WITH_CRITIC | {"critic.ppo_max_token_len_per_gpu": 700, "critic.megatron.dtype": "bfloat16", "critic.ppo_mini_batch_size": 4,
                                            "data.train_batch_size": 4, f"{ACTOR}.ppo_mini_batch_size": 4, "trainer.total_training_steps": 3, "trainer.critic_warmup": 4})
    found = ppo_run.train(rl_world, tmp_path / "alone", 1, "ppo", **ppo)
    again = ppo_run.train(rl_world, tmp_path / "tp2", 2, "ppo", **ppo | {"critic.megatron.tensor_model_parallel_size": 2})
    assert found[3]["critic/vpred_mean"] != 0
    for step, metrics in found.items():
        assert metrics["training/rollout_probs_diff_max"] == again[step]["training/rollout_probs_diff_max"] == 0
        assert samples(tmp_path / "alone", step) == samples(tmp_path / "tp2", step)
        for name in ("critic/vpred_mean", "critic/vf_loss", "critic/grad_norm"):
            assert again[step][name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_learned_depends_on_the_pixels(frozen, rl_world, alone, tmp_path):
    import torch
    import transformers
    saving = {"checkpoint.save_freq": 1, "checkpoint.save_hf": True}
    write_rows(tmp_path / "other.jsonl", prompts(tmp_path, 1))
    other = ppo_run.train(rl_world, tmp_path / "run", **rl_settings(**saving | {
        f"{ACTOR}.freeze_vision_tower": frozen, "data.train_files": [str(tmp_path / "other.jsonl")]}))
    assert other[1]["prompt_length/mean"] == alone[1]["prompt_length/mean"] > 60
    assert other[1]["actor/entropy"] != alone[1]["actor/entropy"]
    before, after = (transformers.AutoModelForImageTextToText.from_pretrained(folder).state_dict()
                     for folder in (rl_world / "model", tmp_path / "run/actor/hf_model"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    of_tower = {name for name in before if ".visual." in name}
    assert changed - of_tower and changed & of_tower == (set() if frozen else of_tower)
    for step in other.values():
        assert step["training/rollout_probs_diff_max"] == step["rollout_corr/kl"] == step["actor/ppo_kl"] == 0


def test_a_run_with_images_resumes_with_the_same_numbers(rl_world, alone, tmp_path):
    again = ppo_run.train(rl_world, tmp_path / "run", **rl_settings(**{"checkpoint.save_freq": 1, "trainer.total_training_steps": 1}))
    again = ppo_run.train(rl_world, tmp_path / "run", **rl_settings(**{"checkpoint.save_freq": 1, "trainer.total_training_steps": 2}))
    assert again.keys() == alone.keys()
    for name in ("actor/entropy", "actor/grad_norm", "critic/score/mean", "rollout_corr/training_log_ppl"):
        assert again[2][name] == alone[2][name], name
    assert samples(tmp_path / "run", 2) == samples(rl_world / "alone", 2)


def test_images_are_read_from_parquet_from_parts_and_from_a_column_of_another_name(rl_world, alone, tmp_path):
    import pyarrow
    import pyarrow.parquet
    rows = prompts(rl_world, 0)
    columns, parts = [], []
    for one in rows:
        files = [image["path"] for image in one["images"] or []]
        columns.append({key: value for key, value in one.items() if key != "images"} |
                       {"pictures": [{"bytes": open(file, "rb").read(), "path": None} for file in files]})
        text = one["prompt"][0]["content"].split("<image>")
        content = [{"type": "text", "text": text[0]}] if text[0] else []
        for file, words in zip(files, text[1:], strict=True):
            content += [{"type": "image", "image": file}, {"type": "text", "text": words}]
        parts.append({key: value for key, value in one.items() if key != "images"} | {"prompt": [{"role": "user", "content": content}]})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(columns), tmp_path / "train.parquet")
    write_rows(tmp_path / "parts.jsonl", parts)
    for file, more in [("train.parquet", {"data.image_key": "pictures"}), ("parts.jsonl", {})]:
        found = ppo_run.train(rl_world, tmp_path / file.split(".")[1], **rl_settings(**more | {"data.train_files": [str(tmp_path / file)]}))
        assert found == alone, file
        assert samples(tmp_path / file.split(".")[1], 1) == samples(rl_world / "alone", 1)


def test_images_of_prompts_that_do_not_fit_are_named(rl_world, tmp_path):
    def trouble(rows, algorithm="grpo", **more):
        write_rows(tmp_path / "bad.jsonl", rows * 5)
        given = ppo_run.settings(rl_world, tmp_path / "run", **rl_settings(**{"data.train_files": [str(tmp_path / "bad.jsonl")],
                                                                        "data.malformed_rows": "fail"} | more))
        ((status, said),) = finish(start_training(1, algorithm, given))
        assert status == 2
        return said
    good = prompts(rl_world, 0)
    file = {"path": str(rl_world / "0.0.png")}
    assert "images: there are 2, and the messages have places for 1" in trouble([row("<image> what", [file] * 2)])
    assert "the column of images has only 1" in trouble([row("<image> what <image>", [file])])
    assert "none.png" in trouble([row("<image> what", [{"path": str(tmp_path / "none.png")}])])
    assert "is an address" in trouble([row("<image> what", ["https://example.org/a.png"])])
    assert "one with images is not cut" in trouble(good, **{"data.max_prompt_length": 20, "data.truncation": "left"})
    assert "programs of program_agent do not take" in trouble(good, **{
        f"{ROLLOUT}.agent.default_agent_loop": "program_agent", f"{ROLLOUT}.agent.program_command": "cat"})
    shutil.copytree(rl_world / "model", tmp_path / "blind", ignore=shutil.ignore_patterns("preprocessor_config.json", "processor_config.json"))
    said = trouble(good, **{"actor_rollout_ref.model.path": str(tmp_path / "blind")})
    assert "the model's images are not computed" in said and "loaded" not in said
