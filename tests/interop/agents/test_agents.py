"""`ferry train grpo` with answers of several turns: tools that are programs, an environment, what is learned of them, and the same bytes again."""
import json
import subprocess
import sys

import pytest

from agent_world import CALCULATOR, CALLS, ENVIRONMENT, PARTIAL, with_tools, write_tools, write_world
from ppo_run import ACTOR, APART, ROLLOUT, assert_same_weights, kill_behind, metrics, samples, settings, train
from ranks import TORCH_PROGRAM, finish, start_training, wait_for
from sft_run import write_rows
from support import ROOT, run_ok, tree

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")

@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = write_world(tmp_path_factory.mktemp("agents"), CALLS)
    return write_tools(world)


@pytest.fixture(scope="module")
def once(world):
    """The metrics of steps 1 and 2 on one rank."""
    return train(world, world / "once", **with_tools(world))


def test_the_trainer_computes_what_turns_were_drawn_by(once):
    for step in once.values():
        assert step["num_turns/max"] >= 4, "no tool was called"
        for name in ("actor/ppo_kl", "actor/pg_clipfrac", "training/rollout_probs_diff_max", "rollout_corr/kl"):
            assert step[name] == 0, name


def test_truncated_draws_leave_what_tools_said_out(world, work):
    """Such a token is the only one that could be drawn, so its log-probability is 0 wherever it is computed."""
    steps = train(world, work, **with_tools(world), **{f"{ROLLOUT}.top_k": 12, f"{ACTOR}.use_kl_loss": True})
    for step in steps.values():
        assert step["num_turns/max"] >= 4
        for name in ("actor/ppo_kl", "training/rollout_probs_diff_max", "rollout_corr/kl"):
            assert step[name] == 0, name
        assert step["actor/grad_norm"] > 0


def test_an_asynchronous_run_that_was_killed_goes_on_with_what_tools_have_said(world, work):
    """Answers of several turns, whose masks have holes, lie beside the checkpoint. Answers of tools have the same bytes, whoever asks."""
    more = with_tools(world) | APART | {"async_training.staleness_threshold": 2, "trainer.total_training_steps": 4, "checkpoint.save_freq": 2}
    whole, run = train(world, work / "whole", 2, **more), work / "run"
    assert all(step["num_turns/max"] >= 4 for step in whole.values())
    kill_behind(2, world, run, 2, **more)
    assert (run / "pending/iter_0000002.cbor").is_file()
    assert train(world, run, 2, **more) == whole
    assert_same_weights(run, work / "whole", 4)


def test_tools_answer_and_errors_do(world, once):
    said = "".join(sample["output"] for step in once for sample in samples(world / "once", step))
    for text in ("<|tool|>51", "<|tool|>31", "Error executing tool 'calculator'", "Error executing tool 'nothing'"):
        assert text.replace("<|tool|>", "|tool|>") in said, text


@pytest.mark.parametrize("more", [{}, {f"{ACTOR}.recompute_old_log_prob": "auto"}])
def test_a_run_reproduces_to_the_byte(more, world, once, work):
    again = train(world, work, **with_tools(world), **more)
    for step in once:
        assert samples(work, step) == samples(world / "once", step)
        for name, value in again[step].items():
            assert once[step][name] == value, name


# Two ranks have programs of their own; of two that compute the same sessions, the first asks.
@pytest.mark.parametrize("more", [{}, {f"{ACTOR}.megatron.tensor_model_parallel_size": 2, f"{ROLLOUT}.tensor_model_parallel_size": 2}],
                         ids=["dp2", "tp2"])
