"""Adapters merged into blocks of FP8 that stay in FP8, with PEFT's merge in fp32 as the judge."""
import json
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import FERRY, ferry_json, hf_tensors, llama_config, llama_shapes, random_tensors, refuse, run_ok, tree, write_hf
from test_merge import ALL, make_adapter

CONFIG = llama_config(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                      vocab_size=300)
BLOCK = (16, 32)  # small, ragged at the end of 176 columns
SCALE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "powers": torch.float32, "exponents": torch.float8_e8m0fnu}
PROJECTIONS = [name for name, *_ in llama_shapes(CONFIG).items() if name.endswith("_proj.weight")]


def blocks_of(tensor):
    """-> a view of each block's elements, by row and column of blocks"""
    return [[tensor[r:r + BLOCK[0], c:c + BLOCK[1]] for c in range(0, tensor.shape[1], BLOCK[1])] for r in range(0, tensor.shape[0], BLOCK[0])]


def spread(scales, shape):
    return scales.float().repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[:shape[0], :shape[1]]


def quantize(weight, kind, room):
    """[rows, columns] -> codes, scales; `room` is how much larger elements may become by the same scale"""
    largest = torch.tensor([[block.abs().max() for block in row] for row in blocks_of(weight.float())])
    scales = largest * room / 448
    if kind in ("powers", "exponents"):
        scales = 2.0 ** torch.ceil(torch.log2(scales))
    scales = scales.to(SCALE_DTYPES[kind])
    return (weight.float() / spread(scales, weight.shape)).to(torch.float8_e4m3fn), scales


