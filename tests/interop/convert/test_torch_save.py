"""Ferry reads Hugging Face checkpoints that torch.save wrote: pytorch_model.bin, one or many with an index."""
import collections
import json
import shlex
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

from support import DATA, described, digest_of, ferry, ferry_json, hf_tensors, refuse_to_convert, run_ok

MODELS = ["llama", "qwen2", "qwen2_tied", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"]


def hf(model):
    return DATA / f"hf_{model}/hf"


def weights(model):
    return load_file(hf(model) / "model.safetensors")


def write_bin(folder, model, tensors, parts=1, **how):
    """Writes the model as save_pretrained did before safetensors."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json"):
        shutil.copy(hf(model) / name, folder)
    if parts == 1:
        torch.save(tensors, folder / "pytorch_model.bin", **how)
        return folder
    names, weight_map = list(tensors), {}
    for i in range(parts):
        file = f"pytorch_model-{i + 1:05d}-of-{parts:05d}.bin"
        part = names[len(names) * i // parts:len(names) * (i + 1) // parts]
        torch.save({n: tensors[n] for n in part}, folder / file, **how)
        weight_map |= {n: file for n in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_holds_the_same_weights_as_safetensors(model, parts, work):
    source = write_bin(work / "bin", model, weights(model), parts)
    assert digest_of(source) == digest_of(hf(model))
    run_ok("verify", source, hf(model))


def test_converts_to_megatron_and_to_safetensors(work):
    source = write_bin(work / "bin", "llama", weights("llama"), 2)
    run_ok("convert", source, work / "megatron", "--tp", 2)
    run_ok("convert", work / "megatron", work / "back")
    assert described(hf_tensors(work / "back")) == described(hf_tensors(hf("llama")))
    assert (work / "back/config.json").read_bytes() == (hf("llama") / "config.json").read_bytes()
    run_ok("convert", source, work / "safetensors", "--to", "hf")
    assert described(hf_tensors(work / "safetensors")) == described(hf_tensors(hf("llama")))


def test_inspect_lists_the_tensors(work):
    report = ferry_json("inspect", write_bin(work / "bin", "qwen3", weights("qwen3"), 2))
    assert {t["name"]: t["shape"] for t in report["tensors"]} == {n: list(t.shape) for n, t in weights("qwen3").items()}


def test_the_configuration_may_be_named(work):
    source = write_bin(work / "bin", "llama", weights("llama"))
    done = ferry("digest", source, "--hf-config", hf("llama"))  # has its own, as every Hugging Face folder
    assert done.returncode == 2 and "has its own config.json" in done.stderr
    (source / "config.json").unlink()
    assert digest_of(source, "--hf-config", hf("llama")) == digest_of(hf("llama"))
    done = ferry("convert", source, work / "out")
    assert done.returncode == 2 and "--hf-config" in done.stderr


def test_views_parameters_and_ordered_dictionaries(work):
    """Real files hold parameters, tensors that share a storage, views at an offset, transposed ones, a tied head."""
    tensors = weights("qwen2_tied")
    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    both = torch.cat([tensors[q], tensors[k]])
    tensors[q], tensors[k] = both[:tensors[q].shape[0]], both[tensors[q].shape[0]:]
    down = "model.layers.1.mlp.down_proj.weight"
    tensors[down] = tensors[down].t().contiguous().t()
    up = "model.layers.1.mlp.up_proj.weight"
    wide = torch.zeros(tensors[up].shape[0], 100, dtype=torch.bfloat16)
    wide[:, 7:7 + tensors[up].shape[1]] = tensors[up]
    tensors[up] = wide[:, 7:7 + tensors[up].shape[1]]
    norm = "model.norm.weight"
    tensors[norm] = torch.nn.Parameter(tensors[norm])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    ordered = collections.OrderedDict(tensors)
    ordered._metadata = {"": {"version": 1}}
    source = write_bin(work / "bin", "qwen2_tied", ordered)
    assert digest_of(source) == digest_of(hf("qwen2_tied"))


def test_expanded_tensors(work):
    """torch.save keeps one row of such a tensor, one column, or a single element."""
    tensors = weights("llama")
    tensors["model.norm.weight"] = torch.ones(1, dtype=torch.bfloat16).expand(32)
    row, column, one = (f"model.layers.{i}.mlp.up_proj.weight" for i in range(3))
    shape = tensors[row].shape
    tensors[row] = tensors[row][:1].clone().expand(shape)
    tensors[column] = tensors[column][:, :1].clone().expand(shape)
    tensors[one] = tensors[one][:1, :1].clone().expand(shape)
    source = write_bin(work / "bin", "llama", tensors)
    whole = write_bin(work / "whole", "llama", {n: t.contiguous() for n, t in tensors.items()})
    assert (source / "pytorch_model.bin").stat().st_size < (whole / "pytorch_model.bin").stat().st_size
    assert digest_of(source) == digest_of(whole)
    run_ok("convert", source, work / "megatron", "--tp", 2)
    run_ok("verify", source, work / "megatron")
    run_ok("diff", source, work / "megatron")


def test_a_tied_head_that_differs_is_untied(work):
    tensors = weights("qwen2_tied")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"].view(torch.int16)[3, 5] ^= 1
    source = write_bin(work / "bin", "qwen2_tied", tensors)
    run_ok("convert", source, work / "megatron", "--tp", 2)
    run_ok("convert", work / "megatron", work / "back")
    back = load_file(work / "back/model.safetensors")
    assert all(torch.equal(back[n], t) for n, t in tensors.items())
    assert json.loads((work / "back/config.json").read_text())["tie_word_embeddings"] is False


def test_rotary_frequencies_travel_as_they_do_from_safetensors(work):
    tensors = weights("llama")
    frequencies = 1.0 / 500000.0 ** (torch.arange(0, 8, 2).float() / 8)
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": frequencies for i in range(4)}
    source = write_bin(work / "bin", "llama", tensors)
    assert digest_of(source)[0] == digest_of(hf("llama"))[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes(work, dtype):
    tensors = {n: t.to(dtype) for n, t in weights("llama").items()}
    source = write_bin(work / "bin", "llama", tensors)
    run_ok("convert", source, work / "out", "--to", "hf")
    got = load_file(work / "out/model.safetensors")
    assert all(torch.equal(got[n], t) and got[n].dtype == dtype for n, t in tensors.items())


# ---------------------------------------------------------------------------------------------------------- bad input


def test_the_format_before_torch_1_6_is_refused_with_the_way_out(work, monkeypatch):
    source = write_bin(work / "bin", "llama", weights("llama"), _use_new_zipfile_serialization=False)
    said = refuse_to_convert(work, source, "pytorch_model.bin", "torch 1.6", "python3 -c")
    code, path = shlex.split(said.split("python3 -c ")[1])
    monkeypatch.setattr(sys, "argv", ["-c", path])
    exec(code, {})
    assert digest_of(source) == digest_of(hf("llama"))


class Harmful:
    def __reduce__(self):
        import os
        return os.system, ("touch harmed",)


def test_a_foreign_global_is_named_and_not_run(work):
    tensors = weights("llama")
    tensors["model.norm.weight"] = Harmful()
    source = write_bin(work / "bin", "llama", tensors)
    refuse_to_convert(work, source, "posix.system", "nothing was executed", "python3 -c")
    assert not (source / "harmed").exists()


def index_with(source, change):
    path = source / "pytorch_model.bin.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_a_missing_part_is_named(work):
    source = write_bin(work / "bin", "llama", weights("llama"), 3)
    (source / "pytorch_model-00002-of-00003.bin").unlink()
    refuse_to_convert(work, source, "pytorch_model-00002-of-00003.bin", "not there")


def test_parts_without_an_index_are_refused(work):
    source = write_bin(work / "bin", "llama", weights("llama"), 3)
    (source / "pytorch_model.bin.index.json").unlink()
    refuse_to_convert(work, source, "pytorch_model.bin.index.json")


@pytest.mark.parametrize("name", ["../bin/pytorch_model-00001-of-00003.bin", "/etc/passwd", ".."])
def test_a_path_that_leaves_the_folder_is_refused(work, name):
    source = write_bin(work / "bin", "llama", weights("llama"), 3)
    index_with(source, lambda m: m.update({"model.norm.weight": name}))
    refuse_to_convert(work, source, "not a plain name")


def test_an_index_that_lies_is_refused(work):
    source = write_bin(work / "bin", "llama", weights("llama"), 3)
    index_with(source, lambda m: m.update({"model.norm.weight": "pytorch_model-00001-of-00003.bin"}))
    refuse_to_convert(work, source, "model.norm.weight")


@pytest.mark.parametrize("change, words", [
    (lambda t: t.pop("model.norm.weight"), ["model.norm.weight is missing"]),
    (lambda t: t.update({"model.norm.weight": torch.ones(31)}), ["model.norm.weight", "[31]", "[32]"]),
    (lambda t: t.update({"model.extra": torch.ones(31)}), ["model.extra", "no rule"]),
    (lambda t: t.update({"model.norm.weight": 7}), ["model.norm.weight", "not a tensor"]),
    (lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int64)}), ["model.norm.weight", "dtype"]),
    (lambda t: t.update({"model.norm.weight": torch.ones(32).to_sparse()}), ["torch._utils._rebuild_sparse_tensor"]),
    (lambda t: t.update({"model.norm.weight": torch.quantize_per_tensor(torch.ones(32), 1, 0, torch.qint8)}), ["pytorch_model.bin"]),
], ids=["missing", "shape", "surplus", "number", "integers", "sparse", "quantized"])
def test_tensors_that_do_not_fit_are_named(work, change, words, monkeypatch):
    # pickle looks for the module of a quantisation scheme and asks every module that any test has imported; transformers' import others then.
    for module in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, module)
    tensors = weights("llama")
    change(tensors)
    refuse_to_convert(work, write_bin(work / "bin", "llama", tensors), *words)


@pytest.mark.parametrize("cut", [0, 10, 5000, -1, -100])
def test_a_truncated_file_is_named(work, cut):
    source = write_bin(work / "bin", "llama", weights("llama"))
    path = source / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:cut])
    refuse_to_convert(work, source, "pytorch_model.bin")


@pytest.mark.parametrize("model, name", [("llama", "model.norm.weight"), ("qwen2_tied", "model.embed_tokens.weight")])
def test_a_flipped_bit_is_found_by_the_checksum(work, model, name):
    """Also where two tensors share the bytes."""
    tensors = weights(model)
    if model == "qwen2_tied":
        tensors["lm_head.weight"] = tensors[name]
    source = write_bin(work / "bin", model, tensors)
    path = source / "pytorch_model.bin"
    data = bytearray(path.read_bytes())
    data[data.index(tensors[name].view(torch.uint8).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)
    refuse_to_convert(work, source, "pytorch_model.bin", "CRC-32")


def test_a_list_is_no_state(work):
    source = write_bin(work / "bin", "llama", [1, 2])
    refuse_to_convert(work, source, "pytorch_model.bin", "dict")
