"""ferry.compat.megatron_bridge beside Megatron-Bridge 0.6.2: providers, as it makes them of the Hugging Face folders, and, where it is installed, its loader."""
import json
import os
import shutil
import subprocess

import pytest
import torch
import yaml
from safetensors.torch import load_file

from support import DATA, HERE, ferry_json, run_ok, tree
from weight_mapping import describe

ferry = pytest.importorskip("ferry", reason="the Python module is not built")
from ferry.compat.megatron_bridge import AutoBridge, write_run_config  # noqa: E402

MODELS = ["llama", "qwen2", "qwen2_tied", "qwen3", "qwen3_moe", "olmoe", "glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "minimax_m2"]
HF = DATA / "hf_llama/hf"
BRIDGE = os.environ.get("BRIDGE_PYTHON")
# Fields of the layout and of Megatron-Bridge's own taste, which say nothing about the model
FREE = {"make_vocab_size_divisible_by", "expert_tensor_parallel_size", "seq_length"}
# Different words for the same: no groups of experts; the width of heads where latent attention has its own; YaRN by a factor of 1; experts as wide as
# ffn_hidden_size. MiniMax turns half of each head, which Megatron-Bridge does not find in the rope_parameters of transformers 5.
SAME = [("moe_router_num_groups", None, 1), ("moe_router_group_topk", None, 1), ("moe_router_topk_scaling_factor", 1.0, None), ("kv_channels", 8, None),
        ("kv_channels", 10, 8), ("rope_type", "rope", "yarn"), ("moe_ffn_hidden_size", 24, None), ("rotary_percent", 0.5, 1.0)]


def hf_of(model):
    return DATA / f"hf_{model}" / "hf"


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """{model: root of the checkpoint that import_ckpt wrote}"""
    work = tmp_path_factory.mktemp("imported")
    for model in MODELS:
        assert AutoBridge.import_ckpt(hf_of(model), work / model, progress=False).proved
    return {model: work / model for model in MODELS}


@pytest.mark.parametrize("model", MODELS)
def test_a_run_config_describes_the_model_as_megatron_bridge_does(model, imported):
    """The reference is of `load_with_bridge.py --providers`."""
    found = yaml.safe_load((imported[model] / "iter_0000000/run_config.yaml").read_text())["model"]
    reference = json.loads((DATA / "bridge_models/providers.json").read_text())[model]
    assert found.pop("_target_") == reference.pop("_target_")
    assert found.pop("hf_model_id") == str(hf_of(model)) and found.keys() >= reference.keys() - FREE
    found = {name: value["_target_"].rpartition(".")[2] if isinstance(value, dict) else value for name, value in found.items() if name not in FREE}
    expected = {name: reference[name].rpartition(".")[2] if name == "params_dtype" else reference[name] for name in found}
    assert {name: (found[name], expected[name]) for name in found
            if found[name] != expected[name] and (name, found[name], expected[name]) not in SAME} == {}


@pytest.mark.parametrize("model", ["llama", "deepseek_v3"])
def test_an_imported_checkpoint_is_the_model_and_comes_back(model, imported, work):
    assert ferry.verify(hf_of(model), imported[model])
    bridge = AutoBridge.from_hf_pretrained(hf_of(model), trust_remote_code=True)
    bridge.export_ckpt(imported[model], work / "back", show_progress=False)
    assert tree(work / "back") == {name: digest for name, digest in tree(hf_of(model)).items()}


def test_a_checkpoint_without_a_configuration_takes_that_of_the_bridge(work):
    bridge = AutoBridge.from_hf_pretrained(HF)
    bridge.export_ckpt(DATA / "llama_tp2pp2", work / "hf", show_progress=False)
    assert ferry.verify(HF, work / "hf")
    weights = load_file(HF / "model.safetensors")
    exported = list(bridge.export_hf_weights(DATA / "llama_tp2pp2", cpu=True, show_progress=False))
    assert {one.param_name for one in exported} == set(weights) and all(torch.equal(one.weight, weights[one.param_name]) for one in exported)
    (name, weight), *_ = bridge.export_hf_weights(DATA / "llama_tp2pp2", cpu=True, show_progress=False, weight_dtype=torch.float32)
    assert torch.equal(weight, weights[name].float())


def test_options_of_a_conversion_go_through(work):
    AutoBridge.import_ckpt(HF, work / "megatron", torch_dtype=torch.float32, tp=2, pp=2, make_vocab_size_divisible_by=64, progress=False)
    found = yaml.safe_load((work / "megatron/iter_0000000/run_config.yaml").read_text())["model"]
    assert found["params_dtype"]["_target_"] == "torch.float32" and (found["bf16"], found["pipeline_model_parallel_size"]) == (False, 2)
    assert found["make_vocab_size_divisible_by"] == 64 and found["layernorm_epsilon"] == 1e-5
    with pytest.raises(TypeError, match="num_gpus"):
        AutoBridge.from_hf_pretrained(HF, num_gpus=8)


def test_ferry_convert_writes_a_run_config_and_replaces_it(work):
    run_ok("convert", HF, work / "megatron", "--iteration", "3", "--tp", "2")
    path = work / "megatron/iter_0000003/run_config.yaml"
    written = path.read_text()
    assert "hf_model_id" not in written and yaml.safe_load(written)["model"]["tensor_model_parallel_size"] == 2
    assert write_run_config(work / "megatron", hf_model_id="org/model") == str(path)
    assert yaml.safe_load(path.read_text())["model"] == {**yaml.safe_load(written)["model"], "hf_model_id": "org/model"}
    run_ok("convert", HF, work / "megatron", "--iteration", "3", "--tp", "2", "--overwrite")
    assert path.read_text() == written
    run_ok("convert", work / "megatron", work / "again", "--to", "megatron", "--iteration", "3", "--tp", "2")
    assert (work / "again/iter_0000003/run_config.yaml").read_text() == written


@pytest.mark.parametrize("options, words", [(["--include", "model.norm.weight"], "llama: Megatron-Bridge opens whole language models"),
                                            (["--to", "h5"], ""), ([], "")])
def test_a_report_says_why_there_is_no_run_config(options, words, work):
    assert ferry_json("convert", HF, work / "target", *options)["run_config_problem"] == words
    assert len(list(work.rglob("run_config.yaml"))) == (options == [])


def test_positions_that_megatron_has_no_argument_for_leave_it_out(work):
    config = json.loads((HF / "config.json").read_text())
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500000.0}
    shutil.copytree(HF, work / "hf")
    (work / "hf/config.json").write_text(json.dumps({**config, "rope_parameters": scaling}))
    report = ferry.convert(work / "hf", work / "megatron")
    assert report.run_config_problem == "llama: scales positions by yarn, for which Megatron-LM has no argument"
    assert not list(work.rglob("run_config.yaml"))


