"""Adapters converted between PEFT, verl and Megatron-Bridge's checkpoints: PEFT loads what is written, with the logits of what was read."""
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import DATA, HERE, PEERS, ferry_json, llama_config, llama_shapes, random_tensors, refuse, run_ok, tree, write_hf
from tiny_models import hf_configs

peft = pytest.importorskip("peft", reason="PEFT makes and loads the adapters that are converted")
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM  # noqa: E402

CONFIG = llama_config(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=300)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
WEIGHTS = "adapter_model.safetensors"


def randomize(adapted, folder, seed=5):
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
            elif "lora_" in name or "modules_to_save" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)


def make_adapter(base, folder, **settings):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    randomize(peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings)), folder)


def share_first_factors(folder):
    """One first factor for query, key and value, and for gate and up, as Megatron-Bridge's LoRA has it."""
    tensors = load_file(folder / WEIGHTS)
    for name in list(tensors):
        for one, first in (("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj")):
            if name.endswith(f"{one}.lora_A.weight"):
                tensors[name] = tensors[name.replace(one, first)].clone()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def logits(base, adapter=None):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter:
        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(torch.arange(24).reshape(1, 24) * 7 % 250).logits


def stored(root):
    """{key: shape} of a Megatron checkpoint, as megatron-core reads it, one for each layer and expert"""
    done = subprocess.run([sys.executable, HERE / "read_with_mcore.py", PEERS / "mc0192", root], stdout=subprocess.PIPE, text=True, check=True,
                          env=dict(os.environ, GLOO_SOCKET_IFNAME="lo"))
    return {key: shape for key, (_, shape, _) in json.loads(done.stdout.splitlines()[-1])[str(root)].items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "hf"
    write_hf(folder, {**CONFIG, "dtype": "float32"}, random_tensors(llama_shapes(CONFIG), dtype="F32"))
    return folder


@pytest.mark.parametrize("layout", [(), ("--tp", "2"), ("--tp", "2", "--pp", "2")])
@pytest.mark.parametrize("kind", ["canonical", "fused"])
def test_an_adapter_comes_back_from_megatron_bridge(base, work, kind, layout):
    make_adapter(base, work / "peft", r=4, lora_alpha=6, target_modules=ALL)
    if kind == "fused":
        share_first_factors(work / "peft")
    report = ferry_json("convert", work / "peft", work / "mb", "--base", base, "--to", "megatron", *layout)
    assert report["canonical"] == (kind == "canonical") and report["proved"]
    run_ok("convert", work / "mb", work / "back", "--base", base, "--to", "peft")
    assert (work / "back" / WEIGHTS).read_bytes() == (work / "peft" / WEIGHTS).read_bytes()
    found, want = logits(base, work / "back"), logits(base, work / "peft")
    assert torch.equal(found, want) and (want - logits(base)).abs().max() > 0.01


def test_modules_that_hold_query_key_and_value_or_gate_and_up_are_one_adapter(work):
    AutoModelForCausalLM.from_pretrained(DATA / "hf_phi3/hf", dtype=torch.float32).save_pretrained(work / "base")
    make_adapter(work / "base", work / "peft", r=4, lora_alpha=6, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])
    run_ok("convert", work / "peft", work / "mb", "--base", work / "base", "--to", "megatron", "--tp", "2")
    run_ok("convert", work / "mb", work / "back", "--base", work / "base", "--to", "peft")
    assert (work / "back" / WEIGHTS).read_bytes() == (work / "peft" / WEIGHTS).read_bytes()
    run_ok("merge", work / "base", work / "peft", work / "merged")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(work / "base", dtype=torch.float32), work / "peft")
    merged = load_file(work / "merged/model.safetensors")
    for name, tensor in model.merge_and_unload().state_dict().items():
        assert torch.allclose(merged[name], tensor, atol=1e-6), name


