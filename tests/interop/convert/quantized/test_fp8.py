"""FP8 checkpoints with block scales, as DeepSeek-V3 is published: dequantised bit for bit as torch does it."""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dequantized import assert_same
from support import DATA, ferry_json, hf_tensors, refuse, run_ok, save_from_ranks, tree

BLOCK = 16  # small, so that the tiny model has many blocks and ragged edges

# Scales that no quantiser writes: torch multiplies by them all the same.
ODD_SCALES = {f"model.layers.{layer}.self_attn.{name}_proj.weight": scale for (layer, name), scale in {
    (0, "o"): float("nan"), (0, "q_b"): 0.0, (0, "kv_b"): -0.5, (1, "o"): float("inf"), (1, "q_b"): -0.0, (1, "kv_b"): 1e-42,
    (2, "o"): -3.0e38}.items()}


def dequantize(weight, scale, dtype):
    """inference/kernel.py of DeepSeek-V3, weight_dequant, in plain torch: fp32 times fp32, then one rounding."""
    scales = scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (weight.float() * scales[:weight.shape[0], :weight.shape[1]]).to(dtype)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """The tiny DeepSeek-V3, every projection quantised; with NaN, infinities of the product, zeros and subnormals."""
    folder = tmp_path_factory.mktemp("fp8") / "hf"
    shutil.copytree(DATA / "hf_deepseek_v3/hf", folder)
    tensors, out = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight") or "eh_proj" in name:
            out[name] = tensor
            continue
        bits = torch.randint(0, 256, tensor.shape, generator=generator, dtype=torch.uint8)
        if "experts" in name:
            bits[(bits & 0x7F) == 0x7F] = 0  # NaN in some tensors only
        blocks = [(n + BLOCK - 1) // BLOCK for n in tensor.shape]
        scale = torch.randn(blocks, generator=generator).abs() * 10.0 ** torch.randint(-6, 3, blocks, generator=generator)
        if name in ODD_SCALES:
            scale.view(-1)[0] = ODD_SCALES[name]
        out[name] = bits.view(torch.float8_e4m3fn)
        out[name + "_scale_inv"] = scale.float()
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                     "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def expected(fp8, dtype, only_fp8=False):
    stored = load_file(fp8 / "model.safetensors")
    scaled = {n for n in stored if n + "_scale_inv" in stored}
    return {n: dequantize(t, stored[n + "_scale_inv"], dtype) if n in scaled else t
            for n, t in stored.items() if not n.endswith("_scale_inv")}


def test_dequantises_as_torch_does(fp8, work):
    run_ok("convert", fp8, work / "bf16", "--to", "hf")
    assert_same(work / "bf16", expected(fp8, torch.bfloat16))


@pytest.mark.parametrize("sizes", [["tp=2", "pp=2", "first=1", "ep=2"], ["tp=2", "rows=1", "dp=2"]])
def test_dequantises_on_the_way_to_ranks(fp8, sizes, work):
    """Blocks cut by the ranks' boxes keep their scales. A model holds the router's bias in fp32, and it stays so."""
    save_from_ranks(fp8, work / "saved", *sizes)
    run_ok("convert", work / "saved", work / "bf16")
    assert_same(work / "bf16", {n: t.float() if n.endswith("e_score_correction_bias") else t
                                for n, t in expected(fp8, torch.bfloat16).items()})
    assert "quantization_config" not in json.loads((work / "bf16/config.json").read_text())


def test_dequantises_to_fp32(fp8, work):
    run_ok("convert", fp8, work / "fp32", "--to", "hf", "--dtype", "fp32")
    want = {n: t.float() if "e_score_correction_bias" not in n else t for n, t in expected(fp8, torch.float32).items()}
    assert_same(work / "fp32", want)


@pytest.mark.parametrize("layout", [["--tp", 2, "--ep", 2], ["--pp", 3]])
def test_dequantises_on_the_way_to_megatron(fp8, work, layout):
    run_ok("convert", fp8, work / "megatron", *layout)
    run_ok("convert", work / "megatron", work / "back")
    assert_same(work / "back", expected(fp8, torch.bfloat16))
    run_ok("verify", work / "megatron", work / "back")
    # The fp8 side is compared as it converts.
    assert ferry_json("verify", fp8, work / "megatron", "--weights-only")["identical"]
    assert ferry_json("digest", fp8)["tensors"] == ferry_json("digest", work / "megatron")["tensors"]


def test_the_format_has_two_names(fp8, work):
    """MiniMax-M2 is published with the second one."""
    shutil.copytree(fp8, work / "other")
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"]["fmt"] = "float8_e4m3fn"
    (work / "other/config.json").write_text(json.dumps(config, indent=2))
    run_ok("convert", work / "other", work / "bf16", "--to", "hf")
    assert_same(work / "bf16", expected(fp8, torch.bfloat16))


def test_keeps_fp8(fp8, work):
    run_ok("convert", fp8, work / "same", "--to", "hf", "--keep-fp8")
    assert tree(work / "same") == tree(fp8)
    run_ok("convert", fp8, work / "cut", "--to", "hf", "--keep-fp8", "--max-shard-size", "60KB")
    assert hf_tensors(work / "cut") == hf_tensors(fp8)
    run_ok("verify", fp8, work / "cut", "--weights-only")
    run_ok("convert", fp8, work / "no", "--keep-fp8", code=2)


def test_an_archive_keeps_fp8_or_dequantises(fp8, work):
    run_ok("convert", fp8, work / "kept", "--to", "h5", "--keep-fp8")
    run_ok("convert", work / "kept", work / "same", "--keep-fp8")
    assert tree(work / "same") == tree(fp8)
    run_ok("convert", work / "kept", work / "back")
    run_ok("convert", fp8, work / "plain", "--to", "h5")
    run_ok("convert", work / "plain", work / "again")
    for folder in ("back", "again"):
        assert_same(work / folder, expected(fp8, torch.bfloat16))
    run_ok("convert", work / "plain", work / "no", "--keep-fp8", code=2)


def test_verify_tells_a_scale_that_changed(fp8, work):
    shutil.copytree(fp8, work / "other")
    tensors = load_file(fp8 / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    tensors[name] = tensors[name] * 2
    save_file(tensors, work / "other/model.safetensors", metadata={"format": "pt"})
    assert name in run_ok("verify", fp8, work / "other", code=1).stdout


def broken(case, tensors, config):
    name = "model.layers.0.self_attn.o_proj.weight"
    if case == "scale missing":
        del tensors[name + "_scale_inv"]
    elif case == "scale of another shape":
        tensors[name + "_scale_inv"] = tensors[name + "_scale_inv"][:1].contiguous()
    elif case == "scale without a weight":
        tensors[name] = tensors[name].to(torch.bfloat16)
    elif case == "scale transposed":
        name = "model.layers.0.mlp.up_proj.weight"  # [48, 32]
        tensors[name + "_scale_inv"] = tensors[name + "_scale_inv"].t().contiguous()
    elif case == "scale with a block too many":
        tensors[name + "_scale_inv"] = torch.cat([tensors[name + "_scale_inv"]] * 2)
    elif case == "scale of one dimension":
        tensors[name + "_scale_inv"] = tensors[name + "_scale_inv"].view(-1)
    elif case == "scale of a weight that is not there":
        del tensors[name]
    elif case == "scale of one expert missing":
        name = "model.layers.1.mlp.experts.3.up_proj.weight"
        del tensors[name + "_scale_inv"]
    elif case == "FP8 without scales or a configuration":
        del config["quantization_config"]
        for scale in [n for n in tensors if n.endswith("_scale_inv")]:
            del tensors[scale]
        return "weight: is of dtype fp8"
    elif case == "FP8 of another kind":
        tensors[name] = tensors[name].float().to(torch.float8_e5m2)
    elif case == "scale of integers":
        tensors[name + "_scale_inv"] = tensors[name + "_scale_inv"].to(torch.int32)
    elif case == "another block size":
        config["quantization_config"]["weight_block_size"] = [128, 128]
        return "model.layers"
    elif case == "block size of zero":
        config["quantization_config"]["weight_block_size"] = [0, 16]
        return "weight_block_size"
    elif case == "another method":
        config["quantization_config"]["quant_method"] = "awq"
        return "awq"
    elif case == "no configuration":
        del config["quantization_config"]
        return "fp8"
    return name


@pytest.mark.parametrize("case", ["scale missing", "scale of another shape", "scale without a weight", "scale of integers",
                                  "scale transposed", "scale with a block too many", "scale of one dimension",
                                  "scale of a weight that is not there", "scale of one expert missing",
                                  "FP8 without scales or a configuration", "FP8 of another kind",
                                  "another block size", "block size of zero", "another method", "no configuration"])
def test_inconsistent_scales_are_refused_by_name(case, fp8, work):
    shutil.copytree(fp8, work / "bad")
    tensors, config = load_file(fp8 / "model.safetensors"), json.loads((fp8 / "config.json").read_text())
    word = broken(case, tensors, config)
    save_file(tensors, work / "bad/model.safetensors", metadata={"format": "pt"})
    (work / "bad/config.json").write_text(json.dumps(config))
    done = run_ok("convert", work / "bad", work / "out", code=2)
    assert word in done.stderr
    assert str(work / "bad") in done.stderr
    assert not list(work.glob("*out*")), "something was left at the target, or beside it"


@pytest.mark.parametrize("scheme", ["blocks", "experts"])
def test_experts_in_one_tensor_have_blocks_or_scales_of_their_own(scheme, work):
    """Experts as Qwen3-VL's lie, input channels by output channels; the scales of one expert cover no other."""
    shutil.copytree(DATA / "hf_qwen3_vl_moe/hf", work / "fp8")
    shutil.copytree(DATA / "hf_qwen3_vl_moe/hf", work / "plain")
    generator = torch.Generator().manual_seed(7)
    stored = {}
    for file in sorted((work / "fp8").glob("*.safetensors")):
        stored |= load_file(file)
        for folder in ("fp8", "plain"):
            (work / folder / file.name).unlink()
    plain = dict(stored)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = stored[name].shape
        blocks = [-(-rows // BLOCK), -(-columns // BLOCK)] if scheme == "blocks" else [1, 1]
        stored[name] = torch.randn(experts, rows, columns, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand([experts, *blocks], generator=generator) + 0.5
        stored[name + "_scale_inv"] = scales
        of_each = scales if scheme == "experts" else scales.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :rows, :columns]
        plain[name] = (stored[name].float() * of_each).to(torch.bfloat16)
    save_file(stored, work / "fp8/model.safetensors", metadata={"format": "pt"})
    save_file(plain, work / "plain/model.safetensors", metadata={"format": "pt"})
    config = json.loads((work / "fp8/config.json").read_text())
    config["quantization_config"] = {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK] if scheme == "blocks" else None}
    (work / "fp8/config.json").write_text(json.dumps(config))
    run_ok("convert", work / "fp8", work / "bf16", "--to", "hf")
    assert_same(work / "bf16", plain)
    run_ok("convert", work / "fp8", work / "megatron", "--tp", 2, "--ep", 2, "--etp", 1)
    run_ok("diff", work / "megatron", work / "plain")


def test_scales_go_with_the_part_of_their_weights(fp8, work):
    part = "model.layers.1.mlp.experts.2.*"
    run_ok("convert", fp8, work / "kept", "--to", "hf", "--keep-fp8", "--include", part)
    run_ok("convert", fp8, work / "plain", "--to", "hf", "--include", part + "weight")
    names = {n for n in load_file(fp8 / "model.safetensors") if n.startswith(part[:-1])}
    assert len(names) == 6 and set(load_file(work / "kept/model.safetensors")) == names
    assert_same(work / "plain", {n: t for n, t in expected(fp8, torch.bfloat16).items() if n in names})
    for folder in ("kept", "plain"):
        run_ok("verify", fp8, work / folder, "--weights-only", "--include", part)


@pytest.mark.parametrize("layout", [["--to", "hf"], ["--tp", 2, "--ep", 2]], ids=["hf", "megatron"])
def test_the_element_that_overflows_is_named(fp8, work, layout):
    shutil.copytree(fp8, work / "hf")
    tensors = load_file(work / "hf/model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            tensor.fill_(0.5)
    name, row, column = "model.layers.1.mlp.shared_experts.down_proj.weight", 21, 19
    tensors[name + "_scale_inv"][row // BLOCK, column // BLOCK] = 1000
    block = tensors[name].view(torch.uint8)[row // BLOCK * BLOCK:, column // BLOCK * BLOCK:][:BLOCK, :BLOCK]
    block.zero_()
    block[row % BLOCK, column % BLOCK] = 0x7E
    save_file(tensors, work / "hf/model.safetensors", metadata={"format": "pt"})
    refuse("convert", work / "hf", work / "fp16", *layout, "--dtype", "fp16", words=[f"{name}: element [{row}, {column}] overflows fp16"])
