"""ferry.compat.megatron_bridge beside Megatron-Bridge 0.6.2: providers, as it makes them of the Hugging Face folders, and, where it is installed, its loader."""
import json
import os
import subprocess

import pytest
import torch
import yaml
from safetensors.torch import load_file

from support import DATA, HERE, run_ok, tree
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


def test_an_iteration_with_a_run_config_is_replaced_and_gets_a_new_one(work):
    run_ok("convert", HF, work / "megatron", "--iteration", "3")
    path = write_run_config(work / "megatron")
    assert path == str(work / "megatron/iter_0000003/run_config.yaml") and "hf_model_id" not in open(path).read()
    run_ok("convert", HF, work / "megatron", "--iteration", "3", "--overwrite")
    assert not os.path.exists(path) and write_run_config(work / "megatron", iteration=3) == path


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
    (work / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([BRIDGE, HERE / "python/load_with_bridge.py", work / "jobs.json", work / "report.json"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    report = json.loads((work / "report.json").read_text())
    for model in models:
        weights = {name: tensor.float() if name.endswith("e_score_correction_bias") else tensor
                   for name, tensor in load_file(hf_of(model) / "model.safetensors").items() if not is_second_copy(name)}
        assert {name: one for name, one in report[model].items() if not is_second_copy(name)} == describe(weights), model
        assert ferry.verify(hf_of(model), work / model, hf_config=hf_of(model), weights_only=True), model
