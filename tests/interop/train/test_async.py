"""`ferry train grpo` with `async_training`: answers are generated on ranks of their own while steps before theirs learn, by weights that are a known
number of updates old; the first that are finished are learned from, and others go on with newer weights; a run that was killed goes on as if it had
not been, and a rank that dies meanwhile ends it."""
import json
import signal
import subprocess
import time

import pytest

from ppo_run import (ACTOR, ANSWERS, APART, PARTIAL, PROMPTS, ROLLOUT, assert_same_weights, kill_behind, metrics, samples, settings, train,
                     write_world)
from ranks import TORCH_PROGRAM, finish, start_training

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")
AHEAD = APART | {"trainer.one_step_off": True}
STALENESS = "training/off_policy/trajectory_staleness/max"
WORST = "training/off_policy/trajectory_staleness_worst/max"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("one_step_off"), prompts=32)


def values(steps, name):
    return [steps[step][name] for step in sorted(steps)]


def spans(run, rank, names):
    lines = map(json.loads, (run / f"timeline/timeline_rank{rank}.jsonl").read_text().splitlines())
    return [line for line in lines if line["name"] in names]


def ahead(threshold, sync_step=1):
    return APART | {"async_training.staleness_threshold": threshold, "async_training.trigger_parameter_sync_step": sync_step}


def lines(run):
    log = run / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def test_answers_come_while_the_step_before_learns(world, work):
    steps = train(world, work / "run", 2, **AHEAD, **{"trainer.total_training_steps": 4})
    assert values(steps, STALENESS) == [0, 1, 1, 1]
    # Learning lasts from the first reward of a step to the end of its update: short answers may fall between two of its spans.
    learns = spans(work / "run", 0, {"reward", "old_log_prob", "adv", "update_actor"})
    begins = {step: min(one["start"] for one in learns if one["step"] == step) for step in (1, 2, 3, 4)}
    ends = {step: max(one["end"] for one in learns if one["step"] == step) for step in (1, 2, 3, 4)}
    answers = [one for one in spans(work / "run", 1, {"gen"}) if one["start"] < ends[one["step"]] and begins[one["step"]] < one["end"]]
    assert [one["step"] for one in answers] == [1, 2, 3]
    # The first step is the synchronous run's; later ones have other answers.
    alone = train(world, work / "alone", 2, **APART, **{"trainer.total_training_steps": 2})
    assert values(alone, STALENESS) == [0, 0]
    assert alone[1] == steps[1] and alone[2] != steps[2]


@pytest.mark.parametrize(("mode", "expected"), [(ahead(1), [0, 1, 1, 1, 1]), (ahead(2), [0, 1, 2, 2, 2]), (ahead(0, 3), [0, 1, 2, 0, 1]),
                                                (ahead(0.5, 2), [0, 1, 2, 1, 2])], ids=["1", "2", "every 3", "0.5 every 2"])
def test_answers_are_as_old_as_the_schedule_says(mode, expected, world, work):
    steps = train(world, work / "run", 2, **mode, **{"trainer.total_training_steps": 5})
    assert values(steps, STALENESS) == expected
    for step, old in zip(sorted(steps), expected, strict=True):
        assert all(len(one["global_steps"]) == 1
                   and one["global_steps"][0][0] == step - 1 - old for one in samples(work / "run", step))


def test_a_threshold_of_1_is_one_step_off_and_of_0_the_synchronous_run(world, work):
    more = {"trainer.total_training_steps": 3}
    # Checkpoints change no byte.
    assert train(world, work / "one", 2, **ahead(1), **more, **{"checkpoint.save_freq": 1}) == train(world, work / "off", 2, **AHEAD, **more)
    assert train(world, work / "zero", 2, **ahead(0), **more) == train(world, work / "alone", 2, **APART, **more)


def test_an_answer_that_was_interrupted_is_the_same_answer(world, work):
    """A learning rate that changes no weight: the tokens are those of the synchronous run, in other steps."""
    more = {f"{ACTOR}.optim.lr": 1e-30, "trainer.total_training_steps": 5, f"{ROLLOUT}.max_num_seqs": 5, "data.max_response_length": 16}
    steps = train(world, work / "partial", 2, **PARTIAL | more)
    train(world, work / "alone", 2, **APART | more)
    answers = [sorted((one["input"], one["output"], one["score"]) for step in steps for one in samples(work / run, step)) for run in ("partial", "alone")]
    assert answers[0] == answers[1] and len(answers[0]) == 5 * PROMPTS * ANSWERS
    assert max(values(steps, "training/off_policy/trajectory_spans/max")) == 2  # one of them was drawn by two weights
    assert max(values(steps, "training/rollout_probs_diff_max")) == 0


