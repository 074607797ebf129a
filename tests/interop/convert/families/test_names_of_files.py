"""Tensors whose names or shapes the files decide, and config.json does not: experts in one tensor or apart, or the other way round, and keys that nothing
computes with. A Megatron checkpoint whose sidecar keeps no headers (another dtype, no prediction layers, a part) still tells them."""
import pytest
import torch

from support import DATA, iteration_folder, run_ok
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
