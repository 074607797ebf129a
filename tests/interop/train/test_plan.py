"""`ferry plan`, and the settings that a run leaves to its plan."""
import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from ranks import finish
from sft_run import conversations, settings, start_ranks, write_model, write_rows
from support import DATA, FERRY, ROOT, ferry, ferry_json


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_model(folder / "model", num_hidden_layers=2)
    write_rows(folder / "train.jsonl", conversations())
    return folder


@pytest.fixture
def described(tmp_path):
    """The shape of Llama-3-8B: a configuration, and neither weights nor data."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
         "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "hidden_act": "silu",
         "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
         "torch_dtype": "bfloat16"}))
    run = tmp_path / "run.toml"
    run.write_text(f"""[data]
train_files = ["none.parquet"]
train_batch_size = 64
max_prompt_length = 128
max_response_length = 932
[actor_rollout_ref]
model.path = "{tmp_path / 'model'}"
actor.ppo_mini_batch_size = 16
""")
    return run


def phases(plan, group=0):
    return {phase["name"]: phase for phase in plan["ranks"][group]["phases"]}


def test_a_shape_is_planned_without_weights(described):
    plan = ferry_json("plan", described, "--ranks", "4", "--device", "h200")
    assert plan["fits"] and plan["ranks"][0]["ranks"] == [0, 1, 2, 3]
    assert phases(plan)["update_actor"]["weights"] == 2 * 8030261248
    assert {"update_weights", "gen", "old_log_prob", "update_actor"} == set(plan["seconds"])
    assert plan["step_seconds"] == pytest.approx(sum(plan["seconds"].values()))


MESH, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
TOO_LONG = ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384", f"{MESH}.recompute_granularity=none"]


def operations_of_tower(folder, height, width):
    """The operations of an image of so many patches, as torch counts them in transformers' tower."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
    config = AutoConfig.from_pretrained(folder).vision_config
    config._attn_implementation = "eager"
    patches = torch.zeros(height * width, config.in_channels * config.temporal_patch_size * config.patch_size ** 2)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        Qwen3VLVisionModel(config)(patches, grid_thw=torch.tensor([[1, height, width]]))
    return counter.get_total_flops()


def test_the_seconds_of_a_vision_tower_are_those_of_its_operations(tmp_path):
    hf = DATA / "hf_qwen3_vl_deep/hf"
    run = tmp_path / "run.toml"
    run.write_text(f"""[data]
train_files = ["none.parquet"]
train_batch_size = 64
max_prompt_length = 32
max_response_length = 32
[actor_rollout_ref]
model.path = "{hf}"
rollout.n = 4
actor.ppo_mini_batch_size = 16
""")
    shape = ["plan", run, "--ranks", "2", "--device", "h200"]
    freezes = "actor_rollout_ref.actor.freeze_vision_tower=true"

    def seconds(*more):
        blind, seeing = (ferry_json(*shape, *options, *more)["seconds"] for options in ([], ["--image-tokens", "8"]))
        return {phase: seeing[phase] - blind[phase] for phase in blind}
    forward = operations_of_tower(hf, 4, 8) / 989e12  # of one image, at the device's full rate
    frozen, trained = seconds(freezes), seconds()
    assert frozen["gen"] == pytest.approx(64 / 2 * forward / 0.65)
    for phase in ("old_log_prob", "update_actor"):
        assert frozen[phase] == pytest.approx(256 / 2 * forward / 0.65)
    assert trained["old_log_prob"] == pytest.approx(frozen["old_log_prob"])
    assert trained["update_actor"] == pytest.approx(256 / 2 * 3 * forward / 0.58)
    again = seconds("actor_rollout_ref.actor.ppo_epochs=2")  # in which old log-probabilities are computed once
    assert again["old_log_prob"] == pytest.approx(trained["old_log_prob"]) and again["update_actor"] == pytest.approx(2 * trained["update_actor"])
    for tokens, more, words in ((33, [], "a prompt has 32 tokens at most"), (8, [f"actor_rollout_ref.model.path={DATA / 'hf_llama/hf'}"], "has no effect")):
        done = ferry(*shape, "--image-tokens", str(tokens), *more)
        assert done.returncode == 2 and words in done.stderr


def test_options_without_effect_on_the_host_are_refused(described):
    for option in (["--host-memory", "1TiB"], ["--image-tokens", "8"]):
        done = ferry("plan", described, "trainer.device=cpu", *option)
        assert done.returncode == 2 and f"{option[0]}: has no effect: trainer.device of the run is cpu" in done.stderr


def test_a_run_that_does_not_fit_says_what_would(described):
    shape = ["plan", described, "--ranks", "4", "--device", "h200", *TOO_LONG, f"{MESH}.optimizer_offload=false"]
    done = ferry(*shape)
    assert done.returncode == 2 and "does not fit" in done.stdout
    assert "offload    none suffices: with all that can rest on the host update_actor takes " in done.stdout
    assert "hint: update_actor needs " in done.stderr
    fits = done.stderr.partition("what would fit: ")[2].partition(";")[0]
    assert ferry_json(*shape, fits)["fits"]