def test_modules_of_some_layers_are_named_whole(base, work):
    make_adapter(base, work / "peft", r=4, lora_alpha=4, target_modules=["q_proj", "down_proj"], layers_to_transform=[1], use_rslora=True)
    run_ok("convert", work / "peft", work / "vllm", "--base", base, "--to", "vllm")
    config = json.loads((work / "vllm/adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj"]
    run_ok("convert", work / "peft", work / "mb", "--base", base, "--to", "megatron", "--pp", "2")  # with zeros for the others
    run_ok("convert", work / "mb", work / "back", "--base", base, "--to", "peft")
    assert len(load_file(work / "back" / WEIGHTS)) == 2 * 2 * 4 and len(load_file(work / "vllm" / WEIGHTS)) == 2 * 2
    for one in ("vllm", "back"):
        assert torch.equal(logits(base, work / one), logits(base, work / "peft"))


def test_fused_experts_are_grouped_experts(work):
    config = hf_configs()["qwen3_moe"]()
    torch.manual_seed(1)
    Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(work / "base")
    make_adapter(work / "base", work / "peft", r=2, lora_alpha=4, target_modules=["o_proj"],
                 target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    run_ok("convert", work / "peft", work / "mb", "--base", work / "base", "--to", "megatron", "--ep", "2")
    run_ok("convert", work / "mb", work / "back", "--base", work / "base", "--to", "peft")
    assert (work / "back" / WEIGHTS).read_bytes() == (work / "peft" / WEIGHTS).read_bytes()
    found, want = logits(work / "base", work / "back"), logits(work / "base", work / "peft")
    assert torch.equal(found, want) and (want - logits(work / "base")).abs().max() > 0.001


def test_factors_of_an_output_layer_that_is_the_embedding_go_along(work):
    config = {**CONFIG, "tie_word_embeddings": True, "dtype": "float32"}
    shapes = llama_shapes(config)
    shapes.pop("lm_head.weight", None)
    write_hf(work / "base", config, random_tensors(shapes, dtype="F32"))
    make_adapter(work / "base", work / "peft", r=4, lora_alpha=6, target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True)
    assert any(".lm_head.lora_A" in name for name in load_file(work / "peft" / WEIGHTS))
    run_ok("convert", work / "peft", work / "verl", "--base", work / "base", "--to", "verl")
    run_ok("convert", work / "verl", work / "back", "--base", work / "base", "--to", "peft")
    found, want = load_file(work / "back" / WEIGHTS), load_file(work / "peft" / WEIGHTS)
    assert set(found) == set(want) and all(torch.equal(found[name], tensor) for name, tensor in want.items())
    assert torch.equal(logits(work / "base", work / "back"), logits(work / "base", work / "peft"))
    for to in ("megatron", "vllm"):
        refuse("convert", work / "peft", work / to, "--base", work / "base", "--to", to, words=["lm_head", "is no factor of a linear layer"])


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def packed_by_vllm(tensors, config, layer):
    """The stacks that vLLM makes of a layer's experts: lora_model.py and utils.py take the names apart, pack_moe in lora_weights.py stacks the parts
    [w1, w2, w3] as `[experts, rank, in]` and `[experts, out, rank]`, and multiplies by alpha / r whatever use_rslora says."""
    experts = range(1 + max(int(name.split(".experts.")[1].split(".")[0]) for name in tensors if ".experts." in name))
    prefix = f"base_model.model.model.layers.{layer}.mlp.experts"
    stack = {which: [torch.stack([tensors[f"{prefix}.{expert}.{part}.lora_{which}.weight"] for expert in experts])
                     for part in ("gate_proj", "down_proj", "up_proj")] for which in "AB"}
    return stack["A"], [b * (config["lora_alpha"] / config["r"]) for b in stack["B"]]


def test_vllm_and_sglang_get_the_factors_of_each_expert(work):
    config = hf_configs()["qwen3_moe"]()
    torch.manual_seed(1)
    Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(work / "base")
    make_adapter(work / "base", work / "peft", r=2, lora_alpha=4, use_rslora=True, target_modules=ATTENTION, target_parameters=EXPERTS)
    report = ferry_json("convert", work / "peft", work / "vllm", "--base", work / "base", "--to", "vllm")
    assert report["target_form"] == "vLLM, SGLang"
    run_ok("convert", work / "peft", work / "sglang", "--base", work / "base", "--to", "sglang")
    assert tree(work / "vllm") == tree(work / "sglang")
    fused, apart = load_file(work / "peft" / WEIGHTS), load_file(work / "vllm" / WEIGHTS)
    settings = json.loads((work / "vllm/adapter_config.json").read_text())
    assert settings["target_modules"] == sorted(ALL) and not settings["use_rslora"]
    assert not settings["rank_pattern"] and not settings["alpha_pattern"] and "target_parameters" not in settings
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(work / "base", dtype=torch.float32), work / "peft")
    for number, layer in enumerate(loaded.base_model.model.model.layers):
        a, b = packed_by_vllm(apart, settings, number)
        outer = layer.mlp.experts
        for wrapper, parts in ((outer, [1]), (outer.base_layer, [0, 2])):
            want = wrapper.get_delta_weight("default")  # [experts, out, in]
            found = torch.cat([b[part] @ a[part] for part in parts], dim=1)
            assert torch.allclose(found, want, rtol=1e-5, atol=1e-7)
    assert sum(tensor.numel() for name, tensor in apart.items() if ".experts." not in name) == \
        sum(tensor.numel() for name, tensor in fused.items() if ".experts." not in name)
    want = logits(work / "base", work / "peft")
    assert torch.equal(logits(work / "base", work / "vllm"), want)  # PEFT puts the experts together itself
    assert (want - logits(work / "base")).abs().max() > 0.001
    # The way back, to every form, and the weights that it gives.
    run_ok("convert", work / "vllm", work / "back", "--base", work / "base", "--to", "peft")
    assert (work / "back" / WEIGHTS).read_bytes() == (work / "peft" / WEIGHTS).read_bytes()
    assert torch.equal(logits(work / "base", work / "back"), want)
    for name in ("peft", "vllm"):
        run_ok("convert", work / name, work / f"mb_{name}", "--base", work / "base", "--to", "megatron", "--tp", "2", "--ep", "2")
        run_ok("merge", work / "base", work / name, work / f"merged_{name}")
    assert tree(work / "merged_peft") == tree(work / "merged_vllm")
    for name, form in (("mb_vllm", "peft"), ("mb_peft", "vllm")):
        run_ok("convert", work / name, work / f"{form}_again", "--base", work / "base", "--to", form)
        assert tree(work / f"{form}_again")[WEIGHTS] == tree(work / form)[WEIGHTS]


def test_what_vllm_would_not_apply_is_named(work):
    config = hf_configs()["qwen3_moe"]()
    torch.manual_seed(1)
    Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(work / "base")

    def refuse_to(form, name, *words):
        refuse("convert", work / name, work / "out", "--base", work / "base", "--to", form, words=words)
    for name, words, settings in (
            ("half", ["vLLM takes gate, up and down"], dict(target_modules=["o_proj"], target_parameters=EXPERTS[1:])),
            ("ranks", ["one rank and one alpha"], dict(target_modules=["q_proj", "o_proj"], rank_pattern={"o_proj": 4})),
            ("dora", ["no factor of a linear layer"], dict(target_modules=["o_proj"], use_dora=True)),
            ("whole", ["no factor of a linear layer"], dict(target_modules=["o_proj"], modules_to_save=["lm_head"]))):
        make_adapter(work / "base", work / name, r=2, lora_alpha=4, **settings)
        refuse_to("vllm", name, *words)
    make_adapter(work / "base", work / "peft", r=2, lora_alpha=4, target_modules=["o_proj"], target_parameters=EXPERTS)
    run_ok("convert", work / "peft", work / "vllm", "--base", work / "base", "--to", "vllm")
    whole = load_file(work / "vllm" / WEIGHTS)
    one = "base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_A.weight"
    for change, words in ((lambda tensors: {**tensors, one: tensors[one] + 1}, ["first factors of their own", "experts.3.gate_proj"]),
                          (lambda tensors: {**tensors, one: tensors[one][:1].contiguous()}, ["experts.3", "rank"]),
                          (lambda tensors: {name: tensor for name, tensor in tensors.items() if "1.mlp.experts.3.up_proj" not in name},
                           ["experts.3.up_proj", "is not adapted"]),
                          (lambda tensors: {name: tensor for name, tensor in tensors.items() if "1.mlp.experts.3." not in name},
                           ["experts.3", "is not adapted"])):
        save_file(change(whole), work / "vllm" / WEIGHTS, metadata={"format": "pt"})
        refuse_to("peft", "vllm", *words)
    refuse("convert", work / "base", work / "out", "--to", "vllm", words=["--to vllm is for adapters"])


def test_verl_has_the_folder_of_peft(base, work):
    make_adapter(base, work / "peft", r=4, lora_alpha=8, target_modules=ATTENTION)
    run_ok("convert", work / "peft", work / "verl", "--base", base, "--to", "verl")
    assert tree(work / "verl/lora_adapter") == {name: data for name, data in tree(work / "peft").items() if name.startswith("adapter_")}
    assert json.loads((work / "verl/lora_train_meta.json").read_text()) == {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
    run_ok("convert", work / "verl", work / "back", "--base", base, "--to", "peft")
    assert tree(work / "back") == tree(work / "verl/lora_adapter")


KEPT = {"dora": dict(target_modules=ALL, use_dora=True), "embedding": dict(target_modules=["q_proj", "embed_tokens"]),
        "embedding_alone": dict(target_modules=["embed_tokens"]),
        "whole": dict(target_modules=["q_proj"], modules_to_save=["lm_head", "input_layernorm"])}


@pytest.mark.parametrize("kind", KEPT)
def test_other_tensors_go_along_between_peft_and_verl(base, work, kind):
    make_adapter(base, work / "peft", r=4, lora_alpha=8, **KEPT[kind])
    run_ok("convert", work / "peft", work / "verl", "--base", base, "--to", "verl")
    run_ok("convert", work / "verl", work / "back", "--base", base, "--to", "peft")
    assert load_file(work / "back" / WEIGHTS).keys() == load_file(work / "peft" / WEIGHTS).keys()
    assert (work / "back/adapter_config.json").read_bytes() == (work / "peft/adapter_config.json").read_bytes()
    found, want = logits(base, work / "back"), logits(base, work / "peft")
    assert torch.equal(found, want) and (want - logits(base)).abs().max() > 0.01


def test_tensors_that_do_not_fit_the_base_are_named(base, work):
    make_adapter(base, work / "peft", r=4, lora_alpha=8, target_modules=["q_proj"], modules_to_save=["lm_head"])
    tensors = load_file(work / "peft" / WEIGHTS)
    name = "base_model.model.lm_head.weight"
    for other, words in (({name: tensors[name][:-1].contiguous()}, [name, "[299, 64]", "[300, 64]"]),
                         ({"base_model.model.head.weight": tensors[name]}, ["head.weight", "no such tensor"])):
        save_file({**{key: value for key, value in tensors.items() if key != name}, **other}, work / "peft" / WEIGHTS, metadata={"format": "pt"})
        refuse("convert", work / "peft", work / "out", "--base", base, "--to", "verl", words=words)


@pytest.mark.parametrize("alpha", ["1e300", "1e-300", "-4", "0", "nan", "inf"])
def test_an_alpha_that_is_no_number_to_multiply_by_is_named(base, work, alpha):
    make_adapter(base, work / "peft", r=4, lora_alpha=8, target_modules=["q_proj"])
    run_ok("convert", work / "peft", work / "mb", "--base", base, "--to", "megatron")
    refuse("convert", work / "mb", work / "out", "--base", base, "--to", "peft", f"--lora-alpha={alpha}", words=["alpha of"])
    record = work / "mb/iter_0000000/run_config.yaml"
    record.write_text(record.read_text().replace("alpha: 8", f"alpha: {alpha}"))
    refuse("convert", work / "mb", work / "out", "--base", base, "--to", "peft", words=["alpha"])
    config = work / "peft/adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', f'"lora_alpha": {alpha.replace("nan", "NaN").replace("inf", "Infinity")}'))
    refuse("convert", work / "peft", work / "out", "--base", base, "--to", "verl", words=["adapter_config.json"])
    refuse("merge", base, work / "peft", work / "out", words=["adapter_config.json"])


def test_names_of_ms_swift_become_those_of_peft(base, work):
    make_adapter(base, work / "peft", r=4, lora_alpha=8, target_modules=ATTENTION)
    tensors = load_file(work / "peft" / WEIGHTS)
    (work / "swift").mkdir()
    save_file({name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}, work / "swift" / WEIGHTS)
    (work / "swift/adapter_config.json").write_bytes((work / "peft/adapter_config.json").read_bytes())
    run_ok("convert", work / "swift", work / "out", "--base", base, "--to", "peft")
    assert (work / "out" / WEIGHTS).read_bytes() == (work / "peft" / WEIGHTS).read_bytes()


def test_what_cannot_be_converted_is_named(base, work):
    make_adapter(base, work / "ranks", r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], rank_pattern={"o_proj": 2})
    refuse("convert", work / "ranks", work / "out", "--base", base, "--to", "megatron", words=["rank 2", "one rank and one alpha"])
    refuse("convert", work / "ranks", work / "out", "--base", base, words=["--to is missing"])
    refuse("convert", work / "ranks", work / "out", "--base", base, "--to", "verl", "--etp", "2", "--pp", "2", words=["--pp, --etp: has no effect"])
    refuse("convert", work / "ranks", work / "out", "--to", "peft", words=["--base"])
    refuse("convert", base, work / "out", "--base", base, "--to", "peft", words=["Hugging Face", "torch_dist"])
    for kind, settings in KEPT.items():
        make_adapter(base, work / kind, r=4, lora_alpha=8, **settings)
        refuse("convert", work / kind, work / "out", "--base", base, "--to", "megatron", words=["no factor of a linear layer", "Megatron-Bridge"])
    make_adapter(base, work / "adapter", r=4, lora_alpha=8, target_modules=["q_proj"])
    run_ok("convert", work / "adapter", work / "mb", "--base", base, "--to", "megatron")
    (work / "mb/iter_0000000/run_config.yaml").unlink()
    refuse("convert", work / "mb", work / "out", "--base", base, "--to", "peft", words=["run_config.yaml", "--lora-alpha"])
    run_ok("convert", work / "mb", work / "out", "--base", base, "--to", "peft", "--lora-alpha", "8")
    assert torch.equal(logits(base, work / "out"), logits(base, work / "adapter"))


def test_megatron_core_reads_the_keys_and_shapes_of_megatron_bridge(base, work):
    make_adapter(base, work / "peft", r=4, lora_alpha=8, target_modules=ALL)
    share_first_factors(work / "peft")
    run_ok("convert", work / "peft", work / "mb", "--base", base, "--to", "megatron", "--tp", "2")
    layer = {"self_attention.linear_qkv": (64, 128), "self_attention.linear_proj": (64, 64), "mlp.linear_fc1": (64, 352), "mlp.linear_fc2": (176, 64)}
    assert stored(work / "mb/iter_0000000") == {
        f"decoder.layers.{number}.{module}.adapter.{factor}.weight": shape for number in range(2) for module, (columns, rows) in layer.items()
        for factor, shape in (("linear_in", [4, columns]), ("linear_out", [rows, 4]))}
