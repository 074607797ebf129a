"""`ferry train grpo` and `ppo` from beginning to end: on any mesh, resharded to any other, stopped at any point."""
import json
import math
import shutil
import signal
import subprocess
import sys
import time

import pytest

from ppo_run import ACTOR, ANSWERS, PROMPTS, REF, ROLLOUT, WITH_CRITIC, metrics, samples, settings, train, write_prompts, write_world
from ranks import TORCH_PROGRAM, finish, start_training
from sft_run import GEMMA, HYBRID
from support import FERRY, run_ok, tree

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")

TP, PP, CP, EP, ETP = (f"{ACTOR}.megatron.{kind}_parallel_size"
                       for kind in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"))
LAYOUT = f"{ACTOR}.megatron.pipeline_model_parallel_layout"
ROLLOUT_TP, ROLLOUT_EP = f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.expert_parallel_size"
CRITIC_TP = "critic.megatron.tensor_model_parallel_size"
REF_TP = f"{REF}.megatron.tensor_model_parallel_size"
SAVING = {"checkpoint.save_freq": 1}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("ppo"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("ppo_experts"), "Mixtral", num_local_experts=4, num_experts_per_tok=2)


@pytest.fixture(scope="module")
def alone(world):
    """The metrics of steps 1 and 2 on one rank."""
    return train(world, world / "alone", **SAVING)


@pytest.fixture(scope="module")
def experts_alone(experts):
    return train(experts, experts / "alone")


def digest(run, role="actor"):
    """The digest of each tensor of the newest checkpoint, as JSON."""
    return run_ok("digest", run / role, "--json").stdout


# --------------------------------------------------------------------------------------------- any mesh, the same bytes

MESHES = {  # name: (processes, settings)
    "dp2": (2, {}),
    "tp2, in the actor's memory": (2, {TP: 2, ROLLOUT_TP: 2}),
    "tp2 to tp1": (2, {TP: 2, f"{ROLLOUT}.checkpoint_engine.verify_weights": True}),
    "pp2 to tp2": (2, {PP: 2, ROLLOUT_TP: 2, f"{ACTOR}.megatron.param_offload": True, f"{ACTOR}.megatron.grad_offload": True,
                       f"{ACTOR}.megatron.optimizer_offload": True}),
    "interleaved": (2, {PP: 2, LAYOUT: "E|t|t|L"}),
    "cp2": (2, {CP: 2}),
    "tp2 dp2, without balance": (4, {TP: 2, "trainer.balance_batch": False}),
    "actor on ranks 2 and 3": (4, {f"{ACTOR}.ranks": [2, 3], f"{ROLLOUT}.ranks": [0, 1], TP: 2}),
    "rank 0 has no role": (4, {f"{ACTOR}.ranks": [1, 2], f"{ROLLOUT}.ranks": [3], PP: 2, f"{ROLLOUT}.checkpoint_engine.update_weights_delta": "host"}),
}
MESHES_OF_EXPERTS = {
    "ep2 to ep1": (2, {EP: 2}),
    "ep2 dp2 to tp2 ep2": (4, {EP: 2, ROLLOUT_TP: 2, ROLLOUT_EP: 2}),
    "tp2 ep4 to tp2 ep4, whole experts": (4, {TP: 2, EP: 4, ETP: 1, ROLLOUT_TP: 2, ROLLOUT_EP: 4, f"{ROLLOUT}.expert_tensor_parallel_size": 1}),
    "pp2, etp2 to ep2": (4, {TP: 2, PP: 2, ETP: 2, ROLLOUT_EP: 2}),
}
# Kernels add in one order, forwards: gradients are sums over ranks, and their norm is not.
OF_GRADIENTS = ("actor/grad_norm",)


def assert_first_step(run, got, reference, expected):
    """In `bitwise` a step's forward passes have the same bytes on every mesh, so what is answered, and all metrics of it, are the same."""
    assert samples(run, 1) == samples(reference, 1)
    assert got[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        if name in OF_GRADIENTS:
            assert got[1][name] == pytest.approx(value, rel=1e-4), name
        elif name == "actor/pg_loss":  # a sum over ranks, in another order
            assert got[1][name] == pytest.approx(value, abs=1e-7), name
        else:
            assert got[1][name] == value, name
    for step in got.values():
        assert_exact(step)


def assert_exact(step):
    """The rollout's probabilities, the trainer's and those of the update are the same numbers."""
    for name in ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "training/rollout_probs_diff_max", "training/rollout_probs_diff_mean",
                 "rollout_corr/kl"):
        assert step[name] == 0, name


@pytest.mark.parametrize("mesh", MESHES)
def test_the_first_step_is_the_same_on_any_mesh(mesh, world, alone, work):
    ranks, more = MESHES[mesh]
    assert_first_step(work, train(world, work, ranks, **more), world / "alone", alone)


@pytest.mark.parametrize("mesh", MESHES_OF_EXPERTS)
def test_the_first_step_of_experts_too(mesh, experts, experts_alone, work):
    ranks, more = MESHES_OF_EXPERTS[mesh]
    assert_first_step(work, train(experts, work, ranks, **more), experts / "alone", experts_alone)


def test_the_first_step_of_gpt_oss_too(work):
    world = write_world(work / "world", "GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=5)
    alone = train(world, work / "alone")
    assert_first_step(work / "ranks", train(world, work / "ranks", 4, **{EP: 2, ROLLOUT_EP: 2}), work / "alone", alone)


def test_the_first_step_of_gemma_3_too(work):
    world = write_world(work / "world", "Gemma3Text", **GEMMA | {"sliding_window_pattern": 2})
    alone = train(world, work / "alone")
    assert_first_step(work / "ranks", train(world, work / "ranks", 4, **{ROLLOUT_TP: 2}), work / "alone", alone)


def test_the_first_step_of_qwen3_next_too(work):
    world = write_world(work / "world", "Qwen3Next", **HYBRID | {"layer_types": ["linear_attention", "full_attention"]})
    alone = train(world, work / "alone")
    assert_first_step(work / "ranks", train(world, work / "ranks", 4, **{CP: 2, EP: 2, ROLLOUT_TP: 2, ROLLOUT_EP: 2}), work / "alone", alone)


# ------------------------------------------------------------------------------------ the same run again, and after a kill


def test_a_seed_reproduces_a_run_to_the_byte(world, alone, work):
    again = train(world, work, **SAVING)
    assert again == alone
    assert digest(work) == digest(world / "alone")
    for step in alone:
        assert samples(work, step) == samples(world / "alone", step)
    other = train(world, work / "other", **{"trainer.seed": 7})
    assert samples(work / "other", 1) != samples(work, 1)


PPO = WITH_CRITIC
LONGER = {"trainer.total_training_steps": 4, "data.val_files": ["VAL"], "trainer.test_freq": 1, "checkpoint.keep_last": 1}


def longer(world, **more):
    """Four steps, validated and saved; a file with two malformed rows, which are counted."""
    path = world / "val.jsonl"
    if not path.exists():
        write_prompts(path, 3)
        write_prompts(world / "bad.jsonl", 9)
        with (world / "bad.jsonl").open("a") as file:
            file.write('{"data_source": "counting"}\nno JSON\n')
    return SAVING | LONGER | {"data.val_files": [str(path)], "data.train_files": [str(world / "bad.jsonl")]} | more


KILLS = {  # name: (algorithm, settings, processes, when)
    "grpo, while it answers": ("grpo", {}, 1, lambda run: (run / "validations/1.jsonl").exists()),
    "grpo, while it saves": ("grpo", {}, 1, lambda run: any((run / "actor").glob(".iter_0000002*"))),
    "ppo, while it learns": ("ppo", PPO, 1, lambda run: (run / "rollouts/1.jsonl").exists()),
    "ppo, between critic and actor": ("ppo", PPO, 1, lambda run: (run / "critic/iter_0000002").exists()),
    "ppo in the background": ("ppo", PPO | {"checkpoint.async_save": True}, 1, lambda run: (run / "actor/iter_0000002").exists()),
    "grpo of two ranks": ("grpo", {TP: 2}, 2, lambda run: (run / "actor/iter_0000001").exists()),
}


@pytest.fixture(scope="module")
def undisturbed(world):
    """Runs that nothing happens to, as they are asked for."""
    runs = {}

    def run(algorithm, ranks, more):
        key = json.dumps([algorithm, ranks, more])
        if key not in runs:
            folder = world / f"undisturbed_{len(runs)}"
            runs[key] = folder, train(world, folder, ranks, algorithm, **longer(world, **more))
        return runs[key]

    return run


@pytest.mark.parametrize("kill", KILLS)
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(kill, world, undisturbed, work):
    algorithm, more, count, when = KILLS[kill]
    reference, expected = undisturbed(algorithm, count, more)
    assert expected[4]["training/malformed_rows"] > 0
    arguments = settings(world, work, **longer(world, **more))
    ranks = start_training(count, algorithm, arguments)
    until = time.monotonic() + 60
    while not when(work) and ranks[0].poll() is None and time.monotonic() < until:
        time.sleep(0.0005)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    finish(ranks)
    assert when(work) or kill.startswith(("grpo, while it saves", "ppo in the background")), "it was over before"
    assert train(world, work, count, algorithm, **longer(world, **more)) == expected
    for role in ("actor", "critic") if algorithm == "ppo" else ("actor",):
        assert digest(work, role) == digest(reference, role)
    for step in range(1, 5):
        for folder in ("rollouts", "validations"):
            assert samples(work, step, folder) == samples(reference, step, folder)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_run_goes_on_on_another_mesh(elsewhere, world, work):
    """The same numbers in its first step there, which `bitwise` gives on any mesh; from its own folder or another one's."""
    more = PPO | SAVING | {"trainer.total_training_steps": 3}
    whole = train(world, work / "whole", 1, "ppo", **more)
    folder = work / "other" if elsewhere else work / "whole"
    if elsewhere:  # behind a step that is not the newest
        more |= {"checkpoint.resume_mode": "resume_path", "checkpoint.resume_from_path": str(work / "whole/actor/iter_0000002")}
    for role in ("actor", "critic") if not elsewhere else ():
        shutil.rmtree(work / "whole" / role / "iter_0000003")
    again = train(world, folder, 2, "ppo", **more, **{TP: 2, CRITIC_TP: 1})
    assert sorted(again) == ([3] if elsewhere else [1, 2, 3])
    assert samples(folder, 3)
    for name, value in whole[3].items():
        assert again[3][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert again[3]["actor/ppo_kl"] == again[3]["training/rollout_probs_diff_max"] == 0


def test_float16_finds_the_scales_of_its_losses_and_resumes(world, work):
    """Actor and critic have one each, and may need more steps than a run may else have without a finite gradient."""
    dtype = {f"{ACTOR}.megatron.dtype": "float16", "trainer.total_training_steps": 24, "checkpoint.save_freq": 8}
    whole = train(world, work / "whole", 1, "ppo", **PPO, **dtype)
    for role in ("actor", "critic"):
        scales = [step[f"{role}/loss_scale"] for step in whole.values()]
        skipped = sum(step.get(f"{role}/skipped", 0) for step in whole.values())
        assert scales == sorted(scales, reverse=True) and scales[-1] == 2 ** (33 - skipped) > 1
        assert math.isfinite(whole[24][f"{role}/grad_norm"])
    train(world, work / "cut", 1, "ppo", **PPO, **dtype | {"trainer.total_training_steps": 8})
    assert train(world, work / "cut", 1, "ppo", **PPO, **dtype) == whole
    for role in ("actor", "critic"):
        assert digest(work / "cut", role) == digest(work / "whole", role)


# ----------------------------------------------------------------------------------------------- roles on ranks of their own


@pytest.fixture(scope="module")
def ppo_alone(world):
    return train(world, world / "ppo_alone", 1, "ppo", **PPO)


PLACES = {  # name: (processes, settings)
    "actor on tp2, critic on dp2, reference on pp2": (2, {TP: 2, CRITIC_TP: 1, REF_TP: 1, f"{REF}.megatron.pipeline_model_parallel_size": 2}),
    "each on its own": (4, {f"{ACTOR}.ranks": [0, 1], f"{ROLLOUT}.ranks": [3], "critic.ranks": [1, 2], f"{REF}.ranks": [2], TP: 2, CRITIC_TP: 1,
                            REF_TP: 1, "critic.megatron.pipeline_model_parallel_size": 2}),
}


@pytest.mark.parametrize("place", PLACES)
def test_roles_have_meshes_and_ranks_of_their_own(place, world, ppo_alone, work):
    ranks, more = PLACES[place]
    got = train(world, work, ranks, "ppo", **PPO, **more)
    assert samples(work, 1) == samples(world / "ppo_alone", 1)
    for name, value in ppo_alone[1].items():
        assert got[1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for step in got.values():
        assert_exact(step)


def test_a_reward_model_scores_on_its_own_mesh(world, work):
    """A model of one label: its scores alone, with a form's and the penalty for length, or with a program's on top."""
    import torch
    import transformers
    torch.manual_seed(5)
    config = transformers.AutoConfig.from_pretrained(world / "model", num_labels=1)
    model = transformers.LlamaForSequenceClassification(config)
    model.save_pretrained(world / "judge")
    judge = {"reward_model.enable": True, "reward_model.model.path": str(world / "judge")}
    one = {"trainer.total_training_steps": 1}
    expected = train(world, work / "alone", **judge, **one, **{"reward_model.command": None})
    got = train(world, work / "apart", 2, **judge, **one, **{"reward_model.command": None, TP: 2, "reward_model.ranks": [1],
                                                                       "reward_model.megatron.tensor_model_parallel_size": 1})
    assert samples(work / "apart", 1) == samples(work / "alone", 1)
    for sample in samples(work / "alone", 1):
        assert math.isfinite(sample["score"])
    assert len({sample["score"] for sample in samples(work / "alone", 1)}) > 1
    assert got[1]["critic/score/mean"] == expected[1]["critic/score/mean"]
    formed = {"reward_model.format_pattern": "[\\s\\S]*", "reward_model.format_score": 0.25, "reward_model.overlong_buffer.enable": True,
              "reward_model.overlong_buffer.len": 8}
    train(world, work / "formed", **judge, **one, **{"reward_model.command": None}, **formed)
    of_form = samples(work / "formed", 1)
    assert min(sample["overlong_reward"] for sample in of_form) < 0
    for plain, sample in zip(samples(work / "alone", 1), of_form):
        assert sample["score"] == pytest.approx(plain["score"] + 0.25 + sample["overlong_reward"], abs=1e-5)
    train(world, work / "both", **judge, **one)
    of_program = {(s["input"], s["output"]): s["characters"] for s in samples(work / "both", 1)}
    for alone, both in zip(samples(work / "alone", 1), samples(work / "both", 1)):
        assert (alone["input"], alone["output"]) == (both["input"], both["output"])
        text = both["output"]
        assert both["score"] == pytest.approx(alone["score"] + sum(map(ord, text)) % 7 / 6, abs=1e-5)


# --------------------------------------------------------------------------------------------------------- algorithms


BYPASS = {"algorithm.rollout_correction.bypass_mode": True, f"{ACTOR}.recompute_old_log_prob": "auto"}
ALGORITHMS = {  # name: settings beside those of two updates of a step, of two epochs
    **{name: {"algorithm.adv_estimator": name} for name in ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg",
                                                            "grpo_passk")},
    **{name: {f"{ACTOR}.policy_loss.loss_mode": name} for name in ("gspo", "cispo", "clip_cov", "kl_cov", "geo_mean", "sapo")},
    "dr_grpo, entropy, kl loss": {"algorithm.norm_adv_by_std_in_grpo": False, f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
                                  f"{ACTOR}.entropy_coeff": 0.01, f"{ACTOR}.use_kl_loss": True},
    "dapo": {"algorithm.filter_groups.enable": True, "reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 4,
             f"{ACTOR}.clip_ratio_high": 0.28},
    "weights of tokens, fast": {f"{ACTOR}.megatron.alignment": "fast", "algorithm.rollout_correction.rollout_is": "token"},
    "weights of sequences, fast": {f"{ACTOR}.megatron.alignment": "fast", "algorithm.rollout_correction.rollout_is": "sequence"},
    "rejection": {"algorithm.rollout_correction.rollout_rs": "seq_mean_k1", "algorithm.rollout_correction.rollout_rs_threshold": "0.999_1.001"},
    "bypass, fast": {f"{ACTOR}.megatron.alignment": "fast", **BYPASS},
    "bypass and rejection": BYPASS | {"algorithm.rollout_correction.rollout_rs": "token_k1", "algorithm.rollout_correction.rollout_rs_threshold": "0.5_2.0"},
    "reinforce and weights": BYPASS | {"algorithm.rollout_correction.rollout_is": "token", "algorithm.rollout_correction.loss_type": "reinforce"},
    "micro-batches of two, drawn cold": {f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.ppo_max_token_len_per_gpu": None,
                                         f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2, f"{ROLLOUT}.temperature": 0.7},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_take_their_step(name, world, work):
    """Their formulas are held beside verl's elsewhere: here their columns and metrics arrive, two mini-batches, twice, and weights change."""
    epochs = {f"{ACTOR}.ppo_epochs": 2, f"{ACTOR}.ppo_mini_batch_size": 2, f"{ACTOR}.shuffle": True, "trainer.total_training_steps": 1}
    step = train(world, work, **epochs | ALGORITHMS[name])[1]
    assert all(value is not None for value in step.values()), step
    assert step["actor/grad_norm"] > 0 and "actor/skipped" not in step
    expected = {"remax": "critic/returns/mean", "dapo": "train/num_gen_batches", "weights of tokens, fast": "rollout_corr/rollout_is_mean",
                "weights of sequences, fast": "rollout_corr/rollout_is_eff_sample_size", "rejection": "rollout_corr/rollout_rs_masked_fraction",
                "bypass and rejection": "rollout_corr/rollout_rs_token_k1_mean", "reinforce and weights": "rollout_corr/rollout_is_mean",
                "dr_grpo, entropy, kl loss": "actor/kl_loss"}
    assert expected.get(name, "actor/pg_loss") in step, sorted(step)
    if "fast" not in name:
        assert step.get("training/rollout_probs_diff_max", 0) == 0


def test_a_batch_that_is_rejected_teaches_nothing(world, work):
    """Two ranks share the batch; the run goes on, and says so."""
    step = train(world, work, 2, **{"algorithm.rollout_correction.rollout_rs": "token_k1",
                                    "algorithm.rollout_correction.rollout_rs_threshold": "2.0_3.0"})[2]
    assert step["actor/skipped"] == 1 and "actor/pg_loss" not in step


# ------------------------------------------------------------------------------------------------------ metrics and data

# The metrics that verl 0.9.1 logs for a step, except FLOPs on hosts, memory of GPUs and turns of conversations: compute_data_metrics,
# compute_timing_metrics, compute_throughout_metrics, calculate_debug_metrics, and those of the losses.
STATISTICS = ("mean", "max", "min")
OF_A_STEP = {
    *(f"critic/{of}/{one}" for of in ("score", "rewards", "advantages", "returns") for one in STATISTICS),
    *(f"{of}/{one}" for of in ("response_length", "response_length_non_aborted", "prompt_length") for one in (*STATISTICS, "clip_ratio")),
    "response/aborted_ratio", "actor/entropy", "actor/pg_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/grad_norm",
    "actor/lr", "training/rollout_probs_diff_valid", "training/rollout_probs_diff_max", "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_std", "training/rollout_actor_probs_pearson_corr", "training/global_step", "training/epoch",
    *(f"timing_s/{phase}" for phase in ("step", "gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights")),
    "timing_per_token_ms/gen", "timing_per_token_ms/adv", "timing_per_token_ms/update_actor", "perf/total_num_tokens", "perf/time_per_step",
    "perf/throughput",
}
OF_A_CRITIC = {*(f"critic/values/{one}" for one in STATISTICS), "critic/vf_explained_var", "critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean",
               "critic/grad_norm", "critic/lr", "timing_s/values", "timing_s/update_critic", "timing_per_token_ms/values",
               "timing_per_token_ms/update_critic"}
OF_A_REFERENCE = {"actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff", "timing_s/ref", "timing_per_token_ms/ref"}


def test_metrics_have_verls_names(world, alone, ppo_alone):
    def names(run, step):
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return {name for line in lines if line["step"] == step for name in line["data"]}

    assert OF_A_STEP | {"timing_s/save_checkpoint"} <= names(world / "alone", 2), OF_A_STEP - names(world / "alone", 2)
    of_ppo = OF_A_STEP | OF_A_CRITIC | OF_A_REFERENCE
    assert of_ppo <= names(world / "ppo_alone", 2), of_ppo - names(world / "ppo_alone", 2)


def test_validation_draws_several_answers(world, work):
    """Before the first step and behind each, three answers to each of four prompts, two prompts at a time."""
    write_prompts(work / "val.jsonl", 4)
    val = f"{ROLLOUT}.val_kwargs"
    more = {"data.val_files": [str(work / "val.jsonl")], "trainer.test_freq": 1, "trainer.val_before_train": True, f"{val}.n": 3,
            f"{val}.do_sample": True, f"{val}.temperature": 0.7, f"{val}.top_p": 0.9, "data.val_batch_size": 2}
    steps = train(world, work / "run", 2, **more)
    assert sorted(steps) == [0, 1, 2]
    assert train(world, work / "run", 2, **more, **SAVING) == steps  # begun anew, as nothing was saved: no line is there twice
    for number, step in steps.items():
        rows = samples(work / "run", number, "validations")
        assert len(rows) == 12 and len({row["output"] for row in rows[:3]}) > 1
        assert step["val-core/counting/reward/mean@3"] == pytest.approx(sum(row["score"] for row in rows) / 12)
        assert "val-aux/counting/reward/best@3/mean" in step or "val-core/counting/reward/best@3/mean" in step, sorted(step)
    assert samples(work / "run", 1, "validations") != samples(work / "run", 2, "validations")


def test_validation_alone_is_of_the_model_or_a_checkpoint(world, work):
    """Temperature says how answers are drawn, do_sample nothing. A run that goes on from another one's checkpoint validates first, too."""
    write_prompts(work / "val.jsonl", 3)
    val = f"{ROLLOUT}.val_kwargs"
    more = {"data.val_files": [str(work / "val.jsonl")], f"{val}.n": 4, f"{val}.temperature": 1.0}
    of_model = train(world, work / "model", **more, **{"trainer.val_only": True})
    assert list(of_model) == [0] and not (work / "model/actor").exists()
    assert len({row["output"] for row in samples(work / "model", 0, "validations")[:4]}) > 1
    train(world, work / "run", **SAVING)
    behind = {"checkpoint.resume_mode": "resume_path", "checkpoint.resume_from_path": str(work / "run/actor/iter_0000001")}
    of_step = train(world, work / "step", **more, **behind, **{"trainer.val_only": True})
    assert list(of_step) == [1] and of_step != of_model
    first = train(world, work / "on", **more, **behind, **{"trainer.val_before_train": True})
    assert list(first) == [1, 2]
    assert {name: first[1][name] for name in of_step[1]} == of_step[1]


def test_groups_are_generated_as_many_as_are_asked_for(world, work):
    filtered = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 0, "trainer.total_training_steps": 1}
    assert train(world, work / "few", **filtered, **{"data.gen_batch_size": 1})[1]["train/num_gen_batches"] >= PROMPTS
    assert train(world, work / "many", **filtered, **{"data.gen_batch_size": 3 * PROMPTS})[1]["train/num_gen_batches"] == 1


def test_records_that_nothing_scores_end_the_run_before_it_generates(world, work):
    (status, said), = finish(start_training(1, "grpo", settings(world, work / "run", **{"reward_model.command": None})))
    assert status == 2 and "no rule scores data_source counting" in said and "reward_model.command" in said, said
    assert not (work / "run/rollouts").exists() or not any((work / "run/rollouts").iterdir())


def test_rows_that_are_malformed_or_too_long(world, work):
    long = {"data_source": "counting", "prompt": [{"role": "user", "content": "one " * 60}], "reward_model": {"style": "rule", "ground_truth": "x"}}
    write_prompts(work / "good.jsonl", 8)
    (work / "train.jsonl").write_text('no JSON\n{"data_source": "counting", "reward_model": {"ground_truth": "x"}}\n' + json.dumps(long) + "\n" +
                                      (work / "good.jsonl").read_text())
    data = {"data.train_files": [str(work / "train.jsonl")], "data.shuffle": False, "trainer.total_training_steps": 3}
    (status, said), = finish(start_training(1, "grpo", settings(world, work / "refused", **data)))
    assert status == 2 and "tokens, more than data.max_prompt_length of 32" in said and "data.filter_overlong_prompts" in said, said
    steps = train(world, work / "filtered", **data, **{"data.filter_overlong_prompts": True})
    assert [step["training/malformed_rows"] for step in steps.values()] == [3, 3, 6]
    assert all(len(samples(work / "filtered", step)) == PROMPTS * ANSWERS for step in steps)
    for side in ("left", "right"):
        steps = train(world, work / side, **data, **{"data.truncation": side})
        assert max(step["prompt_length/max"] for step in steps.values()) == 32 and steps[1]["training/malformed_rows"] == 2
    (status, said), = finish(start_training(1, "grpo", settings(world, work / "strict", **data, **{"data.malformed_rows": "fail"})))
    assert status == 2 and "train.jsonl: line 1" in said, said


# ---------------------------------------------------------------------------------------------------------------- saves


def test_checkpoints_come_out_as_hugging_face_files(world, work):
    """In the background, the last ones only: two of actor and critic, so that both have one. These are checkpoints that ferry knows."""
    import transformers
    more = PPO | SAVING | {"checkpoint.save_hf": True, "checkpoint.keep_last": 1, "checkpoint.async_save": True, TP: 2, CRITIC_TP: 2, "trainer.total_training_steps": 3}
    train(world, work, 2, "ppo", **more)
    for role in ("actor", "critic"):
        assert {folder.name for folder in (work / role).glob("iter_*")} == {"iter_0000002", "iter_0000003"}
    run_ok("verify", work / "actor", work / "actor/hf_model")
    transformers.AutoModelForCausalLM.from_pretrained(work / "actor/hf_model")
    run_ok("convert", work / "critic", work / "critic_hf", "--to", "hf")
    run_ok("report", work, "--output", work / "run.html")


def test_a_run_does_not_write_over_another(world, alone, work):
    shutil.copytree(world / "alone", work / "run")
    for more in ({"checkpoint.resume_mode": "disable"}, {"checkpoint.resume_mode": "resume_path", "checkpoint.resume_from_path": str(work / "old")}):
        shutil.copytree(world / "alone", work / "old", dirs_exist_ok=True)
        shutil.rmtree(work / "old/actor/iter_0000002")
        before = tree(work / "run")
        (status, said), = finish(start_training(1, "grpo", settings(world, work / "run", **more)))
        assert status == 2 and "has a checkpoint of step 2" in said and "checkpoint.resume_mode=auto" in said, said
        assert tree(work / "run") == before
    (status, said), = finish(start_training(1, "ppo", settings(world, work / "new", **PPO, **{
        "checkpoint.resume_mode": "resume_path", "checkpoint.resume_from_path": str(work / "run")})))
    assert status == 2 and "has checkpoints of actor, and none of critic" in said, said
    (status, said), = finish(start_training(1, "grpo", settings(world, work / "new", **{
        "checkpoint.resume_mode": "resume_path", "checkpoint.resume_from_path": str(work / "run/actor/iter_0000003")})))
    assert status == 2 and "no checkpoint of actor behind step 3, only behind 1, 2" in said, said


def test_torchrun_runs_it_as_a_user_would(world, work):
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone", "--nproc-per-node=2",
                           FERRY, "train", "grpo", *settings(world, work / "run", **{"reward_model.command": None}),
                           "--reward-command", f"{sys.executable} {world / 'reward.py'}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 2/2" in done.stderr and done.stdout == ""
    assert sorted(metrics(work / "run")) == [1, 2]
