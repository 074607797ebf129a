"""Models that Megatron-Bridge 0.6.2 makes (its providers and layers, megatron-core's GPTModel) load what Ferry writes of a family, compute the logits of
transformers, and are exported by it as the folder that Ferry converted. The families that megatron-core builds by itself are in test_write_for_megatron.py."""
import json
import os
import shutil
import subprocess
import sys

import pytest

import torch_dist_raw as raw
from support import DATA, HERE, PEERS, iteration_folder, refuse, run_ok, tree

TP_PP, TP_EP = ["--tp", 2, "--pp", 2], ["--tp", 2, "--ep", 4, "--etp", 1]
PREDICTING = ["--pp", 2, "--ep", 2, "--tp", 2, "--pipeline-model-parallel-layout", "Et|tmL"]
YARN = {"yarn_original_max_position_embeddings": 16, "yarn_correction_range_round_to_int": True}
SCALED = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 16}
ALTERNATE = {"interleaved_attn_pattern": [1, 1]}
SPARSE = {"bridge": ["glm_moe_dsa.glm5_bridge", "GLM5Bridge"], "settings": {"mtp_num_layers": None}}
KIMI = {"bridge": ["kimi.kimi_bridge", "KimiK2Bridge"]}
FAMILIES = {  # name: options of `ferry convert`, and what Megatron-Bridge does not find in config.json
    "llama": (TP_PP, {}),
    "yarn": (TP_PP, {}),
    "qwen3_moe": (TP_EP, {}),
    "glm4_moe": (["--tp", 2, "--ep", 2], {}),
    "gpt_oss": (["--tp", 2, "--ep", 2], {}),
    "qwen3_next": (["--tp", 2, "--ep", 2, "--dtype", "fp32"], {}),  # norms less one have more bits than bf16
    "qwen3_5": (["--tp", 2], {}),
    "qwen3_5_moe": (["--tp", 2, "--ep", 2], {}),
    "qwen3_5_vl": (["--tp", 2], {}),
    "qwen3_5_moe_vl": (["--tp", 2, "--ep", 2], {}),
    "gemma2": (["--tp", 2], {}),
    "gemma3_text": (TP_PP, {}),
    "gemma3": (TP_PP, {"settings": {**ALTERNATE, "is_vision_language": False}}),  # windows of text, not of images
    "gemma4_text": (TP_PP, {}),
    "gemma4": (TP_EP, {}),
    "gemma4_e2b": (TP_PP, {}),
    "gemma4_e4b": (TP_PP, {}),
    "ernie4_5_moe": (TP_EP, {"settings": {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}}),  # it takes the sigmoid
    "olmoe": (TP_EP, {}),
    "minimax_m2": (TP_EP, {}),
    "ministral3": (TP_PP, {"bridge": ["ministral3.ministral3_bridge", "Ministral3Bridge"], "settings": {**YARN, "yarn_rotary_scaling_factor": 4.0}}),
    "mistral3": (TP_PP, {"settings": YARN}),  # its YaRN is that of the released models
    "qwen2_5_vl": (TP_PP, {"settings": {"mrope_section": [2, 1, 1]}}),
    "qwen3_vl": (TP_PP, {}),
    "qwen3_vl_moe": (["--tp", 2, "--ep", 3], {}),
    "kimi_k2": (["--tp", 2, "--ep", 2], {}),
    "kimi_k25": (TP_EP, {**KIMI, "settings": {"moe_router_score_function": "sigmoid"}}),
    "bailing_moe_v2": (PREDICTING, {}),
    "glm_moe_dsa": (PREDICTING, {"of_config": {"indexer_rope_interleave": True, "first_k_dense_replace": 1}}),
    "glm_5_2": (["--tp", 2, "--ep", 2], {"of_config": {"indexer_rope_interleave": True, "first_k_dense_replace": 1}}),
    "deepseek_v32": (PREDICTING, {**SPARSE, "of_config": {"indexer_rope_interleave": False, "first_k_dense_replace": 1}}),
}
# Their models are those that run_config.yaml describes.
DESCRIBED = {"llama", "yarn", "qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma2", "gemma3_text", "gemma4_text", "olmoe", "minimax_m2",
             "kimi_k2", "bailing_moe_v2", "glm_moe_dsa", "glm_5_2"}
