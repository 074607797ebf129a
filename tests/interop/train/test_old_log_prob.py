"""`ferry train grpo` and `ppo` in `bitwise`: old log-probabilities that are taken from the rollout, and those that the actor computes, make the same
run, byte for byte; so they do where top-k and top-p leave tokens out, which actor and reference leave out, too."""
import json

import pytest

from ppo_run import ACTOR, REF, ROLLOUT, WITH_CRITIC, samples, train, write_world
from ranks import TORCH_PROGRAM
from support import run_ok

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")
RECOMPUTE = f"{ACTOR}.recompute_old_log_prob"
# Metrics that compare the rollout's log-probabilities with the actor's, and so are missing where the actor computes none.
COMPARED = {"training/rollout_probs_diff_valid", "training/rollout_probs_diff_max", "training/rollout_probs_diff_mean",
            "training/rollout_probs_diff_std", "training/rollout_actor_probs_pearson_corr"}
TP = f"{ACTOR}.megatron.tensor_model_parallel_size"
RUNS = {  # name: (algorithm, processes, settings)
    "grpo, of dp 2, with updates and losses": ("grpo", 2, {
        f"{ACTOR}.ppo_mini_batch_size": 2, f"{ACTOR}.ppo_epochs": 2, f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.entropy_coeff": 0.01,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean", f"{ROLLOUT}.temperature": 0.7}),
    "grpo, of tp 2, with rejection and top-p": ("grpo", 2, {
        TP: 2, f"{ROLLOUT}.top_p": 0.8, "algorithm.rollout_correction.rollout_is": "token", "algorithm.rollout_correction.rollout_rs": "seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold": "0.999_1.001"}),
    "ppo, with warm-up, kl in rewards and top-k": ("ppo", 1, WITH_CRITIC | {"trainer.critic_warmup": 2, f"{ROLLOUT}.top_k": 5}),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("old_log_prob"))


def phases(run):
    return {json.loads(line)["name"] for line in (run / "timeline/timeline_rank0.jsonl").read_text().splitlines()}


def same_runs(computed, taken, mine, theirs, roles):
    """The metrics of both, and the tensors of their newest checkpoints."""
    for step, values in theirs.items():
        assert values.keys() - mine[step].keys() == COMPARED and values["training/rollout_probs_diff_max"] == 0
        assert mine[step] == {name: value for name, value in values.items() if name not in COMPARED}
        assert samples(taken, step) == samples(computed, step)
    for role in roles:
        assert run_ok("digest", taken / role, "--json").stdout == run_ok("digest", computed / role, "--json").stdout


@pytest.mark.parametrize("name", RUNS)
def test_the_rollouts_are_the_actors(name, world, work):
    algorithm, ranks, more = RUNS[name]
    more = more | {"checkpoint.save_freq": 1}
    theirs = train(world, work / "computed", ranks, algorithm, **more, **{RECOMPUTE: True})
    mine = train(world, work / "taken", ranks, algorithm, **more, **{RECOMPUTE: "auto"})
    assert "old_log_prob" in phases(work / "computed") and "old_log_prob" not in phases(work / "taken")
    assert mine[2]["actor/entropy"] > 0
    same_runs(work / "computed", work / "taken", mine, theirs, ("actor", "critic") if algorithm == "ppo" else ("actor",))


def test_a_run_goes_on_either_way(world, work):
    """Two steps that compute them, then two that take them."""
    more = {"checkpoint.save_freq": 1}
    theirs = train(world, work / "computed", **more, **{RECOMPUTE: True, "trainer.total_training_steps": 4})
    for steps, recompute in ((2, True), (4, False)):
        mine = train(world, work / "both", **more, **{RECOMPUTE: recompute, "trainer.total_training_steps": steps})
    same_runs(work / "computed", work / "both", {step: mine[step] for step in (3, 4)}, {step: theirs[step] for step in (3, 4)}, ("actor",))


def ratio_is_one(steps):
    """Rollout, actor and the only update agree in every bit; `rollout_corr/kl` is measured, since the actor computes."""
    for step in steps.values():
        for name in ("actor/ppo_kl", "actor/pg_clipfrac", "rollout_corr/kl", "rollout_corr/k3_kl", "training/rollout_probs_diff_max"):
            assert step[name] == 0, name


@pytest.mark.parametrize("cut", [{f"{ROLLOUT}.top_p": 0.7}, {f"{ROLLOUT}.top_k": 9, f"{ROLLOUT}.top_p": 0.9}], ids=["top-p", "both"])
def test_what_is_left_out_of_the_draw_is_left_out_everywhere(cut, world, work):
    """Alone, and by an actor of TP 2 and a rollout of one rank, the same first step. A reference that is the actor is at distance 0."""
    more = cut | {f"{ACTOR}.use_kl_loss": True, RECOMPUTE: True}
    alone = train(world, work / "alone", **more)
    apart = train(world, work / "apart", 3, **more, **{f"{ACTOR}.ranks": [0, 1], f"{REF}.ranks": [0, 1], TP: 2, f"{ROLLOUT}.ranks": [2]})
    ratio_is_one(alone)
    ratio_is_one(apart)
    assert samples(work / "apart", 1) == samples(work / "alone", 1)
    assert apart[1]["actor/entropy"] == alone[1]["actor/entropy"] > 0
    assert alone[1]["actor/kl_loss"] == 0 < alone[2]["actor/kl_loss"]


def test_fast_runs_leave_out_the_same_tokens(world, work):
    """Rollout and actor round otherwise; the whole vocabulary would be off by the logarithm of what is left, some tenths here."""
    more = {f"{ACTOR}.megatron.alignment": "fast", f"{ROLLOUT}.top_p": 0.7, TP: 2}
    for step in train(world, work, 2, **more).values():
        assert abs(step["rollout_corr/kl"]) < 1e-5 and step["training/rollout_probs_diff_max"] < 1e-4
