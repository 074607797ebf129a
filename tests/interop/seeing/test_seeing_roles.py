"""Images of prompts beside everything else that answers, asks or scores: reward models and critics, which transformers opens, agents, replicas."""
import json
import math
import sys

import pytest

import hf_reference
import ppo_run
import seeing_model
from ppo_run import ACTOR, APART, ROLLOUT, samples
from ranks import TORCH_PROGRAM
from seeing_run import prompts, rl_settings, write_world
from sft_run import write_rows
from support import ferry, ferry_json

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")
ONE = {"trainer.total_training_steps": 1}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The model often ends its turn: the first channel of every token is the same, so that a weight of it is a bias."""
    import torch
    import transformers
    world = write_world(tmp_path_factory.mktemp("seeing_roles"))
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(world / "model", dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.language_model.embed_tokens.weight[:, 0] = 10
        model.lm_head.weight[0, 0] += 0.7
    model.save_pretrained(world / "model")
    return world


def class_of(head):
    """Qwen3-VL with a head of scores, which transformers has no class of: docs/converting.md."""
    import transformers
    from transformers import modeling_layers
    return type(f"Qwen3VLFor{head}Classification", (getattr(modeling_layers, f"GenericFor{head}Classification"), transformers.Qwen3VLPreTrainedModel), {})


def chat_of(prompt):
    """A prompt of the file as transformers' processors take it"""
    text = prompt["prompt"][0]["content"].split("<image>")
    parts = [{"type": "text", "text": text[0]}] if text[0] else []
    for image, words in zip(prompt["images"] or [], text[1:], strict=True):
        parts += [{"type": "image", "image": image["path"]}, {"type": "text", "text": words}]
    return [{"role": "user", "content": parts}]


