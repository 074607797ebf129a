"""Models without their head, as AutoModel saves them: the names of their tensors lack transformers' base_model_prefix, and a tied head is not there."""
import json

import pytest
import torch
import transformers

from support import DATA, digest_of, ferry_json, refuse, run_ok
from tiny_models import load_hf_sd


def base_of(model, folder):
    """-> the names in the files"""
    transformers.AutoModel.from_pretrained(DATA / f"hf_{model}/hf").save_pretrained(folder)
    return load_hf_sd(str(folder)).keys()


@pytest.mark.parametrize("model, name", [("qwen2_tied", "layers.0.mlp.up_proj.weight"), ("gemma3_text", "layers.1.mlp.up_proj.weight"), ("qwen3_vl", "visual.pos_embed.weight"),
                                         ("gemma4", "language_model.embed_tokens.weight"), ("gemma4_unified", "vision_embedder.pos_embedding")])
def test_a_base_model_is_read_as_the_whole_one(model, name, work):
    hf = DATA / f"hf_{model}/hf"
    assert name in base_of(model, work / "base")
    assert digest_of(work / "base") == digest_of(hf)
    run_ok("convert", work / "base", work / "megatron", "--tp", 2)
    run_ok("convert", work / "megatron", work / "back")
    run_ok("convert", work / "base", work / "named", "--to", "hf")
    whole = load_hf_sd(str(hf))
    for folder in (work / "back", work / "named"):
        found = load_hf_sd(str(folder))
        assert found.keys() == whole.keys() and all(torch.equal(found[key], whole[key]) for key in whole)
    want, found = (transformers.AutoModel.from_pretrained(folder).state_dict() for folder in (work / "base", work / "named"))
    assert all(torch.equal(found[key], want[key]) for key in want)


def test_files_of_pickle_and_other_comparisons_take_it(work):
    hf = DATA / "hf_qwen2_tied/hf"
    base_of("qwen2_tied", work / "base")
    (work / "pickle").mkdir()
    (work / "pickle/config.json").write_bytes((work / "base/config.json").read_bytes())
    torch.save(load_hf_sd(str(work / "base")), work / "pickle/pytorch_model.bin")
    assert digest_of(work / "pickle") == digest_of(work / "base")
    assert ferry_json("diff", work / "base", hf)["changed_tensors"] == 0
    run_ok("inspect", work / "base")


def test_an_untied_model_lacks_its_head(work):
    assert "lm_head.weight" not in base_of("qwen3", work / "base")
    for target in ("hf", "megatron"):
        refuse("convert", work / "base", work / "out", "--to", target, words=["lm_head.weight is missing", "AutoModel", "tie_word_embeddings"])
    config = json.loads((work / "base/config.json").read_text())
    (work / "base/config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    run_ok("convert", work / "base", work / "out", "--to", "hf")
