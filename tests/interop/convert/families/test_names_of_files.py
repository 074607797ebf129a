"""Tensors whose names or shapes the files decide, and config.json does not: experts in one tensor or apart, or the other way round, and keys that nothing
computes with. A Megatron checkpoint whose sidecar keeps no headers (another dtype, no prediction layers, a part) still tells them."""
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from support import DATA, iteration_folder, run_ok, tree
from tiny_models import load_hf_sd

MODELS = {"qwen3_5_moe": "model.layers.0.mlp.experts.gate_up_proj", "qwen3_5_moe_vl": "model.language_model.layers.0.mlp.experts.gate_up_proj",
          "qwen3_vl_moe": "model.language_model.layers.0.mlp.experts.gate_up_proj", "gemma4_e4b": "model.language_model.layers.3.self_attn.k_proj.weight"}


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def turned(tmp_path_factory):
    """Qwen3-VL with experts as transformers 5 saves it: the other way round than on the hub."""
    import transformers
    folder = tmp_path_factory.mktemp("turned") / "hf"
    transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(DATA / "hf_qwen3_vl_moe/hf").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model", [*MODELS, "turned"])
def test_another_dtype_keeps_them(model, turned, work):
    hf = turned if model == "turned" else DATA / f"hf_{model}/hf"
    assert model not in MODELS or MODELS[model] in load_hf_sd(str(hf))
    run_ok("convert", hf, work / "megatron", "--dtype", "fp32", "--tp", 2)
    run_ok("convert", work / "megatron", work / "relaid", "--to", "megatron")
    run_ok("convert", work / "relaid", work / "back")
    assert not list(iteration_folder(work / "relaid").glob("ferry/headers/*"))
    assert same(load_hf_sd(str(work / "back")), {name: tensor.float() for name, tensor in load_hf_sd(str(hf)).items()})


@pytest.mark.parametrize("options, left", [(["--mtp", "drop"], "mtp."), (["--exclude", "*embed_tokens*"], "model.embed_tokens.")])
def test_a_model_without_a_part_keeps_them(options, left, work):
    hf = DATA / "hf_qwen3_5_moe/hf"
    run_ok("convert", hf, work / "megatron", *options)
    run_ok("convert", work / "megatron", work / "back")
    wanted = {name: tensor for name, tensor in load_hf_sd(str(hf)).items() if not name.startswith(left)}
    assert same(load_hf_sd(str(work / "back")), wanted)


@pytest.mark.parametrize("model", [*MODELS, "turned"])
def test_an_archive_of_another_dtype_keeps_them(model, turned, work):
    hf = turned if model == "turned" else DATA / f"hf_{model}/hf"
    run_ok("convert", hf, work / "h5", "--to", "h5", "--dtype", "fp32")
    run_ok("convert", work / "h5", work / "megatron", "--to", "megatron")
    run_ok("convert", work / "megatron", work / "back")
    assert same(load_hf_sd(str(work / "back")), {name: tensor.float() for name, tensor in load_hf_sd(str(hf)).items()})


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """-> a function that makes a folder with what state_dict() of transformers' modules holds, under their names."""
    def make(model):
        from fsdp_worker import modules
        hf = tmp_path_factory.mktemp(model) / "hf"
        shutil.copytree(DATA / f"hf_{model}/hf", hf)
        if model == "gemma3":  # as on the hub, where its tower lies a module deeper
            named = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in load_hf_sd(str(hf)).items()}
            save_file(named, hf / "model.safetensors", metadata={"format": "pt"})
        folder = hf.with_name("modules")
        shutil.copytree(hf, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        return hf, folder, {name: tensor.detach().clone().contiguous() for name, tensor in modules(hf).state_dict().items()}
    return make


@pytest.mark.parametrize("model", ["qwen2_moe", "ernie4_5_moe", "gemma3", "mistral3", "qwen2_5_vl"])
def test_names_of_transformers_modules_are_read_and_come_back(model, state, work):
    hf, folder, tensors = state(model)
    assert tensors.keys() - load_hf_sd(str(hf)).keys()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run_ok("verify", folder, hf, "--weights-only")
    run_ok("convert", folder, work / "megatron", "--tp", 2)
    run_ok("convert", work / "megatron", work / "back")
    assert tree(work / "back") == tree(folder)


@pytest.mark.parametrize("model", ["qwen2_moe", "gemma3"])
def test_pytorch_model_bin_of_modules_becomes_files_of_the_hub(model, state, work):
    hf, folder, tensors = state(model)
    torch.save(tensors, folder / "pytorch_model.bin")
    run_ok("convert", folder, work / "out", "--to", "hf")
    assert same(load_hf_sd(str(work / "out")), load_hf_sd(str(hf)))


@pytest.mark.parametrize("said", [None, "in text_config"])
def test_ends_that_config_json_leaves_to_its_class_stay_two(said, work):
    """Mistral Small 3.1 says nothing of tied ends, and Ministral 3 in text_config alone; their class ties, and transformers unties what differs."""
    hf = work / "hf"
    shutil.copytree(DATA / "hf_mistral3/hf", hf)
    config = json.loads((hf / "config.json").read_text())
    for described in (config, config["text_config"]):
        described.pop("tie_word_embeddings", None)
    if said:
        config["text_config"]["tie_word_embeddings"] = False
    (hf / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    run_ok("convert", hf, work / "megatron", "--megatron-layout", "megatron-bridge")
    run_ok("convert", work / "megatron", work / "back")
    assert tree(work / "back") == tree(hf)
    shutil.rmtree(iteration_folder(work / "megatron") / "ferry")
    run_ok("convert", work / "megatron", work / "without", "--hf-config", hf)
    assert same(load_hf_sd(str(work / "without")), load_hf_sd(str(hf)))
    assert (work / "without/config.json").read_bytes() == (hf / "config.json").read_bytes()
    run_ok("convert", hf, work / "part", "--include", "*lm_head*", "--to", "hf")
    assert json.loads((work / "part/config.json").read_text())["tie_word_embeddings"] is False
    run_ok("digest", work / "part")