def test_the_first_step_is_the_same_on_any_mesh(more, world, once, work):
    two = train(world, work, 2, **with_tools(world), **more)
    assert samples(work, 1) == samples(world / "once", 1)
    for name in ("num_turns/mean", "critic/score/mean", "response_length/mean", "actor/entropy", "rollout_corr/kl"):
        assert two[1][name] == once[1][name], name


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A tool that is slow where the first rank asks, so that the other is over while that one waits."""
    world = write_world(tmp_path_factory.mktemp("agents_of_experts"), CALLS, "Mixtral", num_local_experts=4, num_experts_per_tok=2)
    slow = "    if os.environ.get('RANK') == '0': time.sleep(.1)\n    try:\n"
    (world / "calculator.py").write_text(CALCULATOR.read_text().replace("import sys\n", "import os, sys, time\n").replace("    try:\n", slow))
    write_tools(world, f"{sys.executable} {world / 'calculator.py'}")
    return world


EP2 = {f"{ROLLOUT}.expert_parallel_size": 2}


@pytest.mark.parametrize("more", [EP2, EP2 | {f"{ACTOR}.megatron.expert_model_parallel_size": 2}], ids=["ep2", "ep2, in the actor's memory"])
def test_ranks_that_share_experts_have_sessions_of_their_own(more, experts, work):
    once = train(experts, work / "once", **with_tools(experts))
    two = train(experts, work / "two", 2, **with_tools(experts), **more)
    assert samples(work / "two", 1) == samples(work / "once", 1) and two[1]["num_turns/max"] >= 4
    for name in ("num_turns/mean", "critic/score/mean", "response_length/mean", "actor/entropy", "rollout_corr/kl"):
        assert two[1][name] == once[1][name], name
    again = {f"{ROLLOUT}.agent.replay_dir": str(work / "two/sessions")}
    assert train(experts, work / "again", 2, **with_tools(experts), **more, **again) == two


def test_a_run_is_played_again_without_its_tools(world, once, work):
    write_tools(work, "exit 1")
    again = {f"{ROLLOUT}.agent.replay_dir": str(world / "once/sessions")}
    assert train(world, work / "again", **with_tools(work), **again) == once
    assert tree(work / "again/sessions") == tree(world / "once/sessions")
    assert tree(work / "again/rollouts") == tree(world / "once/rollouts")
    other = settings(world, work / "other", **with_tools(work), **again, **{"trainer.seed": 7})
    (status, said), = finish(start_training(1, "grpo", other), timeout=120)
    assert status == 2 and "the run is another one than that which is played again" in said


@pytest.mark.parametrize("mode", [PARTIAL, PARTIAL | {"reward_model.num_workers": 2},
                                  PARTIAL | {f"{ROLLOUT}.ranks": [1, 2], f"{ROLLOUT}.tensor_model_parallel_size": 2},
                                  PARTIAL | {f"{ROLLOUT}.ranks": [1, 2], f"{ROLLOUT}.max_num_seqs": 3},
                                  {key: value for key, value in PARTIAL.items() if "partial" not in key and "gen_batch" not in key}],
                         ids=["partial", "partial, scored early", "partial, tp2", "partial, dp2", "two steps off"])
def test_an_asynchronous_run_is_played_again(mode, world, work):
    """The journal has which sessions are finished first, and where the others were interrupted, so that it does not matter how long tools take."""
    ranks = 1 + len(mode[f"{ROLLOUT}.ranks"])
    first = train(world, work / "first", ranks, **with_tools(world), **mode)
    again = {f"{ROLLOUT}.agent.replay_dir": str(work / "first/sessions")}
    write_tools(work, "exit 1")
    assert train(world, work / "again", ranks, **with_tools(work), **mode, **again) == first
    for folder in ("sessions", "rollouts"):
        assert tree(work / "again" / folder) == tree(work / "first" / folder)
    spans = [len(sample["global_steps"]) for step in first for sample in samples(work / "first", step)]
    assert max(spans) == (2 if "data.gen_batch_size" in mode else 1)


def test_partial_rollouts_of_ranks_that_share_experts_are_played_again(experts, work):
    more = with_tools(experts) | PARTIAL | EP2 | {f"{ROLLOUT}.ranks": [1, 2], f"{ROLLOUT}.max_num_seqs": 3}
    first = train(experts, work / "first", 3, **more)
    whole = more | {f"{ROLLOUT}.expert_parallel_size": 1}
    assert train(experts, work / "again", 3, **whole, **{f"{ROLLOUT}.agent.replay_dir": str(work / "first/sessions")}) == first
    for folder in ("sessions", "rollouts"):
        assert tree(work / "again" / folder) == tree(work / "first" / folder)
    assert max(len(sample["global_steps"]) for step in first for sample in samples(work / "first", step)) == 2


def test_a_partial_rollout_of_replicas_is_played_again(world, work):
    """Two ranks share the model. Which sessions are finished first depends on replicas and tools: the journal has it."""
    (work / "reward.py").write_text((world / "reward.py").read_text().replace("import json, sys\n", "import json, sys, time\n")
                                    .replace("    print", "    time.sleep(.02)\n    print"))
    more = with_tools(world) | PARTIAL | {f"{ROLLOUT}.ranks": [1, 2], f"{ROLLOUT}.tensor_model_parallel_size": 2, f"{ROLLOUT}.replicas.num": 1,
                                          "reward_model.command": f"{sys.executable} {work / 'reward.py'}", "trainer.total_training_steps": 30}
    first = train(world, work / "run", 3, **more)
    answered = [json.loads(line).get("of replicas", {}) for line in (work / "run/replicas/rank1.jsonl").read_text().splitlines()]
    assert sum(sum(of.values()) for of in answered) > 0
    assert train(world, work / "again", 3, **more, **{f"{ROLLOUT}.agent.replay_dir": str(work / "run/sessions")}) == first
    for folder in ("sessions", "rollouts"):
        assert tree(work / "again" / folder) == tree(work / "run" / folder)


def test_replicas_answer_sessions_with_tools_of_their_own(world, work):
    """The run has the bytes of one without them, and its journal plays both again. A step takes a while, so that they load within a few."""
    (work / "reward.py").write_text((world / "reward.py").read_text().replace("import json, sys\n", "import json, sys, time\n")
                                    .replace("    print", "    time.sleep(.02)\n    print"))
    more = with_tools(world) | {"reward_model.command": f"{sys.executable} {work / 'reward.py'}", "trainer.total_training_steps": 60,
                                f"{ROLLOUT}.max_num_seqs": 5, f"{ACTOR}.ranks": [0], f"{ROLLOUT}.ranks": [1], "async_training.staleness_threshold": 2}
    replicas = {f"{ROLLOUT}.replicas.num": 1}
    alone = train(world, work / "alone", 2, **more)
    assert train(world, work / "run", 2, **more, **replicas) == alone
    assert train(world, work / "again", 2, **more, **replicas, **{f"{ROLLOUT}.agent.replay_dir": str(work / "run/sessions")}) == alone
    for run in ("run", "again"):
        for folder in ("sessions", "rollouts"):
            assert tree(work / run / folder) == tree(work / "alone" / folder)
        answered = [json.loads(line).get("of replicas", {}) for line in (work / run / "replicas/rank1.jsonl").read_text().splitlines()]
        assert sum(sum(of.values()) for of in answered) > 0


def test_a_run_that_is_killed_goes_on_to_the_same_bytes(world, work):
    """In the midst of the third step, whose sessions wait for a tool."""
    more = with_tools(world) | {"trainer.total_training_steps": 4, "checkpoint.save_freq": 1, "data.val_files": [str(world / "train.jsonl")],
                                "data.val_batch_size": 4, "trainer.test_freq": 2}
    whole = train(world, work / "whole", **more)
    exchanges = [exchange for folder in ("sessions", "sessions/validation") for path in (work / "whole" / folder).glob("[012].jsonl")
                 for line in path.read_text().splitlines() for exchange in json.loads(line)["exchanges"]]
    asked, leave = work / "asked", work / "leave"
    pause = f"""    number = globals().get("number", 0) + 1
    if number == {2 + sum(exchange["question"]["name"] == "calculator" for exchange in exchanges)} and not os.path.exists({str(asked)!r}):
        open({str(asked)!r}, "w")
        while not os.path.exists({str(leave)!r}): time.sleep(.01)
