"""Settings of `ferry train ppo` and `grpo` beside verl's, through whole runs: on one data parallel rank, two and four. Every key of verl's, taken or explained."""
import itertools
import json
import re
import subprocess
import sys

import pytest
import torch
import yaml

import verl_core
from ppo_run import ACTOR, ANSWERS, APART, PROMPTS, ROLLOUT, metrics, samples, settings, train, write_prompts, write_world
from ranks import TORCH_PROGRAM, finish, start_training
from support import PEERS, ROOT, ferry, run_ok

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")

RANKS = (1, 2, 4)
ONE = {"trainer.total_training_steps": 1}
LONGEST_ANSWER = 8  # data.max_response_length


# Keys that verl has elsewhere.
MOVED = {"reward_model.enable": "reward.reward_model.enable", "reward_model.model.path": "reward.reward_model.model_path",
         "reward_model.num_workers": "reward.num_workers", "checkpoint.save_freq": "trainer.save_freq",
         "checkpoint.keep_last": "trainer.max_actor_ckpt_to_keep", "checkpoint.async_save": f"{ACTOR}.checkpoint.async_save",
         "checkpoint.resume_mode": "trainer.resume_mode", "checkpoint.resume_from_path": "trainer.resume_from_path",
         "trainer.nccl_timeout": "actor_rollout_ref.nccl_timeout", f"{ACTOR}.router_replay.mode": f"{ACTOR}.megatron.router_replay.mode",
         **{f"{role}.megatron.recompute_granularity": f"{role}.megatron.override_transformer_config.recompute_granularity" for role in (ACTOR, "critic")}}