def write_base(folder, kind, room=2.0):
    """The same model in blocks of FP8 and dequantised to fp32: folder/fp8, folder/fp32."""
    write_hf(folder / "bf16", CONFIG, random_tensors(llama_shapes(CONFIG)))
    tensors = load_file(folder / "bf16/model.safetensors")
    fp8, fp32 = {}, {}
    for name, tensor in tensors.items():
        fp8[name], fp32[name] = tensor, tensor.float()
        if name in PROJECTIONS:
            fp8[name], fp8[name + "_scale_inv"] = quantize(tensor, kind, room)
            fp32[name] = fp8[name].float() * spread(fp8[name + "_scale_inv"], tensor.shape)
    how = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
    for name, config, data in (("fp8", {**CONFIG, "quantization_config": how}, fp8), ("fp32", {**CONFIG, "dtype": "float32"}, fp32)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file(data, folder / name / "model.safetensors", metadata={"format": "pt"})
    return folder / "fp8"


def ordinals(codes):
    bits = codes.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


def judge(work, adapted, rescales):
    """The merged checkpoint beside PEFT's, quantised by the base's scales. -> elements that changed, that vanished, blocks rescaled"""
    before, found = load_file(work / "fp8/model.safetensors"), load_file(work / "merged/model.safetensors")
    merged = {name: tensor.detach() for name, tensor in adapted.merge_and_unload().state_dict().items()}
    start = load_file(work / "fp32/model.safetensors")
    assert found.keys() == before.keys()
    changed = vanished = rescaled = elements = 0
    for name in PROJECTIONS:
        scales, old = found[name + "_scale_inv"], before[name + "_scale_inv"]
        assert found[name].dtype == torch.float8_e4m3fn and scales.dtype == old.dtype
        beyond = torch.tensor([[(block.abs().max() > 464 * scale).item() for block, scale in zip(*row)]
                               for row in zip(blocks_of(merged[name]), old.float())])
        other = scales.float() != old.float()
        assert torch.equal(beyond, other), name
        for r, c in other.nonzero().tolist():
            largest = blocks_of(merged[name])[r][c].abs().max()
            want = (largest / 448).to(scales.dtype).float() if rescales == "largest" else 2.0 ** torch.ceil(torch.log2(largest / 448))
            torch.testing.assert_close(scales[r, c].float(), want, rtol=1e-5 if scales.dtype == torch.float32 else 2 ** -8, atol=0)
        want = (merged[name] / spread(scales, merged[name].shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
        steps = (ordinals(found[name]) - ordinals(want)).abs()
        assert steps.max() <= 1 and (steps > 0).double().mean() < 2e-3, name
        value = found[name].float() * spread(scales, want.shape)
        stays = value == start[name]
        changed += (~stays).sum().item()
        vanished += (stays & (merged[name] != start[name])).sum().item()
        rescaled += other.sum().item()
        elements += stays.numel()
    return elements, changed, vanished, rescaled


@pytest.mark.parametrize("kind", SCALE_DTYPES)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_codes_are_those_of_peft_quantised_by_the_scales_of_the_base(work, kind, dora):
    write_base(work, kind, room=1.0)
    adapted = make_adapter(work / "fp32", work / "adapter", torch.float32, r=8, lora_alpha=128, target_modules=ALL, use_dora=dora)
    report = ferry_json("merge", work / "fp8", work / "adapter", work / "merged", "--keep-quantized")["adapter"]
    elements, changed, vanished, rescaled = judge(work, adapted, "power" if kind in ("powers", "exponents") else "largest")
    assert (rescaled > 0) != (dora and kind in ("powers", "exponents"))  # which have room for rows of the same length
    assert report["rescaled"] == rescaled and report["elements"] == elements
    assert abs(report["changed"] - changed) <= 1e-3 * elements and abs(report["vanished"] - vanished) <= 1e-3 * elements
    assert report["changed"] > report["vanished"]


def test_what_the_adapter_leaves_alone_is_copied(work):
    write_base(work, "fp32")
    make_adapter(work / "fp32", work / "adapter", torch.float32, r=8, lora_alpha=64, target_modules=["q_proj"])
    run_ok("merge", work / "fp8", work / "adapter", work / "merged", "--keep-fp8")
    before, after = hf_tensors(work / "fp8"), hf_tensors(work / "merged")
    differ = {name for name in before if before[name] != after[name]}
    assert differ and all("q_proj.weight" in name for name in differ) and before.keys() == after.keys()
    run_ok("merge", work / "fp8", work / "adapter", work / "archive", "--keep-fp8", "--to", "h5")
    run_ok("convert", work / "archive", work / "again", "--keep-fp8")
    assert tree(work / "again") == tree(work / "merged")


def stop_while_copying(work):
    """Leaves the working folder of a merge that was killed, with zeros for what it had written."""
    command = [FERRY, "merge", work / "fp8", work / "adapter", work / "merged", "--keep-quantized", "--threads", "1"]
    for _ in range(20):
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while run.poll() is None and not any(journal.stat().st_size > 100 for journal in work.glob(".*.ferry/journal")):
            pass
        run.kill()
        run.wait()
        if not (work / "merged").exists():
            break
        shutil.rmtree(work / "merged")
    written = work / ".merged.ferry/output/model.safetensors"
    written.write_bytes(bytes(written.stat().st_size))


def test_a_run_whose_leftovers_are_damaged_begins_anew(work):
    write_base(work, "fp32")
    make_adapter(work / "fp32", work / "adapter", torch.float32, r=8, lora_alpha=64, target_modules=ALL)
    stop_while_copying(work)
    again = ferry_json("merge", work / "fp8", work / "adapter", work / "merged", "--keep-quantized", "--resume")
    assert again["redone"]
    whole = ferry_json("merge", work / "fp8", work / "adapter", work / "whole", "--keep-quantized")
    assert again["adapter"] == whole["adapter"] and tree(work / "merged") == tree(work / "whole")


def test_an_adapter_that_fp8_cannot_hold_is_refused_unless_asked_for(work):
    write_base(work, "fp32")
    adapted = make_adapter(work / "fp32", work / "adapter", torch.float32, r=8, lora_alpha=0.05, target_modules=ALL)
    said = refuse("merge", work / "fp8", work / "adapter", work / "merged", "--keep-quantized", words=["changes", "--allow-vanished", "bf16"])
    assert not (work / "merged").exists()
    report = ferry_json("merge", work / "fp8", work / "adapter", work / "merged", "--keep-quantized", "--allow-vanished")["adapter"]
    _, changed, _, rescaled = judge(work, adapted, "largest")
    assert rescaled == report["rescaled"] == 0 and report["changed"] == changed < report["vanished"]
    assert f"leaves {report['vanished']} elements" in said


def test_an_adapter_of_zeros_changes_nothing(work):
    write_base(work, "fp32")
    make_adapter(work / "fp32", work / "adapter", torch.float32, r=2, lora_alpha=4, target_modules=["q_proj"])
    path = work / "adapter/adapter_model.safetensors"
    save_file({name: tensor * ("lora_B" not in name) for name, tensor in load_file(path).items()}, path)
    refuse("merge", work / "fp8", work / "adapter", work / "merged", "--keep-quantized", words=["has 0 of 0 changes"])
    run_ok("merge", work / "fp8", work / "adapter", work / "merged", "--keep-quantized", "--allow-vanished")
    assert tree(work / "merged") == tree(work / "fp8")


def test_options_that_have_no_effect(work):
    write_base(work, "fp32")
    make_adapter(work / "fp32", work / "adapter", torch.float32, r=2, lora_alpha=4, target_modules=["q_proj"])
    refuse("merge", work / "fp8", work / "adapter", work / "out", "--allow-vanished", words=["--allow-vanished", "--keep-quantized"])
    refuse("merge", work / "bf16", work / "adapter", work / "out", "--keep-quantized", words=["--keep-quantized", "no FP8"])
    refuse("merge", work / "fp8", work / "adapter", work / "out", "--keep-quantized", "--to", "megatron", words=["Megatron-Core"])


@pytest.mark.parametrize("what", ["nan", "scale", "whole"])
def test_weights_that_cannot_be_changed_are_named(work, what):
    base = write_base(work, "fp32")
    make_adapter(work / "fp32", work / "adapter", torch.float32, r=2, lora_alpha=4, target_modules=["q_proj"])
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors = load_file(base / "model.safetensors")
    if what == "nan":
        tensors[name].view(torch.uint8)[3, 5] = 0x7F
    elif what == "scale":
        tensors[name + "_scale_inv"][1, 1] = -1
    else:
        tensors = {n: torch.tensor(0.5) if n.endswith("_scale_inv") else t for n, t in tensors.items()}
        config = json.loads((base / "config.json").read_text())
        del config["quantization_config"]["weight_block_size"]
        (base / "config.json").write_text(json.dumps(config))
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    word = {"nan": "not finite", "scale": "negative", "whole": "blocks"}[what]
    refuse("merge", base, work / "adapter", work / "out", "--keep-quantized", words=["q_proj.weight", word])
    assert not (work / "out").exists()
