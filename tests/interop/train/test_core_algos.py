"""Advantages, losses, penalties and rollout corrections beside verl's own functions, with their gradients and metrics."""
import functools
import json
import random
import subprocess

import pytest
import torch

from support import FERRY
from verl_core import Batch, Config, core_algos, losses, rollout_corr_helper, torch_functional

SEQUENCES, LENGTH = 24, 17
# fp32, the same sums in the same order but for how the two are fused: some units in the last place, of the largest value.
BOUND = 2e-6


@functools.cache
def tool():
    return subprocess.Popen([FERRY.parent.parent / "tests/algorithm_tool"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ours(question):
    print(json.dumps(question, default=lambda t: t.tolist()), file=tool().stdin, flush=True)
    answer = json.loads(tool().stdout.readline())
    assert "error" not in answer, answer
    return answer["answer"]


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    tool().stdin.close()
    assert tool().wait(timeout=60) == 0


def agrees(mine, theirs, what):
    mine, theirs = torch.as_tensor(mine, dtype=torch.float64), torch.as_tensor(theirs, dtype=torch.float64)
    assert mine.shape == theirs.shape, f"{what}: {mine.shape}, verl has {theirs.shape}"
    size = max(theirs.abs().max().item(), 1e-3)
    worst = (mine - theirs).abs().max().item()
    assert worst <= BOUND * size, f"{what}: off by {worst} of {size}"


def metrics_agree(mine, theirs, what=""):
    assert mine.keys() == theirs.keys(), what
    for name in theirs:
        agrees(mine[name], theirs[name], f"{what} {name}")


def normal(scale, generator):
    return torch.randn(SEQUENCES, LENGTH, generator=generator) * scale


def some_lengths(generator):
    return torch.randint(1, LENGTH + 1, (SEQUENCES, 1), generator=generator)


def some_mask(generator, holes=False, lengths=None):
    """Answers of different lengths; with holes, where a tool spoke."""
    mask = (torch.arange(LENGTH) < (some_lengths(generator) if lengths is None else lengths)).long()
    if holes:
        mask *= (torch.rand(SEQUENCES, LENGTH, generator=generator) < 0.8).long()
        mask[:, 0] = 1
    return mask


@pytest.fixture(params=[0, 1, 2])
def generator(request):
    random.seed(request.param)
    return torch.Generator().manual_seed(request.param)


# ------------------------------------------------------------------------------------------------------- advantages

# Groups of five, four, one and equal ones, not in order.
GROUPS = [0] * 5 + [1] * 4 + [2] * 6 + [3] * 4 + [4] * 4 + [5]


def outcomes(generator, holes):
    """Rewards at the last token of each answer, also where the mask lacks it: those of group 3 are all equal, of group 2 zero or one."""
    lengths = some_lengths(generator)
    mask = some_mask(generator, holes, lengths)
    index = [GROUPS[i] for i in torch.randperm(SEQUENCES, generator=generator)]
    rewards = torch.zeros(SEQUENCES, LENGTH)
    for i, group in enumerate(index):
        score = {2: float(random.random() < 0.5), 3: 0.25}.get(group, random.gauss(0, 2))
        rewards[i, lengths[i] - 1] = score
    return {"token_level_rewards": rewards, "response_mask": mask, "index": index}


def advantages_agree(name, inputs, config, theirs):
    mine = ours({"op": "advantage", "adv_estimator": name, "config": config, **inputs})
    for part, expected in zip(("advantages", "returns"), theirs, strict=True):
        agrees(mine[part], expected, f"{name} {part}")


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg"])
@pytest.mark.parametrize("holes", [False, True])
def test_advantages_of_outcomes(name, holes, generator):
    inputs = outcomes(generator, holes)
    theirs = core_algos.get_adv_estimator_fn(name)(**inputs, config=Config())
    advantages_agree(name, inputs, {}, theirs)


@pytest.mark.parametrize("name", ["grpo_vectorized", "rloo_vectorized"])
def test_advantages_of_other_names(name, generator):
    """verl's rloo_vectorized gives a group of one nothing, where rloo keeps its reward: a run of rloo has none."""
    inputs = outcomes(generator, holes=True)
    if name == "rloo_vectorized": inputs["index"] = [min(group, 4) for group in inputs["index"]]
    theirs = core_algos.get_adv_estimator_fn(name)(**inputs, config=Config())
    advantages_agree(name, inputs, {}, theirs)


@pytest.mark.parametrize("name", ["grpo", "grpo_passk"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("holes", [False, True])
def test_advantages_with_and_without_deviation(name, norm, holes, generator):
    """grpo without is Dr. GRPO."""
    inputs = outcomes(generator, holes)
    inputs["index"] = [min(group, 4) for group in inputs["index"]]
    config = {"norm_adv_by_std_in_grpo": norm}
    theirs = core_algos.get_adv_estimator_fn(name)(**inputs, **config, config=Config(config))
    advantages_agree(name, inputs, config, theirs)


@pytest.mark.parametrize("gamma,lam", [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae(gamma, lam, generator):
    inputs = {"token_level_rewards": normal(1, generator), "values": normal(1, generator), "response_mask": some_mask(generator, holes=True)}
    theirs = core_algos.compute_gae_advantage_return(**inputs, gamma=gamma, lam=lam)
    advantages_agree("gae", inputs, {"gamma": gamma, "lam": lam}, theirs)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(gamma, generator):
    inputs = {"token_level_rewards": normal(1, generator), "response_mask": some_mask(generator, holes=True)}
    theirs = core_algos.get_adv_estimator_fn("reinforce_plus_plus")(**inputs, config=Config(gamma=gamma))
    advantages_agree("reinforce_plus_plus", inputs, {"gamma": gamma}, theirs)


def test_remax(generator):
    inputs = {"token_level_rewards": normal(1, generator), "response_mask": some_mask(generator, holes=True),
              "reward_baselines": torch.randn(SEQUENCES, generator=generator)}
    advantages_agree("remax", inputs, {}, core_algos.get_adv_estimator_fn("remax")(**inputs, config=Config()))


def test_masked(generator):
    values, mask = normal(3, generator) + 1, some_mask(generator, holes=True)
    mine = ours({"op": "masked", "values": values, "response_mask": mask})
    agrees(mine["sum"], torch_functional.masked_sum(values, mask, -1), "masked_sum")
    agrees(mine["mean"], torch_functional.masked_mean(values, mask), "masked_mean")
    agrees(mine["var"], torch_functional.masked_var(values, mask), "masked_var")
    agrees(mine["whiten"], torch_functional.masked_whiten(values, mask), "masked_whiten")


# ----------------------------------------------------------------------------------------------------------- losses

AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def policy_inputs(generator):
    old = -normal(1, generator).abs()
    # Some ratios far outside of what is clipped.
    far = normal(1, generator) * (torch.rand(SEQUENCES, LENGTH, generator=generator) < 0.1) * 12
    return {"old_log_prob": old, "log_prob": old + normal(0.3, generator) + far, "advantages": normal(2, generator),
            "response_mask": some_mask(generator, holes=True)}


def actor_config(mode, aggregation, **more):
    return {"loss_mode": mode, "loss_agg_mode": aggregation, "clip_ratio": 0.2, "clip_ratio_low": 0.15, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0,
            "tau_pos": 1.0, "tau_neg": 1.05, "clip_cov_ratio": 0.05, "clip_cov_lb": 0.2, "clip_cov_ub": 8.0, "kl_cov_ratio": 0.04,
            "ppo_kl_coef": 0.7, "entropy_coeff": 0.0, "use_kl_loss": False, **more}


def losses_agree(inputs, config, seed=5, ours_config=None):
    """verl's ppo_loss and ours on a mini-batch that is one micro-batch; one sequence of it is masked out."""
    inputs["response_mask"][3] = 0
    counts = {"batch_num_tokens": int(inputs["response_mask"].sum()), "global_batch_size": SEQUENCES, "loss_scale_factor": 40}
    mine = ours({"op": "actor_loss", "config": ours_config or config, "seed": seed, **counts, **inputs})

    leaves = {name: inputs[name].clone().requires_grad_() for name in ("log_prob", "entropy") if name in inputs}
    data = Batch(inputs | {"old_log_probs": inputs["old_log_prob"], "dp_size": 1, **counts})
    theirs = Config(config | {"global_batch_info": {}, "policy_loss": Config(config), "loss_scale_factor": counts["loss_scale_factor"]})
    torch.manual_seed(seed)  # clip_cov draws from the global generator
    loss, metrics = losses.ppo_loss(theirs, {"log_probs": leaves["log_prob"], "entropy": leaves.get("entropy")}, data)
    loss.backward()
    agrees(mine["loss"], loss.detach(), "loss")
    for name, leaf in leaves.items():
        agrees(mine["grad"][name], leaf.grad, f"gradient of {name}")
    metrics.pop("kl_coef", None)
    # verl's trainer writes kl_loss as actor/kl_loss.
    metrics_agree(mine["metrics"], {name if "/" in name else f"actor/{name}": m.value for name, m in metrics.items()})
    return mine


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo", "clip_cov", "kl_cov", "geo_mean", "sapo", "gpg"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("weighed", [False, True])
def test_policy_losses(mode, aggregation, weighed, generator):
    inputs = policy_inputs(generator)
    if mode == "geo_mean":
        inputs["advantages"] = inputs["advantages"][:, :1].expand(-1, LENGTH).contiguous()
    if mode in ("clip_cov", "kl_cov"):  # unclamped there: keep the exponential small
        inputs["log_prob"] = inputs["log_prob"].clamp(inputs["old_log_prob"] - 3, inputs["old_log_prob"] + 3)
    if weighed:
        inputs["rollout_is_weights"] = torch.exp(normal(0.5, generator))
    mine = losses_agree(inputs, actor_config(mode, aggregation))
    if mode == "vanilla":
        assert mine["metrics"]["actor/pg_clipfrac"] > 0.1 and mine["metrics"]["actor/pg_clipfrac_lower"] > 0
    if mode == "clip_cov":
        assert mine["metrics"]["actor/pg_clipfrac"] > 0.03


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("correction", [
    {}, {"rollout_is": "token"}, {"rollout_is": "sequence", "rollout_is_threshold": "1.5", "rollout_is_batch_normalize": True},
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.6"}, {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.05"},
    {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0", "rollout_rs": "token_k2,seq_max_k2", "rollout_rs_threshold": "0.2"},
], ids=lambda c: "-".join(map(str, c.values())) or "metrics")
def test_bypass_mode(loss_type, correction, generator):
    """Weights and rejection are of the policy as it is now; verl's registered loss, with every aggregation."""
    correction = correction | {"loss_type": loss_type}
    for aggregation in AGGREGATIONS:
        inputs = policy_inputs(generator)
        inputs["log_prob"] = inputs["log_prob"].clamp(inputs["old_log_prob"] - 3, inputs["old_log_prob"] + 3)  # exponentials of sums stay small
        config = actor_config("bypass_mode", aggregation, rollout_correction=Config(correction))
        mine = losses_agree(inputs, config, ours_config=config | {"loss_mode": "vanilla"})
        assert "rollout_corr/kl" in mine["metrics"]
        if "rollout_rs" in correction:
            assert 0 < mine["metrics"]["rollout_corr/rollout_rs_masked_fraction"] < 1


@pytest.mark.parametrize("kl_loss_type", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"])
def test_losses_with_entropy_and_divergence(kl_loss_type, generator):
    inputs = policy_inputs(generator) | {"entropy": normal(1, generator).abs()}
    inputs["ref_log_prob"] = inputs["log_prob"] + normal(2, generator)
    aggregation = random.choice(AGGREGATIONS)
    losses_agree(inputs, actor_config("vanilla", aggregation, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type=kl_loss_type))

    logprob, ref = inputs["log_prob"].clone().requires_grad_(), inputs["ref_log_prob"]
    value = core_algos.kl_penalty(logprob, ref, kl_loss_type)
    value.sum().backward()
    mine = ours({"op": "kl_penalty", "kl_penalty": kl_loss_type, "logprob": inputs["log_prob"], "ref_logprob": ref})
    agrees(mine["value"], value.detach(), kl_loss_type)
    agrees(mine["grad"], logprob.grad, f"gradient of {kl_loss_type}")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_value_loss(aggregation, generator):
    values = normal(1, generator)
    inputs = {"vpreds": values + normal(1, generator), "values": values, "returns": normal(1, generator), "response_mask": some_mask(generator, holes=True)}
    counts = {"batch_num_tokens": int(inputs["response_mask"].sum()), "global_batch_size": SEQUENCES, "loss_scale_factor": 40}
    config = {"cliprange_value": 0.4, "loss_agg_mode": aggregation}
    mine = ours({"op": "critic_loss", "config": config, **counts, **inputs})
    vpreds = inputs["vpreds"].clone().requires_grad_()
    loss, metrics = losses.value_loss(Config(config | {"loss_scale_factor": 40}), {"values": vpreds}, Batch(inputs | {"dp_size": 1, **counts}))
    loss.backward()
    agrees(mine["loss"], loss.detach(), "loss")
    agrees(mine["grad"]["vpreds"], vpreds.grad, "gradient")
    metrics_agree(mine["metrics"], {name: getattr(m, "value", m) for name, m in metrics.items()})
    assert mine["metrics"]["critic/vf_clipfrac"] > 0.1


# -------------------------------------------------------------------------------------------------------- penalties


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
@pytest.mark.parametrize("kl_penalty", ["kl", "abs", "mse", "low_var_kl"])
def test_kl_in_reward(kind, kl_penalty, generator):
    """Three steps of verl's ray_trainer.apply_kl_penalty, which computes as written here, with verl's controllers."""
    old, mask = -normal(1, generator).abs(), some_mask(generator, holes=True)
    inputs = {"token_level_scores": normal(1, generator), "old_log_probs": old, "ref_log_prob": old + normal(0.5, generator), "response_mask": mask}
    control = Config(type=kind, kl_coef=0.05, target_kl=0.1, horizon=100)
    mine = ours({"op": "apply_kl_penalty", "kl_penalty": kl_penalty, "kl_ctrl": control, "steps": 3, **inputs})
    controller = core_algos.get_kl_controller(control)
    for step in mine["steps"]:
        beta = controller.value
        divergence = core_algos.kl_penalty(old, inputs["ref_log_prob"], kl_penalty) * mask
        current = torch_functional.masked_mean(divergence, mask=mask, axis=-1).mean(0).item()
        controller.update(current_kl=current, n_steps=SEQUENCES)
        agrees(step["token_level_rewards"], inputs["token_level_scores"] - beta * divergence, "rewards")
        metrics_agree(step["metrics"], {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": beta})
    assert (controller.value != 0.05) == (kind == "adaptive")
    agrees(mine["value"], controller.value, "controller")


def test_overlong_penalty():
    """The line of verl's DAPORewardManager: min(-exceed_len / overlong_buffer_len * overlong_penalty_factor, 0)."""
    cases = [(length, limit, buffer, factor) for limit, buffer, factor in [(100, 20, 1.0), (64, 64, 0.5), (4096, 4095, 2.0)]
             for length in (0, 1, limit - buffer, limit - buffer + 1, limit - 1, limit)]
    mine = [ours({"op": "overlong", "response_length": n, "max_resp_len": limit, "len": buffer, "penalty_factor": factor})
            for n, limit, buffer, factor in cases]
    assert mine == [min(-(n - (limit - buffer)) / buffer * factor, 0) for n, limit, buffer, factor in cases]


# ----------------------------------------------------------------------------------------------- rollout correction

CORRECTIONS = [
    {},
    {"rollout_is": "token"},
    {"rollout_is": "sequence", "rollout_is_threshold": "1.5"},
    {"rollout_is": "token", "rollout_is_threshold": "0.8_1.25"},
    {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"},
    {"rollout_is": "token", "rollout_is_batch_normalize": True},
    {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    *({"rollout_rs": name, "rollout_rs_threshold": threshold} for name, threshold in [
        ("token_k1", "0.6_1.6"), ("token_k1", "1.5"), ("token_k2", "0.05"), ("token_k3", "0.05"), ("seq_sum_k1", "0.5_2.0"), ("seq_sum_k2", "0.3"),
        ("seq_sum_k3", "0.3"), ("seq_mean_k1", "0.9_1.1"), ("seq_mean_k2", "0.03"), ("seq_mean_k3", "0.03"), ("seq_max_k2", "0.1"), ("seq_max_k3", "0.1")]),
    {"rollout_rs": "token_k1, seq_mean_k3,token_k1", "rollout_rs_threshold": "0.5_2.0, 0.04"},
    {"rollout_is": "token", "rollout_rs": "token_k2,seq_max_k2", "rollout_rs_threshold": "0.2"},
]


@pytest.mark.parametrize("config", CORRECTIONS, ids=lambda c: "-".join(map(str, c.values())) or "metrics")
def test_rollout_correction(config, generator):
    rollout = -normal(1, generator).abs()
    far = normal(1, generator) * (torch.rand(SEQUENCES, LENGTH, generator=generator) < 0.02) * 15
    mask = some_mask(generator, holes=True)
    if len(config) != 1:
        mask[7] = 0  # a sequence without a token
    inputs = {"old_log_prob": rollout + normal(0.2, generator) + far, "rollout_log_prob": rollout, "response_mask": mask}
    mine = ours({"op": "rollout_correction", "config": config, **inputs})
    weights, kept, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(**inputs, **config)
    assert ("rollout_is_weights" in mine) == (weights is not None)
    if weights is not None:
        agrees(mine["rollout_is_weights"], weights.batch["rollout_is_weights"], "weights")
    assert mine["response_mask"] == kept.tolist()
    if "rollout_rs" in config:
        assert 0 < kept.sum() < mask.sum()
    metrics_agree(mine["metrics"], metrics)