def test_mistrals_window_goes_along(work):
    config = json.loads((HF / "config.json").read_text())
    shutil.copytree(HF, work / "hf")
    (work / "hf/config.json").write_text(json.dumps({**config, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}))
    run_ok("convert", work / "hf", work / "megatron")
    assert yaml.safe_load((work / "megatron/release/run_config.yaml").read_text())["model"]["window_size"] == [15, 0]  # MistralBridge's own words


@pytest.mark.parametrize("model, words", [("mixtral", "mixtral: Megatron-Bridge's model of this family is not known"), ("moonlight", "has no q_lora_rank")])
def test_a_model_without_a_provider_is_refused_before_anything_is_written(model, words, work):
    with pytest.raises(ferry.Error, match=words) as error:
        AutoBridge.import_ckpt(hf_of(model), work / "megatron")
    assert error.value.kind == "usage" and not (work / "megatron").exists()


@pytest.mark.skipif(not BRIDGE, reason="BRIDGE_PYTHON names no Python 3.12 with megatron-bridge (load_with_bridge.py says what else)")
def test_megatron_bridge_loads_exports_and_saves_what_was_imported(imported, work):
    """Biases of routers are fp32 in Megatron; second copies of prediction layers are not exported by all. Ferry reads what Megatron-Bridge saves."""
    def is_second_copy(name):
        return name.endswith((".embed_tokens.weight", ".shared_head.head.weight")) and name != "model.embed_tokens.weight"

    models = [model for model in MODELS if model != "olmoe"]  # whose grouped queries Megatron-Bridge's norms do not know; OLMoE itself has none
    jobs = {model: {"hf": str(hf_of(model)), "checkpoint": str(imported[model]), "saved": str(work / model)} for model in models}
    for model, mesh in {"llama": ["--tp", "2", "--pp", "2"], "qwen3_moe": ["--tp", "2", "--ep", "2"], "deepseek_v3": ["--tp", "4"]}.items():
        run_ok("convert", hf_of(model), work / "meshes" / model, *mesh)  # the vocabulary is padded, too
        jobs[model + " of ferry convert"] = {**jobs[model], "checkpoint": str(work / "meshes" / model / "release"), "saved": str(work / "meshes/saved" / model)}
    (work / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([BRIDGE, HERE / "python/load_with_bridge.py", work / "jobs.json", work / "report.json"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    report = json.loads((work / "report.json").read_text())
    for model in models:
        weights = {name: tensor.float() if name.endswith("e_score_correction_bias") else tensor
                   for name, tensor in load_file(hf_of(model) / "model.safetensors").items() if not is_second_copy(name)}
        for job in [name for name in jobs if name.startswith(model) and jobs[name]["hf"] == jobs[model]["hf"]]:
            assert {name: one for name, one in report[job].items() if not is_second_copy(name)} == describe(weights), job
        assert ferry.verify(hf_of(model), work / model, hf_config=hf_of(model), weights_only=True), model
