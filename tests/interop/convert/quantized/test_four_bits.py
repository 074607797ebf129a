"""Weights of four bits, INT4 and NVFP4, dequantised bit for bit as compressed-tensors does it; of ModelOpt by its formula; FP8 with other scales."""
import json
import shutil

import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor, PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from support import DATA, refuse, run_ok, tree

GROUP = {"pack-quantized": 8, "nvfp4-pack-quantized": 16, "modelopt": 16, "mixed": 16}  # mixed: ModelOpt's, with FP8 in attention
ARGUMENTS = {"pack-quantized": dict(num_bits=4, type="int", strategy="group", group_size=8, symmetric=True),
             "nvfp4-pack-quantized": dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def random(shape, generator, high=256):
    return torch.randint(0, high, shape, generator=generator, dtype=torch.uint8)


def packed(name, shape, how, generator):
    """{part: tensor} of a weight of that shape, with random bits."""
    rows, columns = shape
    if how == "fp8":
        return {"weight": random(shape, generator, 127).view(torch.float8_e4m3fn), "weight_scale": torch.rand((), generator=generator) / 10,
                "input_scale": torch.tensor(0.25)}
    scales = (rows, columns // GROUP[how])
    if how == "pack-quantized":
        return {"weight_packed": random((rows, columns // 2), generator).view(torch.int32),
                "weight_scale": torch.randn(scales, generator=generator).to(torch.bfloat16), "weight_shape": torch.tensor(shape)}
    scale = random(scales, generator, 127).view(torch.float8_e4m3fn)
    if how in ("modelopt", "mixed"):
        return {"weight": random((rows, columns // 2), generator), "weight_scale": scale,
                "weight_scale_2": torch.rand((), generator=generator) / 1000, "input_scale": torch.tensor(0.25)}
    return {"weight_packed": random((rows, columns // 2), generator), "weight_scale": scale,
            "weight_global_scale": 1000 * torch.rand(1, generator=generator), "input_global_scale": torch.tensor([0.25])}


def unpacked(parts, how):
    if how == "fp8":
        return (parts["weight"].float() * parts["weight_scale"]).to(torch.bfloat16)
    if how in ("modelopt", "mixed"):  # NVFP4QTensor.dequantize: both scales, then the element, in fp32
        bits = parts["weight"]
        elements = E2M1[torch.stack((bits & 15, bits >> 4), -1).flatten(1).long()]
        scale = parts["weight_scale"].float() * parts["weight_scale_2"]
        return (elements.unflatten(1, (-1, 16)) * scale[:, :, None]).flatten(1).to(torch.bfloat16)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**ARGUMENTS[how]))
    compressor = PackedQuantizationCompressor if how == "pack-quantized" else NVFP4PackedCompressor
    return compressor.decompress(parts, scheme)["weight"].to(torch.bfloat16)


def quantization(how):
    if how == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    if how == "mixed":
        return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"],
                "quantized_layers": {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                                     "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}}
    return {"quant_method": "compressed-tensors", "format": how, "quantization_status": "compressed", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": ARGUMENTS[how]}}}


@pytest.fixture(scope="module", params=list(GROUP))
def quantized(request, tmp_path_factory):
    """(folder, {name: tensor} that it stands for): the tiny Qwen3, its projections quantised."""
    how, generator = request.param, torch.Generator().manual_seed(7)
    folder = tmp_path_factory.mktemp("packed") / "hf"
    shutil.copytree(DATA / "hf_qwen3/hf", folder)
    stored, want = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        want[name] = stored[name] = tensor
        if not name.endswith("_proj.weight"):
            continue
        del stored[name]
        kind = "fp8" if how == "mixed" and "self_attn" in name else how
        parts = packed(name, tensor.shape, kind, generator)
        want[name] = unpacked(parts, kind)
        stored |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
        if "k_proj" in name:  # of cached keys and values
            stored |= {name.replace("k_proj.weight", part): torch.tensor([1.0]) for part in ("k_scale", "v_scale")}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization(how)}, indent=2))
    return folder, want


def assert_same(folder, want):
    got = load_file(folder / "model.safetensors")
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name].view(torch.int16), tensor.view(torch.int16)), name


def test_dequantises_as_the_reference_does(quantized, work):
    folder, want = quantized
    run_ok("convert", folder, work / "bf16", "--to", "hf")
    assert_same(work / "bf16", want)
    assert "quantization_config" not in json.loads((work / "bf16/config.json").read_text())


def test_dequantises_on_the_way_to_megatron(quantized, work):
    folder, want = quantized
    run_ok("convert", folder, work / "megatron", "--tp", 2, "--pp", 2)
    run_ok("verify", folder, work / "megatron")
    run_ok("convert", work / "megatron", work / "back")
    assert_same(work / "back", want)


def test_keeps_them(quantized, work):
    folder, _ = quantized
    run_ok("convert", folder, work / "kept", "--to", "hf", "--keep-quantized")
    assert tree(work / "kept") == tree(folder)
    run_ok("convert", folder, work / "archive", "--to", "h5", "--keep-quantized")
    run_ok("convert", work / "archive", work / "back", "--keep-quantized")
    assert tree(work / "back") == tree(folder)


def test_a_lost_scale_is_named(quantized, work):
    shutil.copytree(quantized[0], work / "bad")
    tensors = load_file(work / "bad/model.safetensors")
    lost = "model.layers.1.mlp.up_proj.weight_scale"
    del tensors[lost]
    save_file(tensors, work / "bad/model.safetensors", metadata={"format": "pt"})
    refuse("convert", work / "bad", work / "no", words=[lost, "missing"])


@pytest.mark.parametrize("changes, words", [({"num_bits": 8}, "only symmetric int of 4 bits"), ({"symmetric": False}, "only symmetric int of 4 bits"),
                                            ({"actorder": "group"}, "actorder is none of")])
def test_other_integers_are_refused(changes, words, work):
    shutil.copytree(DATA / "hf_qwen3/hf", work / "hf")
    config = json.loads((work / "hf/config.json").read_text())
    how = quantization("pack-quantized")
    how["config_groups"]["group_0"]["weights"] = {**ARGUMENTS["pack-quantized"], **changes}
    (work / "hf/config.json").write_text(json.dumps({**config, "quantization_config": how}))
    refuse("convert", work / "hf", work / "no", words=["config_groups.group_0", words])


def test_weights_without_a_configuration_are_told(quantized, work):
    shutil.copytree(quantized[0], work / "bad")
    config = json.loads((work / "bad/config.json").read_text())
    format = config.pop("quantization_config").get("format")
    (work / "bad/config.json").write_text(json.dumps(config))
    refuse("convert", work / "bad", work / "no", words=["weight_shape: is of dtype i64"] if format == "pack-quantized" else ["need a quantization_config", "hf_quant_config.json"])


@pytest.mark.parametrize("scales", ["exponents", "one"])
def test_fp8_with_other_scales(scales, work):
    """Exponents in E8M0, as DeepSeek-V3.1 has them; one scale of a tensor and one of its input, as Ministral 3."""
    shutil.copytree(DATA / "hf_qwen3/hf", work / "hf")
    generator, stored, want = torch.Generator().manual_seed(9), {}, {}
    for name, tensor in load_file(work / "hf/model.safetensors").items():
        want[name] = stored[name] = tensor
        if not name.endswith("_proj.weight"):
            continue
        elements = random(tensor.shape, generator, 127).view(torch.float8_e4m3fn)
        if scales == "exponents":
            scale = (100 + random([(n + 15) // 16 for n in tensor.shape], generator, 40)).view(torch.float8_e8m0fnu)
            grid = scale.float().repeat_interleave(16, 0).repeat_interleave(16, 1)[:tensor.shape[0], :tensor.shape[1]]
        else:
            scale = grid = torch.rand((), generator=generator).to(torch.bfloat16)
            stored[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5, dtype=torch.bfloat16)
        stored[name], stored[name + "_scale_inv"] = elements, scale
        want[name] = (elements.float() * grid.float()).to(torch.bfloat16)
    save_file(stored, work / "hf/model.safetensors", metadata={"format": "pt"})
    config = json.loads((work / "hf/config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16] if scales == "exponents" else None}
    (work / "hf/config.json").write_text(json.dumps(config))
    run_ok("convert", work / "hf", work / "bf16", "--to", "hf")
    assert_same(work / "bf16", want)
    run_ok("convert", work / "hf", work / "kept", "--to", "hf", "--keep-quantized")
    assert set(load_file(work / "kept/model.safetensors")) == set(stored)
