"""Sources that lack what their configuration names: prediction layers by the policy of --mtp, and exports that others made, audited by verify."""
import argparse
import json
import shutil

import pytest
import torch

import torch_dist_raw as raw
from support import DATA, ferry_json, hf_tensors, iteration_folder, refuse, refuse_to_convert, run_ok, safetensors_bytes, tree, write_hf

MODELS = {"hf_glm4_moe_lite": 2, "hf_deepseek_v3": 3, "hf_bailing_moe_v2": 2}  # and the Hugging Face layer of prediction


def of_prediction(name, model):
    return name.startswith(f"model.layers.{MODELS[model]}.")


def without(tensors, gone):
    return {name: tensor for name, tensor in tensors.items() if not gone(name)}


def save(tensors, source, to):
    """The same folder with other tensors."""
    shutil.copytree(source, to)
    (to / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return to


@pytest.fixture(params=MODELS)
def model(request):
    return request.param


def test_keep_converts_what_is_there(model, work):
    """transformers saves so: config.json names a prediction layer, and no tensor is of one."""
    hf = DATA / model / "hf"
    saved = save(without(hf_tensors(hf), lambda name: of_prediction(name, model)), hf, work / "saved")
    run_ok("convert", saved, work / "megatron")
    run_ok("convert", work / "megatron", work / "back")
    assert tree(work / "back") == tree(saved)


def test_error_refuses_a_source_without_them(model, work):
    hf = DATA / model / "hf"
    saved = save(without(hf_tensors(hf), lambda name: of_prediction(name, model)), hf, work / "saved")
    refuse_to_convert(work, saved, "names 1 prediction layer", "num_nextn_predict_layers", "--mtp drop", options=["--mtp", "error"])
    run_ok("convert", saved, work / "megatron")
    refuse_to_convert(work, work / "megatron", "names 1 prediction layer", options=["--mtp", "error"])
    run_ok("convert", hf, work / "whole", "--mtp", "error")


def dropped(hf, model):
    """-> tensors and configuration that are left"""
    config = json.loads((hf / "config.json").read_text())
    return without(hf_tensors(hf), lambda name: of_prediction(name, model)), {**config, "num_nextn_predict_layers": 0}


@pytest.mark.parametrize("first", ["--to=megatron", "--to=hf", "--to=h5"])
def test_drop_leaves_them_out_of_tensors_and_configuration(model, first, work):
    hf = DATA / model / "hf"
    run_ok("convert", hf, work / "less", first, "--mtp", "drop")
    run_ok("convert", work / "less", work / "back", "--to", "hf")
    assert (hf_tensors(work / "back"), json.loads((work / "back/config.json").read_text())) == dropped(hf, model)


def test_drop_takes_them_out_of_a_megatron_checkpoint(model, work):
    hf = DATA / model / "hf"
    run_ok("convert", hf, work / "megatron", "--ep", 2)
    for to in ("megatron", "hf"):
        run_ok("convert", work / "megatron", work / to / "less", "--to", to, "--mtp", "drop")
    checkpoint = raw.Checkpoint(str(iteration_folder(work / "megatron/less")))
    assert not [key for key in [*checkpoint.tensors, *checkpoint.objects] if "mtp." in key]
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert torch.load(iteration_folder(work / "megatron/less") / "common.pt", weights_only=True)["args"].mtp_num_layers is None
    run_ok("convert", work / "megatron/less", work / "back")
    for folder in (work / "back", work / "hf/less"):
        assert (hf_tensors(folder), json.loads((folder / "config.json").read_text())) == dropped(hf, model)


def test_drop_without_anything_to_drop_is_an_error(work):
    refuse_to_convert(work, DATA / "hf_llama/hf", "--mtp drop: has no effect", options=["--mtp", "drop"])


# ------------------------------------------------------------------------------------------------ audits


def missing(*arguments):
    """-> the tensors that verify, which says no, finds on one side only"""
    report = ferry_json("verify", *arguments, code=1)
    assert all(tensor["kind"] in ("only_left", "only_right") for tensor in report["tensors"])
    return {tensor["name"] for tensor in report["tensors"]}


def test_verify_names_every_tensor_that_an_export_lacks(model, work):
    hf = DATA / model / "hf"
    gone = {name for name in hf_tensors(hf) if name.endswith((".experts.3.up_proj.weight", "model.norm.weight", "q_a_layernorm.weight"))}
    export = save(without(hf_tensors(hf), lambda name: name in gone), hf, work / "export")
    assert missing(hf, export) == gone
    assert missing(export, hf) == gone
    run_ok("convert", hf, work / "megatron")
    assert missing(work / "megatron", export) == gone
    refuse_to_convert(work, export, "is missing, and")


def test_verify_names_the_prediction_layers_that_an_export_lacks(model, work):
    hf = DATA / model / "hf"
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    gone = {name for name in hf_tensors(hf) if of_prediction(name, model) and not name.endswith(copies)}
    export = save(without(hf_tensors(hf), lambda name: of_prediction(name, model)), hf, work / "export")
    assert missing(hf, export) == gone


def test_verify_names_the_tensors_of_files_that_are_gone(work):
    write_hf(work / "hf", shards=3)
    shutil.copytree(work / "hf", work / "export")
    gone = set(hf_tensors(work / "hf"))
    file = sorted((work / "export").glob("model-*-of-*.safetensors"))[1]
    index = json.loads((work / "export/model.safetensors.index.json").read_text())["weight_map"]
    gone = {name for name, of in index.items() if of == file.name}
    assert gone
    file.unlink()
    assert missing(work / "hf", work / "export") == gone
    refuse("digest", work / "export", words=[file.name, "not there"])