# The default configuration, which verl generates of all of its pieces: each key with its value, and whether it is that of a key of the actor.
FLATTEN = """import json, sys
from omegaconf import OmegaConf
config = OmegaConf.load(sys.argv[1])
def flatten(node, prefix=""):
    for key in node:
        name = f"{prefix}{key}"
        if OmegaConf.is_missing(node, key):
            continue
        if OmegaConf.is_dict(node[key]) and node[key]:
            yield from flatten(node[key], name + ".")
        else:
            raw = OmegaConf.to_container(node, resolve=False)[key]
            value = node[key] if not OmegaConf.is_config(node[key]) else OmegaConf.to_container(node[key], resolve=True)
            yield name, [value, isinstance(raw, str) and raw.startswith("${oc.select:actor_rollout_ref.actor.")]
print(json.dumps(dict(flatten(config))))
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("beside_verl"))


@pytest.fixture(scope="module")
def defaults():
    """{key of ours: [verl's default, whether it is the actor's]} of those that verl has, too"""
    config = PEERS / "verl091/verl/trainer/config/_generated_ppo_megatron_trainer.yaml"
    theirs = json.loads(subprocess.run([sys.executable, "-c", FLATTEN, config], stdout=subprocess.PIPE, text=True, check=True).stdout)
    both = {key: theirs[name] for key in printed() if (name := MOVED.get(key, key)) in theirs}
    assert set(MOVED) < set(both) and len(both) > 150
    return both


def printed(**settings):
    """{key: its text in a configuration that ferry prints} of every key, "not set" where it has no value"""
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    keys, section = {}, ""
    for line in run_ok("train", "ppo", "--print-config", *overrides).stdout.splitlines():
        if named := re.fullmatch(r"\[(.*)\]", line):
            section = named[1]
        elif key := re.match(r"(# )?(\w+) =(.*?) +# ", line):
            keys[f"{section}.{key[2]}"] = "not set" if key[1] else key[3].strip()
    return keys


LEAST = {"actor_rollout_ref.model.path": "hf", "data.train_files": "train.jsonl", "data.val_files": "val.jsonl"}


def test_defaults_that_differ_stand_in_the_documents(defaults):
    """The table has both values; all others mean the same, and none of verl's is refused. Where verl has the value of the actor's key, a role inherits it."""
    theirs = LEAST | {key: value for key, (value, is_actors) in defaults.items() if not is_actors}
    packing = f"{ACTOR}.use_dynamic_bsz"  # false asks for a size of micro-batches, in verl, too
    in_sequences = {packing: theirs.pop(packing), f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4}
    ours, with_theirs = printed(), printed(**theirs)
    with_theirs[packing] = printed(**LEAST, **in_sequences)[packing]
    differ = {key: (json.dumps(value), ours[key]) for key, (value, is_actors) in defaults.items()
              if not is_actors and (with_theirs[key] != ours[key] or value is None and ours[key] == '"auto"')}
    assert all(ours[key] == "not set" or ".megatron." in key for key, (_, is_actors) in defaults.items() if is_actors)
    text = (ROOT / "docs/training/grpo.md").read_text().partition("### Defaults\n")[2].partition("\n## ")[0]
    documented = {}
    for keys, theirs, ours in re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \| .+ \|$", text, re.MULTILINE):
        for key in re.findall(r"`(.*?)`", keys):
            role = re.match(r"(actor|ref|rollout|model)\.", key)
            documented[f"actor_rollout_ref.{key}" if role else key] = (theirs.replace("`", ""), ours.replace("`", ""))
    assert documented == differ


def test_the_critics_sum_of_tokens_has_verls_scale(world, work):
    """The width of the column of answers, by default."""
    mask = torch.ones(2, LONGEST_ANSWER)
    theirs = [verl_core.core_algos.agg_loss(mask, mask, mode).item() for mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm")]
    ours = [train(world, work / mode, 1, "ppo", **ONE, **{"actor_rollout_ref.rollout.n": 1, "critic.loss_agg_mode": mode})[1]
            for mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm")]
    for name in ("critic/vf_loss", "critic/grad_norm"):
        assert ours[0][name] / ours[1][name] == pytest.approx(theirs[0] / theirs[1], rel=1e-5), name


def test_mini_batches_are_the_same_on_any_number_of_ranks(world, work):
    """Shuffled, and what clip_cov draws of them: two epochs of two, whose later ratios tell which answers the first ones had."""
    updates = {f"{ACTOR}.ppo_epochs": 2, f"{ACTOR}.ppo_mini_batch_size": PROMPTS // 2, f"{ACTOR}.shuffle": True,
               f"{ACTOR}.policy_loss.loss_mode": "clip_cov", f"{ACTOR}.policy_loss.clip_cov_ratio": 0.25,
               f"{ACTOR}.policy_loss.clip_cov_lb": -100.0, f"{ACTOR}.policy_loss.clip_cov_ub": 100.0}
    names = ("actor/pg_loss", "actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm")
    steps = [train(world, work / str(ranks), ranks, **ONE, **updates)[1] for ranks in RANKS]
    alone, *others = ({name: step[name] for name in names} for step in steps)
    assert alone["actor/pg_clipfrac"] > 0.1
    for other in others:
        assert other == pytest.approx(alone, rel=1e-3, abs=1e-5)
    in_order = train(world, work / "in order", 1, **ONE, **updates | {f"{ACTOR}.shuffle": False})[1]
    assert in_order["actor/ppo_kl"] != pytest.approx(alone["actor/ppo_kl"], rel=1e-2)


@pytest.mark.parametrize("ranks", RANKS)
def test_an_epoch_is_a_pass_over_what_the_filter_leaves(ranks, world, work):
    """Steps and the rate go by it; what validation leaves out is counted, too."""
    def write(path, good):
        write_prompts(path, good)
        long = {"data_source": "counting", "prompt": "one " * 60, "reward_model": {"style": "rule", "ground_truth": "x"}}
        rows = path.read_text().splitlines()
        path.write_text("\n".join(['{"data_source": "counting"}', *rows[:1], json.dumps(long), *rows[1:], "no JSON", json.dumps(long)]) + "\n")

    write(work / "train.jsonl", 2 * PROMPTS)
    write(work / "val.jsonl", 3)
    arguments = settings(world, work / "run", **{
        "data.train_files": [str(work / "train.jsonl")], "data.val_files": [str(work / "val.jsonl")], "data.filter_overlong_prompts": True, "data.shuffle": False,
        "trainer.total_training_steps": None, "trainer.total_epochs": 2, "trainer.test_freq": 4, f"{ACTOR}.optim.lr": 4e-3,
        f"{ACTOR}.optim.lr_decay_style": "linear"})
    for status, said in finish(start_training(ranks, "grpo", arguments)):
        assert status == 0, said[-3000:]
    steps = metrics(work / "run")
    assert [step["training/epoch"] for step in steps.values()] == [0, 0, 1, 1]
    assert [step["actor/lr"] for step in steps.values()] == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3])
    assert {len({row["input"] for step in epoch for row in samples(work / "run", step)}) for epoch in ((1, 2), (3, 4))} == {
        len(set(row["input"] for step in (1, 2, 3, 4) for row in samples(work / "run", step)))}
    assert [step["training/malformed_rows"] for step in steps.values()] == [2, 2, 6, 6]  # two are at the end
    assert steps[4]["val/malformed_rows"] == 4
    assert len(samples(work / "run", 4, "validations")) == 3


def test_what_is_skipped_is_named(world, work):
    write_prompts(work / "train.jsonl", PROMPTS)
    with (work / "train.jsonl").open("a") as file:
        file.write("no JSON\n")
    arguments = settings(world, work / "run", **{"data.train_files": [str(work / "train.jsonl")], "data.shuffle": False})
    (status, said), = finish(start_training(1, "grpo", arguments))
    assert status == 0 and f"skipped    {work / 'train.jsonl'}: line {PROMPTS + 1}: " in said, said


def test_the_program_that_scores_is_named_once():
    done = ferry("train", "grpo", "--reward-command", "a", "reward_model.command=b", *(f"{key}={value}" for key, value in LEAST.items()))
    assert done.returncode == 2 and "--reward-command and reward_model.command=: name the program that scores once" in done.stderr


def test_gspo_is_of_sequences_unless_it_is_said(world, work):
    """The default is that of verl's own function; verl's configuration has token-mean for all losses."""
    gspo = {f"{ACTOR}.policy_loss.loss_mode": "gspo"}
    usual, of_sequences, of_tokens = (train(world, work / name, **ONE, **gspo, **more)[1] for name, more in (
        ("usual", {}), ("sequences", {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}), ("tokens", {f"{ACTOR}.loss_agg_mode": "token-mean"})))
    assert verl_core.core_algos.compute_policy_loss_gspo.__defaults__[0] == "seq-mean-token-mean"
    assert usual == of_sequences != of_tokens


def test_groups_are_filtered_by_acc_of_a_rule_that_says_a_number(world, work):
    """verl's managers call that number acc. All answers are wrong: no group is left."""
    write_prompts(work / "train.jsonl", PROMPTS)
    (work / "train.jsonl").write_text((work / "train.jsonl").read_text().replace('"counting"', '"openai/gsm8k"'))
    filtered = {"data.train_files": [str(work / "train.jsonl")], "reward_model.command": None, "algorithm.filter_groups.enable": True,
                "algorithm.filter_groups.metric": "acc", "algorithm.filter_groups.max_num_gen_batches": 1}
    (status, said), = finish(start_training(1, "grpo", settings(world, work / "run", **filtered)))
    assert status == 2 and f"0 of {PROMPTS} groups differ in acc after 1 batches" in said, said


