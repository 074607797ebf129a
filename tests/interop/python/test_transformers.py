"""ferry.compat.transformers: models from checkpoints of any format beside those that transformers loads from Hugging Face folders."""
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers

from support import DATA, ROOT, llama_config, llama_shapes, write_hf

ferry = pytest.importorskip("ferry", reason="the Python module is not built")
from ferry.compat.transformers import from_pretrained, load_tokenizer  # noqa: E402

CHECKPOINTS = [("llama_tp2pp2", "hf_llama"), ("legacy/mixtral_legacy_ep2", "hf_mixtral"), ("mixtral_ep2", "hf_mixtral"), ("qwen2_tied_pp2", "hf_qwen2_tied"),
               ("deepseek_v3_tp2pp2", "hf_deepseek_v3"), ("glm4_moe_tp2ep2", "hf_glm4_moe")]


def require_same_model(ours, theirs):
    expected = theirs.state_dict()
    found = ours.state_dict()
    assert set(found) == set(expected)
    assert [name for name in expected if found[name].dtype != expected[name].dtype or not torch.equal(found[name], expected[name])] == []
    ids = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("path, model", CHECKPOINTS)
def test_weights_and_logits_are_those_of_the_hugging_face_folder(path, model):
    hf = DATA / model / "hf"
    ours, loading = from_pretrained(DATA / path, hf_config=hf, output_loading_info=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf)
    assert type(ours) is type(theirs) and not ours.training
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    require_same_model(ours, theirs)


@pytest.mark.parametrize("model, to", [("hf_qwen3_moe", "megatron"), ("hf_qwen3_next", "megatron"), ("hf_qwen3_5_moe", "megatron"), ("hf_qwen3_moe", "h5")])
def test_what_goes_along_comes_from_the_checkpoint_itself(model, to, work):
    hf = DATA / model / "hf"
    ferry.convert(hf, work / "out", to=to)
    checkpoint = ferry.open(work / "out")
    assert {name: checkpoint.read_file(name) for name in checkpoint.files} == {
        path.name: path.read_bytes() for path in hf.iterdir() if path.suffix == ".json"}
    require_same_model(from_pretrained(checkpoint), transformers.AutoModelForCausalLM.from_pretrained(hf))
    with pytest.raises(ferry.Error, match="weights.txt: the checkpoint carries no such file"):
        checkpoint.read_file("weights.txt")


def test_options_of_transformers_go_through():
    hf = DATA / "hf_llama/hf"
    options = dict(dtype=torch.float32, attn_implementation="eager")
    ours = from_pretrained(DATA / "llama_tp2pp2", hf_config=hf, **options)
    assert ours.dtype == torch.float32 and ours.config._attn_implementation == "eager"
    require_same_model(ours, transformers.AutoModelForCausalLM.from_pretrained(hf, **options))
    body = from_pretrained(hf, auto_class=transformers.AutoModel)
    assert type(body).__name__ == "LlamaModel"


@pytest.mark.parametrize("options", [dict(use_cache=False), dict(output_hidden_states=True), dict(pad_token_id=3), dict(num_hidden_layers=2),
                                     dict(rope_parameters={"rope_theta": 1e4, "rope_type": "default"}), dict(dtype=torch.float32, use_cache=False),
                                     dict(auto_class=transformers.AutoModelForSequenceClassification, num_labels=3),
                                     dict(auto_class=transformers.Qwen2ForCausalLM, return_dict=False), dict(dtype="auto", attn_implementation="eager")], ids=str)
def test_fields_of_the_configuration_are_options(options, work):
    ferry.convert(DATA / "hf_qwen2_tied/hf", work / "megatron")
    ours = from_pretrained(work / "megatron", **options)
    auto = options.pop("auto_class", transformers.AutoModelForCausalLM)
    theirs = auto.from_pretrained(DATA / "hf_qwen2_tied/hf", **options)
    assert type(ours) is type(theirs) and ours.dtype == theirs.dtype
    assert ours.config.to_diff_dict() == theirs.config.to_diff_dict() and ours.config._attn_implementation == theirs.config._attn_implementation


