"""Adapters of fused experts (PEFT's target_parameters), merged by `ferry merge` and by PEFT's merge_and_unload."""
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import ferry_json, refuse, run_ok, tree
from tiny_models import hf_configs, make_wrapped

peft = pytest.importorskip("peft", reason="PEFT merges the adapters that are compared")
import transformers as T  # noqa: E402

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
WEIGHTS = "adapter_model.safetensors"
# Experts one by one in the files, stacked with columns of gate and up that take turns, stacked and transposed.
MODELS = ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_vl_moe"]


def make_base(name, folder):
    """-> the class that reads it"""
    if name == "qwen3_vl_moe":
        make_wrapped(name, str(folder))
        weights = {key: tensor.float() for key, tensor in load_file(folder / "model.safetensors").items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return T.Qwen3VLMoeForConditionalGeneration
    torch.manual_seed(1)
    model = T.AutoModelForCausalLM.from_config(hf_configs()[name]()).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return T.AutoModelForCausalLM


def load(model_class, folder):
    return model_class.from_pretrained(folder, dtype=torch.float32)


def make_adapter(model_class, base, folder, parameters=EXPERTS, **settings):
    torch.manual_seed(5)
    model = peft.get_peft_model(load(model_class, base), peft.LoraConfig(target_parameters=parameters, **{**dict(
        r=3, lora_alpha=6, target_modules=["o_proj"]), **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def require_same(found, want):
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-6, atol=2e-7, msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_peft(name, work):
    model_class = make_base(name, work / "base")
    adapted = make_adapter(model_class, work / "base", work / "adapter")
    before = load(model_class, work / "base").state_dict()
    report = ferry_json("merge", work / "base", work / "adapter", work / "merged")["adapter"]
    want = adapted.merge_and_unload().state_dict()
    require_same(load(model_class, work / "merged").state_dict(), want)
    changed = [key for key in want if not torch.equal(want[key], before[key])]
    assert any("experts" in key for key in changed) and any("o_proj" in key for key in changed)
    assert report["elements"] == sum(want[key].numel() for key in changed) >= report["changed"] > 0.99 * report["elements"]


@pytest.mark.parametrize("parameters", [EXPERTS[:1], EXPERTS[1:]])
def test_one_of_two_parameters(parameters, work):
    model_class = make_base("qwen3_moe", work / "base")
    adapted = make_adapter(model_class, work / "base", work / "adapter", parameters, target_modules=["q_proj"], use_rslora=True,
                           alpha_pattern={"layers.1.mlp.experts.*_proj": 2})
    run_ok("merge", work / "base", work / "adapter", work / "merged")
    require_same(load(model_class, work / "merged").state_dict(), adapted.merge_and_unload().state_dict())


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe", "minimax_m2", "qwen3_next"])
def test_all_linear_is_merged_with_its_routers(name, work):
    """PEFT makes target_parameters of experts and routers, the rank of gate and up twice that of others."""
    model_class = make_base(name, work / "base")
    adapted = make_adapter(model_class, work / "base", work / "adapter", parameters=None, target_modules="all-linear")
    config = json.loads((work / "adapter/adapter_config.json").read_text())
    assert set(config["target_parameters"]) == {"gate.weight", "gate_up_proj", "down_proj"} and list(config["rank_pattern"].values()) == [6]
    run_ok("merge", work / "base", work / "adapter", work / "merged")
    before, want = load(model_class, work / "base").state_dict(), adapted.merge_and_unload().state_dict()
    require_same(load(model_class, work / "merged").state_dict(), want)
    assert any(name.endswith("mlp.gate.weight") and not torch.equal(tensor, before[name]) for name, tensor in want.items())
    run_ok("convert", work / "adapter", work / "verl", "--base", work / "base", "--to", "verl")
    if name != "qwen3_next":
        run_ok("convert", work / "verl", work / "peft", "--base", work / "base", "--to", "peft")
        loaded = peft.PeftModel.from_pretrained(load(model_class, work / "base"), work / "peft").merge_and_unload().state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in want.items())
        for form in ("megatron", "vllm"):  # of one rank, with zeros: no product changes
            run_ok("convert", work / "adapter", work / form, "--base", work / "base", "--to", form)
            run_ok("merge", work / "base", work / form, work / f"merged_{form}")
            assert tree(work / f"merged_{form}") == tree(work / "merged")
        shapes = {tensor.shape[0] for key, tensor in load_file(work / "vllm" / WEIGHTS).items() if "lora_A" in key}
        assert shapes == {6} and json.loads((work / "vllm/adapter_config.json").read_text())["r"] == 6
        loaded = peft.PeftModel.from_pretrained(load(model_class, work / "base"), work / "vllm").merge_and_unload().state_dict()
        require_same(loaded, want)


@pytest.mark.parametrize("name, router", [("qwen2_moe", "gate"), ("gpt_oss", "router"), ("qwen3_vl_moe", "gate")])
def test_patterns_see_a_parameters_whole_name(name, router, work):
    model_class = make_base(name, work / "base")
    adapted = make_adapter(model_class, work / "base", work / "adapter", [f"{router}.weight", *EXPERTS], rank_pattern={f"{router}.weight": 2},
                           alpha_pattern={f"mlp.{router}": 7, f"mlp.{router}.weight": 5})
    run_ok("merge", work / "base", work / "adapter", work / "merged")
    require_same(load(model_class, work / "merged").state_dict(), adapted.merge_and_unload().state_dict())


def test_experts_without_a_gate(work):
    model_class = make_base("nemotron_h", work / "base")
    adapted = make_adapter(model_class, work / "base", work / "adapter", ["gate.weight", "experts.up_proj", "experts.down_proj"],
                           target_modules=["q_proj", "o_proj"])
    run_ok("merge", work / "base", work / "adapter", work / "merged")
    require_same(load(model_class, work / "merged").state_dict(), adapted.merge_and_unload().state_dict())


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_what_is_split_of_a_model_with_experts_is_what_peft_loads(name, work):
    """PEFT takes dense feed-forwards and shared experts of such models for routed ones, unless they are named as parameters."""
    model_class = make_base(name, work / "base")
    tensors = load_file(work / "base/model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for key, tensor in tensors.items():
        if tensor.ndim == 2 and not key.startswith(("model.embed", "lm_head")):
            left, right = (0.1 * torch.randn(shape, generator=generator) for shape in ((tensor.shape[0], 1), (1, tensor.shape[1])))
            tensors[key] = tensor + left @ right
    (work / "tuned").mkdir()
    (work / "tuned/config.json").write_bytes((work / "base/config.json").read_bytes())
    save_file(tensors, work / "tuned/model.safetensors", metadata={"format": "pt"})
    run_ok("split", work / "base", work / "tuned", work / "found", "--rank", "2")
    loaded = peft.PeftModel.from_pretrained(load(model_class, work / "base"), work / "found").merge_and_unload().state_dict()
    for key, tensor in load(model_class, work / "tuned").state_dict().items():
        torch.testing.assert_close(loaded[key], tensor, rtol=1e-5, atol=1e-5, msg=key)
    run_ok("split", work / "base", work / "tuned", work / "mb", "--rank", "2", "--to", "megatron", "--tp", "2")
    run_ok("merge", work / "base", work / "found", work / "merged")
    run_ok("merge", work / "base", work / "mb", work / "merged_mb")
    assert tree(work / "merged_mb") == tree(work / "merged")


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_merge_into_megatron_core_is_that_into_hugging_face(name, work):
    model_class = make_base(name, work / "base")
    make_adapter(model_class, work / "base", work / "adapter")
    run_ok("merge", work / "base", work / "adapter", work / "merged")
    run_ok("merge", work / "base", work / "adapter", work / "ep2", "--to", "megatron", "--tp", "2", "--ep", "2")
    run_ok("convert", work / "base", work / "base_ep2", "--ep", "2")
    run_ok("merge", work / "base_ep2", work / "adapter", work / "from_ep2", "--to", "hf", "--threads", "3")
    run_ok("verify", work / "merged", work / "ep2")
    assert tree(work / "from_ep2") == tree(work / "merged")


def test_factors_of_other_experts_are_named(work):
    model_class = make_base("qwen3_moe", work / "base")
    make_adapter(model_class, work / "base", work / "adapter")
    tensors = load_file(work / "adapter" / WEIGHTS)
    name = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, work / "adapter" / WEIGHTS, metadata={"format": "pt"})
    refuse("merge", work / "base", work / "adapter", work / "out", words=["model.layers.0.mlp.experts.down_proj", "not those of 4 experts"])
    save_file(tensors, work / "adapter" / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((work / "adapter/adapter_config.json").read_text())
    (work / "adapter/adapter_config.json").write_text(json.dumps({**config, "target_parameters": [*EXPERTS, "mlp.router.weight"]}))
    refuse("merge", work / "base", work / "adapter", work / "out", words=["target_parameters", "mlp.router.weight"])
    assert not (work / "out").exists()