REJECTED = APART | {"trainer.one_step_off": True, "trainer.total_training_steps": 2, f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean", f"{ACTOR}.optim.lr": 2e-2,
                    "algorithm.norm_adv_by_std_in_grpo": False, "algorithm.rollout_correction.rollout_rs": "seq_mean_k1",
                    "algorithm.rollout_correction.rollout_rs_threshold": "1.0_9.0"}


def test_rejected_answers_count_among_those_that_a_mean_divides_by(world, work):
    """The answers of step 2 are one update old, and about half of them are rejected. Ratios to the actor are 1 before an update, so that the loss is the
    sum of the advantages of those that are kept, over all answers of the step, on any number of ranks."""
    steps = []
    for ranks in RANKS:
        more = REJECTED | {f"{ACTOR}.ranks": list(range(ranks)), f"{ROLLOUT}.ranks": [ranks]}
        steps.append(train(world, work / str(ranks), ranks + 1, **more)[2])
    alone, *others = ({name: value for name, value in step.items() if name.startswith(("actor/", "rollout_corr/"))} for step in steps)
    for other in others:
        assert other == pytest.approx(alone, rel=1e-3, abs=1e-5)
    rejected = alone["rollout_corr/rollout_rs_seq_masked_fraction"] * PROMPTS * ANSWERS
    assert 0 < rejected < PROMPTS * ANSWERS and rejected == int(rejected)
    groups = [[row["score"] for row in samples(work / "1", 2)[i:i + ANSWERS]] for i in range(0, PROMPTS * ANSWERS, ANSWERS)]
    advantages = [score - sum(group) / ANSWERS for group in groups for score in group]
    kept = itertools.combinations(advantages, PROMPTS * ANSWERS - int(rejected))
    assert any(-sum(some) / (PROMPTS * ANSWERS) == pytest.approx(alone["actor/pg_loss"], abs=1e-6) for some in kept)


