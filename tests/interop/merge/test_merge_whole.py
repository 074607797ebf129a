"""Modules that were trained whole (modules_to_save) and rows of an embedding (trainable_token_indices), merged by `ferry merge` and by PEFT."""
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import DATA, ferry_json, refuse, run_ok, tree

peft = pytest.importorskip("peft", reason="PEFT merges the adapters that are compared")
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification  # noqa: E402

IDS = torch.arange(24).reshape(1, 24) * 7 % 250


def train(base, folder, auto=AutoModelForCausalLM, dtype=torch.bfloat16, **settings):
    """Saves an adapter with random changes of everything that is trained. -> the model with the adapter"""
    torch.manual_seed(5)
    model = auto.from_pretrained(base, dtype=dtype)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **settings}))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return adapted


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.double()


def same_as_peft(base, work, auto=AutoModelForCausalLM, **settings):
    """-> names of the tensors that were trained whole; those are PEFT's bit for bit, the others are those of the base but for q_proj"""
    adapted = train(base, work / "adapter", auto, **settings)
    report = ferry_json("merge", base, work / "adapter", work / "merged")
    want, found = adapted.merge_and_unload().state_dict(), auto.from_pretrained(work / "merged", dtype=torch.bfloat16).state_dict()
    before = auto.from_pretrained(base, dtype=torch.bfloat16).state_dict()
    assert want.keys() == found.keys()
    assert all(torch.equal(found[name], want[name]) for name in want if "q_proj" not in name)
    changed = {name for name in want if not torch.equal(found[name], before[name])}
    assert report["adapter"]["changed"] <= report["adapter"]["elements"]
    return {name for name in changed if "q_proj" not in name}


@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens", "lm_head"], ["input_layernorm", "norm"]])
def test_modules_that_were_trained_whole(work, modules):
    base = DATA / "hf_llama/hf"
    changed = same_as_peft(base, work, modules_to_save=modules)
    assert all(any(f"{module}.weight" in name for name in changed) for module in modules)
    run_ok("convert", base, work / "tp2", "--tp", "2")
    run_ok("merge", work / "tp2", work / "adapter", work / "from_tp2", "--to", "hf")
    assert tree(work / "from_tp2") == tree(work / "merged")


def test_the_score_of_a_reward_model(work):
    model = AutoModelForSequenceClassification.from_pretrained(DATA / "hf_qwen2_tied/hf", num_labels=3, dtype=torch.bfloat16)
    model.config.pad_token_id = 0
    model.save_pretrained(work / "base")
    assert same_as_peft(work / "base", work, AutoModelForSequenceClassification, task_type="SEQ_CLS") == {"score.weight"}
    refuse("merge", DATA / "hf_qwen2_tied/hf", work / "adapter", work / "out", words=["score.weight", "no such tensor", "AutoModelForSequenceClassification"])


def test_ends_of_a_tied_embedding_that_were_trained_whole(work):
    base = DATA / "hf_qwen2_tied/hf"
    for modules in (["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]):
        train(base, work / "adapter", modules_to_save=modules)
        refuse("merge", base, work / "adapter", work / "out", words=["for both ends" if len(modules) == 2 else "tie_word_embeddings"])
        assert not (work / "out").exists()
    trained = train(base, work / "one", modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    run_ok("merge", base, work / "one", work / "merged")
    found = AutoModelForCausalLM.from_pretrained(work / "merged", dtype=torch.bfloat16)
    assert torch.equal(found.get_input_embeddings().weight, trained.merge_and_unload().get_input_embeddings().weight)


@pytest.mark.parametrize("model, indices", [("llama", [3, 4, 249, 17]), ("qwen2_tied", [0, 7]), ("llama", {"lm_head": [5, 6]}),
                                            ("qwen2_tied", {"embed_tokens": [9], "lm_head": [9]})])
def test_tokens_that_were_trained(work, model, indices):
    base = DATA / f"hf_{model}/hf"
    changed = same_as_peft(base, work, trainable_token_indices=indices)
    ends = {"lm_head.weight", "model.embed_tokens.weight"}
    assert changed == (ends if model == "qwen2_tied" else {"lm_head.weight"} if isinstance(indices, dict) else {"model.embed_tokens.weight"})


def test_tokens_that_are_not_merged_are_named(work):
    base = DATA / "hf_qwen2_tied/hf"
    train(base, work / "head", trainable_token_indices={"lm_head": [9]})
    refuse("merge", base, work / "head", work / "out", words=["lm_head", "tie_word_embeddings"])
    train(base, work / "adapter", trainable_token_indices=[1, 2])
    refuse("convert", work / "adapter", work / "out", "--base", base, "--to", "verl", words=["trainable_token_indices"])
    config = json.loads((work / "adapter/adapter_config.json").read_text())
    for tokens, words in (([1], ["[2, 32]", "[1, 32]"]), ([1, 250], ["250", "rows"]), ("embed", ["no list of tokens"])):
        (work / "adapter/adapter_config.json").write_text(json.dumps({**config, "trainable_token_indices": tokens}))
        refuse("merge", base, work / "adapter", work / "out", words=words)
    tensors = load_file(work / "head/adapter_model.safetensors")
    save_file({**tensors, "base_model.model.lm_head.bias": torch.ones(250)}, work / "head/adapter_model.safetensors", metadata={"format": "pt"})
    refuse("merge", base, work / "head", work / "out", words=["lm_head.bias", "no factor of LoRA"])
