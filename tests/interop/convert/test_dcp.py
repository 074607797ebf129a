"""Ferry reads sharded checkpoints of torch.distributed.checkpoint, written by real torch on four ranks."""
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from sharded_runs import OF_MODULES, sharded_runs
from support import DATA, described, digest_of, ferry_json, hf_tensors, refuse_to_convert, run_ok

HF_NAMES = {"dcp_flat": "llama", "dcp_model": "llama", "dcp_nested": "llama", "dcp_fsdp1_llama": "llama",
            "dcp_fsdp1_mesh_llama": "llama", "dcp_grid": "qwen2_moe", **{f"dcp_of_{model}": model for model in OF_MODULES}}
MEGATRON_NAMES = {"torch_dcp": "llama", "fsdp_dtensor_llama": "llama", "fsdp_dtensor_qwen2_moe": "qwen2_moe"}


def hf(model):
    return DATA / f"hf_{model}/hf"


@pytest.mark.parametrize("case, model", {**HF_NAMES, **MEGATRON_NAMES}.items())
def test_holds_the_weights_that_were_sharded(case, model):
    """FSDP1 and FSDP2, keys flattened from any depth, rows that do not divide, a grid of rows and columns, Megatron's names."""
    assert digest_of(sharded_runs() / case, "--hf-config", hf(model)) == digest_of(hf(model))


def test_hugging_face_names_are_converted_to_megatron_and_back(work):
    source = work / "dcp"
    shutil.copytree(sharded_runs() / "dcp_model", source)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(hf("llama") / name, source)
    report = ferry_json("convert", source, work / "megatron", "--tp", 2)
    assert report["source"]["format"] == "torch_dcp" and report["target"]["format"] == "torch_dist"
    assert report["training_state_left_out"] >= 5
    run_ok("convert", work / "megatron", work / "back")
    assert described(hf_tensors(work / "back")) == described(hf_tensors(hf("llama")))
    assert (work / "back/config.json").read_bytes() == (hf("llama") / "config.json").read_bytes()
    assert not (work / "back/.metadata").exists()
    run_ok("verify", source, hf("llama"))


def test_megatron_names_are_converted_to_hugging_face(work):
    report = ferry_json("convert", sharded_runs() / "fsdp_dtensor_qwen2_moe", work / "hf", "--hf-config", hf("qwen2_moe"))
    assert report["target"]["format"] == "huggingface"
    assert described(hf_tensors(work / "hf")) == described(hf_tensors(hf("qwen2_moe")))


def test_the_arguments_of_torch_dcp_say_which_model_it_is(work):
    assert digest_of(sharded_runs() / "torch_dcp") == digest_of(hf("llama"))
    run_ok("convert", sharded_runs() / "torch_dcp", work / "out", "--to", "megatron", "--pp", 2)
    assert (work / "out/iter_0000010/.metadata").exists()
    run_ok("verify", work / "out", hf("llama"))


def test_inspect_lists_tensors_and_chunks():
    report = ferry_json("inspect", sharded_runs() / "dcp_flat", "--hf-config", hf("llama"))
    names = {t["name"]: t for t in report["tensors"]}
    assert names["model.embed_tokens.weight"]["shape"] == [250, 32]
    assert [c["sizes"] for c in names["model.embed_tokens.weight"]["chunks"]] == [[63, 32], [63, 32], [63, 32], [61, 32]]


# ---------------------------------------------------------------------------------------------------------- bad input


def refuse(work, source, *words, options=("--hf-config", hf("llama"))):
    refuse_to_convert(work, source, *words, options=options)


def copied(work, case="dcp_model"):
    shutil.copytree(sharded_runs() / case, work / case)
    return work / case


def test_a_configuration_is_asked_for(work):
    refuse(work, sharded_runs() / "dcp_flat", "config.json", "--hf-config", options=())


def test_a_missing_file_is_named(work):
    source = copied(work)
    (source / "__2_0.distcp").unlink()
    refuse(work, source, "__2_0.distcp")


@pytest.mark.parametrize("file", ["__1_0.distcp", ".metadata"])
def test_a_truncated_file_is_named(work, file):
    source = copied(work)
    data = (source / file).read_bytes()
    (source / file).write_bytes(data[:len(data) // 2])
    refuse(work, source, file)


def test_an_interrupted_save_of_megatron_is_not_taken_for_one(work):
    shutil.copytree(DATA / "llama_tp1/iter_0000010", work / "iter_0000010")
    (work / "iter_0000010/metadata.json").unlink()
    refuse(work, work / "iter_0000010", "metadata.json", "not whole", options=())


def save(work, state):
    dcp.save(state, checkpoint_id=work / "saved")
    return work / "saved"


def weights():
    return load_file(hf("llama") / "model.safetensors")


def test_a_missing_tensor_is_named(work):
    state = weights()
    del state["model.norm.weight"]
    refuse(work, save(work, {"model": state}), "model.norm.weight is missing")


def test_a_surplus_tensor_is_named(work):
    refuse(work, save(work, {"model": {**weights(), "model.extra": torch.ones(3)}}), "model.extra", "no rule")


def test_tensors_beside_the_model_are_no_part_of_it_unless_it_is_flat(work):
    refuse(work, save(work, {**weights(), "extra": torch.ones(3)}), "extra", "no rule")


def test_a_tensor_of_another_shape_is_named(work):
    refuse(work, save(work, {"model": {**weights(), "model.norm.weight": torch.ones(31)}}), "model.norm.weight", "[31]", "[32]")


def test_two_models_are_refused(work):
    refuse(work, save(work, {"model": weights(), "ema": weights()}), "several models", "ema.", "model.")


def test_names_of_other_trainers_are_refused(work):
    refuse(work, save(work, {"tok_embeddings.weight": torch.ones(4, 4)}), "embed_tokens", "only the names")


def test_chunks_that_leave_a_hole_are_refused(work):
    """The last rank's chunk of a tensor is gone from .metadata."""
    source = copied(work, "dcp_flat")
    metadata = dcp.FileSystemReader(source).read_metadata()
    name = "model.embed_tokens.weight"
    chunk = metadata.state_dict_metadata[name].chunks.pop()
    metadata.storage_data.pop(next(k for k in metadata.storage_data if k.fqn == name and k.offset == chunk.offsets))
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    refuse(work, source, name, "0 times")