CONFIG = PEERS / "verl091/verl/trainer/config"
ENGINES = ("automodel", "fsdp", "megatron", "torchtitan", "veomni")
ELSEWHERE = {"trainer.save_freq", "trainer.resume_mode", "trainer.resume_from_path"}


def verls(name):
    return yaml.safe_load((CONFIG / f"{name}.yaml").read_text())


def keys_of(node, prefix=""):
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from keys_of(value, f"{prefix}{name}.")
        elif name not in ("_target_", "defaults"):
            yield prefix + name


def keys_of_verl(command):
    """Keys of all engines that verl has."""
    if command == "ppo":
        return {key for path in CONFIG.glob("_generated_ppo*.yaml") for key in keys_of(verls(path.stem))}
    parts = [{"model": verls("model/hf_model"), "profiler": verls("profiler/profiler")}, verls("sft_trainer_engine")]
    parts += [{kind: verls(f"{kind}/{engine}")} for kind in ("engine", "optim") for engine in ENGINES]
    return {key for part in parts for key in keys_of(part)}


def keys_of_ferry(command):
    section, keys = "", set()
    for line in run_ok("train", command, "--print-config").stdout.splitlines():
        if named := re.fullmatch(r"\[(.*)\]", line):
            section = named[1]
        elif key := re.match(r"(# )?(\w+) =", line):
            keys.add(f"{section}.{key[2]}")
    return keys


@pytest.mark.parametrize("command,count", [("ppo", 1000), ("sft", 200)])
def test_each_key_is_taken_or_has_a_hint(command, count):
    keys = keys_of_verl(command)
    assert len(keys) > count
    unknown = sorted(keys - keys_of_ferry(command))
    done = ferry("train", command, "--print-config", *(f"{key}=1" for key in unknown))
    assert done.returncode == 2 and f"and {len(unknown) - 1} more" in done.stderr, done.stderr[:2000]
    said = dict(re.findall(r"^(?:hint: | {6})(\S+): (.*)$", done.stderr, re.MULTILINE))
    assert not [key for key in unknown if said.get(key, "there is no such key") == "there is no such key"]
    assert {key for key in unknown if said[key].startswith("did you mean")} == ELSEWHERE
