"""`ferry train grpo` of a model with experts, whose updates send tokens where they went when their old log-probabilities were computed (R2), or
where the rollout sent them (R3); and `ferry generate`, whose routes are those of transformers' forward."""
import json
import shutil

import pytest
import torch

from generate_beside_transformers import load, random_prompts
from ppo_run import ACTOR, PROMPTS, ROLLOUT, settings, train, write_world
from ranks import TORCH_PROGRAM, finish, start_training
from sft_run import HYBRID
from support import DATA, run_ok

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")
R2, R3 = ({f"{ACTOR}.router_replay.mode": mode} for mode in ("R2", "R3"))
PP, CP, EP = (f"{ACTOR}.megatron.{kind}_parallel_size" for kind in ("pipeline_model", "context", "expert_model"))
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("replay"), "Qwen3Moe", **EXPERTS)


def test_it_changes_no_byte_where_nothing_was_updated_in_between(world, work):
    """One update a step, in bitwise: routers choose the same experts. Packs of several answers."""
    alone = train(world, work / "chosen")
    for name, mode in (("R2", R2), ("R3", R3)):
        assert train(world, work / name, **mode) == alone, name
    assert all(values["actor/ppo_kl"] == 0 for values in alone.values())


# Four updates a step.
UPDATES = {f"{ACTOR}.ppo_mini_batch_size": PROMPTS // 2, f"{ACTOR}.ppo_epochs": 2, f"{ACTOR}.optim.lr": 5e-2, "trainer.total_training_steps": 1}


def test_it_replays_where_updates_lie_in_between(world, work):
    """Ranks that exchange rows: the first step begins alike, and the ratios that come later are others."""
    more = UPDATES
    chosen, replayed, of_rollout = (train(world, work / name, 2, **more, **mode) for name, mode in (("chosen", {}), ("R2", R2), ("R3", R3)))
    assert chosen[1]["actor/entropy"] == replayed[1]["actor/entropy"]
    assert chosen[1]["actor/ppo_kl"] != replayed[1]["actor/ppo_kl"]
    # An answer's last token has a route in R2 alone, and no other token sees it: only loads may differ.
    without_loads = [{name: value for name, value in steps[1].items() if "/moe/load_" not in name} for steps in (of_rollout, replayed)]
    assert without_loads[0] == without_loads[1]


# A dense layer before those with experts, whose routes are then not numbered as the layers are.
ROUTED = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
          "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize("family, shape, mesh", [
    ("Qwen3Next", HYBRID | {"layer_types": ["linear_attention", "full_attention"]}, {CP: 2, EP: 2}),
    ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}, {PP: 2}),
    ("Glm4Moe", ROUTED, {PP: 2}), ("DeepseekV3", ROUTED | LATENT, {EP: 2}), ("DeepseekV3", ROUTED | LATENT, {PP: 2})])
def test_it_replays_in_layers_of_other_kinds(family, shape, mesh, work):
    """The rollout's routes, at an actor whose ranks share sequences or layers: those that it chooses itself, until it has been updated."""
    world = write_world(work / "world", family, **shape)
    once = {"trainer.total_training_steps": 1}
    assert train(world, work / "replayed once", 2, **once, **mesh, **R3) == train(world, work / "chosen once", 2, **once, **mesh)
    chosen, replayed = (train(world, work / name, 2, **UPDATES, **mesh, **mode) for name, mode in (("chosen", {}), ("R3", R3)))
    assert chosen[1]["actor/entropy"] == replayed[1]["actor/entropy"]
    assert chosen[1]["actor/ppo_kl"] != replayed[1]["actor/ppo_kl"]