UNPREDICTING = {"glm_moe_dsa", "deepseek_v32"}  # Megatron-Bridge leaves their prediction layer behind
# Half a unit in the last place of each weight changes Gemma 4's logits by 2e-4, so sharp is its attention. The norms of latent queries and keys have an
# epsilon of 1e-6 in transformers, of config.json's 1e-5 in megatron-core.
TOLERANCES = {name: 1e-3 if name.startswith("gemma4") else 5e-5 if name in {*UNPREDICTING, "glm_5_2"} else 2e-5 for name in FAMILIES}


def changed(name, to, config=None, weights=None):
    """-> a copy of a tiny model with another configuration, or other weights"""
    from safetensors.torch import load_file, save_file
    shutil.copytree(DATA / f"hf_{name}/hf", to)
    if config:
        (to / "config.json").write_text(json.dumps({**json.loads((to / "config.json").read_text()), **config}))
    if weights:
        tensors = load_file(to / "model.safetensors")
        save_file({**tensors, **weights(tensors)}, to / "model.safetensors", metadata={"format": "pt"})
    return to


def sharing(to):
    """-> GLM-5.2: layers that take over the keys that the layer before has chosen, and have no indexer"""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.from_pretrained(DATA / "hf_glm_moe_dsa/hf", num_hidden_layers=5, num_nextn_predict_layers=0, dtype="bfloat16",
                                        layer_types=None, mlp_layer_types=["dense"] + 4 * ["sparse"],
                                        indexer_types=["full", "full", "shared", "shared", "full"])
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter) + (parameter.ndim == 1))
    model.to(torch.bfloat16).save_pretrained(to)
    return to


def ungrouped(tensors):
    """A key and a value for each of the eight queries: Megatron-Bridge's norms of OLMoE know no others."""
    import torch
    torch.manual_seed(5)
    return {name: torch.randn(48, *t.shape[1:]).to(t.dtype) for name, t in tensors.items() if name.split(".")[-2] in ("k_proj", "v_proj", "k_norm")}