"""
    (work / "calculator.py").write_text(CALCULATOR.read_text().replace("import sys\n", "import os, sys, time\n").replace("    asked = ", pause + "    asked = "))
    write_tools(work, f"{sys.executable} {work / 'calculator.py'}")
    rank, = start_training(1, "grpo", settings(world, work / "run", **more | with_tools(work)))
    wait_for(asked.exists, rank)
    rank.kill()
    leave.touch()  # the tool has the run's standard error
    rank.communicate()
    assert max(metrics(work / "run")) == 2
    assert train(world, work / "run", **more) == whole
    for folder in ("rollouts", "sessions", "validations"):
        assert tree(work / "run" / folder) == tree(work / "whole" / folder), folder


# ------------------------------------------------------------------------------------------------------------- environments

@pytest.mark.parametrize("estimator", ["grpo", "gae", "gigpo", "grpo_turns"])
def test_an_environment_rewards_each_turn(estimator, world, work):
    (work / "environment.py").write_text(ENVIRONMENT)
    more = {f"{ROLLOUT}.agent.default_agent_loop": "env_agent", f"{ROLLOUT}.agent.env_command": f"{sys.executable} {work / 'environment.py'}",
            "algorithm.adv_estimator": estimator, "reward_model.command": None, "data.max_prompt_length": 64, "data.max_response_length": 48,
            f"{ACTOR}.ppo_max_token_len_per_gpu": 256, "data.val_files": [str(world / "train.jsonl")], "trainer.test_freq": 1}
    steps = train(world, work / "run", algorithm="ppo" if estimator == "gae" else "grpo", **more)
    for step in (1, 2):
        assert steps[step]["rollout_corr/kl"] == steps[step]["training/rollout_probs_diff_max"] == 0
        assert 0 <= steps[step]["val-core/counting/reward/mean@1"] <= .75
        for sample in samples(work / "run", step):
            assert "find" in sample["input"]
            assert sample["score"] in (0, .25, .5, .75) and sample["num_turns"] <= 6
        sessions = [json.loads(line) for line in (work / f"run/sessions/{step}.jsonl").read_text().splitlines()]
        earned = [sum(exchange["answer"].get("reward", 0) for exchange in session["exchanges"]) for session in sessions]
        assert sorted(earned) == sorted(sample["score"] for sample in samples(work / "run", step)) and max(earned) > 0


def test_a_session_that_stood_in_the_midst_of_an_environment_begins_again(world, work):
    """The environment of a run that goes on has not heard of it: the session's tokens are drawn by the weights of then, and the journal plays the run again."""
    (work / "environment.py").write_text(ENVIRONMENT)
    more = PARTIAL | {f"{ROLLOUT}.agent.default_agent_loop": "env_agent", f"{ROLLOUT}.agent.env_command": f"{sys.executable} {work / 'environment.py'}",
                      "reward_model.command": None, "data.max_prompt_length": 64, "data.max_response_length": 48, f"{ROLLOUT}.max_num_seqs": 3,
                      f"{ACTOR}.ppo_max_token_len_per_gpu": 256, "checkpoint.save_freq": 2}

    def drawn_by():
        lines = [json.loads(line) for step in (3, 4) for line in (work / f"run/sessions/{step}.jsonl").read_text().splitlines()]
        return {line["session"]: {step for step, _ in line["global_steps"]} for line in lines}

    train(world, work / "run", 2, **more)
    midst = {session for session, steps in drawn_by().items() if min(steps) < 2 <= max(steps)}
    subprocess.run(["rm", "-r", work / "run/actor/iter_0000004", work / "run/actor/latest_checkpointed_iteration.txt"], check=True)
    whole = train(world, work / "run", 2, **more)
    after = drawn_by()
    assert len(whole) == 4 and midst and all(min(after[session]) >= 2 for session in midst & after.keys())
    assert train(world, work / "again", 2, **more, **{f"{ROLLOUT}.agent.replay_dir": str(work / "run/sessions")}) == whole
    for folder in ("sessions", "rollouts"):
        assert tree(work / "again" / folder) == tree(work / "run" / folder)