def test_partial_answers_go_on_with_newer_weights(world, work):
    more = {"trainer.total_training_steps": 6}
    steps = train(world, work / "run", 2, **PARTIAL | more)
    assert values(steps, WORST)[0] == 0 and max(values(steps, WORST)) == 2
    runs = [one["global_steps"] for step in steps for one in samples(work / "run", step)]
    assert any(len(run) == 2 for run in runs)
    assert all(run == sorted(run) and sum(count for _, count in run) <= 16 for run in runs)
    assert max(values(steps, "training/rollout_probs_diff_max")) > 0
    assert train(world, work / "again", 2, **PARTIAL | more, **{"checkpoint.save_freq": 2, "checkpoint.keep_last": 1}) == steps
    assert not list((work / "again/pending").glob("*2.cbor"))  # of a checkpoint that is gone


TP2 = {f"{ROLLOUT}.ranks": [1, 2], f"{ROLLOUT}.tensor_model_parallel_size": 2}
DP2 = {f"{ROLLOUT}.ranks": [1, 2]}


def test_two_ranks_of_a_model_interrupt_the_same_answers(world, work):
    more = {"trainer.total_training_steps": 5, "reward_model.num_workers": 2}
    steps = train(world, work / "one", 2, **PARTIAL | more)
    assert train(world, work / "two", 3, **PARTIAL | more | TP2) == steps
    for step in steps:
        assert samples(work / "two", step) == samples(work / "one", step)
    assert any(len(one["global_steps"]) == 2 for step in steps for one in samples(work / "two", step))


@pytest.mark.parametrize("mesh", [DP2, DP2 | TP2 | {f"{ROLLOUT}.ranks": [1, 2, 3, 4]}], ids=["dp2", "dp2 tp2"])
def test_each_copy_of_a_model_interrupts_answers_of_its_own(mesh, world, work):
    """Again the same to the byte; and with a learning rate that changes no weight, the tokens of the synchronous run, in other steps."""
    ranks, more = 1 + len(mesh[f"{ROLLOUT}.ranks"]), PARTIAL | mesh | {"trainer.total_training_steps": 5, f"{ROLLOUT}.max_num_seqs": 2}
    steps = train(world, work / "run", ranks, **more)
    assert train(world, work / "again", ranks, **more) == steps
    assert max(values(steps, WORST)) == 2
    assert any(len(one["global_steps"]) == 2 for step in steps for one in samples(work / "run", step))
    more |= {f"{ACTOR}.optim.lr": 1e-30}
    steps = train(world, work / "still", ranks, **more)
    train(world, work / "alone", 2, **APART, **{key: value for key, value in more.items() if not key.startswith((f"{ROLLOUT}.", "async", "data.gen", ACTOR))},
          **{f"{ACTOR}.optim.lr": 1e-30})
    answers = [sorted((one["input"], one["output"], one["score"]) for step in steps for one in samples(work / run, step)) for run in ("still", "alone")]
    assert answers[0] == answers[1] and max(values(steps, "training/rollout_probs_diff_max")) == 0


def test_ranks_that_share_experts_interrupt_answers_of_their_own(work):
    """They take the same steps of the engine, but stop at different ones: with the same bytes as ranks that have all experts."""
    world = write_world(work / "world", "Mixtral", prompts=32, num_local_experts=4, num_experts_per_tok=2)
    more = PARTIAL | DP2 | {"trainer.total_training_steps": 5, f"{ROLLOUT}.max_num_seqs": 2}
    steps = train(world, work / "whole", 3, **more)
    assert train(world, work / "shared", 3, **more, **{f"{ROLLOUT}.expert_parallel_size": 2}) == steps
    for step in steps:
        assert samples(work / "shared", step) == samples(work / "whole", step)
    assert any(len(one["global_steps"]) == 2 for step in steps for one in samples(work / "shared", step))


def test_it_learns_as_the_synchronous_run_does(world, work):
    """Answers are to have the letters of the first half of the alphabet."""
    program = work / "reward.py"
    program.write_text("import json, sys\nfor line in sys.stdin:\n    q = json.loads(line)\n    text = q['solution_str']\n"
                       "    print(json.dumps({'id': q['id'], 'score': sum(c < 'n' for c in text) / max(1, len(text))}), flush=True)\n")
    more = {"reward_model.command": f"python3 {program}", "trainer.total_training_steps": 12, f"{ROLLOUT}.n": 8, f"{ACTOR}.optim.lr": 3e-2,
            f"{ROLLOUT}.max_num_seqs": 32}
    epochs = []
    partial = {key: value for key, value in PARTIAL.items() if key in AHEAD or key.startswith(("async", "data.gen"))}
    for name, mode in {"alone": APART, "ahead": AHEAD, "two ahead": ahead(2), "partial": partial}.items():
        steps = train(world, work / name, 2, **mode, **more)
        score = values(steps, "critic/score/mean")
        assert sum(score[-3:]) / 3 > sum(score[:3]) / 3 + 0.1, (name, score)
        epochs.append(values(steps, "training/epoch"))
    assert epochs[0] == epochs[1] == epochs[2] and len(set(epochs[0])) > 1  # of the prompts that the step learns from


