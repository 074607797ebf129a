"""ferry.compat.megatron_bridge beside Megatron-Bridge 0.6.2: its loader and exporter on what Ferry imported, its models of the Hugging Face folders."""
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file

from servers import serve_files
from support import DATA, HERE, PEERS, ROOT, ferry_json, run_ok, tree
from weight_mapping import describe
sys.path.append(str(HERE / "convert/families"))
from bridge_reference import of_bridge, stored  # noqa: E402

ferry = pytest.importorskip("ferry", reason="the Python module is not built")
from ferry.compat.megatron_bridge import AutoBridge, write_run_config  # noqa: E402

MODELS = ["llama", "qwen2", "qwen2_tied", "qwen3", "qwen3_moe", "olmoe", "glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "minimax_m2", "gpt_oss",
          "qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma2", "gemma3_text", "gemma4_text", "bailing_moe_v2", "nemotron_h", "qwen2_5_vl",
          "qwen3_vl_deep", "qwen3_vl_moe", "gemma3"]
LOADED = [model for model in MODELS if model != "olmoe"]  # whose grouped queries Megatron-Bridge's norms do not know; OLMoE itself has none
ROUNDED = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h"]  # Megatron-Bridge holds in bf16 what is fp32, and norms less one
HF = DATA / "hf_llama/hf"
# Megatron-Bridge's own taste: speed, the vocabulary's padding, and how much training rounds
FREE = {"make_vocab_size_divisible_by", "expert_tensor_parallel_size", "persist_layer_norm", "cross_entropy_fusion_impl", "moe_shared_expert_overlap",
        "autocast_dtype", "attention_softmax_in_fp32"}

# Different words for the same: [field, of run_config.yaml, of Megatron-Bridge's model]
SAME = [["moe_router_num_groups", None, 1], ["moe_router_group_topk", None, 1], ["moe_router_topk_scaling_factor", 1.0, None],
        ["rope_type", "rope", "yarn"], ["kv_channels", 8, None], ["moe_layer_freq", [0, 0, 0, 1, 0], 1]]  # YaRN by a factor of 1; the pattern of layers says which have experts
# Settings that Megatron-Bridge does not find in config.json, or counts by itself, and a coefficient of a loss that it does not add
OWN = {"deepseek_v2": {"seq_length": [64, 4096]},
       "glm4_moe_lite": {"kv_channels": [10, 8]},
       "minimax_m2": {"rotary_percent": [0.5, 1.0], "moe_ffn_hidden_size": [24, None]},
       "gpt_oss": {"moe_aux_loss_coeff": [0.0, 0.001]},
       **{model: {"mtp_num_layers": [1, None]} for model in ("qwen3_next", "qwen3_5", "qwen3_5_moe")},
       "gemma4_text": {"qk_layernorm": [True, False], "rotary_base": [1000000, 10000]},  # neither of which its model asks for
       "qwen2_5_vl": {"mrope_section": [[2, 1, 1], [16, 24, 24]], "bf16": [True, False], "params_dtype": ["torch.bfloat16", "torch.float32"]},
       # of the text alone: its dtype, which its part of config.json does not name, and tokens that are null there
       "qwen3_vl_deep": {"bf16": [True, False], "params_dtype": ["torch.bfloat16", "torch.float32"], "vision_config.dtype": [None, "torch.float32"]},
       "qwen3_vl_moe": {"bf16": [True, False], "params_dtype": ["torch.bfloat16", "torch.float32"], "vision_config.dtype": [None, "torch.float32"],
                        "bos_token_id": [151643, None], "eos_token_id": [151645, None]},
       # a projector, whose sizes of attention and feed-forward, which it has none of, follow from its width
       "gemma3": {"interleaved_attn_pattern": [[1, 1], [5, 1]], "softmax_scale": [8 ** -0.5, 1 / 8 ** 0.5], "bos_token_id": [2, 0],
                  "vision_projector_config.ffn_hidden_size": [160, 10240], "vision_projector_config.kv_channels": [5, 320]},
       "gemma3_text": {"interleaved_attn_pattern": [[1, 1], [5, 1]], "softmax_scale": [8 ** -0.5, 1 / 8 ** 0.5]},
       "bailing_moe_v2": {"moe_shared_expert_intermediate_size": [40, 20], "moe_router_pre_softmax": [False, True]}}
