"""Adapters made of two checkpoints by `ferry split`: PEFT loads them, and a merge gives back what was split."""
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from support import ferry_json, llama_config, llama_shapes, random_tensors, refuse, run_ok, tree, write_hf
from tiny_models import hf_configs, make_hf

peft = pytest.importorskip("peft", reason="PEFT loads the adapters that are made")
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM  # noqa: E402

CONFIG = llama_config(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=300)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module", params=["F32", "BF16"])
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "hf"
    config = {**CONFIG, "dtype": "bfloat16" if request.param == "BF16" else "float32"}
    write_hf(folder, config, random_tensors(llama_shapes(CONFIG), dtype=request.param))
    return folder


def make_adapter(base, folder, dtype=torch.float32, **settings):
    """-> the model with it"""
    torch.manual_seed(5)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return adapted


def logits(base, adapter=None):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter:
        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(torch.arange(24).reshape(1, 24) * 7 % 250).logits


def change_model(source, target, change):
    """A copy of a checkpoint with some tensors changed: change(name, tensor) -> tensor"""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def test_an_update_of_that_rank_comes_back_up_to_rounding(base, work):
    make_adapter(base, work / "adapter", r=4, lora_alpha=6, target_modules=ALL)
    run_ok("merge", base, work / "adapter", work / "tuned")
    report = ferry_json("split", base, work / "tuned", work / "found", "--rank", "4")
    want, before = load_file(work / "tuned/model.safetensors"), load_file(base / "model.safetensors")
    exact = next(iter(want.values())).dtype == torch.float32
    # The merge rounded: of fp32 a share of 2 ** -24 of each weight, of bf16 2 ** -9.
    assert 0 < report["error"] < (1e-5 if exact else 0.1) * report["change"] and len(report["tensors"]) == 14 and report["equal"] == 7
    run_ok("merge", base, work / "found", work / "again")
    for name, tensor in load_file(work / "again/model.safetensors").items():
        moved = (want[name].double() - before[name].double()).abs().max()
        largest = want[name].double().abs().max()
        assert (tensor.double() - want[name].double()).abs().max() <= (2 ** -22 * largest if exact else 2 ** -7 * largest), name
        assert name.endswith("proj.weight") == bool(moved > 0)
    found, tuned = logits(base, work / "found"), logits(work / "tuned")
    assert (found - tuned).abs().max() < (1e-4 if exact else 0.05) * tuned.abs().max() < (logits(base) - tuned).abs().max()