def test_the_rollouts_routes_reach_an_actor_on_another_mesh(world, work):
    """An actor of two ranks that share layers and experts, a rollout of its own; old log-probabilities that are the rollout's."""
    more = {f"{ACTOR}.ranks": [0, 1], f"{ACTOR}.megatron.tensor_model_parallel_size": 2, f"{ACTOR}.megatron.expert_model_parallel_size": 2,
            f"{ACTOR}.megatron.expert_tensor_parallel_size": 1, f"{ROLLOUT}.ranks": [2], "algorithm.rollout_correction.bypass_mode": True,
            f"{ACTOR}.recompute_old_log_prob": "auto"}
    assert train(world, work / "replayed", 3, **more, **R3) == train(world, work / "chosen", 3, **more)


def test_it_brings_rollout_and_actor_nearer_in_fast(work):
    """In bf16 an actor of two ranks rounds otherwise than a rollout of one, and routers that are nearly undecided flip."""
    shape = EXPERTS | {"num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    world = write_world(work / "world", "Qwen3Moe", **shape)
    more = {f"{ACTOR}.ranks": [0, 1], f"{ACTOR}.megatron.tensor_model_parallel_size": 2, f"{ROLLOUT}.ranks": [2], f"{ACTOR}.megatron.alignment": "fast",
            f"{ACTOR}.megatron.dtype": "bfloat16", "data.max_response_length": 24, "trainer.total_training_steps": 1}
    chosen, replayed = (train(world, work / name, 3, **more, **mode)[1]["rollout_corr/k3_kl"] for name, mode in (("chosen", {}), ("R3", R3)))
    assert 0 < replayed < chosen


def test_a_model_without_experts_is_refused(work):
    world = write_world(work / "dense")
    (status, said), = finish(start_training(1, "grpo", settings(world, work / "run", **R2)))
    assert status == 2 and "router_replay.mode" in said and "has no experts" in said, said


@torch.no_grad()
def routes_of_transformers(model, tokens):
    """[tokens, layers with experts, topk], in one forward; of GPT-OSS, filled up behind to a multiple of 16 tokens."""
    of_layers = []
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(lambda module, inputs, output: of_layers.append(output[2])) for router in routers]
    padding = -len(tokens) % 16 if model.config.model_type == "gpt_oss" else 0
    model(torch.tensor([tokens + [0] * padding]))
    for hook in hooks:
        hook.remove()
    return torch.stack(of_layers, 1)[:len(tokens)]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "ernie4_5_moe", "olmoe", "minimax_m2",
                                    "glm4_moe_lite", "qwen3_next", "qwen3_5_moe", "kimi_k25", "qwen3_vl_moe"])
def test_routes_are_those_of_transformers_forward_of_the_finished_sequence(family, work):
    """Prompts begin alike and are longer than a step; each has several answers, on one rank and on two that share all."""
    shutil.copytree(DATA / f"hf_{family}/hf", work / "hf")
    config = json.loads((work / "hf/config.json").read_text())
    config.get("text_config", config)["max_position_embeddings"] = 256
    (work / "hf/config.json").write_text(json.dumps(config))
    model = load(work / "hf")
    beginning, *others = random_prompts(model, 4, [70, 3, 20, 9])
    ids = [argument for prompt in [beginning, *([*beginning, *other] for other in others)] for argument in ("--prompt-ids", ",".join(map(str, prompt)))]
    how = ["--enable-return-routed-experts", "--json", "-q", "--ignore-eos", "--max-tokens", 12, "--n", 2, "--max-num-seqs", 4, "--max-num-batched-tokens", 48]
    done = run_ok("generate", work / "hf", *ids, *how)
    assert run_ok("generate", work / "hf", *ids, *how, "--tp", 2, "--ep", 2, "--etp", 1).stdout == done.stdout
    outputs = [(answer["prompt_token_ids"], output) for answer in map(json.loads, done.stdout.splitlines()) for output in answer["outputs"]]
    assert len(outputs) == 8
    for prompt, output in outputs:
        theirs = routes_of_transformers(model, prompt + output["token_ids"])
        assert torch.equal(torch.tensor(output["routed_experts"]), theirs[:-1]), (family, len(prompt))