def test_a_reward_model_sees_what_transformers_sees(world, tmp_path):
    import torch
    import transformers
    torch.manual_seed(3)
    judge = tmp_path / "judge"
    config = transformers.AutoConfig.from_pretrained(world / "model", num_labels=1)
    model = class_of("Sequence")(config).to(torch.bfloat16)
    body = transformers.Qwen3VLForConditionalGeneration.from_pretrained(world / "model", dtype=torch.bfloat16).model
    model.model.load_state_dict(body.state_dict())
    model.save_pretrained(judge)
    model = class_of("Sequence").from_pretrained(judge, dtype=torch.bfloat16, attn_implementation="eager").eval()
    given = rl_settings(**ONE | {"reward_model.enable": True, "reward_model.model.path": str(judge), "reward_model.command": None,
                                 "data.max_response_length": 1, f"{ROLLOUT}.n": 6})
    ppo_run.train(world, tmp_path / "run", **given)
    found = samples(tmp_path / "run", 1)
    ppo_run.train(world, tmp_path / "apart", 2, **given | {"reward_model.ranks": [1]})
    assert samples(tmp_path / "apart", 1) == found
    _, processor = seeing_model.load_peer(world / "model")
    texts = processor.tokenizer.batch_decode([[i] for i in range(304)], skip_special_tokens=True)
    compared = 0
    for number, prompt in enumerate(prompts(world, 0)):
        inputs = processor.apply_chat_template(chat_of(prompt), tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        ids, types = inputs.pop("input_ids"), inputs.pop("mm_token_type_ids")
        inputs.pop("attention_mask")
        for sample in found[6 * number:6 * number + 6]:
            said = [i for i, text in enumerate(texts) if text == sample["output"] and i not in range(3, 7)]
            if len(said) != 1:  # parts of characters, and special tokens
                continue
            whole = torch.cat([ids, torch.tensor([said])], 1)
            with torch.no_grad():
                score = model(input_ids=whole, mm_token_type_ids=torch.nn.functional.pad(types, (0, 1)), **inputs).logits
            assert sample["score"] == pytest.approx(float(score), rel=1e-6), (number, sample["output"])
            compared += bool(prompt["images"])
    assert compared > 5


def test_a_critic_is_opened_by_transformers(world, tmp_path, monkeypatch):
    """The lines of docs/converting.md open it; its values of text have the bits of transformers' model."""
    import torch
    import transformers
    ppo = rl_settings(**ONE | ppo_run.WITH_CRITIC | {"critic.ppo_max_token_len_per_gpu": 700, "critic.megatron.dtype": "bfloat16",
                                                     "critic.ppo_mini_batch_size": 5, "checkpoint.save_freq": 1,
                                                     "critic.freeze_vision_tower": True})
    ppo_run.train(world, tmp_path / "run", 1, "ppo", **ppo)
    done = ferry("convert", tmp_path / "run/critic", tmp_path / "critic", "--to", "hf")
    assert done.returncode == 0, done.stderr
    assert "transformers has no Qwen3VLForTokenClassification: docs/converting.md" in done.stdout + done.stderr
    assert json.loads((tmp_path / "critic/config.json").read_text())["architectures"] == ["Qwen3VLForTokenClassification"]
    opened, report = class_of("Token").from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tower = transformers.Qwen3VLForConditionalGeneration.from_pretrained(world / "model").model.visual.state_dict()
    for name, value in opened.model.visual.state_dict().items():
        assert torch.equal(value, tower[name]), name
    assert opened.score.weight.any()
    monkeypatch.setattr(transformers, "AutoModelForTokenClassification", class_of("Token"))
    hf_reference.main([str(tmp_path / "critic"), str(tmp_path / "reference.safetensors"), "--lengths", "24,64"])
    assert ferry_json("verify", "--logits", tmp_path / "critic", "--reference", tmp_path / "reference.safetensors")["equal"]


ENVIRONMENT = """import json, sys
for line in sys.stdin:
    q = json.loads(line)
    if q["method"] == "reset":
        print(json.dumps({"id": q["id"], "observation": "what is in that"}), flush=True)
    elif q["method"] == "step":
        print(json.dumps({"id": q["id"], "observation": "and that one", "reward": len(q["action"]) % 5, "done": q["action"] == ""}), flush=True)
"""


def agent_settings(world, **more):
    (world / "environment.py").write_text(ENVIRONMENT)
    return rl_settings(**{f"{ROLLOUT}.agent.default_agent_loop": "env_agent", f"{ROLLOUT}.agent.env_command": f"{sys.executable} {world / 'environment.py'}",
                          "data.max_response_length": 60, f"{ROLLOUT}.multi_turn.max_assistant_turns": 4, f"{ACTOR}.ppo_max_token_len_per_gpu": 1000} | more)


def test_tokens_of_images_go_to_the_experts_that_the_rollout_chose(tmp_path):
    """Ranks that share layers and experts, and a second update: it begins alike, and the ratios that come later are others."""
    world = write_world(tmp_path, "Qwen3VLMoe")
    mesh = {f"{ACTOR}.megatron.{kind}_parallel_size": size for kind, size in (("tensor_model", 2), ("expert_model", 2), ("expert_tensor", 1))}
    chosen, replayed = (ppo_run.train(world, tmp_path / mode, 2, **rl_settings(**ONE, **mesh, **{
        f"{ACTOR}.ppo_epochs": 2, f"{ACTOR}.router_replay.mode": mode}))[1] for mode in ("disabled", "R3"))
    assert chosen["training/rollout_probs_diff_max"] == replayed["training/rollout_probs_diff_max"] == 0
    assert chosen["actor/entropy"] == replayed["actor/entropy"] and chosen["actor/ppo_kl"] != replayed["actor/ppo_kl"]


def test_agents_answer_about_images_turn_after_turn(world, tmp_path):
    """The environment adds to the prompt, which is encoded anew, and to the answer: the actor computes what the rollout drew."""
    found = ppo_run.train(world, tmp_path / "alone", **agent_settings(world))
    ppo_run.train(world, tmp_path / "tp2", 2, **agent_settings(world, **{f"{ACTOR}.megatron.tensor_model_parallel_size": 2}))
    assert samples(tmp_path / "tp2", 1) == samples(tmp_path / "alone", 1)
    for step in found.values():
        assert step["num_turns/max"] >= 4
        for name in ("training/rollout_probs_diff_max", "rollout_corr/kl", "actor/ppo_kl"):
            assert step[name] == 0, name
    assert all("what is in that" in sample["input"] for sample in samples(tmp_path / "alone", 1))
    write_rows(tmp_path / "other.jsonl", prompts(tmp_path, 1))
    other = ppo_run.train(world, tmp_path / "other", **agent_settings(world, **{"data.train_files": [str(tmp_path / "other.jsonl")]}))
    assert other[1]["prompt_length/mean"] == found[1]["prompt_length/mean"]
    assert other[1]["actor/entropy"] != found[1]["actor/entropy"]


def test_a_tool_agent_and_a_program_that_scores_take_prompts_with_images(world, tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps({"tools": [{"command": "cat", "tool_schema": {"type": "function", "function": {
        "name": "look", "parameters": {"type": "object", "properties": {}}}}}]}))
    (tmp_path / "reward.py").write_text("""import json, sys
for line in sys.stdin:
    q = json.loads(line)
    parts = [p for m in q["messages"] if isinstance(m["content"], list) for p in m["content"] if p["type"] == "image"]
    print(json.dumps({"id": q["id"], "score": len(parts)}), flush=True)
""")
    found = ppo_run.train(world, tmp_path / "run", **agent_settings(world, **ONE | {
        f"{ROLLOUT}.agent.default_agent_loop": "tool_agent", f"{ROLLOUT}.multi_turn.tool_config_path": str(tmp_path / "tools.json"),
        "reward_model.command": f"{sys.executable} {tmp_path / 'reward.py'}"}))
    assert [sample["score"] for sample in samples(tmp_path / "run", 1)] == [2, 2, 1, 1, 2, 2, 1, 1, 0, 0]
    assert found[1]["training/rollout_probs_diff_max"] == 0


def test_replicas_answer_about_images_with_the_same_bytes(world, tmp_path):
    """Scores wait for the replica, which takes longer than a step to load."""
    given = rl_settings(**APART | {"async_training.staleness_threshold": 2, "trainer.total_training_steps": 8, "trainer.total_epochs": 8})
    alone = ppo_run.train(world, tmp_path / "alone", 2, **given)
    log = tmp_path / "shared/replicas/rank1.jsonl"
    (tmp_path / "reward.py").write_text(f"""import os, time
until = time.monotonic() + 60
while not (os.path.exists({str(log)!r}) and '"joined"' in open({str(log)!r}).read()) and time.monotonic() < until:
    time.sleep(.02)
""" + ppo_run.REWARD)
    shared = ppo_run.train(world, tmp_path / "shared", 2, **given | {f"{ROLLOUT}.replicas.num": 1,
                                                                    "reward_model.command": f"{sys.executable} {tmp_path / 'reward.py'}"})
    assert shared == alone
    for step in alone:
        assert samples(tmp_path / "shared", step) == samples(tmp_path / "alone", step)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(count for event in events if event["event"] == "answered" for count in event["of replicas"].values()), events
    assert not [event for event in events if event["event"] == "left out"]
    assert all(math.isfinite(step["actor/entropy"]) for step in alone.values())
