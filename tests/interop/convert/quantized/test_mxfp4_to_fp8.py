"""MXFP4 of compressed-tensors (mxfp4-pack-quantized): dequantised as compressed-tensors does it, and written as FP8 without losing a bit."""
import json
import shutil

import pytest
import torch
import transformers
from compressed_tensors.compressors import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from support import DATA, refuse, run_ok, tree

WEIGHTS = dict(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype="torch.uint8")
SIZES = {"whole": dict(hidden_size=256, intermediate_size=384, head_dim=64), "ragged": dict(hidden_size=160, intermediate_size=224, head_dim=96)}
MODULE = "model.layers.0.mlp.up_proj."


def packed(shape, generator, exponents):
    """Random elements; a group has a 4 or a 6, as every encoder leaves it."""
    rows, columns = shape
    elements = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    elements[:, ::16] = elements[:, ::16] & 0x8F | 0x60
    low, high = exponents
    return {"weight_packed": elements, "weight_scale": torch.randint(low, high, (rows, columns // 32), generator=generator, dtype=torch.uint8)}


def make(folder, sizes, exponents):
    """(folder, {name: tensor} that it stands for, {module: its parts})"""
    generator = torch.Generator().manual_seed(3)
    config = transformers.Qwen3Config(vocab_size=90, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, dtype="bfloat16", **sizes)
    torch.manual_seed(2)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**WEIGHTS))
    stored, want, modules = {}, {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        want[name] = stored[name] = tensor
        if not name.endswith("_proj.weight"):
            continue
        del stored[name]
        module = name.removesuffix("weight")
        modules[module] = packed(tensor.shape, generator, exponents)
        want[name] = MXFP4PackedCompressor.decompress(modules[module], scheme)["weight"].to(torch.bfloat16)
        stored |= {module + part: t for part, t in modules[module].items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
                                      "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}}
    (folder / "config.json").write_text(json.dumps(written, indent=2))
    return folder, want, modules


@pytest.fixture(scope="module", params=list(SIZES))
def quantized(request, tmp_path_factory):
    return make(tmp_path_factory.mktemp("mxfp4") / "hf", SIZES[request.param], (115, 129))  # of fourteen powers of two


def assert_same(got, want):
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name].view(torch.int16), tensor.view(torch.int16)), name


def as_deepseek(parts):
    """Elements and scales of FP8, by the steps of cast_e2m1fn_to_e4m3fn (DeepSeek-V4, inference/convert.py): the scale of a block is the largest of
    its groups, less six powers of two; ragged blocks filled up with zeros of the least scale."""
    codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    bits, scale = parts["weight_packed"], parts["weight_scale"].view(torch.float8_e8m0fnu).float()
    elements = torch.stack((codes[(bits & 15).long()], codes[(bits >> 4).long()]), -1).flatten(1)
    rows, columns = elements.shape
    up = [-rows % 128, -columns % 128]
    elements = torch.nn.functional.pad(elements, (0, up[1], 0, up[0]))
    scale = torch.nn.functional.pad(scale, (0, up[1] // 32, 0, up[0]), value=float(scale.min()))
    high, wide = elements.shape[0] // 128, elements.shape[1] // 128
    of_block = scale.view(high, 128, wide, 4).amax((1, 3)) / 2**6
    offset = scale.view(high, 128, wide, 4) / of_block[:, None, :, None]
    made = elements.view(high, 128, wide, 4, 32) * offset[..., None]
    return made.view(high * 128, wide * 128)[:rows, :columns].to(torch.float8_e4m3fn), of_block


def test_dequantises_as_compressed_tensors_does(quantized, work):
    folder, want, _ = quantized
    run_ok("convert", folder, work / "bf16", "--to", "hf")
    assert_same(load_file(work / "bf16/model.safetensors"), want)
    run_ok("convert", folder, work / "megatron", "--tp", 2)
    run_ok("verify", folder, work / "megatron")
    run_ok("convert", folder, work / "kept", "--to", "hf", "--keep-quantized")
    assert tree(work / "kept") == tree(folder)


def test_becomes_fp8_bit_for_bit_as_deepseek_does_it(quantized, work):
    folder, want, modules = quantized
    run_ok("convert", folder, work / "fp8", "--to", "hf", "--quantize", "fp8-block-lossless")
    got = load_file(work / "fp8/model.safetensors")
    for module, parts in modules.items():
        elements, scales = as_deepseek(parts)
        assert torch.equal(got[module + "weight"].view(torch.uint8), elements.view(torch.uint8)), module
        assert torch.equal(got[module + "weight_scale_inv"], scales), module
    how = json.loads((work / "fp8/config.json").read_text())["quantization_config"]
    assert how["quant_method"] == "fp8" and how["scale_fmt"] == "ue8m0" and how["weight_block_size"] == [128, 128]
    run_ok("verify", folder, work / "fp8", "--weights-only")
    run_ok("convert", work / "fp8", work / "bf16", "--to", "hf")
    assert_same(load_file(work / "bf16/model.safetensors"), want)


def test_a_block_of_too_many_powers_of_two_is_refused(work):
    folder, _, modules = make(work / "hf", SIZES["whole"], (120, 121))
    stored = load_file(folder / "model.safetensors")
    stored[MODULE + "weight_scale"][7, 1] = 120 - 15
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    refuse("convert", folder, work / "fp8", "--to", "hf", "--quantize", "fp8-block-lossless", words=[MODULE + "weight", "no number of E4M3"])
    run_ok("convert", folder, work / "rounded", "--to", "hf", "--quantize", "fp8-block")


def test_a_source_without_such_weights_is_refused(work):
    shutil.copytree(DATA / "hf_qwen3/hf", work / "hf")
    refuse("convert", work / "hf", work / "fp8", "--to", "hf", "--quantize", "fp8-block-lossless", words=["no weights of four bits"])
    refuse("convert", work / "hf", work / "fp8", "--quantize", "fp8-block-lossless", words=["no place for the scales"])