def test_the_error_is_that_of_the_truncated_decomposition(base, work):
    generator = torch.Generator().manual_seed(3)
    change_model(base, work / "tuned", lambda name, tensor: tensor + (0.01 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
                 if "proj" in name else tensor)
    report = ferry_json("split", base, work / "tuned", work / "found", "--rank", "8")
    before, after, factors = (load_file(path) for path in (base / "model.safetensors", work / "tuned/model.safetensors", work / "found" / WEIGHTS))
    for tensor in report["tensors"]:
        change = (after[tensor["name"]].float() - before[tensor["name"]].float()).double().numpy()
        best = np.sqrt((np.linalg.svd(change, compute_uv=False)[8:] ** 2).sum())
        module = "base_model.model." + tensor["name"].removesuffix(".weight")
        a, b = (factors[f"{module}.lora_{part}.weight"].double().numpy() for part in "AB")
        assert a.shape[0] == b.shape[1] == 8
        left = np.linalg.norm(change - b @ a)
        assert abs(tensor["error"] / left - 1) < 1e-6 and best <= left * (1 + 1e-9) and left < 1.001 * best
        assert abs(tensor["change"] / np.linalg.norm(change) - 1) < 1e-6
    assert abs(report["error"] ** 2 / sum(tensor["error"] ** 2 for tensor in report["tensors"]) - 1) < 1e-9


@pytest.mark.parametrize("layout", [(), ("--tp", "2"), ("--tp", "2", "--pp", "2")])
def test_megatron_bridge_and_verl_get_the_same_factors(base, work, layout):
    make_adapter(base, work / "adapter", r=4, lora_alpha=4, target_modules=ALL)
    run_ok("merge", base, work / "adapter", work / "tuned")
    run_ok("convert", work / "tuned", work / "tuned_mcore", "--tp", "2")
    run_ok("split", base, work / "tuned", work / "peft", "--rank", "4")
    run_ok("split", base, work / "tuned_mcore", work / "mb", "--rank", "4", "--to", "megatron", *layout)
    run_ok("convert", work / "mb", work / "back", "--base", base, "--to", "peft")
    assert tree(work / "back") == tree(work / "peft")
    run_ok("split", base, work / "tuned", work / "verl", "--rank", "4", "--to", "verl")
    assert tree(work / "verl/lora_adapter") == tree(work / "peft")


def assert_comes_back(work, adapted):
    """work/base changed by work/adapter, of rank 2, is split into factors of the same shapes, with its logits."""
    adapted.merge_and_unload().save_pretrained(work / "tuned")
    report = ferry_json("split", work / "base", work / "tuned", work / "found", "--rank", "2")
    assert report["error"] < 1e-5 * report["change"]
    shapes = {name: tensor.shape for name, tensor in load_file(work / "adapter" / WEIGHTS).items()}
    assert {name: tensor.shape for name, tensor in load_file(work / "found" / WEIGHTS).items()} == shapes
    found, tuned = logits(work / "base", work / "found"), logits(work / "tuned")
    assert (found - tuned).abs().max() < 1e-4 * tuned.abs().max() < (logits(work / "base") - tuned).abs().max()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_projections_that_megatron_core_holds_in_parts_are_split(family, work):
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(hf_configs()[family]()).to(torch.float32).save_pretrained(work / "base")
    modules = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"]
    adapted = make_adapter(work / "base", work / "adapter", r=2, lora_alpha=4, target_modules=modules)
    assert_comes_back(work, adapted)
    for source in (("split", work / "base", work / "tuned", work / "refused", "--rank", "2"),
                   ("convert", work / "found", work / "refused", "--base", work / "base")):
        refuse(*source, "--to", "megatron", words=["linear_attn.in_proj_qkv", "Megatron-Core holds it in parts"])
        assert not (work / "refused").exists()


def test_experts_of_one_tensor_are_not_split(work):
    make_hf("qwen3_5_moe", work / "base")
    change_model(work / "base/hf", work / "tuned", lambda name, tensor: tensor * 2 if name.endswith("gate_up_proj") else tensor)
    refuse("split", work / "base/hf", work / "tuned", work / "found", "--rank", "2", words=["mlp.experts.gate_up_proj", "a stack of experts"])


def test_experts_have_factors_together(work):
    torch.manual_seed(1)
    Qwen3MoeForCausalLM(hf_configs()["qwen3_moe"]()).to(torch.float32).save_pretrained(work / "base")
    adapted = make_adapter(work / "base", work / "adapter", r=2, lora_alpha=4, target_modules=["o_proj"],
                           target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    assert_comes_back(work, adapted)


def test_a_selection_is_split_alone(base, work):
    change_model(base, work / "tuned", lambda name, tensor: tensor * 1.25)
    report = ferry_json("split", base, work / "tuned", work / "found", "--rank", "2", "--include", "*.1.self_attn.[qv]_proj.weight")
    assert [tensor["name"] for tensor in report["tensors"]] == [f"model.layers.1.self_attn.{one}_proj.weight" for one in "qv"]
    config = json.loads((work / "found/adapter_config.json").read_text())
    assert config["target_modules"] == [f"model.layers.1.self_attn.{one}_proj" for one in "qv"] and config["r"] == config["lora_alpha"] == 2
    logits(base, work / "found")


def test_what_no_adapter_changes_is_named(base, work):
    for part in ("embed_tokens", "input_layernorm"):
        change_model(base, work / part, lambda name, tensor: tensor * 1.25 if part in name else tensor)
        refuse("split", base, work / part, work / "out", "--rank", "2", words=[part, "no weight of a linear layer", "--exclude"])
    change_model(base, work / "nan", lambda name, tensor: tensor * float("nan") if "0.mlp.up_proj" in name else tensor)
    refuse("split", base, work / "nan", work / "out", "--rank", "2", words=["model.layers.0.mlp.up_proj.weight", "not finite"])
    refuse("split", base, base, work / "out", "--rank", "2", words=["do not differ"])
    refuse("split", base, work / "nan", work / "nan", "--rank", "2", words=["exists already"])
    refuse("split", base, work / "nan", work / "out", "--rank", "0", words=["--rank"])
    refuse("split", base, work / "nan", work / "out", "--rank", "999", words=["--rank 999", "rank above"])
    for form in ("peft", "verl"):
        refuse("split", base, work / "nan", work / "out", "--rank", "2", "--to", form, "--tp", "2", words=["--tp: has no effect", "--to megatron"])
    other = llama_config(**{**CONFIG, "num_hidden_layers": 3})
    write_hf(work / "deeper", other, random_tensors(llama_shapes(other)))
    refuse("split", base, work / "deeper", work / "out", "--rank", "2", words=["num_layers"])
    assert not (work / "out").exists() and not list(work.glob(".*"))
