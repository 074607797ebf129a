"""GPT-OSS as it is published: experts in MXFP4, dequantised bit for bit as transformers does it, or kept."""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dequantized import assert_same
from support import DATA, digest_of, ferry_json, hf_tensors, refuse, run_ok, save_from_ranks, tree

HIDDEN, FFN, EXPERTS = 96, 64, 6  # three blocks, and two; no two dimensions alike


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory):
    """The tiny GPT-OSS, wider, with random blocks; among them the largest and smallest exponents that there are."""
    folder = tmp_path_factory.mktemp("mxfp4") / "hf"
    shutil.copytree(DATA / "hf_gpt_oss/hf", folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(hidden_size=HIDDEN, intermediate_size=FFN,
                  quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generator, out = torch.Generator().manual_seed(5), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        shape = [HIDDEN if size == 32 else size for size in tensor.shape]
        if not name.endswith(("gate_up_proj", "down_proj")):
            out[name] = torch.randn(shape, generator=generator).to(torch.bfloat16)
            continue
        _, columns, rows = shape
        blocks = (EXPERTS, rows, columns // 32, 16)
        out[name + "_blocks"] = torch.randint(0, 256, blocks, generator=generator, dtype=torch.uint8)
        scales = torch.randint(90, 140, blocks[:-1], generator=generator, dtype=torch.uint8)
        scales.view(-1)[:6] = torch.tensor([0, 1, 2, 253, 254, 255])
        out[name + "_scales"] = scales
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def expected(mxfp4):
    """{name: tensor} as transformers loads them with dequantize=True."""
    stored, out = load_file(mxfp4 / "model.safetensors"), {}
    for name, tensor in stored.items():
        if name.endswith("_blocks"):
            out[name.removesuffix("_blocks")] = convert_moe_packed_tensors(tensor, stored[name.removesuffix("_blocks") + "_scales"])
        elif not name.endswith("_scales"):
            out[name] = tensor
    return out


def test_dequantises_as_transformers_does(mxfp4, work):
    run_ok("convert", mxfp4, work / "bf16", "--to", "hf")
    assert_same(work / "bf16", expected(mxfp4))
    assert "quantization_config" not in json.loads((work / "bf16/config.json").read_text())


@pytest.mark.parametrize("layout", [["--tp", 2, "--ep", 3, "--etp", 1], ["--pp", 3, "--tp", 4, "--etp", 2]])
def test_dequantises_on_the_way_to_megatron(mxfp4, work, layout):
    run_ok("convert", mxfp4, work / "megatron", *layout)
    run_ok("convert", work / "megatron", work / "back")
    assert_same(work / "back", expected(mxfp4))
    assert ferry_json("verify", mxfp4, work / "megatron", "--weights-only")["identical"]
    assert digest_of(mxfp4) == digest_of(work / "megatron")


@pytest.mark.parametrize("sizes", [["tp=2", "pp=2", "first=1", "ep=3"], ["tp=2", "rows=1", "dp=2"]])
def test_dequantises_on_the_way_to_ranks(mxfp4, sizes, work):
    """Blocks cut by the ranks' boxes keep their scales; a rank asks for rows of gate and up apart."""
    save_from_ranks(mxfp4, work / "saved", *sizes)
    run_ok("convert", work / "saved", work / "back")
    assert_same(work / "back", expected(mxfp4))


def test_keeps_the_blocks(mxfp4, work):
    run_ok("convert", mxfp4, work / "same", "--to", "hf", "--keep-quantized")
    assert tree(work / "same") == tree(mxfp4)
    run_ok("convert", mxfp4, work / "cut", "--to", "hf", "--keep-quantized", "--max-shard-size", "60KB")
    assert hf_tensors(work / "cut") == hf_tensors(mxfp4)
    run_ok("verify", mxfp4, work / "cut", "--weights-only")
    refuse("convert", mxfp4, work / "no", "--keep-quantized", words=["--keep-quantized", "no place"])


def test_an_archive_keeps_the_blocks(mxfp4, work):
    run_ok("convert", mxfp4, work / "kept", "--to", "h5", "--keep-quantized")
    run_ok("convert", work / "kept", work / "same", "--keep-quantized")
    assert tree(work / "same") == tree(mxfp4)
    run_ok("convert", work / "kept", work / "bf16")
    assert_same(work / "bf16", expected(mxfp4))


def test_takes_a_part(mxfp4, work):
    part = "model.layers.1.mlp.experts.*_proj"
    run_ok("convert", mxfp4, work / "kept", "--to", "hf", "--keep-quantized", "--include", part)
    assert set(hf_tensors(work / "kept")) == {f"model.layers.1.mlp.experts.{name}_proj_{kind}" for name in ("gate_up", "down")
                                              for kind in ("blocks", "scales")}
    run_ok("convert", mxfp4, work / "bf16", "--to", "hf", "--include", part)
    want = {n: t for n, t in expected(mxfp4).items() if n.startswith("model.layers.1.mlp.experts.") and n.endswith("_proj")}
    assert_same(work / "bf16", want)


@pytest.mark.parametrize("change,words", [
    (lambda t: t.pop("model.layers.0.mlp.experts.down_proj_scales"), ["down_proj_scales is missing"]),
    (lambda t: t.pop("model.layers.0.mlp.experts.down_proj_blocks"), ["down_proj_scales", "down_proj_blocks is missing"]),
    (lambda t: t.update({"model.layers.0.mlp.experts.down_proj_blocks": t["model.layers.0.mlp.experts.down_proj_blocks"].mT.contiguous()}),
     ["down_proj_blocks", "not the blocks of"]),
])
def test_says_which_blocks_are_wrong(change, words, mxfp4, work):
    shutil.copytree(mxfp4, work / "hf")
    tensors = load_file(mxfp4 / "model.safetensors")
    change(tensors)
    save_file(tensors, work / "hf/model.safetensors", metadata={"format": "pt"})
    refuse("convert", work / "hf", work / "out", words=words)


@pytest.mark.parametrize("projection, expert, column, row", [("gate_up_proj", 4, 37, 101), ("down_proj", 2, 51, 83)])
@pytest.mark.parametrize("layout", [["--to", "hf"], ["--tp", 2, "--ep", 3, "--etp", 2]], ids=["hf", "megatron"])
def test_the_element_that_overflows_is_named(mxfp4, work, projection, expert, column, row, layout):
    """Six times two to the fifteenth is no number of fp16. Elements lie by rows in the file, by columns in the tensor."""
    shutil.copytree(mxfp4, work / "hf")
    tensors = load_file(work / "hf/model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_scales"):
            tensor.fill_(127)
    name = f"model.layers.1.mlp.experts.{projection}"
    tensors[name + "_scales"][expert, row, column // 32] = 127 + 15
    packs = tensors[name + "_blocks"][expert, row, column // 32]
    packs.zero_()
    packs[column % 32 // 2] = 7 << (column % 2 * 4)
    save_file(tensors, work / "hf/model.safetensors", metadata={"format": "pt"})
    refuse("convert", work / "hf", work / "fp16", *layout, "--dtype", "fp16", words=[f"{name}: element [{expert}, {column}, {row}] overflows fp16"])