def test_a_tokenizer_comes_from_a_checkpoint_of_megatron(work):
    from tokenizers import Tokenizer, models, pre_tokenizers
    write_hf(work / "hf", companions={})
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "ferry": 1, "boat": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(work / "hf")
    ferry.convert(work / "hf", work / "megatron")
    loaded = load_tokenizer(work / "megatron")
    assert loaded("boat ferry sea")["input_ids"] == [2, 1, 0] and loaded.name_or_path == ferry.open(work / "megatron").path


def test_a_checkpoint_without_a_configuration_is_refused():
    with pytest.raises(ferry.Error) as error:
        from_pretrained(DATA / "llama_tp2pp2")
    assert error.value.kind in ("usage", "not_found") and "config" in str(error.value)


def test_memory_is_that_of_the_model(work):
    config = llama_config(hidden_size=512, intermediate_size=4096, num_hidden_layers=30, num_attention_heads=4, num_key_value_heads=4)
    write_hf(work / "hf", config, {name: ("BF16", shape, bytes(2 * int(np.prod(shape)))) for name, shape in llama_shapes(config).items()}, companions={})
    ferry.convert(work / "hf", work / "megatron", tp=2, pp=2, progress=False)
    (work / "hf/model.safetensors").unlink()
    program = """
import re, sys, transformers, torch
from ferry.compat.transformers import from_pretrained
def memory(what): return int(re.search(what + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = memory("VmRSS")
model = from_pretrained(sys.argv[1])
print(memory("VmHWM") - before, sum(p.nbytes for p in model.parameters()))
"""
    done = subprocess.run([sys.executable, "-c", program, work / "megatron"], stdout=subprocess.PIPE, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT / "build/python")})
    peak, model = map(int, done.stdout.split())
    assert model > 400e6 and peak < model + 200e6, (peak, model)  # transformers' modules, and buffers of Ferry


@pytest.mark.parametrize("model", ["hf_mixtral", "hf_qwen3_moe", "hf_qwen2_5_vl", "hf_gemma3"])
def test_names_of_modules_are_those_of_files(model, work):
    """transformers 5 keeps experts together and towers below `model.`: files hold what its own conversion gives."""
    path = DATA / model / "hf"
    auto = transformers.AutoModelForImageTextToText if model in ("hf_qwen2_5_vl", "hf_gemma3") else transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(path)
    state = theirs.state_dict()
    reverted = transformers.core_model_loading.revert_weight_conversion(theirs, state)
    assert set(state) != set(reverted)
    for name, tensors in (("modules", state), ("files", reverted)):
        ferry.save(work / name, tensors, like=path)
        assert ferry.verify(path, work / name).notes == ferry.verify(path, path).notes
        assert {file.name: file.read_bytes() for file in (work / name).glob("*.safetensors")} == {
            file.name: file.read_bytes() for file in path.glob("*.safetensors")}


def test_a_tied_head_is_a_second_name(work):
    state = transformers.AutoModelForCausalLM.from_pretrained(DATA / "hf_qwen2_tied/hf").state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    ferry.save(work / "out", state, like=DATA / "hf_qwen2_tied/hf")
    assert ferry.verify(DATA / "hf_qwen2_tied/hf", work / "out")


@pytest.mark.parametrize("place", [{"revision": "v2"}, {"subfolder": "model"}])
def test_a_place_on_the_hub_is_part_of_the_address(place):
    for load in (from_pretrained, load_tokenizer):
        with pytest.raises(ferry.Error, match="is part of the address") as error:
            load(DATA / "hf_llama/hf", **place)
        assert "hf://ORG/REPO@REVISION/FOLDER" in error.value.hint
