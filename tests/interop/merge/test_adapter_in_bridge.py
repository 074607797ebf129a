"""Megatron-Bridge opens the adapters that Ferry writes for it: it makes LoRA modules by their run_config.yaml, loads every factor, and gives PEFT's logits."""
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from support import DATA, HERE, PEERS, ferry_json, llama_config, llama_shapes, random_tensors, refuse, run_ok, write_hf

peft = pytest.importorskip("peft", reason="PEFT makes the adapters that are converted")
from transformers import AutoModelForCausalLM  # noqa: E402

LLAMA = llama_config(hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=96)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IDS = [(37 * i + 11) % 90 for i in range(24)]
ADAPTERS = {  # base: tiny model; LoRA's settings
    "two_of_three": ("llama", dict(target_modules=["q_proj", "v_proj", "up_proj"])),
    "one_layer": ("llama", dict(target_modules=["q_proj", "down_proj"], layers_to_transform=[1])),
    "ranks": ("llama", dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], rank_pattern={"o_proj": 4, "k_proj": 3}, alpha_pattern={"o_proj": 8, "k_proj": 6})),
    "all_linear": ("qwen3_moe", dict(target_modules="all-linear")),
    "experts": ("qwen3_moe", dict(target_modules=["q_proj"], target_parameters=[*EXPERTS, "mlp.gate.weight"])),
    "experts_of_one_layer": ("qwen3_moe", dict(target_modules=["o_proj"], target_parameters=["layers.1.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"])),
    "experts_beside_dense": ("deepseek_v3", dict(target_modules=["o_proj"], target_parameters=EXPERTS)),
}


def base_of(kind, folder):
    """In fp32, as transformers has it: with the predictions of DeepSeek's files, which it leaves out."""
    if kind == "llama":
        write_hf(folder, {**LLAMA, "dtype": "float32"}, random_tensors(llama_shapes(LLAMA), dtype="F32"))
    else:
        run_ok("convert", DATA / f"hf_{kind}/hf", folder, "--to", "hf", "--dtype", "fp32")
    return folder


def with_adapter(base, settings):
    torch.manual_seed(5)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return model.eval()


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


def open_with_bridge(work, jobs):
    """-> {job: logits of Megatron-Bridge's model with the adapter and without}"""
    (work / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([sys.executable, HERE / "merge/load_adapter_with_bridge.py", work / "jobs.json", work / "report.json"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=600, env=dict(os.environ, PYTHONPATH=f"{PEERS}/mc0192:{PEERS}/mb062"))
    assert done.returncode == 0, done.stdout[-3000:]
    return {name: {key: torch.tensor(value) for key, value in one.items()} for name, one in json.loads((work / "report.json").read_text()).items()}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """-> the folder of the adapters, PEFT's logits, and what Megatron-Bridge makes of them"""
    work = tmp_path_factory.mktemp("opened")
    bases = {kind: base_of(kind, work / "bases" / kind) for kind in {kind for kind, _ in ADAPTERS.values()}}
    jobs, expected = {}, {}
    for name, (kind, settings) in ADAPTERS.items():
        model = with_adapter(bases[kind], dict(r=2, lora_alpha=4, **settings))
        model.save_pretrained(work / name / "peft")
        expected[name] = logits_of(model)
        run_ok("convert", work / name / "peft", work / name / "mb", "--base", bases[kind], "--to", "megatron")
        jobs[name] = {"hf": str(bases[kind]), "adapter": str(work / name / "mb/iter_0000000"), "factors": str(work / name / "factors")}
    # `ferry split` of all that "experts" changes, routers and keys without a change among it.
    model = with_adapter(bases["qwen3_moe"], dict(r=2, lora_alpha=4, **ADAPTERS["experts"][1]))
    model.merge_and_unload().save_pretrained(work / "split/tuned")
    run_ok("split", bases["qwen3_moe"], work / "split/tuned", work / "split/mb", "--rank", "2", "--to", "megatron")
    expected["split"] = expected["experts"]
    jobs["split"] = {"hf": str(bases["qwen3_moe"]), "adapter": str(work / "split/mb/iter_0000000"), "factors": str(work / "split/factors")}
    return work, expected, open_with_bridge(work, jobs)


@pytest.mark.parametrize("name", [*ADAPTERS, "split"])
def test_megatron_bridge_gives_pefts_logits(name, opened):
    _, expected, found = opened
    largest = expected[name].abs().max()
    assert (found[name]["logits"] - expected[name]).abs().max() < 1e-4 * largest
    assert (found[name]["without"] - expected[name]).abs().max() > 1e-2 * largest


def products(factors):
    """{module: B A}"""
    return {name.removesuffix(".lora_A.weight"): factors[name.replace("lora_A", "lora_B")] @ a for name, a in factors.items() if name.endswith(".lora_A.weight")}


@pytest.mark.parametrize("name", ["two_of_three", "one_layer", "ranks"])
def test_what_is_added_are_zeros(name, opened):
    """Each module that PEFT has keeps its product to the bit, others have none."""
    work, *_ = opened
    want = products(load_file(work / name / "peft/adapter_model.safetensors"))
    found = {f"base_model.model.{module}": product for module, product in products(load_file(work / name / "factors")).items()}
    assert want.keys() < found.keys() or name == "ranks"
    assert all(torch.equal(product, want.get(module, torch.zeros_like(product))) for module, product in found.items())


def test_gate_and_up_in_one_tensor_beside_query_key_and_value_apart_are_refused(work):
    base = base_of("glm4", work / "base")
    with_adapter(base, dict(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj", "v_proj", "gate_up_proj"])).save_pretrained(work / "peft")
    refuse("convert", work / "peft", work / "mb", "--base", base, "--to", "megatron", words=["mlp.linear_fc1.weight", "one first factor", "CanonicalLoRA"])
    assert not (work / "mb").exists()
    with_adapter(base, dict(r=2, lora_alpha=4, target_modules=["o_proj", "gate_up_proj"])).save_pretrained(work / "fused")
    assert not ferry_json("convert", work / "fused", work / "mb", "--base", base, "--to", "megatron")["canonical"]