@pytest.mark.parametrize("estimator", ["gigpo", "grpo_turns"])
def test_advantages_of_turns_are_the_same_on_two_ranks(estimator, world, work):
    (work / "environment.py").write_text(ENVIRONMENT)
    more = {f"{ROLLOUT}.agent.default_agent_loop": "env_agent", f"{ROLLOUT}.agent.env_command": f"{sys.executable} {work / 'environment.py'}",
            "algorithm.adv_estimator": estimator, "reward_model.command": None, "data.max_prompt_length": 64, "data.max_response_length": 48,
            f"{ACTOR}.ppo_max_token_len_per_gpu": 256, "trainer.total_training_steps": 1}
    one, two = train(world, work / "one", **more)[1], train(world, work / "two", 2, **more)[1]
    assert samples(work / "one", 1) == samples(work / "two", 1)
    for name in ("critic/advantages/mean", "critic/advantages/max", "critic/advantages/min"):
        assert one[name] == two[name]
    assert one["critic/advantages/max"] > 0 > one["critic/advantages/min"]


def test_each_record_chooses_its_loop(world, work):
    """The prompts of all three loops in one step, to the same tokens as in runs of one loop; only tools' sessions are shown the tools."""
    (work / "environment.py").write_text(ENVIRONMENT)
    rows = [json.loads(line) for line in (world / "train.jsonl").read_text().splitlines()]
    loops = ["tool_agent", "env_agent", None, "single_turn_agent"]
    write_rows(work / "train.jsonl", [row | ({"agent_name": loops[i % 4]} if loops[i % 4] else {}) for i, row in enumerate(rows)])
    both = {f"{ROLLOUT}.agent.env_command": f"{sys.executable} {work / 'environment.py'}", f"{ROLLOUT}.multi_turn.tool_config_path": str(world / "tools.json")}
    more = with_tools(world) | both | {f"{ROLLOUT}.agent.default_agent_loop": "single_turn_agent", "data.shuffle": False,
                                       "trainer.total_training_steps": 1, f"{ROLLOUT}.multi_turn.max_assistant_turns": 2}
    train(world, work / "mixed", **more, **{"data.train_files": [str(work / "train.jsonl")]})
    mixed = samples(work / "mixed", 1)
    for loop, name in (("tool_agent", "tool_agent"), ("env_agent", "env_agent"), ("single_turn_agent", None)):
        train(world, work / loop, **more | {f"{ROLLOUT}.agent.default_agent_loop": loop, "data.train_files": [str(world / "train.jsonl")]})
        alone = samples(work / loop, 1)
        of_loop = [i for i in range(len(mixed)) if (loops[i // 2 % 4] or "single_turn_agent") == loop]
        assert of_loop and [mixed[i]["output"] for i in of_loop] == [alone[i]["output"] for i in of_loop]
        assert all(mixed[i]["input"].startswith("calculator") == (loop == "tool_agent") for i in of_loop)
        assert all(("find" in mixed[i]["input"]) == (loop == "env_agent") for i in of_loop)
    assert any(sample["num_turns"] > 2 for sample in mixed)


@pytest.mark.parametrize("name, said", [("env_agent", "agent_name: a record asks for env_agent, which needs agent.env_command or env_url"),
                                        ("search_agent", "agent_name: search_agent is none of single_turn_agent, tool_agent, env_agent, program_agent")])
def test_a_loop_that_the_run_has_not_ends_it(name, said, world, work):
    rows = [json.loads(line) for line in (world / "train.jsonl").read_text().splitlines()]
    write_rows(work / "train.jsonl", [row | {"agent_name": name} for row in rows])
    more = with_tools(world) | {"data.train_files": [str(work / "train.jsonl")]}
    (status, told), = finish(start_training(1, "grpo", settings(world, work / "run", **more)), timeout=120)
    assert status == 2 and said in told


def test_an_environment_that_errs_ends_the_run(world, work):
    more = {f"{ROLLOUT}.agent.default_agent_loop": "env_agent", f"{ROLLOUT}.agent.env_command": "read line; exit 3", "reward_model.command": None}
    (status, said), = finish(start_training(1, "grpo", settings(world, work / "run", **more)), timeout=120)
    assert status == 2 and "the program ended (exit status 3)" in said


# ------------------------------------------------------------------------------------------------------------------ example

def test_the_example_runs_as_it_is(work):
    """Its files, but for one smaller step from the untrained model."""
    example = ROOT / "docs/examples/guessing"
    subprocess.run([sys.executable, example / "make_games.py", work / "games"], check=True)
    games = {split: set((work / f"games/{split}.jsonl").read_text().splitlines()) for split in ("train", "val")}
    asked = {split: {json.loads(game)["prompt"][0]["content"] for game in some} for split, some in games.items()}
    assert len(games["val"]) == 256 and not asked["val"] & asked["train"]
    (work / "games/val.jsonl").write_text("".join(f"{game}\n" for game in sorted(games["val"])[:8]))
    run_ok("train", "grpo", "--config", example / "grpo.toml", "data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4",
           "actor_rollout_ref.model.path=games/model", "trainer.total_training_steps=1", f"{ACTOR}.recompute_old_log_prob=true",
           f"{ROLLOUT}.agent.env_command={sys.executable} {example / 'environment.py'}", "--quiet", cwd=work)
    assert 0 <= metrics(work / "grpo")[0]["val-core/guessing/reward/mean@1"] <= 1
    step = metrics(work / "grpo")[1]
    assert step["num_turns/max"] <= 14 and step["rollout_corr/kl"] == step["training/rollout_probs_diff_max"] == 0


@pytest.mark.parametrize("estimator", ["grpo", "gigpo", "grpo_turns"])
def test_the_example_is_played_again_with_each_estimator(estimator, work):
    example = ROOT / "docs/examples/guessing"
    subprocess.run([sys.executable, example / "make_games.py", work / "games"], check=True)
    more = ["--config", example / "grpo.toml", "data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4", "actor_rollout_ref.model.path=games/model",
            "trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=false", f"algorithm.adv_estimator={estimator}", "--quiet"]
    run_ok("train", "grpo", *more, f"{ROLLOUT}.agent.env_command={sys.executable} {example / 'environment.py'}", cwd=work)
    run_ok("train", "grpo", *more, f"{ROLLOUT}.agent.env_command=exit 1", f"{ROLLOUT}.agent.replay_dir=grpo/sessions", "trainer.default_local_dir=again", cwd=work)
    assert metrics(work / "again") == metrics(work / "grpo")
    for folder in ("sessions", "rollouts"):
        assert tree(work / "again" / folder) == tree(work / "grpo" / folder)