def test_a_run_that_does_not_fit_offloads_its_optimizer(described):
    """Hosts have to have the memory: twelve bytes of each parameter, over the ranks that share them."""
    shape = ["plan", described, "--ranks", "4", "--device", "h200", *TOO_LONG]
    plan = ferry_json(*shape)
    assert plan["fits"] and plan["chosen"][0] == f"{MESH}.optimizer_offload=true"
    assert phases(plan)["gen"]["host"] == 12 * 8030261248 // 4
    assert plan["offload"][0].startswith("masters and moments of actor, 22.4 GiB, do not fit beside the other ")
    on_two_hosts = ["--host-memory", "45GiB", "--ranks-per-host", "2"]
    assert ferry_json(*shape, *on_two_hosts)["fits"]
    said = ferry(*shape, *on_two_hosts[:2])
    assert said.returncode == 2 and "optimizer_offload=true\n" not in said.stdout
    assert "ranks 0-3 on host 0 would pin 89.7 GiB of the host's memory, where 45.0 GiB are free; moments in bfloat16" in said.stdout


def test_the_table_is_for_people(described):
    said = ferry("plan", described, "--ranks", "4", "--device", "h200").stdout
    assert "chosen     actor_rollout_ref.actor.ppo_max_token_len_per_gpu=" in said
    assert "ranks 0-3: actor; rollout; GiB" in said and "tokens/s on each device" in said


def test_an_unknown_device_is_refused_with_those_that_are_known(described):
    done = ferry("plan", described, "--device", "abacus")
    assert done.returncode == 2 and "H200" in done.stderr


def test_a_run_writes_down_what_its_plan_chose(world, tmp_path):
    """Chosen alike on both ranks, said once, and nothing is left to choose in the record of the run."""
    run = tmp_path / "run"
    more = {"data.max_token_len_per_gpu": None, "trainer.total_training_steps": 1}
    finished = finish(start_ranks(2, settings(world, run, **more)))
    for rank, (status, said) in enumerate(finished):
        assert status == 0, said[-3000:]
        for chosen in ("data.max_token_len_per_gpu=96", "engine.recompute_granularity=none"):
            assert said.count(f"chosen     {chosen}\n") == (rank == 0), said
        assert ("actor      ranks 0-1  TP 1  PP 1  CP 1  EP 1  DP 2\n" in said) == (rank == 0), said
    plan = (run / "plan.txt").read_text()
    assert plan in finished[0][1] and "\nranks 0-1: actor; GiB\nphase " in plan
    assert all(f"\n{phase} " in plan for phase in ("forward_backward", "optimizer")), plan
    record = tomllib.loads((run / "config.toml").read_text())
    assert record["data"]["max_token_len_per_gpu"] == 96 and record["engine"]["recompute_granularity"] == "none"
    assert record["engine"]["optimizer_offload"] is False
    assert ferry_json("plan", run / "config.toml")["chosen"] == []


def test_auto_may_be_asked_for_by_name(world, tmp_path):
    chosen = ferry_json("plan", *settings(world, tmp_path, **{"data.max_token_len_per_gpu": "auto"}))["chosen"]
    assert "data.max_token_len_per_gpu=96" in chosen


@pytest.fixture
def published(tmp_path):
    """A folder with the shapes of published models."""
    for model, config in json.loads((Path(__file__).parent / "published_models.json").read_text()).items():
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_examples_of_the_document_are_what_the_program_prints(published):
    shutil.copy(ROOT / "docs/examples/planning/grpo.toml", published)
    document = (ROOT / "docs/training/planning.md").read_text()
    blocks = [block.partition("```")[0].splitlines() for block in document.split("```console\n")[1:]]
    shown = [block for block in blocks if len(block) > 1 and not block[1].startswith("$")]
    assert len(shown) == 2
    for command, *expected in shown:
        done = ferry(*shlex.split(command.removeprefix("$ ferry ")), cwd=published)
        assert done.stdout.splitlines() == expected


def test_a_mixture_may_have_whole_experts_on_all_ranks_of_its_rollout(published):
    """verl's layout: expert_parallel_size is tensor_model_parallel_size times the number of engines."""
    shape = ["plan", ROOT / "docs/examples/planning/grpo.toml", "--ranks", "4", "--device", "B300",
             f"actor_rollout_ref.model.path={published}/Qwen3-30B-A3B", f"{MESH}.expert_model_parallel_size=4",
             f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.expert_parallel_size=4"]
    refused = ferry(*shape)
    assert refused.returncode == 2
    assert f"error: {ROLLOUT}: 4 ranks are no multiple of expert_tensor_parallel_size 2 x expert_parallel_size 4" in refused.stderr
    setting = refused.stderr.partition("hint: ")[2].split()[0]
    assert setting == f"{ROLLOUT}.expert_tensor_parallel_size=1"
    assert ferry_json(*shape, setting)["fits"]


def test_the_table_of_large_models_is_what_the_program_plans(published):
    done = subprocess.run([sys.executable, ROOT / "docs/examples/planning/tables.py", FERRY, published], stdout=subprocess.PIPE, text=True, check=True)
    table, commands = done.stdout.strip().split("\n\n")
    assert table.count("\n") == 8 and commands.count("\n$ ferry plan") == 7
    document = (ROOT / "docs/training/planning.md").read_text()
    for line in done.stdout.splitlines():
        assert line in document
