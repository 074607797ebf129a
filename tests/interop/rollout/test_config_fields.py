"""Fields of config.json that decide what a model computes, as transformers' classes take them: logits equal bit for bit, regime of test_logits.py."""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_reference
from support import DATA, FERRY, ferry_json, run_ok

pytestmark = pytest.mark.skipif(not (FERRY.parent / "ferry-torch").exists(), reason="this build has no models: configure it with -Dtorch_root")

YARN = {"rope_type": "yarn", "rope_theta": 10000.0}
NULL = object()  # said to be null
LAYERS = {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}, "rope_theta": None}
# Family, what its text config says otherwise (None: nothing), and the lengths of sequences.
CASES = {
    "yarn-original": ("llama", {"rope_parameters": YARN | {"factor": 4.0}, "rope_theta": None, "max_position_embeddings": 64}, "24,64"),
    "yarn-factor": ("qwen3", {"rope_parameters": YARN | {"factor": None, "original_max_position_embeddings": 32}, "rope_theta": None, "max_position_embeddings": 128}, "24,64"),
    "llama3-original": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                                                      "high_freq_factor": 4.0}, "rope_theta": None, "max_position_embeddings": 64}, "24,64"),
    "rope-of-two-names": ("qwen2_5_vl", {"rope_parameters": {"rope_type": "default", "type": "mrope", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}}, "24"),
    "mistral-layers": ("llama", {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 6,
                                 "layer_types": ["full_attention", "sliding_attention"] * 2}, "24,64"),
    "groups-of-another-method": ("deepseek_v2", {"topk_method": "greedy"}, "24,64"),
    "sums-of-qwen3_5": ("qwen3_5_moe", {"norm_topk_prob": False}, "24"),
    "cap-of-gemma3": ("gemma3", {"final_logit_softcapping": 0.5}, "24"),
    "window-of-qwen3_vl": ("qwen3_vl", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}, "24"),
    "unsaid-epsilon": ("mixtral", {"rms_norm_eps": None}, "24"),
    "unsaid-scaling": ("deepseek_v3", {"routed_scaling_factor": None}, "24"),
    "unsaid-scaling-of-kimi": ("kimi_k25", {"routed_scaling_factor": None}, "24"),
    "unsaid-rope-of-ministral3": ("ministral3", {"rope_parameters": None}, "24,100"),
    "null-rope-of-ministral3": ("ministral3", {"rope_parameters": NULL, "rope_theta": 5e4}, "24,100"),
    "unsaid-rope-of-mistral3": ("mistral3", {"rope_parameters": None}, "24,100"),
    "unsaid-epsilon-of-mistral3": ("mistral3", {"rms_norm_eps": None}, "24"),
    "layers-of-ministral-in-mistral3": ("mistral3", LAYERS | {"model_type": "ministral"}, "24"),
    "layers-of-mistral-in-mistral3": ("mistral3", LAYERS | {"model_type": "mistral"}, "24"),
    "original-at-the-top": ("llama", {"original_max_position_embeddings": 16, "rope_theta": None,
                                      "rope_parameters": YARN | {"factor": 4.0, "original_max_position_embeddings": 2048}}, "24,64"),
    "beta-of-llama": ("llama", {"rope_parameters": YARN | {"factor": 4.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1},
                                "rope_theta": None}, "24,64"),
    "whole-heads-of-llama": ("llama", HALF, "24"),
    "whole-heads-of-qwen2": ("qwen2", HALF, "24"),
    "whole-heads-of-mixtral": ("mixtral", HALF, "24"),
    "whole-heads-of-qwen3_moe": ("qwen3_moe", HALF, "24"),
    "whole-heads-of-olmoe": ("olmoe", HALF, "24"),
    "whole-heads-of-ernie4_5": ("ernie4_5", HALF, "24"),
    "whole-heads-of-ernie4_5_moe": ("ernie4_5_moe", HALF, "24"),
    "whole-heads-of-seed_oss": ("seed_oss", HALF, "24"),
    "whole-heads-of-gemma2": ("gemma2", HALF, "24"),
    "parts-of-heads-of-minimax_m2": ("minimax_m2", HALF, "24"),
    "parts-of-heads-of-qwen3_next": ("qwen3_next", HALF, "24"),
    "window-of-phi3": ("phi3", {"sliding_window": 6}, "24"),
    "older-longrope-of-phi3": ("phi3", {"rope_parameters": None, "rope_theta": 10000.0, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.75,
                                        "rope_scaling": {"type": "su", "original_max_position_embeddings": 32, "short_factor": [1.0, 1.05, 1.7],
                                                         "long_factor": [1.3, 2.2, 9.5]}}, "24,64"),
    "unsaid-factors-of-granite": ("granite", dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")), "24"),
    "whole-heads-of-smollm3": ("smollm3", HALF, "24"),
    "whole-heads-of-olmo2": ("olmo2", HALF, "24"),
    "counted-layers-of-smollm3": ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 3, "tie_word_embeddings": None}, "24"),
    "window-of-smollm3": ("smollm3", {"use_sliding_window": True, "sliding_window": 6, "layer_types": None}, "24"),
    "named-windows-of-smollm3": ("smollm3", {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"] * 2}, "24"),
    "unsaid-layers-of-olmo3": ("olmo3", {"layer_types": None, "rope_parameters": None}, "24"),
    "older-rope-of-olmo3": ("olmo3", {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": YARN | {"factor": 4.0, "original_max_position_embeddings": 16}},
                            "24,64"),
    "two-bases-of-olmo3": ("olmo3", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e5},
                                                         "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, "24"),
    "rope-of-windows-of-olmo3": ("olmo3", {"rope_theta": None, "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, "24"),
    "rope-of-windows-of-gemma3": ("gemma3_text", {"rope_theta": None, "rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 1e5}}}, "24"),
    "unsaid-groups-of-glm4": ("glm4", {"num_key_value_heads": None}, "24"),
    "unsaid-groups-of-ernie4_5": ("ernie4_5", {"num_key_value_heads": None}, "24"),
    "unsaid-groups-of-qwen3_next": ("qwen3_next", {"num_key_value_heads": None}, "24"),
    "unsaid-shared-experts-of-deepseek_v2": ("deepseek_v2", {"n_shared_experts": None}, "24"),
    "unsaid-shared-experts-of-deepseek_v3": ("moonlight", {"n_shared_experts": None}, "24"),
    "unsaid-layers-of-glm4_moe": ("glm4_moe", {"first_k_dense_replace": None, "n_shared_experts": None}, "24"),
}


def changed(folder, family, fields):
    shutil.copytree(DATA / f"hf_{family}/hf", folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    for name, value in fields.items():
        if value is None:
            text.pop(name, None)
        else:
            text[name] = None if value is NULL else value
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def made(folder, family, sizes):
    """A tiny model of other sizes"""
    from transformers import AutoConfig, AutoModelForCausalLM
    folder.mkdir()
    config = json.loads((DATA / f"hf_{family}/hf/config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith("bias"))]:
            tensor.copy_(0.2 * torch.randn_like(tensor) + (tensor.ndim == 1))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


# Family, sizes that its class takes where config.json says none, and sizes that it says.
CLASS_SIZES = {
    "deepseek_v3": ({"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}, {"n_routed_experts": 16, "num_hidden_layers": 4}),
    "glm_moe_dsa": ({"first_k_dense_replace": 3, "mlp_layer_types": None, "n_shared_experts": 1},
                    {"num_hidden_layers": 4, "layer_types": None, "indexer_types": None}),
    "mixtral": ({"num_key_value_heads": 8, "num_local_experts": 8}, {"num_attention_heads": 16}),
    "qwen3_moe": ({"num_key_value_heads": 4}, {"num_attention_heads": 8}),
    "ernie4_5_moe": ({"num_key_value_heads": 4}, {}),
    "glm4_moe": ({"num_key_value_heads": 8}, {"num_attention_heads": 16}),
}


@pytest.mark.parametrize("family", CLASS_SIZES)
def test_sizes_that_nothing_says_are_those_of_the_class(family, tmp_path):
    unsaid, sizes = CLASS_SIZES[family]
    folder = made(tmp_path / "hf", family, {**unsaid, **sizes})
    config = json.loads((folder / "config.json").read_text())
    for name in unsaid:
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    run_ok("convert", folder, tmp_path / "megatron")
    if family == "glm_moe_dsa":  # is not computed
        return
    hf_reference.main([str(folder), str(tmp_path / "reference.safetensors"), "--lengths", "24"])
    assert ferry_json("verify", "--logits", folder, "--reference", tmp_path / "reference.safetensors")["equal"]


# Megatron's arguments say it all: family, and what its config.json says of positions.
SAID_BY_ARGUMENTS = {
    "plain": ("llama", {}),
    "rounded": ("qwen3", {"truncate": True}),
    "unrounded": ("qwen3", {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}),
    "two-scales": ("llama", {"mscale": 0.707, "mscale_all_dim": 0.5}),
    "one-scale": ("llama", {"mscale": 0.707}),
    "some-layers": ("smollm3", {}),
    "latent": ("deepseek_v3", {}),
    "latent-two-scales": ("deepseek_v3", {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16.0}),
    "latent-scale-of-logits": ("deepseek_v2", {"mscale_all_dim": 0.707}),
    "latent-factor": ("glm4_moe_lite", {"attention_factor": 1.25}),
}


@pytest.mark.parametrize("case", SAID_BY_ARGUMENTS)
def test_arguments_of_megatron_say_yarn_without_the_sidecar(case, tmp_path):
    family, more = SAID_BY_ARGUMENTS[case]
    scaling = YARN | {"factor": 4.0, "original_max_position_embeddings": 16} | more
    folder = changed(tmp_path / "hf", family, {"rope_parameters": scaling, "rope_theta": None})
    hf_reference.main([str(folder), str(tmp_path / "reference.safetensors"), "--lengths", "24,64"])
    run_ok("convert", folder, tmp_path / "megatron", "--tp", 2)
    (sidecar,) = tmp_path.glob("megatron/*/ferry")
    shutil.rmtree(sidecar)
    done = run_ok("verify", "--logits", tmp_path / "megatron", "--reference", tmp_path / "reference.safetensors")
    assert "by Megatron's arguments; --hf-config names another" in done.stderr


def test_the_prediction_layer_of_ernie_travels_beside_the_model_or_is_dropped(tmp_path):
    folder = changed(tmp_path / "hf", "ernie4_5_moe", {"num_nextn_predict_layers": 1})
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    hidden = tensors["model.norm.weight"].shape[0]
    predicting = {name.replace("model.layers.0.", "model.mtp_block.0."): tensor.clone()
                  for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    predicting |= {f"model.mtp_{name}.0.weight": torch.randn(shape).to(torch.bfloat16)
                   for name, shape in {"emb_norm": (hidden,), "hidden_norm": (hidden,), "linear_proj": (hidden, 2 * hidden)}.items()}
    save_file(tensors | predicting, file, metadata={"format": "pt"})
    hf_reference.main([str(folder), str(tmp_path / "reference.safetensors"), "--lengths", "24"])
    run_ok("convert", folder, tmp_path / "megatron", "--tp", 2)
    run_ok("convert", tmp_path / "megatron", tmp_path / "back")
    run_ok("diff", folder, tmp_path / "back")
    assert set(predicting) <= set(load_file(tmp_path / "back" / file.name))
    run_ok("convert", folder, tmp_path / "dropped", "--mtp", "drop", "--to", "hf")
    assert set(load_file(tmp_path / "dropped" / file.name)) == set(tensors)
    assert json.loads((tmp_path / "dropped/config.json").read_text())["num_nextn_predict_layers"] == 0
    run_ok("convert", folder, tmp_path / "megatron_dropped", "--mtp", "drop", "--ep", 2)
    for source in (folder, tmp_path / "megatron", tmp_path / "back", tmp_path / "dropped", tmp_path / "megatron_dropped"):
        assert ferry_json("verify", "--logits", source, "--reference", tmp_path / "reference.safetensors")["equal"], source


@pytest.mark.parametrize("name", ["norm_topk_prob", "rope_interleave"])
def test_null_is_false_to_the_class_of_deepseek_v3(name, tmp_path):
    folder = changed(tmp_path / "hf", "deepseek_v3", {name: NULL})
    assert f"{name} is false" in run_ok("convert", folder, tmp_path / "megatron", code=2).stderr


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, tmp_path):
    family, fields, lengths = CASES[case]
    folder = changed(tmp_path / "hf", family, fields)
    hf_reference.main([str(folder), str(tmp_path / "reference.safetensors"), "--lengths", lengths])
    report = ferry_json("verify", "--logits", folder, "--reference", tmp_path / "reference.safetensors")
    assert report["equal"]
    run_ok("convert", folder, tmp_path / "megatron", "--tp", 2)
    run_ok("diff", folder, tmp_path / "megatron")


@pytest.mark.parametrize("family", ["mistral3", "gemma2"])
def test_an_output_layer_of_its_own_is_not_tied_where_nothing_is_said(family, tmp_path):
    """transformers ties embedding and output layer by default here, but not where both are there and differ."""
    folder = changed(tmp_path / "hf", family, {})
    config = json.loads((folder / "config.json").read_text())
    for object in (config, config.get("text_config", {})):
        object.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    head = {"mistral3": "language_model.lm_head.weight", "gemma2": "lm_head.weight"}[family]
    tensors[head] = tensors[embedding].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    assert ferry_json("inspect", folder)["config"]["untie_embeddings_and_output_weights"] is False
    tensors[head] = torch.randn(tensors[embedding].shape, generator=torch.Generator().manual_seed(1)).to(tensors[embedding].dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    hf_reference.main([str(folder), str(tmp_path / "reference.safetensors"), "--lengths", "24"])
    run_ok("convert", folder, tmp_path / "megatron", "--tp", 2)
    run_ok("convert", tmp_path / "megatron", tmp_path / "back")
    run_ok("diff", folder, tmp_path / "back")
    assert (tmp_path / "back/config.json").read_bytes() == (folder / "config.json").read_bytes()  # the ends say it
    for source in (folder, tmp_path / "megatron", tmp_path / "back"):
        assert ferry_json("verify", "--logits", source, "--reference", tmp_path / "reference.safetensors")["equal"], source
