"""Adapters merged by `ferry merge` and by PEFT's merge_and_unload, and the logits of both."""
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from support import DATA, ferry_json, llama_config, llama_shapes, random_tensors, refuse, run_ok, tree, write_hf

peft = pytest.importorskip("peft", reason="PEFT merges the adapters that are compared")
from transformers import AutoModelForCausalLM  # noqa: E402

CONFIG = llama_config(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                      vocab_size=300)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
KINDS = {
    "classic": dict(r=8, lora_alpha=16, target_modules=ALL),
    "rslora": dict(r=8, lora_alpha=16, target_modules=ATTENTION, use_rslora=True),
    "dora": dict(r=4, lora_alpha=8, target_modules=ALL, use_dora=True),
    "patterns": dict(r=8, lora_alpha=16, target_modules=ALL, rank_pattern={"layers.1.self_attn.q_proj": 4, "mlp.*_proj": 2},
                     alpha_pattern={"o_proj": 5}),
    "embedding": dict(r=4, lora_alpha=8, target_modules=["embed_tokens", "lm_head", "q_proj"]),
}


def make_adapter(base, folder, dtype=torch.bfloat16, seed=3, **settings):
    """A random adapter of the base, saved by PEFT. -> the model with the adapter"""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
            elif "lora_" in name:
                parameter.copy_(0.05 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return adapted


def logits(model):
    with torch.no_grad():
        return model(torch.arange(24).reshape(1, 24) * 7 % CONFIG["vocab_size"]).logits.double()


def ordinals(tensor):
    """bf16 as numbers of which neighbours differ by one."""
    bits = tensor.view(torch.int16).long() & 0xFFFF
    return torch.where(bits >= 0x8000, 0x8000 - bits, bits)


@pytest.fixture(scope="module", params=["BF16", "F32"])
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "hf"
    config = {**CONFIG, "dtype": "bfloat16" if request.param == "BF16" else "float32"}
    write_hf(folder, config, random_tensors(llama_shapes(CONFIG), dtype=request.param))
    return folder, torch.bfloat16 if request.param == "BF16" else torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_logits_are_those_of_peft(base, work, kind):
    folder, dtype = base
    if kind == "embedding" and dtype == torch.bfloat16:
        pytest.skip("PEFT rounds the change of an embedding to bf16 before it adds it, and so rounds twice")
    adapted = make_adapter(folder, work / "adapter", dtype, **KINDS[kind])
    report = ferry_json("merge", folder, work / "adapter", work / "merged")
    assert report["adapter"]["changed"] > 0.9 * report["adapter"]["elements"] > 0
    merged = adapted.merge_and_unload()
    want, found = merged.state_dict(), AutoModelForCausalLM.from_pretrained(work / "merged", dtype=dtype).state_dict()
    assert want.keys() == found.keys()
    for name, tensor in want.items():
        if dtype == torch.float32:
            torch.testing.assert_close(found[name], tensor, rtol=2e-6, atol=2e-7, msg=name)
        else:  # one rounding each; the fp32 sums before it run in another order, and may cancel
            steps = (ordinals(found[name]) - ordinals(tensor)).abs()
            cancelled = (found[name].float() - tensor.float()).abs() < 2e-7
            assert (steps[~cancelled] <= 1).all() and (steps > 0).double().mean() < 0.01, name
    mine = logits(AutoModelForCausalLM.from_pretrained(work / "merged", dtype=dtype))
    scale = logits(merged).abs().max()
    assert (mine - logits(merged)).abs().max() <= (1e-5 if dtype == torch.float32 else 0.03) * scale


def test_dora_of_an_embedding_and_weights_of_pickle_are_named(work):
    torch.manual_seed(1)
    AutoModelForCausalLM.from_pretrained(DATA / "hf_llama/hf").float().save_pretrained(work / "base")
    make_adapter(work / "base", work / "adapter", torch.float32, r=3, lora_alpha=6, target_modules=["embed_tokens"], use_dora=True)
    refuse("merge", work / "base", work / "adapter", work / "out", words=["embed_tokens", "DoRA of an embedding is not handled"])
    torch.save(load_file(work / "adapter/adapter_model.safetensors"), work / "adapter/adapter_model.bin")
    (work / "adapter/adapter_model.safetensors").unlink()
    for command in (["merge", work / "base", work / "adapter", work / "out"], ["convert", work / "adapter", work / "out", "--to", "verl", "--base", work / "base"]):
        refuse(*command, words=["adapter_model.bin alone", "adapter_model.safetensors"])


@pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_one_end_of_a_tied_embedding(work, modules):
    """PEFT's merge would change the other end, too: its merged model is not the one that was trained, which an untied base holds."""
    from tiny_models import hf_configs
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(hf_configs()["qwen2_tied"]()).float()
    model.save_pretrained(work / "base")
    trained = make_adapter(work / "base", work / "adapter", torch.float32, r=3, lora_alpha=6, target_modules=modules)
    refuse("merge", work / "base", work / "adapter", work / "out", words=["one tensor for embedding and output layer", "tie_word_embeddings"])
    (work / "untied").mkdir()
    tensors = load_file(work / "base/model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, work / "untied/model.safetensors", metadata={"format": "pt"})
    config = json.loads((work / "base/config.json").read_text())
    (work / "untied/config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    run_ok("merge", work / "untied", work / "adapter", work / "merged")
    found = AutoModelForCausalLM.from_pretrained(work / "merged", dtype=torch.float32)
    ids = torch.arange(24).reshape(1, 24) * 7 % 250
    with torch.no_grad():
        want, got, plain = trained(ids).logits, found(ids).logits, model(ids).logits
    assert (got - want).abs().max() < 1e-5 < 0.01 < (plain - want).abs().max()


def test_both_ends_of_a_tied_embedding_that_were_trained_as_one(work):
    """PEFT's own merge adds the change of either end to the one tensor: twice what was trained."""
    from tiny_models import hf_configs
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(hf_configs()["qwen2_tied"]()).float().save_pretrained(work / "base")
    trained = make_adapter(work / "base", work / "adapter", torch.float32, r=3, lora_alpha=6, target_modules=["embed_tokens"], ensure_weight_tying=True)
    run_ok("merge", work / "base", work / "adapter", work / "merged")
    found = AutoModelForCausalLM.from_pretrained(work / "merged", dtype=torch.float32)
    ids = torch.arange(24).reshape(1, 24) * 7 % 250
    with torch.no_grad():
        want, got, twice = trained(ids).logits, found(ids).logits, trained.merge_and_unload()(ids).logits
    assert (got - want).abs().max() < 1e-5 < 0.01 < (twice - want).abs().max()
    tensors = load_file(work / "adapter/adapter_model.safetensors")
    tensors["base_model.model.lm_head.lora_B.weight"][0, 0] += 1
    save_file(tensors, work / "adapter/adapter_model.safetensors", metadata={"format": "pt"})
    refuse("merge", work / "base", work / "adapter", work / "out", words=["lm_head.lora_B.weight", "not the transpose of"])


def test_a_merge_into_megatron_core_is_that_into_hugging_face(base, work):
    folder, dtype = base
    make_adapter(folder, work / "adapter", dtype, **KINDS["classic"])
    run_ok("merge", folder, work / "adapter", work / "merged")
    run_ok("merge", folder, work / "adapter", work / "tp2", "--to", "megatron", "--tp", "2")
    run_ok("convert", folder, work / "base_tp2", "--tp", "2")
    run_ok("merge", work / "base_tp2", work / "adapter", work / "from_tp2", "--to", "hf")
    run_ok("verify", work / "merged", work / "tp2")
    assert tree(work / "from_tp2") == tree(work / "merged")


def test_changes_too_small_for_bf16_are_counted(work):
    write_hf(work / "base", CONFIG, random_tensors(llama_shapes(CONFIG)))
    make_adapter(work / "base", work / "adapter", r=1, lora_alpha=1e-4, target_modules=["q_proj"])
    report = ferry_json("merge", work / "base", work / "adapter", work / "merged")["adapter"]
    assert report["vanished"] > 0.9 * report["elements"] and report["changed"] < 0.1 * report["elements"]


@pytest.mark.parametrize("setting, value", [("layer_replication", [[0, 1]]), ("bias", "all"), ("fan_in_fan_out", True),
                                            ("peft_type", "IA3"), ("lora_bias", True), ("lora_alpha", 0), ("r", 3), ("use_bdlora", {"nblocks": 2})])
def test_settings_that_are_not_merged_are_named(work, setting, value):
    write_hf(work / "base", CONFIG, random_tensors(llama_shapes(CONFIG)))
    make_adapter(work / "base", work / "adapter", r=2, lora_alpha=4, target_modules=["q_proj"])
    config = json.loads((work / "adapter/adapter_config.json").read_text())
    (work / "adapter/adapter_config.json").write_text(json.dumps({**config, setting: value}))
    refuse("merge", work / "base", work / "adapter", work / "out", words=["rank" if setting == "r" else setting])
    assert not (work / "out").exists()


def test_what_a_merge_takes_counts_in_the_memory(work):
    """Three floats of each of a million elements of bf16, beside the buffers of any conversion."""
    write_hf(work / "base", CONFIG, random_tensors(llama_shapes(CONFIG)))
    make_adapter(work / "base", work / "adapter", r=2, lora_alpha=4, target_modules=["q_proj"])
    run_ok("convert", work / "base", work / "copy", "--to", "hf", "--max-memory", "12MiB")
    refuse("merge", work / "base", work / "adapter", work / "out", "--max-memory", "12MiB", words=["one thread needs 18 MiB"])


@pytest.mark.parametrize("way", ["pissa", "pissa_niter_2", "olora"])
def test_a_beginning_that_changes_the_base_is_refused_until_peft_converts_it(work, way):
    """PEFT takes the first factors out of the base wherever it loads such an adapter: the base plus the last factors is another model."""
    write_hf(work / "base", CONFIG, random_tensors(llama_shapes(CONFIG), dtype="F32"))
    settings = dict(r=2, lora_alpha=2, target_modules=["q_proj"], init_lora_weights=way)
    model = AutoModelForCausalLM.from_pretrained(work / "base", dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    adapted.peft_config["default"].init_lora_weights = True  # as PEFT's example of PiSSA saves the first factors
    adapted.save_pretrained(work / "first")
    adapted.peft_config["default"].init_lora_weights = way
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    adapted.save_pretrained(work / "last")
    refuse("merge", work / "base", work / "last", work / "out", words=[f'init_lora_weights: "{way}"', "path_initial_model_for_weight_conversion"])
    adapted.save_pretrained(work / "converted", path_initial_model_for_weight_conversion=str(work / "first"))
    run_ok("merge", work / "base", work / "converted", work / "out")
    found, wanted = load_file(work / "out/model.safetensors"), adapted.merge_and_unload().state_dict()
    assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in found)


def test_an_adapter_of_another_model(work):
    write_hf(work / "base", CONFIG, random_tensors(llama_shapes(CONFIG)))
    other = {**CONFIG, "num_hidden_layers": 3}
    write_hf(work / "deeper", other, random_tensors(llama_shapes(other)))
    make_adapter(work / "deeper", work / "adapter", r=2, lora_alpha=4, target_modules=["q_proj"])
    refuse("merge", work / "base", work / "adapter", work / "out", words=["model.layers.2.self_attn.q_proj.weight", "lacks it"])
    wide = llama_config(**{**CONFIG, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2})
    write_hf(work / "narrow", wide, random_tensors(llama_shapes(wide)))
    make_adapter(work / "narrow", work / "small", r=2, lora_alpha=4, target_modules=["q_proj"])
    refuse("merge", work / "base", work / "small", work / "out", words=["[64, 64]", "[32, 32]"])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_an_adapter_of_a_run_that_diverged(work, number):
    write_hf(work / "base", CONFIG, random_tensors(llama_shapes(CONFIG)))
    make_adapter(work / "base", work / "adapter", r=2, lora_alpha=4, target_modules=["q_proj"])
    path = work / "adapter/adapter_model.safetensors"
    factors = load_file(path)
    factors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"][5, 1] = number
    save_file(factors, path)
    refuse("merge", work / "base", work / "adapter", work / "out", words=["model.layers.1.self_attn.q_proj.weight", "makes"])
    assert not (work / "out").exists()


def test_folders_of_other_commands_are_named(work):
    write_hf(work / "base", CONFIG, random_tensors(llama_shapes(CONFIG)))
    make_adapter(work / "base", work / "adapter", r=2, lora_alpha=4, target_modules=["q_proj"])
    run_ok("merge", work / "base", work / "adapter", work / "merged")
    run_ok("delta", "make", work / "base", work / "merged", work / "delta")
    for command in (["inspect"], ["convert", "--to", "megatron"]):
        target = [work / "out"] if command[0] == "convert" else []
        refuse(*command, work / "adapter", *target, words=["is a LoRA adapter", "ferry merge BASE ADAPTER DST"])
        refuse(*command, work / "delta", *target, words=["is a delta", "ferry delta apply BASE DELTA DST"])
    refuse("inspect", "Qwen/Qwen3-8B", words=["Qwen/Qwen3-8B: is not there", "hint: a model of the Hugging Face hub is hf://Qwen/Qwen3-8B"])
