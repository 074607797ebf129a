"""Sources that lack what their configuration names: prediction layers by the policy of --mtp, and exports that others made, audited by verify."""
import argparse
import json
import shutil

import pytest
import torch

import torch_dist_raw as raw
from support import DATA, ferry_json, hf_tensors, iteration_folder, refuse, refuse_to_convert, run_ok, safetensors_bytes, tree, write_hf

USUAL, QWEN = "num_nextn_predict_layers", "mtp_num_hidden_layers"
MODELS = {  # the names of prediction layers begin so; config.json's word for their number, and the member that has it
    "hf_glm4_moe_lite": ("model.layers.2.", USUAL, None),
    "hf_deepseek_v3": ("model.layers.3.", USUAL, None),
    "hf_bailing_moe_v2": ("model.layers.2.", USUAL, None),
    "hf_nemotron_h": ("mtp.", USUAL, None),
    "hf_qwen3_next": ("mtp.", USUAL, None),
    "hf_qwen3_5": ("mtp.", QWEN, None),
    "hf_qwen3_5_vl": ("mtp.", QWEN, "text_config"),
}


def of_prediction(name, model):
    return name.startswith(MODELS[model][0])


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
    refuse_to_convert(work, saved, "names 1 prediction layer", f"({MODELS[model][1]})", "--mtp drop", options=["--mtp", "error"])
    run_ok("convert", saved, work / "megatron")
    refuse_to_convert(work, work / "megatron", "names 1 prediction layer", options=["--mtp", "error"])
    run_ok("convert", hf, work / "whole", "--mtp", "error")


def with_prediction_layers(config, number, model):
    _, key, member = MODELS[model]
    return {**config, member: {**config[member], key: number}} if member else {**config, key: number}


def dropped(hf, model):
    """-> tensors and configuration that are left"""
    config = json.loads((hf / "config.json").read_text())
    return without(hf_tensors(hf), lambda name: of_prediction(name, model)), with_prediction_layers(config, 0, model)


@pytest.mark.parametrize("first", ["--to=megatron", "--to=hf", "--to=h5"])
def test_drop_leaves_them_out_of_tensors_and_configuration(model, first, work):
    hf = DATA / model / "hf"
    run_ok("convert", hf, work / "less", first, "--mtp", "drop")
    run_ok("convert", work / "less", work / "back", "--to", "hf")
    assert (hf_tensors(work / "back"), json.loads((work / "back/config.json").read_text())) == dropped(hf, model)


def test_drop_takes_them_out_of_a_megatron_checkpoint(model, work):
    hf = DATA / model / "hf"
    run_ok("convert", hf, work / "megatron", "--tp", 2)
    for to in ("megatron", "hf"):
        run_ok("convert", work / "megatron", work / to / "less", "--to", to, "--mtp", "drop")
    checkpoint = raw.Checkpoint(str(iteration_folder(work / "megatron/less")))
    assert not [key for key in [*checkpoint.tensors, *checkpoint.objects] if "mtp." in key]
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert torch.load(iteration_folder(work / "megatron/less") / "common.pt", weights_only=True)["args"].mtp_num_layers is None
    run_ok("convert", work / "megatron/less", work / "back")
    for folder in (work / "back", work / "hf/less"):
        assert (hf_tensors(folder), json.loads((folder / "config.json").read_text())) == dropped(hf, model)


@pytest.mark.parametrize("spelling", [USUAL, QWEN])
def test_drop_is_told_under_every_name_that_is_there(spelling, work):
    """Whatever a reader looks for: a Qwen3.5 whose prediction layers are named, too, as others name them."""
    shutil.copytree(DATA / "hf_qwen3_5/hf", work / "hf")
    config = {**json.loads((work / "hf/config.json").read_text()), USUAL: 1, spelling: 1}
    (work / "hf/config.json").write_text(json.dumps(config))
    run_ok("convert", work / "hf", work / "less", "--to", "hf", "--mtp", "drop")
    assert json.loads((work / "less/config.json").read_text()) == {**config, USUAL: 0, spelling: 0}
    run_ok("convert", work / "less", work / "again", "--mtp", "error")
    assert "mtp_num_layers" not in ferry_json("inspect", work / "again")["config"]


