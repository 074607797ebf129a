"""The balance of experts: losses and biases beside Megatron-Core's own router, and runs that even out the loads of a model."""
import json
import subprocess
import sys

import pytest

import ppo_run
from ranks import TORCH_PROGRAM, finish
from sft_run import conversations, settings, start_ranks, write_model, write_rows
from support import FERRY, PEERS, ROOT, ferry, run_ok

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")

AUX, SEQ, GLOBAL, Z = ([0.02 * (i == kind) for i in range(4)] for kind in range(4))
ALL = [0.03, 0.02, 0.05, 0.01]
NAMES = {"load_balancing_loss": "moe/aux_loss", "seq_load_balancing_loss": "moe/seq_aux_loss",
         "global_load_balancing_loss": "moe/global_aux_loss", "z_loss": "moe/z_loss"}


def case(coeffs, topk=2, experts=8, score="softmax", lengths=((12, 12, 12), (12, 12, 12)), tp=1, cp=1, dp=1, padding=0):
    import torch
    generator = torch.Generator().manual_seed(topk + 10 * experts)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    logits = [draw(sum(one), experts) * 2 + draw(experts) for one in lengths]
    return {"coeffs": coeffs, "topk": topk, "score_function": score, "tp": tp, "cp": cp, "dp": dp, "padding": padding,
            "micro_batches": [{"lengths": one, "logits": rows.tolist()} for one, rows in zip(lengths, logits)],
            "tokens_per_expert": torch.randint(0, 9, (experts,), generator=generator).tolist(), "expert_bias": draw(experts).tolist(), "rate": 1e-3}


