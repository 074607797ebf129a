"""Replicas of the rollout in `ferry train grpo`: processes that answer beside a rank. They die, hang, are started again and join a run that goes on;
the run has the same bytes."""
import json
import os
import signal
import subprocess
import time

import pytest

from ppo_run import ACTOR, APART, PARTIAL, REWARD, ROLLOUT, metrics, settings, train, write_world
from ranks import TORCH_PROGRAM, finish, start_training
from support import tree

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")
REPLICAS = f"{ROLLOUT}.replicas"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A step takes a while, so that replicas load within a few."""
    world = write_world(tmp_path_factory.mktemp("replicas"))
    (world / "reward.py").write_text(REWARD.replace("import json, sys\n", "import json, sys, time\n").replace("    text = ", "    time.sleep(.02)\n    text = "))
    return world


MORE = APART | {"async_training.staleness_threshold": 2, "trainer.total_training_steps": 80}


@pytest.fixture(scope="module")
def alone(world):
    return train(world, world / "alone", 2, **MORE)


def events(run, name=None):
    path = run / "replicas/rank1.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if name in (None, line["event"])]


def wait_for_event(run, ranks, name, count=1):
    until = time.monotonic() + 120
    while len(events(run, name)) < count and ranks[0].poll() is None and time.monotonic() < until:
        time.sleep(.01)
    assert len(events(run, name)) >= count, (events(run), ranks[0].poll())
    return events(run, name)


def wait_for_answers(run, ranks, replica):
    """-> the process of the replica, once it has answered something"""
    until = time.monotonic() + 120
    while not any(line["of replicas"].get(replica) for line in events(run, "answered")):
        assert ranks[0].poll() is None and time.monotonic() < until, events(run)
        time.sleep(.01)
    return next(line["pid"] for line in events(run, "joined") if str(line["replica"]) == replica)


def start(world, run, **more):
    return start_training(2, "grpo", settings(world, run, **MORE | more))


def ends_as(run, ranks, world, alone):
    for status, said in finish(ranks, timeout=240):
        assert status == 0, said[-3000:]
    assert metrics(run) == alone
    assert tree(run / "rollouts") == tree(world / "alone/rollouts")


def test_a_replica_that_is_killed_while_a_checkpoint_is_written_is_started_again(world, alone, work):
    run = work / "run"
    ranks = start(world, run, **{f"{REPLICAS}.num": 2, "checkpoint.save_freq": 2, "checkpoint.keep_last": 1})
    wait_for_answers(run, ranks, "1")
    killed = wait_for_answers(run, ranks, "0")
    while all((run / "actor" / pending.stem).is_dir() for pending in (run / "pending").glob("*.cbor")) and ranks[0].poll() is None:
        time.sleep(.001)
    os.kill(killed, signal.SIGKILL)
    wait_for_answers(run, ranks, "2")
    ends_as(run, ranks, world, alone)
    assert [line["why"] for line in events(run, "left out")] == ["ended"] and len(events(run, "started")) == 3


def test_a_replica_that_hangs_is_noticed(world, alone, work):
    run = work / "run"
    ranks = start(world, run, **{f"{REPLICAS}.num": 1, f"{REPLICAS}.timeout": 1})
    os.kill(wait_for_answers(run, ranks, "0"), signal.SIGSTOP)
    why = wait_for_event(run, ranks, "left out")[0]["why"]
    assert "said nothing for 1 s" in why or "took no weights" in why
    ends_as(run, ranks, world, alone)
    assert len(events(run, "started")) == 2


def test_a_replica_that_fails_again_and_again_is_given_up(world, alone, work):
    run = work / "run"
    ranks = start(world, run, **{f"{REPLICAS}.num": 1, f"{REPLICAS}.max_restarts": 1, f"{REPLICAS}.timeout": 3})
    for lost in ("0", "1"):
        os.kill(wait_for_answers(run, ranks, lost), signal.SIGKILL)
    why = wait_for_event(run, ranks, "given up")[0]["why"]
    assert why == "ended" or "took no weights" in why  # they may be under way
    ends_as(run, ranks, world, alone)
    assert len(events(run, "started")) == 2


def test_replicas_join_and_leave_a_run_that_goes_on(world, alone, work):
    run = work / "run"
    ranks = start(world, run, **{f"{REPLICAS}.elastic": True})
    socket = run / "replicas/rank1.sock"
    until = time.monotonic() + 120
    while not socket.exists() and time.monotonic() < until:
        time.sleep(.01)
    guests = [subprocess.Popen([TORCH_PROGRAM, "train", "replica", socket], env=os.environ | {"OMP_NUM_THREADS": "1"}) for _ in range(2)]
    wait_for_answers(run, ranks, "0")
    wait_for_answers(run, ranks, "1")
    refused = subprocess.run([TORCH_PROGRAM, "train", "replica", socket, "--gpu", "1"], capture_output=True, text=True)
    assert refused.returncode == 2 and "--gpu 1: has no effect: trainer.device of the run is cpu" in refused.stderr
    guests[0].kill()
    ends_as(run, ranks, world, alone)
    assert guests[0].wait() == -signal.SIGKILL and guests[1].wait(timeout=20) == 0
    assert len(events(run, "left out")) == 2 and not events(run, "started")
    assert not socket.exists() and not list((run / "replicas").glob("*.store"))


def test_each_rank_of_the_rollout_has_replicas_of_its_own(world, work):
    """Two copies of the model, each with a replica."""
    two = {f"{ROLLOUT}.ranks": [1, 2], "trainer.total_training_steps": 15}
    whole = train(world, work / "whole", 3, **MORE | two)
    assert train(world, work / "run", 3, **MORE | two, **{f"{REPLICAS}.num": 1}) == whole
    assert tree(work / "run/rollouts") == tree(work / "whole/rollouts")


def test_a_run_with_replicas_is_the_same_again(world, alone, work):
    """Synchronously, too, with rewards that are scored early."""
    more = {f"{REPLICAS}.num": 1, "reward_model.num_workers": 2, "async_training.staleness_threshold": 0, "trainer.total_training_steps": 20}
    steps = [train(world, work / name, 2, **MORE | more | other) for name, other in (("one", {}), ("two", {}), ("none", {f"{REPLICAS}.num": 0}))]
    assert steps[0] == steps[1] == steps[2]


TP2 = {f"{ROLLOUT}.ranks": [1, 2], f"{ROLLOUT}.tensor_model_parallel_size": 2}
SOME = PARTIAL | {"trainer.total_training_steps": 40, f"{ROLLOUT}.replicas.timeout": 1}


@pytest.fixture(scope="module")
def partial(world):
    return train(world, world / "partial", 2, **SOME)


def test_ranks_of_a_model_share_its_replicas(world, alone, work):
    """Two ranks that hold half of the model each, and replicas with all of it; one of them is killed."""
    run = work / "run"
    ranks = start_training(3, "grpo", settings(world, run, **MORE | TP2 | {f"{REPLICAS}.num": 2}))
    os.kill(wait_for_answers(run, ranks, "0"), signal.SIGKILL)
    wait_for_answers(run, ranks, "2")
    ends_as(run, ranks, world, alone)
    assert not (run / "replicas/rank2.jsonl").exists()  # the first rank has them


def test_ranks_that_share_experts_have_replicas_of_the_whole_model(world, work):
    experts = write_world(work / "experts", "Mixtral", num_local_experts=4, num_experts_per_tok=2)
    (experts / "reward.py").write_text((world / "reward.py").read_text())
    more = MORE | {f"{ROLLOUT}.ranks": [1, 2], "trainer.total_training_steps": 50}
    whole = train(experts, work / "whole", 3, **more)
    run = work / "run"
    ranks = start_training(3, "grpo", settings(experts, run, **more, **{f"{ROLLOUT}.expert_parallel_size": 2, f"{REPLICAS}.num": 1}))
    os.kill(wait_for_answers(run, ranks, "0"), signal.SIGKILL)
    wait_for_answers(run, ranks, "1")
    for status, said in finish(ranks, timeout=240):
        assert status == 0, said[-3000:]
    assert metrics(run) == whole and tree(run / "rollouts") == tree(work / "whole/rollouts")
    assert (run / "replicas/rank2.jsonl").exists()


@pytest.mark.parametrize("mesh", [{}, TP2 | {"reward_model.num_workers": 2}], ids=["whole", "tp2, scored early"])
def test_partial_rollouts_have_replicas(mesh, world, partial, work):
    """The answers that go on with newer weights are the same, and stop at the same tokens, whoever draws them and whoever dies."""
    run = work / "run"
    ranks = start_training(len(mesh.get(f"{ROLLOUT}.ranks", [1])) + 1, "grpo", settings(world, run, **SOME | mesh | {f"{REPLICAS}.num": 2}))
    os.kill(wait_for_answers(run, ranks, "0"), signal.SIGKILL)
    os.kill(wait_for_answers(run, ranks, "1"), signal.SIGSTOP)
    for status, said in finish(ranks, timeout=240):
        assert status == 0, said[-3000:]
    assert metrics(run) == partial
    assert tree(run / "rollouts") == tree(world / "partial/rollouts")
    assert len(events(run, "left out")) >= 2
