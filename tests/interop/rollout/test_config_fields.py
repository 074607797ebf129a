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
}


def changed(folder, family, fields):
    shutil.copytree(DATA / f"hf_{family}/hf", folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    for name, value in fields.items():
        if value is None:
            text.pop(name, None)
        else:
            text[name] = value
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


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
    assert json.loads((tmp_path / "back/config.json").read_text())["tie_word_embeddings"] is False
    for source in (folder, tmp_path / "megatron", tmp_path / "back"):
        assert ferry_json("verify", "--logits", source, "--reference", tmp_path / "reference.safetensors")["equal"], source