UNEVEN = ((9, 20, 4), (5, 27, 1))  # as many tokens
CASES = {
    **{f"top {topk} of {score}": case(ALL, topk, 16, score) for topk in (1, 2, 3, 4, 8) for score in ("softmax", "sigmoid")},
    "aux": case(AUX), "seq": case(SEQ), "global": case(GLOBAL), "z": case(Z),
    "packed": case(ALL, lengths=UNEVEN), "packed, one micro-batch": case(ALL, lengths=((3, 8, 22),)),
    "four micro-batches": case(ALL, lengths=(*UNEVEN, (33,), (16, 17))),
    "tp2, filled up": case(ALL, lengths=UNEVEN, tp=2, padding=1), "cp2, filled up": case(ALL, lengths=UNEVEN, cp=2, padding=3),
    "tp2 cp2, filled up, sigmoid": case(ALL, 4, 16, "sigmoid", UNEVEN, tp=2, cp=2, padding=7),
    "dp2": case([0.03, 0.02, 0, 0.01], lengths=(*UNEVEN, (33,), (16, 17)), dp=2),
    "tp2 dp2": case([0.03, 0.02, 0, 0.01], lengths=UNEVEN, tp=2, dp=2),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(Megatron-Core's results, ours) of each case."""
    folder = tmp_path_factory.mktemp("balance")
    (folder / "cases.json").write_text(json.dumps(list(CASES.values())))
    program = FERRY.parent.parent / "tests/trainer_tool"
    ours = subprocess.run([program, "balance", folder / "cases.json"], capture_output=True, text=True)
    assert ours.returncode == 0, ours.stderr
    script = ROOT / "tests/interop/balance_with_mcore.py"
    theirs = subprocess.run([sys.executable, script, PEERS / "mc0192", folder / "cases.json", folder / "theirs.json"],
                            capture_output=True, text=True)
    assert theirs.returncode == 0, theirs.stderr[-3000:]
    return dict(zip(CASES, zip(json.loads((folder / "theirs.json").read_text()), json.loads(ours.stdout))))


@pytest.mark.parametrize("name", CASES)
def test_losses_and_their_gradients_are_megatrons(name, both):
    import torch
    theirs, ours = both[name]
    for expected, got in zip(theirs["gradients"], ours["gradients"], strict=True):
        expected, got = torch.tensor(expected), torch.tensor(got)
        assert expected.abs().max() > 0
        assert (got - expected).abs().max() <= 2e-6 * expected.abs().max()
    wanted = {NAMES[key]: value for key, value in theirs["metrics"].items() if value}
    assert {key: value for key, value in ours["metrics"].items() if "loss" in key} == pytest.approx(wanted, rel=2e-6)
    assert ours["metrics"]["moe/dropped"] == 0


@pytest.mark.parametrize("name", ["top 1 of softmax", "top 8 of sigmoid", "aux"])
def test_a_bias_moves_as_megatrons(name, both):
    theirs, ours = both[name]
    assert ours["expert_bias"] == theirs["expert_bias"]


# ------------------------------------------------------------------------------------------------------------- runs

EXPERTS, TOPK = 8, 2
DEEPSEEK = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": None,
            "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8}
SHAPE = {"num_hidden_layers": 2, "moe_intermediate_size": 16, "num_experts_per_tok": TOPK}


def change_weights(folder, change):
    from safetensors.torch import load_file, save_file
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def prefer_two_experts(weights):
    """All hidden states have much of one direction, which the first two experts like."""
    import torch
    direction = torch.ones(32)
    weights["model.embed_tokens.weight"] += 0.1 * direction
    for name in weights:
        if name.endswith("mlp.gate.weight"):
            weights[name][:TOPK] += 0.1 * direction


def like_two_experts_more(weights):
    for name in weights:
        if name.endswith("e_score_correction_bias"):
            weights[name][:TOPK] += 0.2


@pytest.fixture(scope="module")
def unbalanced(tmp_path_factory):
    """A model whose routers have no biases."""
    folder = tmp_path_factory.mktemp("unbalanced")
    write_model(folder / "model", family="Qwen3Moe", num_experts=EXPERTS, norm_topk_prob=True, router_aux_loss_coef=0.5, **SHAPE)
    change_weights(folder / "model", prefer_two_experts)
    write_rows(folder / "train.jsonl", conversations())
    return folder


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """One whose routers have them."""
    folder = tmp_path_factory.mktemp("biased")
    write_model(folder / "model", family="DeepseekV3", **DEEPSEEK, **SHAPE, num_key_value_heads=4)
    change_weights(folder / "model", like_two_experts_more)
    write_rows(folder / "train.jsonl", conversations())
    return folder


def metrics_of(run):
    return [line["data"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]


def train(world, run, ranks=1, **more):
    """The metrics of each step."""
    for rank, (status, said) in enumerate(finish(start_ranks(ranks, settings(world, run, **more)), timeout=120)):
        assert status == 0, f"rank {rank}: {said[-3000:]}"
    return metrics_of(run)


def of_training(steps):
    return [{key: value for key, value in step.items() if key.startswith(("moe/", "train/"))} for step in steps]


LONG = {"trainer.total_epochs": 5, "data.max_token_len_per_gpu": 192}
LOSSES = {kind: {"engine.moe_router_load_balancing_type": kind, "engine.moe_aux_loss_coeff": 0.1}
          for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")}


def last_load(steps):
    """The largest share of an expert, of some steps together: a batch of these has few tokens."""
    return sum(step["moe/load_max"] for step in steps[-5:]) / 5


def test_an_unbalanced_model_stays_so_by_itself(unbalanced, tmp_path):
    steps = train(unbalanced, tmp_path, **LONG)
    assert last_load(steps) > 0.9 * EXPERTS / TOPK
    assert all(step["moe/dropped"] == 0 and "moe/aux_loss" not in step for step in steps)


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_even_the_loads_out(kind, unbalanced, tmp_path):
    ranks = {"seq_aux_loss": 2, "global_aux_loss": 4}.get(kind, 1)
    mesh = {"engine.expert_model_parallel_size": 2} if ranks > 1 else {}
    steps = train(unbalanced, tmp_path, ranks, **LONG, **LOSSES[kind], **mesh)
    assert steps[0]["moe/load_max"] > 0.9 * EXPERTS / TOPK
    assert last_load(steps) < 0.75 * EXPERTS / TOPK
    assert steps[-1][f"moe/{kind}"] < 1.2 < 2 < steps[0][f"moe/{kind}"]
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]


def test_biases_stay_by_themselves(biased, tmp_path):
    assert last_load(train(biased, tmp_path, **LONG)) > 0.9 * EXPERTS / TOPK


@pytest.mark.parametrize("ranks", [1, 2])
def test_biases_even_the_loads_out(ranks, biased, tmp_path):
    steps = train(biased, tmp_path, ranks, **LONG, **{"engine.moe_router_bias_update_rate": 0.01})
    assert last_load(steps) < 0.75 * EXPERTS / TOPK


def test_a_resumed_run_goes_on_to_the_byte(biased, tmp_path):
    more = {"engine.moe_router_bias_update_rate": 0.01, "engine.moe_z_loss_coeff": 0.01, "checkpoint.save_freq": 3,
            "engine.moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
            "engine.moe_aux_loss_coeff": [0.01, 0.02, 0.03]}
    whole = train(biased, tmp_path / "whole", **more)
    train(biased, tmp_path / "cut", **more, **{"trainer.total_training_steps": 3})
    resumed = train(biased, tmp_path / "cut", **more)
    assert of_training(resumed) == of_training(whole) and len(whole) == 6
    assert {"moe/aux_loss", "moe/seq_aux_loss", "moe/global_aux_loss", "moe/z_loss"} <= resumed[0].keys()
    run_ok("verify", tmp_path / "cut", tmp_path / "whole")


RECOMPUTED = {
    "layers": {"engine.recompute_granularity": "full", "engine.recompute_method": "uniform", "engine.recompute_num_layers": 1},
    "experts": {"engine.recompute_granularity": "selective", "engine.recompute_modules": ["moe"]},
    "activations of experts": {"engine.recompute_granularity": "selective", "engine.recompute_modules": ["moe_act"]},
}


@pytest.fixture(scope="module")
def kept(biased, tmp_path_factory):
    return train(biased, tmp_path_factory.mktemp("kept"), **LOSSES["aux_loss"], **{"engine.moe_router_bias_update_rate": 0.01})


@pytest.mark.parametrize("what", RECOMPUTED)
def test_what_is_recomputed_counts_once(what, biased, kept, tmp_path):
    steps = train(biased, tmp_path, **LOSSES["aux_loss"], **RECOMPUTED[what], **{"engine.moe_router_bias_update_rate": 0.01})
    assert of_training(steps) == of_training(kept)


REFUSED = {  # settings: what is said
    "a loss without a coefficient": ({"engine.moe_router_load_balancing_type": "aux_loss"}, "moe_aux_loss_coeff"),
    "a coefficient without a loss": ({"engine.moe_aux_loss_coeff": 0.1}, "moe_router_load_balancing_type"),
    "a rate without a bias": ({"engine.moe_router_bias_update_rate": 0.1}, "has no bias of its routers"),
    "another balance": ({"engine.moe_router_load_balancing_type": "sinkhorn", "engine.moe_aux_loss_coeff": 0.1}, "seq_aux_loss"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_balanced_is_refused(name, unbalanced, tmp_path):
    more, says = REFUSED[name]
    refused = ferry("train", "sft", *settings(unbalanced, tmp_path, **more))
    assert refused.returncode == 2 and says in refused.stderr, refused.stderr


def test_losses_of_a_dense_model_are_refused(tmp_path):
    write_model(tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", conversations())
    refused = ferry("train", "sft", *settings(tmp_path, tmp_path / "run", **LOSSES["aux_loss"]))
    assert refused.returncode == 2 and "has no experts" in refused.stderr, refused.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_reinforcement_learning_hands_biases_to_the_rollout(ranks, tmp_path):
    """A sum of log-probabilities that differed by a bit would show in training/rollout_probs_diff."""
    ppo_run.write_world(tmp_path, "DeepseekV3", **DEEPSEEK | SHAPE )
    change_weights(tmp_path / "model", like_two_experts_more)
    megatron = f"{ppo_run.ACTOR}.megatron"
    more = {f"{megatron}.moe_router_bias_update_rate": 0.1, f"{megatron}.moe_z_loss_coeff": 0.01, "trainer.total_training_steps": 3}
    if ranks > 1:
        more |= {f"{megatron}.tensor_model_parallel_size": 2, f"{megatron}.expert_model_parallel_size": 2,
                 f"{megatron}.expert_tensor_parallel_size": 1}
    steps = ppo_run.train(tmp_path, tmp_path / "run", ranks, **more)
    loads = [step["actor/moe/load_max"] for step in steps.values()]
    assert loads[0] == EXPERTS / TOPK > loads[-1]
    for step in steps.values():
        assert step["training/rollout_probs_diff_max"] == 0
        assert step["actor/moe/dropped"] == 0 and step["actor/moe/z_loss"] > 0