def test_drop_is_told_where_a_model_that_also_sees_is_described(work):
    """Kimi K2.5 names in text_config what transformers did not save."""
    shutil.copytree(DATA / "hf_kimi_k25/hf", work / "hf")
    config = json.loads((work / "hf/config.json").read_text())
    config["text_config"][USUAL] = 1
    (work / "hf/config.json").write_text(json.dumps(config))
    refuse_to_convert(work, work / "hf", "names 1 prediction layer", options=["--mtp", "error"])
    run_ok("convert", work / "hf", work / "less", "--to", "hf", "--mtp", "drop")
    config["text_config"][USUAL] = 0
    assert json.loads((work / "less/config.json").read_text()) == config
    run_ok("convert", work / "less", work / "megatron", "--mtp", "error")


UNMAPPED = {  # families whose prediction layers have no counterparts: what config.json says of them, and once they are dropped
    "hf_ernie4_5_moe": ({USUAL: 1}, {USUAL: 0}, f"names 1 prediction layer ({USUAL})"),
    "hf_minimax_m2": ({"use_mtp": True, "num_mtp_modules": 3}, {"use_mtp": False, "num_mtp_modules": 0}, "names 3 prediction layers (num_mtp_modules)"),
}


@pytest.mark.parametrize("name", UNMAPPED)
def test_layers_without_counterparts_are_refused_and_dropped(name, work):
    """Published so: config.json names prediction layers that no file holds."""
    named, dropped, words = UNMAPPED[name]
    shutil.copytree(DATA / name / "hf", work / "hf")
    config = json.loads((work / "hf/config.json").read_text())
    (work / "hf/config.json").write_text(json.dumps({**config, **named}))
    run_ok("convert", work / "hf", work / "megatron")
    for source in (work / "hf", work / "megatron"):
        refuse_to_convert(work, source, words, "--mtp drop", options=["--mtp", "error"])
        run_ok("convert", source, work / "less" / source.name, "--to", "hf", "--mtp", "drop")
        assert json.loads((work / "less" / source.name / "config.json").read_text()) == {**config, **dropped}
        assert hf_tensors(work / "less" / source.name) == hf_tensors(work / "hf")
        run_ok("convert", work / "less" / source.name, work / "again" / source.name, "--mtp", "error")


def test_carried_layers_are_found_and_left_out_of_a_sidecar(work):
    """ERNIE's lie beside the model: --mtp error finds them there, and --mtp drop leaves them."""
    hf = DATA / "hf_ernie4_5_moe/hf"
    tensors = hf_tensors(hf)
    block = {name.replace("layers.0", "mtp_block.0"): tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    save(tensors | block, hf, work / "hf")
    config = json.loads((hf / "config.json").read_text())
    (work / "hf/config.json").write_text(json.dumps({**config, USUAL: 1}))
    run_ok("convert", work / "hf", work / "megatron", "--mtp", "error")
    run_ok("convert", work / "megatron", work / "back", "--mtp", "error")
    assert tree(work / "back") == tree(work / "hf")
    run_ok("convert", work / "megatron", work / "less", "--to", "hf", "--mtp", "drop")
    assert (hf_tensors(work / "less"), json.loads((work / "less/config.json").read_text())) == (tensors, {**config, USUAL: 0})


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
    assert gone
    export = save(without(hf_tensors(hf), lambda name: name in gone), hf, work / "export")
    assert missing(hf, export) == gone
    assert missing(export, hf) == gone
    run_ok("convert", hf, work / "megatron")
    assert missing(work / "megatron", export) == gone
    refuse_to_convert(work, export, "is missing, and" if len(gone) > 1 else "is missing")


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
