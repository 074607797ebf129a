"""`ferry train grpo` of a model with experts, whose updates send tokens where they went when their old log-probabilities were computed."""
import pytest

from ppo_run import ACTOR, PROMPTS, TORCH_PROGRAM, finish, settings, start_ranks, train, write_world

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")
R2 = {f"{ACTOR}.router_replay.mode": "R2"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("replay"), "Qwen3Moe", **EXPERTS)


def test_it_changes_no_byte_where_nothing_was_updated_in_between(world, work):
    """One update a step, in bitwise: routers choose the same experts. Micro-batches of one, whose packs need no filling up."""
    alone = train(world, work / "chosen")
    assert train(world, work / "replayed", **R2) == alone
    assert all(values["actor/ppo_kl"] == 0 for values in alone.values())


def test_it_replays_where_updates_lie_in_between(world, work):
    """Four updates a step, and ranks that exchange rows: the first step begins alike, and the ratios that come later are others."""
    more = {f"{ACTOR}.ppo_mini_batch_size": PROMPTS // 2, f"{ACTOR}.ppo_epochs": 2, f"{ACTOR}.optim.lr": 5e-2, "trainer.total_training_steps": 1}
    chosen, replayed = train(world, work / "chosen", 2, **more), train(world, work / "replayed", 2, **more, **R2)
    assert chosen[1]["actor/entropy"] == replayed[1]["actor/entropy"]
    assert chosen[1]["actor/ppo_kl"] != replayed[1]["actor/ppo_kl"]


def test_a_model_without_experts_is_refused(work):
    world = write_world(work / "dense")
    (status, said), = finish(start_ranks(1, "grpo", settings(world, work / "run", **R2)))
    assert status == 2 and "router_replay.mode" in said and "has no experts" in said, said
