"""Weights quantised on the way to Hugging Face: bit for bit as Megatron-Bridge does it, and read by transformers."""
import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from support import DATA, refuse, run_ok

BLOCK = 128
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
STACKED = ("experts.gate_up_proj", "experts.down_proj")  # of all experts of a layer


@pytest.fixture(scope="module")
def bridge():
    path = Path(os.environ["PEERS"]) / "mb062/megatron/bridge/models/conversion/quantization_utils.py"
    spec = importlib.util.spec_from_file_location("quantization_utils", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors_of(folder):
    out = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        out |= load_file(file)
    return out


def make_moe(folder, **sizes):
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(vocab_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_experts=4,
                                         num_experts_per_tok=2, mlp_only_layers=[0], decoder_sparse_step=1, tie_word_embeddings=True,
                                         dtype="bfloat16", **sizes)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A Qwen3-MoE of several blocks and ragged ones, with a block of zeros, one of the least numbers and one of the largest."""
    folder = make_moe(tmp_path_factory.mktemp("moe") / "hf", hidden_size=272, intermediate_size=300, moe_intermediate_size=160, head_dim=68)
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.layers.0.mlp.up_proj.weight"]  # [300, 272]
    weight[:128, :128] = 0
    weight[128:256, :128] *= 1e-38
    weight[128:256, 128:256] *= 1e37
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """Hidden size and width of several bands of blocks; zeros, ties of rounding, the least and the largest numbers."""
    folder = tmp_path_factory.mktemp("oss") / "hf"
    shutil.copytree(DATA / "hf_gpt_oss/hf", folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(hidden_size=96, intermediate_size=64)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generator, out = torch.Generator().manual_seed(5), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        shape = [96 if size == 32 else size for size in tensor.shape]
        out[name] = torch.randn(shape, generator=generator).to(torch.bfloat16)
    weight = out["model.layers.0.mlp.experts.down_proj"]  # [experts, 64, 96]
    weight[0, :32] = 0
    weight[1, :32] = torch.arange(-48, 48).to(torch.bfloat16) / 8
    weight[2, :32] *= 1e-38
    weight[3, :32] *= 1e37
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def require_fp8_of(plain, quantized, bridge):
    """Each weight of `quantized` is that of `plain`, or what Megatron-Bridge makes of it; the names of those."""
    want, got = tensors_of(plain), tensors_of(quantized)
    assert {name.removesuffix(SCALE) for name in got} == set(want)
    chosen = {name for name in want if name + SCALE in got}
    for name, tensor in want.items():
        if name not in chosen:
            assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
            continue
        elements, scales = bridge.quantize_fp8_e4m3fn_like_scale(tensor, got[name + SCALE], name=name)
        assert torch.equal(got[name + SCALE], scales), name
        assert torch.equal(got[name].view(torch.uint8), elements.view(torch.uint8)), name
    return chosen


def test_fp8_is_what_megatron_bridge_makes(moe, bridge, work):
    run_ok("convert", moe, work / "fp8", "--to", "hf", "--quantize", "fp8-block")
    chosen = require_fp8_of(moe, work / "fp8", bridge)
    assert {name.split(".", 3)[3] for name in chosen if "experts" not in name} == {
        f"{part}_proj.weight" for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")}
    assert len([name for name in chosen if "experts" in name]) == 3 * 4
    config = json.loads((work / "fp8/config.json").read_text())["quantization_config"]
    assert config == {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK],
                      "modules_to_not_convert": ["model.embed_tokens", "model.layers.1.mlp.gate", "lm_head"]}


@pytest.mark.parametrize("model", ["hf_deepseek_v3", "hf_qwen3_next", "hf_glm_moe_dsa", "hf_qwen2_moe"])
def test_fp8_leaves_routers_gates_and_heads_as_they_are(model, bridge, work):
    run_ok("convert", DATA / model / "hf", work / "fp8", "--to", "hf", "--quantize", "fp8-block")
    chosen = require_fp8_of(DATA / model / "hf", work / "fp8", bridge)
    kept = ("embed", "head", "norm", "mlp.gate.", "shared_expert_gate", "eh_proj", "mtp.fc", "conv1d", "in_proj_ba", "weights_proj", "bias")
    assert chosen == {name for name in tensors_of(DATA / model / "hf") if name.endswith(".weight") and not any(part in name for part in kept)}


def test_fp8_of_a_megatron_checkpoint_is_that_of_its_weights(moe, work):
    run_ok("convert", moe, work / "megatron", "--tp", 2, "--ep", 2, "--etp", 1, "--pp", 2)
    run_ok("convert", work / "megatron", work / "from_megatron", "--quantize", "fp8-block", "--max-shard-size", "400KB")
    run_ok("convert", moe, work / "archive", "--to", "h5", "--quantize", "fp8-block")
    run_ok("convert", work / "archive", work / "from_archive", "--keep-quantized")
    run_ok("convert", moe, work / "direct", "--to", "hf", "--quantize", "fp8-block")
    want = tensors_of(work / "direct")
    for folder in ("from_megatron", "from_archive"):
        got = tensors_of(work / folder)
        assert set(got) == set(want) and all(torch.equal(got[n].view(torch.uint8), want[n].view(torch.uint8)) for n in want), folder


def make_qwen3_5_moe(folder, width):
    """Experts of each layer in one tensor, as Qwen3.5 has them in bf16."""
    torch.manual_seed(2)
    config = transformers.Qwen3_5MoeTextConfig(vocab_size=64, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                               head_dim=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=width,
                                               shared_expert_intermediate_size=128, layer_types=["full_attention", "linear_attention"],
                                               linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in tensors_of(folder))
    return folder


@pytest.fixture(scope="module")
def qwen3_5_moe(tmp_path_factory):
    return make_qwen3_5_moe(tmp_path_factory.mktemp("qwen3_5_moe") / "hf", 192)  # gate ends within a block


def test_fp8_of_experts_in_one_tensor_is_that_of_each(qwen3_5_moe, bridge, work):
    """Under the names of Qwen's own FP8 checkpoints, from the Hugging Face form and from Megatron's."""
    apart = {}
    for name, tensor in tensors_of(qwen3_5_moe).items():
        stem = name.rsplit(".", 1)[0]
        for expert in range(4):
            if name.endswith("experts.gate_up_proj"):
                for part, weight in zip(("gate", "up"), tensor[expert].chunk(2)):
                    apart[f"{stem}.{expert}.{part}_proj.weight"] = weight.contiguous()
            elif name.endswith("experts.down_proj"):
                apart[f"{stem}.{expert}.down_proj.weight"] = tensor[expert].contiguous()
            else:
                apart[name] = tensor
    shutil.copytree(qwen3_5_moe, work / "apart")
    save_file(apart, work / "apart/model.safetensors", metadata={"format": "pt"})
    run_ok("convert", qwen3_5_moe, work / "fp8", "--to", "hf", "--quantize", "fp8-block")
    chosen = require_fp8_of(work / "apart", work / "fp8", bridge)
    assert len([name for name in chosen if ".experts." in name]) == 2 * 4 * 3
    run_ok("convert", qwen3_5_moe, work / "megatron", "--tp", 2, "--ep", 2, "--etp", 1)
    run_ok("convert", work / "megatron", work / "from_megatron", "--to", "hf", "--quantize", "fp8-block")
    assert chosen == require_fp8_of(work / "apart", work / "from_megatron", bridge)


def test_fp8_of_a_part_with_experts_in_one_tensor(qwen3_5_moe, bridge, work):
    run_ok("convert", qwen3_5_moe, work / "part", "--to", "hf", "--quantize", "fp8-block", "--include", "model.layers.1.*")
    names = set(tensors_of(work / "part"))
    assert all(name.startswith("model.layers.1.") for name in names)
    assert "model.layers.1.mlp.experts.3.down_proj.weight_scale_inv" in names


def require_transformers_reads(folder, work):
    run_ok("convert", folder, work / "fp8", "--to", "hf", "--quantize", "fp8-block")
    run_ok("convert", work / "fp8", work / "bf16", "--to", "hf")
    read = transformers.AutoModelForCausalLM.from_pretrained(
        work / "fp8", dtype=torch.bfloat16, quantization_config=transformers.FineGrainedFP8Config(dequantize=True))
    again = transformers.AutoModelForCausalLM.from_pretrained(work / "bf16", dtype=torch.bfloat16)
    want = again.state_dict()
    assert set(read.state_dict()) == set(want)
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, want[name]), name


def test_transformers_reads_what_was_quantised(work):  # it reads no ragged blocks
    require_transformers_reads(make_moe(work / "moe", hidden_size=256, intermediate_size=384, moe_intermediate_size=128, head_dim=64), work)


def test_transformers_reads_experts_that_were_taken_apart(work):
    require_transformers_reads(make_qwen3_5_moe(work / "hf", 128), work)


def make_qwen3_vl_moe(folder, orientation, width=128):
    """Experts of each layer in one tensor: input channels by output channels on the hub, turned where transformers saves them."""
    torch.manual_seed(3)
    config = transformers.Qwen3VLMoeConfig.from_pretrained(DATA / "hf_qwen3_vl_moe/hf")
    config.text_config.update({"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
                               "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width})
    config.text_config.rope_parameters["mrope_section"] = [12, 10, 10]
    config.vision_config.out_hidden_size = 256
    transformers.Qwen3VLMoeForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    of_experts = [name for name in tensors if name.endswith(STACKED)]
    assert {tuple(tensors[name].shape) for name in of_experts} == {(4, 2 * width, 256), (4, 256, width)}
    if orientation == "hub":
        save_file(tensors | {name: tensors[name].mT.contiguous() for name in of_experts}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("orientation", ["hub", "transformers"])
def test_fp8_of_experts_that_stay_in_one_tensor(orientation, bridge, work, monkeypatch):
    """Qwen3-VL's, with the scales of each expert's blocks beside them, turned as they are. transformers reads the scales where it keeps FP8, which
    it does on a GPU; its modules are made here without one."""
    plain = make_qwen3_vl_moe(work / "hf", orientation)
    run_ok("convert", plain, work / "megatron", "--tp", 2, "--ep", 2, "--etp", 1)
    for source, folder in ((plain, "fp8"), (work / "megatron", "from_megatron")):
        run_ok("convert", source, work / folder, "--to", "hf", "--quantize", "fp8-block")
    want, got, second = (tensors_of(work / folder) for folder in ("hf", "fp8", "from_megatron"))
    assert set(got) == set(second) and all(torch.equal(got[n].view(torch.uint8), second[n].view(torch.uint8)) for n in got)
    assert len([name for name in got if name.endswith(STACKED)]) == 2 * 2
    for name in [name for name in got if name.endswith(STACKED)]:
        for expert, weight in enumerate(want[name]):
            elements, scales = bridge.quantize_fp8_e4m3fn_like_scale(weight, got[name + SCALE][expert], name=name)
            assert torch.equal(got[name + SCALE][expert], scales), name
            assert torch.equal(got[name][expert].view(torch.uint8), elements.view(torch.uint8)), name

    run_ok("convert", work / "fp8", work / "bf16", "--to", "hf")
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *arguments, **named: None)
    read, info = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(work / "fp8", dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values()), info
    again = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(work / "bf16", dtype=torch.bfloat16).state_dict()
    read = read.state_dict()
    assert set(again) == {name for name in read if not name.endswith(SCALE)}
    for name, tensor in again.items():
        stored = read[name]
        if name + SCALE in read:
            of_each = read[name + SCALE].repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
            stored = (stored.float() * of_each[..., :stored.shape[-2], :stored.shape[-1]]).to(torch.bfloat16)
        assert torch.equal(stored, tensor), name


def test_fp8_of_experts_whose_gate_ends_within_a_block_is_refused(work):
    refuse("convert", make_qwen3_vl_moe(work / "hf", "hub", 192), work / "no", "--to", "hf", "--quantize", "fp8-block",
           words=["experts.gate_up_proj", "[4, 256, 384]", "192", "multiple of 128"])


def require_mxfp4_of(plain, quantized, bridge):
    want, got = tensors_of(plain), tensors_of(quantized)
    for name, tensor in want.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            assert torch.equal(got.pop(name), tensor), name
            continue
        blocks, scales = got.pop(name + BLOCKS), got.pop(name + SCALES)
        for expert, weight in enumerate(tensor):
            like = torch.empty(scales[expert].shape, dtype=torch.float8_e8m0fnu)
            elements, exponents = bridge.quantize_mxfp4_e2m1_like_scale(weight.T.contiguous(), like, name=name)
            assert torch.equal(scales[expert], exponents.view(torch.uint8)), (name, expert)
            assert torch.equal(blocks[expert].flatten(1), elements.view(torch.uint8)), (name, expert)
    assert not got


def test_mxfp4_is_what_megatron_bridge_makes(gpt_oss, bridge, work):
    run_ok("convert", gpt_oss, work / "mxfp4", "--to", "hf", "--quantize", "mxfp4")
    require_mxfp4_of(gpt_oss, work / "mxfp4", bridge)
    assert json.loads((work / "mxfp4/config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    run_ok("convert", gpt_oss, work / "megatron", "--tp", 2, "--ep", 3, "--etp", 1)
    run_ok("convert", work / "megatron", work / "from_megatron", "--quantize", "mxfp4")
    require_mxfp4_of(gpt_oss, work / "from_megatron", bridge)


def test_values_of_mxfp4_stay_what_they_are(gpt_oss, work):
    """Dequantised as transformers does it, and quantised again."""
    run_ok("convert", gpt_oss, work / "mxfp4", "--to", "hf", "--quantize", "mxfp4")
    run_ok("convert", work / "mxfp4", work / "again", "--to", "hf", "--quantize", "mxfp4")
    first, again = tensors_of(work / "mxfp4"), tensors_of(work / "again")
    for name in [name.removesuffix(BLOCKS) for name in first if name.endswith(BLOCKS)]:
        values = [convert_moe_packed_tensors(t[name + BLOCKS], t[name + SCALES]) for t in (first, again)]
        assert torch.equal(*values), name


def test_what_cannot_be_is_refused(moe, gpt_oss, work):
    to_hf = ["--to", "hf", "--quantize"]
    refuse("convert", moe, work / "no", "--quantize", "fp8-block", words=["--quantize", "no place"])
    refuse("convert", moe, work / "no", *to_hf, "mxfp4", words=["mxfp4", "GPT-OSS"])
    refuse("convert", gpt_oss, work / "no", *to_hf, "fp8-block", words=["fp8-block", "gate_up_proj", "one tensor"])
    refuse("convert", moe, work / "no", *to_hf, "fp8-block", "--keep-quantized", words=["--quantize", "exclude each other"])
    shutil.copytree(moe, work / "bad")
    tensors = load_file(moe / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][7, 9] = float("inf")
    save_file(tensors, work / "bad/model.safetensors", metadata={"format": "pt"})
    refuse("convert", work / "bad", work / "no", *to_hf, "fp8-block", words=["layers.1.self_attn.k_proj.weight", "inf"])