@pytest.mark.parametrize(("mode", "expected"), [(AHEAD, [0, 1, 1, 1, 1, 1]), (ahead(2), [0, 1, 2, 2, 2, 2]), (ahead(0.5, 2), [0, 1, 2, 1, 1, 1]),
                                                (AHEAD | {"algorithm.adv_estimator": "remax"}, [0, 1, 1, 1, 1, 1]), (PARTIAL | DP2 | {f"{ROLLOUT}.max_num_seqs": 3}, None),
                                                (PARTIAL | {"reward_model.num_workers": 2}, None), (PARTIAL | TP2 | {f"{ROLLOUT}.replicas.num": 2}, None)],
                         ids=["one step off", "two steps off", "every 2", "remax", "partial, dp2", "partial, scored early", "partial, with replicas of two ranks"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(mode, expected, world, work):
    more = mode | {"trainer.total_training_steps": 6, "checkpoint.save_freq": 3, "trainer.val_before_train": False,
                    "data.val_files": [str(world / "train.jsonl")], "trainer.test_freq": 2}
    count = 1 + len(more[f"{ROLLOUT}.ranks"])
    whole = train(world, work / "whole", count, **more)
    assert expected is None or values(whole, STALENESS) == expected
    run = work / "run"
    kill_behind(3, world, run, count, **more)
    assert (run / "pending/iter_0000003.cbor").is_file()
    assert train(world, run, count, **more) == whole
    assert_same_weights(run, work / "whole", 6)


RESUMED = {"trainer.total_training_steps": 4, "checkpoint.save_freq": 2, "trainer.val_before_train": False}


def test_groups_that_are_replaced_and_a_damaged_file_when_a_run_goes_on(world, work):
    """Dynamic sampling draws prompts of its own for the batch in hand. A byte of pending answers that is another one ends the run by the file's name."""
    filtered = AHEAD | RESUMED | {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "characters"}
    whole, run = train(world, work / "whole", 2, **filtered), work / "run"
    assert max(values(whole, "train/num_gen_batches")) > 1
    kill_behind(2, world, run, 2, **filtered)
    file = run / "pending/iter_0000002.cbor"
    good = bytearray(file.read_bytes())
    file.write_bytes(good[:len(good) * 2 // 3] + bytes([good[len(good) * 2 // 3] ^ 1]) + good[len(good) * 2 // 3 + 1:])
    status, said = finish(start_training(2, "grpo", settings(world, run, **filtered)))[0]
    assert status == 2 and "pending/iter_0000002.cbor: bytes" in said and "CRC-32" in said, said
    file.write_bytes(good)
    assert train(world, run, 2, **filtered) == whole
    assert_same_weights(run, work / "whole", 4)


def test_routes_of_the_rollout_when_a_run_goes_on(work):
    world = write_world(work / "world", "Qwen3Moe", prompts=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
    more = PARTIAL | RESUMED | {f"{ACTOR}.router_replay.mode": "R3", f"{ACTOR}.ppo_mini_batch_size": PROMPTS // 2}
    whole, run = train(world, work / "whole", 2, **more), work / "run"
    assert whole != train(world, work / "chosen", 2, **more | {f"{ACTOR}.router_replay.mode": "disabled"})
    kill_behind(2, world, run, 2, **more)
    assert train(world, run, 2, **more) == whole
    assert_same_weights(run, work / "whole", 4)


def test_pending_answers_of_other_settings_are_left_out(world, work):
    """Such a run begins anew behind the checkpoint, with the prompts that nobody has learned from."""
    run, more = work / "run", {"trainer.total_training_steps": 4, "checkpoint.save_freq": 2}
    train(world, run, 2, **ahead(2), **more)
    for folder in ("actor/iter_0000004", "actor/latest_checkpointed_iteration.txt"):
        subprocess.run(["rm", "-r", run / folder], check=True)
    ranks = finish(start_training(2, "grpo", settings(world, run, **ahead(1), **more)), timeout=120)
    assert ranks[0][0] == 0 and "left out   answers that were pending behind step 2: they are those of another batches_ahead" in ranks[0][1]
    steps = metrics(run)
    assert values(steps, STALENESS) == [0, 1, 0, 1]
    prompts = [sorted(one["input"] for one in samples(run, step)) for step in steps]
    train(world, work / "alone", 2, **APART, **more)
    assert prompts == [sorted(one["input"] for one in samples(work / "alone", step)) for step in steps]


def test_a_rollout_that_dies_ends_the_run(world, work):
    run = work / "run"
    ranks = start_training(2, "grpo", settings(world, run, **AHEAD, **{"trainer.total_training_steps": 1000, "trainer.nccl_timeout": 10}))
    until = time.monotonic() + 120
    while lines(run) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    ranks[1].send_signal(signal.SIGKILL)
    status, said = finish(ranks)[0]
    assert status == 2 and "rank 1" in said, said
