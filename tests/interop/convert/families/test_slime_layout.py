"""Gated delta nets as slime's checkpoints keep them: Hugging Face's tensors below self_attention, by the names that slime_plugins/mbridge/qwen3_next.py and
slime_plugins/models/qwen3_5.py give them. slime needs a GPU; megatron-core's reader and torch are the judges of what is written."""
import json
import re
import shutil

import pytest
import torch

import torch_dist_raw as raw
from bridge_reference import stored
from support import DATA, iteration_folder, refuse, run_ok, tree
from test_megatron_layouts import seen_by_megatron_core
from tiny_models import load_hf_sd

NEXT = {"in_proj_qkvz.weight", "in_proj_ba.weight"}
OF_35 = {"in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"}
ALL = {"A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight"}
MODELS = {"qwen3_next": NEXT, "qwen3_5": OF_35, "qwen3_5_moe": OF_35, "qwen3_5_vl": OF_35}
MESHES = {"tp2": ["--tp", 2], "pp2": ["--pp", 2, "--num-layers-in-first-pipeline-stage", 1]}
KEY = re.compile(r"decoder\.layers\.(\d+)\.self_attention\.((?:linear_attn|input_layernorm)\..*)")


def of_delta_nets(hf):
    """{key in slime: tensor} of a Hugging Face folder"""
    tensors = load_hf_sd(str(hf))
    layers = {match.group(1, 2) for match in (re.match(r"(.*layers\.(\d+)\.)linear_attn\.", name) for name in tensors) if match and "mtp" not in match[1]}
    return {f"decoder.layers.{layer}.self_attention.{name.removeprefix(prefix)}": tensor for prefix, layer in layers for name, tensor in tensors.items()
            if name.startswith((prefix + "linear_attn.", prefix + "input_layernorm."))}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """-> {model and mesh: folder}, {model and mesh: what megatron-core finds there}"""
    work = tmp_path_factory.mktemp("written")
    folders = {(model, mesh): work / f"{model}-{mesh}" for model in MODELS for mesh in MESHES}
    for (model, mesh), folder in folders.items():
        run_ok("convert", DATA / f"hf_{model}/hf", folder, "--megatron-layout", "slime", *MESHES[mesh])
    return folders, seen_by_megatron_core(folders)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_the_tensors_are_hugging_faces_whole(model, mesh, written):
    folders, seen = written
    all_of_it = stored(folders[model, mesh])
    found = {key: tensor for key, tensor in all_of_it.items() if KEY.fullmatch(key)}
    wanted = of_delta_nets(DATA / f"hf_{model}/hf")
    assert {KEY.fullmatch(key)[2].removeprefix("linear_attn.") for key in wanted} == MODELS[model] | ALL | {"input_layernorm.weight"}
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype for key, tensor in wanted.items())
    assert not [key for key in all_of_it if "self_attention.in_proj" in key or "self_attention.out_norm" in key]
    assert wanted.keys() <= set(seen[model, mesh])


@pytest.mark.parametrize("model", MODELS)
def test_comes_back_byte_for_byte(model, work):
    hf = DATA / f"hf_{model}/hf"
    run_ok("convert", hf, work / "slime", "--tp", 2, "--megatron-layout", "slime")
    run_ok("convert", work / "slime", work / "relaid", "--to", "megatron", "--no-save-optim")  # the layout stays
    assert set(stored(work / "relaid")) == set(stored(work / "slime"))
    run_ok("convert", work / "slime", work / "usual", "--to", "megatron", "--megatron-layout", "language-model", "--tp", 2)
    run_ok("convert", hf, work / "straight", "--tp", 2)
    assert set(stored(work / "usual")) == set(stored(work / "straight"))
    for folder in ("slime", "relaid", "usual"):
        run_ok("convert", work / folder, work / f"{folder}-back")
        assert tree(work / f"{folder}-back") == tree(hf)
        run_ok("verify", hf, work / folder)
    run_ok("verify", work / "slime", work / "straight")


@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_5"])
def test_a_checkpoint_whose_arguments_know_nothing_of_delta_nets(model, work):
    """... as slime saves them: by its module, not by Megatron-LM's arguments."""
    hf = DATA / f"hf_{model}/hf"
    run_ok("convert", hf, work / "slime", "--tp", 2, "--megatron-layout", "slime")
    folder = iteration_folder(work / "slime")
    shutil.rmtree(folder / "ferry")
    (folder / "run_config.yaml").unlink(missing_ok=True)
    common = torch.load(folder / "common.pt", weights_only=False)
    for name in [name for name in vars(common["args"]) if name.startswith("linear_") or name == "experimental_attention_variant"]:
        delattr(common["args"], name)
    torch.save(common, folder / "common.pt")
    refuse("convert", work / "slime", work / "out", words=["delta nets", "--hf-config"])
    run_ok("convert", work / "slime", work / "out", "--hf-config", hf)
    found, wanted = load_hf_sd(str(work / "out")), load_hf_sd(str(hf))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name].float(), tensor.float()) for name, tensor in wanted.items())