def exchanged(tensors):
    """The norms of a layer, exchanged"""
    layer = "model.language_model.layers.3."
    one, other = layer + "post_attention_layernorm.weight", layer + "post_feedforward_layernorm.weight"
    return {one: tensors[other], other: tensors[one]}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """{family: what logits_with_bridge.py says}, of one process"""
    work = tmp_path_factory.mktemp("bridge")
    folders = {name: DATA / f"hf_{name}/hf" for name in FAMILIES}
    folders["olmoe"] = changed("olmoe", work / "olmoe", {"num_key_value_heads": 8}, ungrouped)
    folders["yarn"] = changed("qwen3", work / "yarn", {"rope_parameters": SCALED, "max_position_embeddings": 64})
    # Without biases of experts, which megatron-core has not beside a softmax.
    folders["ernie4_5_moe"] = changed("ernie4_5_moe", work / "ernie4_5_moe", weights=lambda tensors: {
        name: t.zero_() for name, t in tensors.items() if name.endswith("e_score_correction_bias")})
    folders["deepseek_v32"] = changed("glm_moe_dsa", work / "deepseek_v32", {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]})
    folders["glm_5_2"] = sharing(work / "glm_5_2")
    sources = {**folders, "exchanged": changed("gemma4", work / "exchanged", weights=exchanged)}
    folders["exchanged"] = folders["gemma4"]
    # transformers knows Kimi K2 as DeepSeek-V3.
    folders["kimi_k2"] = DATA / "hf_deepseek_v3/hf"
    sources["kimi_k2"] = changed("deepseek_v3", work / "kimi_k2", {"model_type": "kimi_k2", "scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    jobs = {}
    for name, hf in sources.items():
        options, job = FAMILIES[name if name in FAMILIES else "gemma4"]
        run_ok("convert", hf, work / "megatron" / name, *options)
        jobs[name] = {"hf": str(folders[name]), "source": str(hf), "checkpoint": str(iteration_folder(work / "megatron" / name)), **job}
    (work / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([sys.executable, HERE / "convert/families/logits_with_bridge.py", work / "jobs.json", work / "report.json"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=600, env=dict(os.environ, PYTHONPATH=f"{PEERS}/mc0192:{PEERS}/mb062"))
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads((work / "report.json").read_text())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_of_megatron_bridge_computes_the_logits_of_transformers(name, report):
    predictions = [key for key in report[name]["left"] if key.startswith("mtp.")]
    without = {"ernie4_5_moe": ["decoder.layers.1.mlp.router.expert_bias"]}.get(name, [])
    assert [key for key in report[name]["left"] if key not in predictions] == without
    assert bool(predictions) == (name in UNPREDICTING)
    assert report[name]["run_config"] == (name in DESCRIBED)
    assert report[name]["error"] < TOLERANCES[name], report[name]


# Its AutoBridge opens folders of the others.
EXPORTED = [name for name, (_, job) in FAMILIES.items() if "bridge" not in job]
TOWERS = ("vision_tower.", "audio_tower.", "visual.", "multi_modal_projector.", "embed_vision.", "embed_audio.")
NOT_EXPORTED = {  # names, besides towers, that Megatron-Bridge's model has not, or not a second time
    "glm4_moe": ["model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"],
    "kimi_k2": ["model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"],
    "ernie4_5_moe": ["model.layers.1.mlp.moe_statics.e_score_correction_bias"],
}
ROUNDED = {"qwen3_5", "qwen3_5_moe"}  # norms of delta nets lie there less one in bf16: Ferry has them from its sidecar


@pytest.mark.parametrize("name", EXPORTED)
def test_megatron_bridge_exports_the_folder_that_ferry_converted(name, report):
    """Its mapping, the other way: of the language model that was loaded from Ferry's checkpoint, element by element."""
    export = report[name]["export"]
    assert export["invented"] == []
    assert [tensor for tensor in export["others"] if name not in ROUNDED or not tensor.endswith("linear_attn.norm.weight")] == []
    missing = [tensor for tensor in export["missing"] if not tensor.removeprefix("model.").startswith(TOWERS)]
    if name in UNPREDICTING:
        assert missing and all(tensor.startswith("model.layers.2.") for tensor in missing)
    else:
        assert missing == NOT_EXPORTED.get(name, [])


def test_the_logits_tell_two_norms_apart(report):
    assert report["exchanged"]["error"] > 0.05


def test_shared_indexers_convert_both_ways(tmp_path):
    """The checkpoint has the indexers of the layers that megatron-core gives one, and config.json may say them in each of transformers' ways."""
    hf = sharing(tmp_path / "hf")
    said = json.loads((hf / "config.json").read_text())
    said.pop("indexer_types")
    ways = {"listed": {"indexer_types": ["full", "full", "shared", "shared", "full"]}, "spelled": {"index_topk_pattern": "FFSSF"},
            "a list in place of a word": {"index_topk_pattern": ["full", "full", "shared", "shared", "full"]},
            "counted": {"index_topk_freq": 3, "index_skip_topk_offset": 2}}
    for way, words in ways.items():
        (hf / "config.json").write_text(json.dumps({**said, **words}))
        run_ok("convert", hf, tmp_path / way, "--tp", 2, "--pp", 2, "--pipeline-model-parallel-layout", "Ett|tttL")
        settings = (iteration_folder(tmp_path / way) / "run_config.yaml").read_text()
        assert "dsa_indexer_topk_freq: 3\n" in settings and "dsa_indexer_skip_topk_offset: 2\n" in settings
        checkpoint = raw.Checkpoint(str(iteration_folder(tmp_path / way)))
        assert {key.split(".")[2] for key in checkpoint.tensors if ".indexer." in key} == {"0", "1", "4"}
        run_ok("convert", tmp_path / way, tmp_path / "back")
        assert tree(tmp_path / "back") == tree(hf)
        shutil.rmtree(tmp_path / "back")
    (hf / "config.json").write_text(json.dumps({**said, "indexer_types": ["full", "shared", "full", "shared", "shared"]}))
    refuse("convert", hf, tmp_path / "out", words=["layer 4 lacks an indexer", "dsa_indexer_topk_freq"])
    for pattern, words in ((["full"] * 4, ["index_topk_pattern", "no list of 5 layers"]), (["F"] * 5, ["index_topk_pattern", '"F"'])):
        (hf / "config.json").write_text(json.dumps({**said, "index_topk_pattern": pattern}))
        refuse("convert", hf, tmp_path / "out", words=words)
