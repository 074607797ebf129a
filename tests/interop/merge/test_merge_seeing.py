"""Adapters of models that also see: PEFT names their modules as transformers does, and files otherwise."""
import pytest
import torch
from safetensors.torch import load_file, save_file

from support import refuse, run_ok, tree
from tiny_models import make_wrapped, wrapped_configs

peft = pytest.importorskip("peft", reason="PEFT makes, merges and loads the adapters that are compared")
import transformers as T  # noqa: E402

WEIGHTS = "adapter_model.safetensors"
# Beginnings of names of modules, and the beginnings that files have for them.
FILES = {
    "gemma3": {"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower."},
    "mistral3": {"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower.",
                 "model.multi_modal_projector.": "multi_modal_projector."},
    "qwen2_5_vl": {"model.language_model.": "model.", "model.visual.": "visual."},
    "qwen3_vl": {},
    "gemma4_unified": {"model.embed_vision.patch_": "model.vision_embedder.patch_",
                       "model.embed_vision.multimodal_embedder.embedding_projection": "model.embed_vision.embedding_projection"},
}


def load(name, folder, adapter=None):
    model_class = getattr(T, wrapped_configs()[name]().__class__.__name__.replace("Config", "ForConditionalGeneration"))
    model = model_class.from_pretrained(folder, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, adapter) if adapter else model


def merged_by_peft(name, folder, adapter):
    return load(name, folder, adapter).merge_and_unload().state_dict()


def make_base(name, folder):
    make_wrapped(name, str(folder))
    weights = {key: tensor.float() for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def make_adapter(name, base, folder, modules="all-linear"):
    torch.manual_seed(5)
    adapted = peft.get_peft_model(load(name, base), peft.LoraConfig(r=4, lora_alpha=6, target_modules=modules))
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)


def require_close(found, want, tolerance=2e-6):
    assert found.keys() == want.keys()
    for key, tensor in want.items():
        torch.testing.assert_close(found[key], tensor, rtol=tolerance, atol=tolerance / 10, msg=key)


@pytest.mark.parametrize("name", FILES)
def test_a_tower_is_merged_and_converted_with_the_language_model(name, work):
    make_base(name, work / "base")
    make_adapter(name, work / "base", work / "adapter")
    want = merged_by_peft(name, work / "base", work / "adapter")
    before = load(name, work / "base").state_dict()
    changed = {key for key, tensor in want.items() if not torch.equal(tensor, before[key])}
    assert any(".language_model." in key for key in changed) and any(".language_model." not in key for key in changed)
    run_ok("merge", work / "base", work / "adapter", work / "merged")
    require_close(load(name, work / "merged").state_dict(), want)
    # Names of older releases, which were those of files.
    tensors, beginning = load_file(work / "adapter" / WEIGHTS), "base_model.model."
    for module, file in FILES[name].items():
        tensors = {key.replace(beginning + module, beginning + file): tensor for key, tensor in tensors.items()}
    (work / "older").mkdir()
    save_file(tensors, work / "older" / WEIGHTS, metadata={"format": "pt"})
    (work / "older/adapter_config.json").write_bytes((work / "adapter/adapter_config.json").read_bytes())
    run_ok("merge", work / "base", work / "older", work / "merged_older")
    assert tree(work / "merged_older") == tree(work / "merged")
    for source in ("adapter", "older"):
        run_ok("convert", work / source, work / f"{source}_peft", "--base", work / "base", "--to", "peft")
        found = merged_by_peft(name, work / "base", work / f"{source}_peft")
        assert all(torch.equal(found[key], tensor) for key, tensor in want.items())
    refuse("convert", work / "adapter", work / "mb", "--base", work / "base", "--to", "megatron", words=["no factor of a linear layer of the language"])
    refuse("convert", work / "adapter", work / "vllm", "--base", work / "base", "--to", "vllm", words=["of a vision tower"])


@pytest.mark.parametrize("name", FILES)
def test_peft_loads_what_is_split_and_what_comes_back(name, work):
    make_base(name, work / "base")
    make_adapter(name, work / "base", work / "adapter", r".*language_model.*\.(q_proj|k_proj|v_proj|gate_proj|up_proj|down_proj)")
    want = merged_by_peft(name, work / "base", work / "adapter")
    run_ok("merge", work / "base", work / "adapter", work / "tuned")
    run_ok("split", work / "base", work / "tuned", work / "found", "--rank", "4")
    require_close(merged_by_peft(name, work / "base", work / "found"), want, tolerance=1e-4)
    run_ok("convert", work / "adapter", work / "mb", "--base", work / "base", "--to", "megatron", "--tp", "2")
    run_ok("convert", work / "mb", work / "back", "--base", work / "base", "--to", "peft")
    assert load_file(work / "back" / WEIGHTS).keys() == load_file(work / "adapter" / WEIGHTS).keys()
    found = merged_by_peft(name, work / "base", work / "back")
    assert all(torch.equal(found[key], tensor) for key, tensor in want.items())
