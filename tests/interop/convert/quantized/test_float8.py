"""FP8 of compressed-tensors (GLM-4.5-FP8, llm-compressor), of ModelOpt and of AutoFP8: dequantised bit for bit as compressed-tensors does it."""
import json
import shutil

import pytest
import torch
from compressed_tensors.compressors import FloatQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from dequantized import assert_same
from support import DATA, refuse, run_ok, tree

BLOCK = [16, 8]
STRATEGIES = {"channel": {}, "tensor": {}, "block": {"block_structure": BLOCK}}
KINDS = [*STRATEGIES, "modelopt", "autofp8"]


def arguments(strategy):
    return dict(num_bits=8, type="float", strategy=strategy, symmetric=True, **STRATEGIES[strategy])


def scale_of(kind, shape, generator):
    sizes = {"channel": (shape[0], 1), "tensor": (1,), "modelopt": (), "autofp8": (1,), "block": [-(-size // block) for size, block in zip(shape, BLOCK)]}[kind]
    scale = torch.rand(sizes, generator=generator) + 0.25
    return scale.to(torch.bfloat16) if kind == "channel" else scale


def plain(weight, scale, kind):
    if kind in ("modelopt", "autofp8", "tensor"):
        return (weight.float() * scale.float()).to(torch.bfloat16)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments(kind)))
    return FloatQuantizationCompressor.decompress({"weight": weight, "weight_scale": scale}, scheme)["weight"].to(torch.bfloat16)


def quantization(kind):
    if kind == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    if kind == "autofp8":
        return {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments(kind), "input_activations": None}}}


@pytest.fixture(scope="module", params=KINDS)
def quantized(request, tmp_path_factory):
    """(folder, {name: tensor} that it stands for): the tiny GLM-4.5, its projections in FP8."""
    kind, generator = request.param, torch.Generator().manual_seed(11)
    folder = tmp_path_factory.mktemp(kind) / "hf"
    shutil.copytree(DATA / "hf_glm4_moe/hf", folder)
    (file,) = folder.glob("*.safetensors")
    stored, want = {}, {}
    for name, tensor in load_file(file).items():
        want[name] = stored[name] = tensor
        if not name.endswith("_proj.weight") or "eh_proj" in name:
            continue
        scale = scale_of(kind, tensor.shape, generator)
        stored[name] = tensor.to(torch.float8_e4m3fn)
        stored[name + "_scale"] = scale
        want[name] = plain(stored[name], scale, kind)
        if kind in ("modelopt", "autofp8", "tensor"):
            stored[name.removesuffix("weight") + "input_scale"] = torch.tensor([0.25])
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization(kind)}, indent=2))
    return folder, want


def test_dequantises_as_the_reference_does(quantized, work):
    folder, want = quantized
    run_ok("convert", folder, work / "bf16", "--to", "hf")
    assert_same(work / "bf16", want)
    run_ok("convert", folder, work / "megatron", "--tp", 2, "--ep", 2, "--etp", 1)
    run_ok("convert", work / "megatron", work / "back")
    assert_same(work / "back", want)


def test_keeps_them(quantized, work):
    run_ok("convert", quantized[0], work / "kept", "--to", "hf", "--keep-quantized")
    assert tree(work / "kept") == tree(quantized[0])


def test_a_lost_scale_and_one_of_another_shape_are_named(quantized, work):
    shutil.copytree(quantized[0], work / "bad")
    (file,) = (work / "bad").glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.self_attn.o_proj.weight_scale"
    save_file({**tensors, name: torch.ones(3, 3)}, file, metadata={"format": "pt"})
    refuse("convert", work / "bad", work / "out", words=[name, "[3, 3]"])
    save_file({one: tensor for one, tensor in tensors.items() if one != name}, file, metadata={"format": "pt"})
    refuse("convert", work / "bad", work / "out", words=["o_proj.weight: is in FP8", name])


@pytest.mark.parametrize("change, word", [({"symmetric": False}, "symmetric"), ({"strategy": "token"}, "token"), ({"num_bits": 4}, "4 bits")])
def test_other_kinds_are_named(work, change, word):
    shutil.copytree(DATA / "hf_glm4_moe/hf", work / "bad")
    config = json.loads((work / "bad/config.json").read_text())
    config["quantization_config"] = quantization("channel")
    config["quantization_config"]["config_groups"]["group_0"]["weights"].update(change)
    (work / "bad/config.json").write_text(json.dumps(config))
    refuse("convert", work / "bad", work / "out", words=[word])