MESHES = {"llama": ["--tp", "2", "--pp", "2"], "qwen3_moe": ["--tp", "2", "--ep", "2"], "deepseek_v3": ["--tp", "4"]}


def hf_of(model):
    return DATA / f"hf_{model}" / "hf"


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """{model: root of the checkpoint that import_ckpt wrote}"""
    work = tmp_path_factory.mktemp("imported")
    for model in MODELS:
        assert AutoBridge.import_ckpt(hf_of(model), work / model, progress=False).proved
    return {model: work / model for model in MODELS}


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


@pytest.mark.parametrize("option", ["torch_dtype", "dtype"])
def test_dtypes_of_models_in_memory_are_taken(option, work):
    """Megatron-Bridge's own example of from_hf_pretrained() names one; an export keeps what the checkpoint has there, too."""
    bridge = AutoBridge.from_hf_pretrained(HF, device_map="cpu", **{option: torch.float16})
    bridge.export_ckpt(DATA / "llama_tp2pp2", work / "hf", show_progress=False)
    assert ferry.verify(HF, work / "hf")
    AutoBridge.import_ckpt(HF, work / "kept", progress=False, **{option: "auto"})
    assert ferry.verify(HF, work / "kept", weights_only=True)
    AutoBridge.import_ckpt(HF, work / "cast", progress=False, **{option: torch.float16})
    assert {info.dtype for info in ferry.open(work / "cast").infos()} == {"fp16"}
    with pytest.raises(ferry.Error, match="are one option"):
        AutoBridge.import_ckpt(HF, work / "both", dtype="bf16", torch_dtype="fp16")


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
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500000.0}
    shutil.copytree(HF, work / "hf")
    (work / "hf/config.json").write_text(json.dumps({**config, "rope_parameters": scaling}))
    report = ferry.convert(work / "hf", work / "megatron")
    assert report.run_config_problem == "llama: scales positions by dynamic, for which Megatron-LM has no argument"
    assert not list(work.rglob("run_config.yaml"))


def test_mistrals_window_goes_along(work):
    config = json.loads((HF / "config.json").read_text())
    shutil.copytree(HF, work / "hf")
    (work / "hf/config.json").write_text(json.dumps({**config, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}))
    run_ok("convert", work / "hf", work / "megatron")
    assert yaml.safe_load((work / "megatron/release/run_config.yaml").read_text())["model"]["window_size"] == [15, 0]  # MistralBridge's own words


@pytest.mark.parametrize("model, words", [("mixtral", "mixtral: Megatron-Bridge 0.6.2 has no model of this family"), ("moonlight", "has no q_lora_rank"),
                                          ("mistral3", "mistral3: Ferry writes none for this family yet")])
def test_a_model_without_a_provider_is_refused_before_anything_is_written(model, words, work):
    with pytest.raises(ferry.Error, match=words) as error:
        AutoBridge.import_ckpt(hf_of(model), work / "megatron")
    assert error.value.kind == "usage" and not (work / "megatron").exists()


HEAD = "vision_tower.head."  # of Gemma 3's tower as transformers 5.17 saves it; nothing computes it, and Megatron-Bridge's has none


@pytest.mark.parametrize("where, words", [("vision_config", "config.json: vision_config has the key \"_target_\""),
                                          ("mrope_section", "config.json: mrope_section has the text \"${oc.env:HOME}\"")])
def test_a_configuration_that_names_what_is_made_is_refused(where, words, work):
    """Megatron-Bridge makes what `_target_` names and expands `${...}`, and config.json may be anyone's."""
    shutil.copytree(DATA / "hf_qwen2_5_vl_deep/hf", work / "hf")
    config = json.loads((work / "hf/config.json").read_text())
    if where == "vision_config":
        config["vision_config"]["more"] = {"_target_": "os.system", "_call_": True}
    else:
        config["text_config"]["rope_parameters"]["mrope_section"] = ["${oc.env:HOME}", 1, 1]
    (work / "hf/config.json").write_text(json.dumps(config))
    with pytest.raises(ferry.Error) as error:
        ferry.convert(work / "hf", work / "megatron", megatron_layout="megatron-bridge")
    assert words in error.value.message and not (work / "megatron").exists()


