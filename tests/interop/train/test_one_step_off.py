"""`ferry train grpo trainer.one_step_off=true`: answers are generated on ranks of their own while the step before them learns, by weights one update
old at most; a run that was killed goes on as if it had not been, and a rank that dies meanwhile ends it."""
import json
import signal
import time

import pytest

from ppo_run import ACTOR, ROLLOUT, metrics, settings, train, write_world
from ranks import TORCH_PROGRAM, finish, start_training

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")
APART = {f"{ACTOR}.ranks": [0], f"{ROLLOUT}.ranks": [1]}
AHEAD = APART | {"trainer.one_step_off": True}
STALENESS = "training/off_policy/trajectory_staleness/max"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("one_step_off"), prompts=32)


def values(steps, name):
    return [steps[step][name] for step in sorted(steps)]


def spans(run, rank, names):
    lines = map(json.loads, (run / f"timeline/timeline_rank{rank}.jsonl").read_text().splitlines())
    return [line for line in lines if line["name"] in names]


def lines(run):
    log = run / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def test_answers_come_while_the_step_before_learns(world, work):
    steps = train(world, work / "run", 2, **AHEAD, **{"trainer.total_training_steps": 4})
    assert values(steps, STALENESS) == [0, 1, 1, 1]
    # From the first reward of a step to the end of its update: short answers may fall between two of its spans.
    learns = spans(work / "run", 0, {"reward", "old_log_prob", "adv", "update_actor"})
    begins = {step: min(one["start"] for one in learns if one["step"] == step) for step in (1, 2, 3, 4)}
    ends = {step: max(one["end"] for one in learns if one["step"] == step) for step in (1, 2, 3, 4)}
    answers = [one for one in spans(work / "run", 1, {"gen"}) if one["start"] < ends[one["step"]] and begins[one["step"]] < one["end"]]
    assert [one["step"] for one in answers] == [1, 2, 3]
    # The first step is the synchronous run's; later ones have other answers.
    alone = train(world, work / "alone", 2, **APART, **{"trainer.total_training_steps": 2})
    assert values(alone, STALENESS) == [0, 0]
    assert alone[1] == steps[1] and alone[2] != steps[2]


def test_it_learns_as_the_synchronous_run_does(world, work):
    """Answers are to have the letters of the first half of the alphabet."""
    program = work / "reward.py"
    program.write_text("import json, sys\nfor line in sys.stdin:\n    q = json.loads(line)\n    text = q['solution_str']\n"
                       "    print(json.dumps({'id': q['id'], 'score': sum(c < 'n' for c in text) / max(1, len(text))}), flush=True)\n")
    more = {"reward_model.command": f"python3 {program}", "trainer.total_training_steps": 12, f"{ROLLOUT}.n": 8, f"{ACTOR}.optim.lr": 3e-2,
            f"{ROLLOUT}.max_num_seqs": 32}
    epochs = []
    for name, mode in {"alone": APART, "ahead": AHEAD}.items():
        steps = train(world, work / name, 2, **mode, **more)
        score = values(steps, "critic/score/mean")
        assert sum(score[-3:]) / 3 > sum(score[:3]) / 3 + 0.1, (name, score)
        epochs.append(values(steps, "training/epoch"))
    assert epochs[0] == epochs[1] and len(set(epochs[0])) > 1  # of the prompts that the step learns from


def test_a_killed_run_goes_on_as_if_it_had_not_been(world, work):
    more = AHEAD | {"trainer.total_training_steps": 6, "checkpoint.save_freq": 3, "trainer.val_before_train": False,
                    "data.val_files": [str(world / "train.jsonl")], "trainer.test_freq": 2}
    whole = train(world, work / "whole", 2, **more)
    # Before a checkpoint nothing is answered ahead.
    assert values(whole, STALENESS) == [0, 1, 1, 0, 1, 1]
    run = work / "run"
    ranks = start_training(2, "grpo", settings(world, run, **more))
    until = time.monotonic() + 120
    while not ((run / "actor/iter_0000003").is_dir() and lines(run) > 2) and time.monotonic() < until:
        time.sleep(0.005)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    finish(ranks)
    assert len(metrics(run)) < 6
    assert train(world, run, 2, **more) == whole


def test_a_rollout_that_dies_ends_the_run(world, work):
    run = work / "run"
    ranks = start_training(2, "grpo", settings(world, run, **AHEAD, **{"trainer.total_training_steps": 1000, "trainer.nccl_timeout": 10}))
    until = time.monotonic() + 120
    while lines(run) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    ranks[1].send_signal(signal.SIGKILL)
    status, said = finish(ranks)[0]
    assert status == 2 and "rank 1" in said, said