def as_slime_packs(query, key, value, groups):
    """linear_qgkv of slime_plugins/mbridge/qwen3_next.py at 08118ec: a group's queries, its gates, its key, its value."""
    head, hidden = key.shape[0] // groups, key.shape[-1]
    query = query.view(groups, -1, 2, head, hidden).transpose(1, 2).flatten(1, 3)
    return torch.cat([query, key.view(groups, head, hidden), value.view(groups, head, hidden)], dim=1).reshape(-1, hidden)


def with_older_names(folder, hf):
    """The checkpoint as slime wrote it until 2025-12-23: gated attention under linear_qgkv."""
    checkpoint, config = raw.Checkpoint(str(folder)), json.loads((hf / "config.json").read_text())
    weights, tensors = load_hf_sd(str(hf)), {}
    for key in checkpoint.tensors:
        dtype, shape, data = checkpoint.tensor(key)
        layer = re.fullmatch(r"(decoder|mtp)\.layers\.(\d+)\.(?:transformer_layer\.)?self_attention\.linear_qkv\.weight", key)
        if layer:
            prefix = f"{'mtp' if layer[1] == 'mtp' else 'model'}.layers.{layer[2]}.self_attn."
            packed = as_slime_packs(*(weights[f"{prefix}{name}_proj.weight"] for name in "qkv"), config["num_key_value_heads"])
            assert list(packed.shape) == list(shape)
            data = packed.contiguous().view(torch.uint8).numpy().tobytes()
        tensors[key.replace(".linear_qkv.", ".linear_qgkv.")] = (dtype, shape, [((0,) * len(shape), shape, data)])
    older = folder.with_name("older")
    raw.write_checkpoint(str(older), tensors, {}, raw.plain(checkpoint.common()))
    return older


def test_the_older_name_of_gated_attention_is_read(work):
    hf = DATA / "hf_qwen3_next/hf"
    run_ok("convert", hf, work / "slime", "--megatron-layout", "slime", "--make-vocab-size-divisible-by", 1)
    older = with_older_names(iteration_folder(work / "slime"), hf)
    assert any(".linear_qgkv." in key for key in raw.Checkpoint(str(older)).tensors)
    run_ok("convert", older, work / "back", "--hf-config", hf)
    found, wanted = load_hf_sd(str(work / "back")), load_hf_sd(str(hf))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name].float(), wanted[name].float()) for name in wanted)
    run_ok("verify", hf, older, "--hf-config", hf)


def test_optimizer_states_are_left_behind_by_name(work):
    hf = DATA / "hf_qwen3_next/hf"
    run_ok("convert", hf, work / "slime", "--megatron-layout", "slime", "--make-vocab-size-divisible-by", 1)
    checkpoint = raw.Checkpoint(str(iteration_folder(work / "slime")))
    tensors = {}
    for key in checkpoint.tensors:
        dtype, shape, data = checkpoint.tensor(key)
        for name in (key, f"optimizer.state.exp_avg.{key}"):
            tensors[name] = (dtype, shape, [((0,) * len(shape), shape, data)])
    raw.write_checkpoint(str(work / "trained"), tensors, {}, raw.plain(checkpoint.common()))
    refuse("convert", work / "trained", work / "out", "--to", "megatron", "--hf-config", hf, words=["slime's layout", "--no-save-optim"])
    run_ok("convert", work / "trained", work / "out", "--to", "megatron", "--hf-config", hf, "--no-save-optim")
    run_ok("verify", hf, work / "out", "--hf-config", hf)


def test_models_without_delta_nets_have_no_such_layout(work):
    refuse("convert", DATA / "hf_llama/hf", work / "out", "--megatron-layout", "slime", words=["--megatron-layout slime", "llama", "no gated delta nets"])


def test_there_is_no_run_config(work):
    said = run_ok("convert", DATA / "hf_qwen3_next/hf", work / "slime", "--megatron-layout", "slime").stdout
    assert "no run_config.yaml: qwen3_next: Megatron-Bridge does not know slime's delta nets" in said
    assert not list(work.rglob("run_config.yaml"))