def is_second_copy(name):
    return name.endswith((".embed_tokens.weight", ".shared_head.head.weight")) and name != "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def bridged(imported, tmp_path_factory):
    """-> what load_with_bridge.py says of every model, and of three that `ferry convert` wrote on a mesh; {model: where it saved it}"""
    work = tmp_path_factory.mktemp("bridged")
    jobs = {model: {"hf": str(hf_of(model)), "checkpoint": str(imported[model] / "iter_0000000"), "saved": str(work / model)} for model in MODELS}
    del jobs["olmoe"]["saved"]
    for model, mesh in MESHES.items():  # the vocabulary is padded, too
        run_ok("convert", hf_of(model), work / "meshes" / model, *mesh)
        jobs["meshes/" + model] = {**jobs[model], "checkpoint": str(work / "meshes" / model / "release"), "saved": str(work / "meshes/saved" / model)}
    (work / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([sys.executable, HERE / "python/load_with_bridge.py", work / "jobs.json", work / "report.json"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=600, env=dict(os.environ, PYTHONPATH=f"{PEERS}/mc0192:{PEERS}/mb062"))
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads((work / "report.json").read_text()), {name: job["saved"] for name, job in jobs.items() if "saved" in job}


@pytest.mark.parametrize("model", MODELS)
def test_a_run_config_describes_the_model_as_megatron_bridge_does(model, bridged):
    """Every field of the provider, but those of speed and those that say the same in other words."""
    found = bridged[0][model]["differences"]
    found.pop("hf_text_config", None)  # which Megatron-Bridge's models do not read
    same = FREE | {name for name, *values in SAME if found.get(name) == values}
    assert {name: values for name, values in found.items() if name not in same and not name.endswith("_fusion")} == OWN.get(model, {})


@pytest.mark.parametrize("model", ROUNDED)
def test_megatron_bridge_exports_and_saves_what_it_does_of_its_own_import(model, bridged):
    report, saved = bridged
    assert report[model]["exported"] == of_bridge(model, "exported")
    wanted = of_bridge(model, "megatron")
    assert describe({key: tensor for key, tensor in stored(saved[model]).items() if key in wanted}) == wanted


@pytest.mark.parametrize("job", [*(model for model in LOADED if model not in ROUNDED), *(f"meshes/{model}" for model in MESHES)])
def test_megatron_bridge_loads_exports_and_saves_what_was_imported(job, bridged):
    """Biases of routers are fp32 in Megatron; second copies of prediction layers are not exported by all. Ferry reads what Megatron-Bridge saves."""
    report, saved = bridged
    model = job.rpartition("/")[2]
    weights = {name: tensor.float() if name.endswith(("e_score_correction_bias", "gate.expert_bias")) else tensor
               for name, tensor in load_file(hf_of(model) / "model.safetensors").items() if not is_second_copy(name) and not name.startswith(HEAD)}
    assert {name: one for name, one in report[job]["exported"].items() if not is_second_copy(name)} == describe(weights)
    found = ferry.verify(hf_of(model), saved[job], hf_config=hf_of(model), weights_only=True)
    assert {one.name for one in found.tensors if not one.name.startswith(HEAD)} == set() and (found or model == "gemma3")


def test_megatron_bridges_training_begins_with_weights_of_any_format(imported, work):
    """Its own factory takes the manager, and its own loader what the manager saves: a run resumes."""
    with serve_files(DATA) as server:
        run_ok("convert", HF, work / "h5", "--to", "h5")
        job = {"hf": str(HF), "checkpoint": str(imported["llama"] / "iter_0000000"), "saved": str(work / "saved"),
               "sources": {"address": f"{server.url}/hf_llama/hf", "archive": str(work / "h5"), "megatron": str(DATA / "llama_tp2pp2")}}
        (work / "job.json").write_text(json.dumps(job))
        done = subprocess.run([sys.executable, HERE / "python/manage_with_bridge.py", work / "job.json", work / "report.json"], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=600,
                              env=dict(os.environ, PYTHONPATH=f"{ROOT}/build/python:{PEERS}/mc0192:{PEERS}/mb062"))
    assert done.returncode == 0, done.stdout[-3000:]
    report = json.loads((work / "report.json").read_text())
    assert {name: one["returned"] for name, one in report.items()} == {"address": [0, 0], "archive": [0, 0], "megatron": [0, 0], "resumed": [7, 11]}
    wanted = describe(load_file(HF / "model.safetensors"))
    assert all(one["exported"] == wanted for one in report.values())


def test_a_plan_of_an_import_writes_nothing(work):
    report = AutoBridge.import_ckpt(HF, work / "megatron", dry_run="plan", progress=False)
    assert report.target.format == "torch_dist" and not list(work.iterdir())


def test_a_revision_with_a_slash_is_one_name():
    assert AutoBridge.from_hf_pretrained("org/model", revision="refs/pr/1").hf_pretrained == "hf://org/model@refs%2Fpr%2F1"


@pytest.mark.parametrize("name", ["./lama", "/tmp/lama", "~/lama", "../org/lama", "lama"])
def test_a_path_that_is_not_there_is_no_model_of_the_hub(name):
    with pytest.raises(ferry.Error, match=f"^{name}: is not there") as error:
        AutoBridge.from_hf_pretrained(name)
    assert error.value.kind == "not_found"


@pytest.mark.parametrize("option, variable", [("token", "HF_TOKEN"), ("cache_dir", "HF_HUB_CACHE")])
def test_settings_of_the_environment_are_named(option, variable, work):
    for act in (lambda **given: AutoBridge.from_hf_pretrained(HF, **given), lambda **given: AutoBridge.import_ckpt(HF, work / "megatron", **given)):
        with pytest.raises(ferry.Error, match=f"^{option}:") as error:
            act(**{option: "x"})
        assert variable in error.value.hint and not (work / "megatron").exists()


def test_a_bridge_of_a_checkpoint_exports_with_the_configuration_of_its_model(work):
    ferry.convert(HF, work / "megatron", to="megatron", progress=False)
    shutil.rmtree(work / "megatron/release/ferry")  # config.json and tokenizer
    bridge = AutoBridge.from_auto_config(work / "megatron", HF)
    assert bridge.export_ckpt(work / "megatron", work / "hf", show_progress=False).proved and ferry.verify(work / "hf", HF)
    with pytest.raises(ferry.Error, match="is not there"):
        AutoBridge.from_auto_config(work / "none", HF)
    with pytest.raises(ferry.Error):
        AutoBridge.from_auto_config(work / "megatron", DATA / "hf_qwen3/hf")


def test_it_says_which_models_are_imported():
    assert AutoBridge.can_handle(HF) and not AutoBridge.can_handle(hf_of("mixtral")) and not AutoBridge.can_handle("./lama")


def test_an_adapter_of_megatron_bridge_becomes_one_of_peft(work):
    tensors = load_file(HF / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    left, right = torch.ones(tensors[name].shape[0], 1), torch.ones(1, tensors[name].shape[1])
    ferry.save(work / "tuned", {**tensors, name: (tensors[name].float() + left @ right).to(tensors[name].dtype)}, like=HF, progress=False)
    ferry.split(HF, work / "tuned", work / "adapter", rank=1, to="megatron", progress=False)
    bridge = AutoBridge.from_hf_pretrained(HF)
    with pytest.raises(ferry.Error, match="exclude_adapter_base_prefixes"):
        bridge.export_adapter_ckpt(work / "adapter", work / "out", exclude_adapter_base_prefixes=["a"])
    report = bridge.export_adapter_ckpt(work / "adapter", work / "peft", show_progress=False)
    assert report.target_form == "PEFT" and report.proved and (work / "peft/adapter_config.json").exists()
