"""`ferry train grpo` and `ppo` in `bitwise`: old log-probabilities that are taken from the rollout, and those that the actor computes, make the same
run, byte for byte."""
import pytest

from ppo_run import ACTOR, ROLLOUT, WITH_CRITIC, samples, train, write_world
from ranks import TORCH_PROGRAM
from support import run_ok

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")
RECOMPUTE = f"{ACTOR}.recompute_old_log_prob"
# What compares the rollout's numbers with the actor's has nothing to compare.
COMPARED = {"training/rollout_probs_diff_valid", "training/rollout_probs_diff_max", "training/rollout_probs_diff_mean",
            "training/rollout_probs_diff_std", "training/rollout_actor_probs_pearson_corr"}
SEVERAL = {f"{ACTOR}.ppo_mini_batch_size": 2, f"{ACTOR}.ppo_epochs": 2}
RUNS = {  # name: (algorithm, processes, settings)
    "grpo": ("grpo", 1, {}),
    "grpo, of dp 2, updates and losses": ("grpo", 2, SEVERAL | {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.entropy_coeff": 0.01,
                                                               f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean", f"{ROLLOUT}.temperature": 0.7}),
    "ppo, with warm-up and kl in rewards": ("ppo", 1, WITH_CRITIC | {"trainer.critic_warmup": 1}),
    "grpo, with rejection, of tp 2": ("grpo", 2, {f"{ACTOR}.megatron.tensor_model_parallel_size": 2, "algorithm.rollout_correction.rollout_is": "token",
                                                  "algorithm.rollout_correction.rollout_rs": "seq_mean_k1",
                                                  "algorithm.rollout_correction.rollout_rs_threshold": "0.999_1.001"}),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("old_log_prob"))


def phases(run):
    return {line.split('"name": "')[1].split('"')[0] for line in (run / "timeline/timeline_rank0.jsonl").read_text().splitlines()}


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
