"""Ferry reads Megatron's legacy checkpoints: a file of torch.save for each model parallel rank."""
import argparse
import json
import shlex
import shutil
import sys

import pytest
import torch

from support import DATA, described, digest_of, ferry, ferry_json, hf_tensors, iteration_folder, refuse_to_convert, run_ok

CASES = sorted(p.parent.name for p in (DATA / "legacy").glob("*/sha256.json"))


def hf_of(case):
    return DATA / json.loads((DATA / "legacy" / case / "sha256.json").read_text())["hf_dir"]


@pytest.mark.parametrize("case", CASES)
def test_holds_the_weights_that_megatron_core_saved(case, work):
    """Two layer specs, experts in both namings, tied heads, uneven stages, expert parallel ranks that are tensor parallel ones too."""
    hf = hf_of(case)
    source = DATA / "legacy" / case
    assert digest_of(source, "--hf-config", hf) == digest_of(hf)
    run_ok("convert", source, work / "hf", "--hf-config", hf)
    assert described(hf_tensors(work / "hf")) == json.loads((source / "sha256.json").read_text())["hf"]
    run_ok("convert", iteration_folder(source), work / "megatron", "--to", "megatron", "--tp", 2, "--hf-config", hf)
    run_ok("verify", work / "megatron", hf)


@pytest.mark.parametrize("case", [c for c in CASES if not c.startswith("deepseek")])
def test_the_arguments_say_which_model_it_is(case):
    assert digest_of(DATA / "legacy" / case) == digest_of(hf_of(case))


def test_inspect_says_how_it_was_saved():
    report = ferry_json("inspect", DATA / "legacy/llama_legacy_tp2pp2")
    names = {t["name"]: t for t in report["tensors"]}
    assert names["decoder.layers.3.mlp.linear_fc1.weight"]["shape"] == [96, 32]
    assert len(names["decoder.layers.3.mlp.linear_fc1.weight"]["chunks"]) == 4, "two halves of two ranks"
    text = run_ok("inspect", DATA / "legacy/llama_legacy_tp2pp2").stdout
    assert "saved with  TP2 PP2 EP1" in text and "Megatron legacy" in text


# ---------------------------------------------------------------------------------------------------- other spellings


class Legacy:
    """A copy of a checkpoint whose files can be edited with torch."""

    def __init__(self, work, case="llama_legacy_tp2pp2"):
        self.path = work / case
        shutil.copytree(DATA / "legacy" / case, self.path)
        self.folder = iteration_folder(self.path)

    def file(self, rank):
        return self.folder / f"mp_rank_{rank}" / "model_optim_rng.pt"

    def edit(self, rank, change):
        state = torch.load(self.file(rank), weights_only=False)
        change(state)
        torch.save(state, self.file(rank))

    def edit_all(self, change):
        for folder in self.folder.iterdir():
            self.edit(folder.name.removeprefix("mp_rank_"), change)


def test_chunks_of_interleaved_stages_count_on_through_the_pipeline(work):
    """Stage 0 holds layers 0 and 2, stage 1 layers 1 and 3: as model0 and model1."""
    legacy = Legacy(work)
    models = {}
    for tp in (0, 1):
        for pp in (0, 1):
            models[tp, pp] = torch.load(legacy.file(f"{tp:02d}_{pp:03d}"), weights_only=False)["model"]
    for tp in (0, 1):
        def layer(i, tp=tp):  # as layer 0
            model = models[tp, i // 2]
            prefix = f"decoder.layers.{i % 2}."
            return {k.replace(prefix, "decoder.layers.0."): v for k, v in model.items() if k.startswith(prefix)}
        rest = {pp: {k: v for k, v in models[tp, pp].items() if "decoder.layers." not in k} for pp in (0, 1)}
        for pp, chunks in ((0, ({**rest[0], **layer(0)}, layer(2))), (1, (layer(1), {**layer(3), **rest[1]}))):
            def change(state, chunks=chunks):
                del state["model"]
                state["model0"], state["model1"] = chunks
                state["args"].virtual_pipeline_model_parallel_size = 2
            legacy.edit(f"{tp:02d}_{pp:03d}", change)
    assert digest_of(legacy.path) == digest_of(DATA / "hf_llama/hf")


def test_stages_of_any_length(work):
    """The files' tensors say which stage has which layers."""
    legacy = Legacy(work)
    moved = {}
    for tp in (0, 1):
        def take(state, tp=tp):
            model = state["model"]
            moved[tp] = {k: model.pop(k) for k in list(model) if k.startswith("decoder.layers.1.")}
        legacy.edit(f"{tp:02d}_000", take)
        def put(state, tp=tp):
            model = state["model"]
            later = {f"decoder.layers.{int(k.split('.')[2]) + 1}.{k.split('.', 3)[3]}": model.pop(k)
                     for k in list(model) if k.startswith("decoder.layers.")}
            first = {k.replace("layers.1.", "layers.0."): v for k, v in moved[tp].items()}
            state["model"] = {**first, **later, **model}
        legacy.edit(f"{tp:02d}_001", put)
    assert digest_of(legacy.path) == digest_of(DATA / "hf_llama/hf")


def test_wrappers_and_training_state_are_left_out(work):
    legacy = Legacy(work)

    def change(state):
        state["model"] = {"module.module." + k: v for k, v in state["model"].items()}
        state["optimizer"] = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}
        state["opt_param_scheduler"] = {"max_lr": 1.0}
        state["rng_state"] = [{"torch_rng_state": torch.get_rng_state()}]
    legacy.edit_all(change)
    assert digest_of(legacy.path) == digest_of(DATA / "hf_llama/hf")
    report = ferry_json("convert", legacy.path, work / "out", "--hf-config", DATA / "hf_llama/hf")
    assert report["training_state_left_out"] == 3


# ---------------------------------------------------------------------------------------------------------- bad input


def refuse(legacy, *words):
    refuse_to_convert(legacy.path.parent, legacy.path, *words, options=("--to", "megatron"))


def test_a_missing_rank_is_named(work):
    legacy = Legacy(work)
    shutil.rmtree(legacy.file("01_000").parent)
    refuse(legacy, "tensor parallel rank 1, pipeline stage 0", "missing", "TP2 PP2")


def test_a_missing_file_is_named(work):
    legacy = Legacy(work)
    legacy.file("01_000").unlink()
    refuse(legacy, "mp_rank_01_000/model_optim_rng.pt: is missing")


def test_a_missing_last_stage_is_named(work):
    legacy = Legacy(work)
    for rank in ("00_001", "01_001"):
        shutil.rmtree(legacy.file(rank).parent)
    refuse(legacy, "pipeline stage 1", "missing")


@pytest.mark.parametrize("field, value", [("hidden_size", 64), ("tensor_model_parallel_size", 4), ("num_layers", 8)])
def test_ranks_of_different_runs_are_refused(work, field, value):
    legacy = Legacy(work)
    legacy.edit("01_001", lambda s: setattr(s["args"], field, value))
    refuse(legacy, "mp_rank_01_001", "mp_rank_00_000")


def test_ranks_that_hold_different_norms_are_refused(work):
    legacy = Legacy(work)
    legacy.edit("01_001", lambda s: s["model"]["decoder.final_layernorm.weight"].add_(1))
    refuse(legacy, "model.norm.weight", "copy")


def test_a_tied_head_that_differs_is_refused(work):
    legacy = Legacy(work, "qwen2_tied_legacy_pp2")
    legacy.edit("00_001", lambda s: s["model"]["output_layer.weight"].view(torch.int16)[3, 5].bitwise_xor_(1))
    refuse(legacy, "model.embed_tokens.weight", "copy")


def test_an_expert_that_is_missing_is_named(work):
    legacy = Legacy(work, "mixtral_legacy_ep2")
    legacy.edit("00_001", lambda s: s["model"].pop("decoder.layers.1.mlp.experts.linear_fc1.weight1"))
    refuse(legacy, "mp_rank_00_001", "experts", "decoder.layers.1.mlp.experts.linear_fc1")


def test_a_slice_of_another_shape_is_named(work):
    legacy = Legacy(work)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    legacy.edit("01_000", lambda s: s["model"].update({name: s["model"][name][:, :-1].clone()}))
    refuse(legacy, "mp_rank_01_000", name, "[32, 23]", "[32, 24]")


def test_a_tensor_that_no_rule_maps_is_named(work):
    legacy = Legacy(work)
    legacy.edit("01_000", lambda s: s["model"].update({"decoder.layers.0.mlp.extra.weight": torch.ones(2)}))
    refuse(legacy, "mp_rank_01_000", "decoder.layers.0.mlp.extra.weight")


def test_a_tensor_that_is_missing_is_named(work):
    legacy = Legacy(work)
    for rank in ("00_000", "01_000"):
        legacy.edit(rank, lambda s: s["model"].pop("decoder.layers.1.mlp.linear_fc1.weight"))
    refuse(legacy, "decoder.layers.1.mlp.linear_fc1.weight", "missing")


def test_grouped_mlp_is_refused_by_name(work):
    legacy = Legacy(work, "mixtral_legacy_ep2")
    legacy.edit("00_000", lambda s: s["model"].update({"decoder.layers.0.mlp.experts.weight1": torch.ones(2, 2)}))
    refuse(legacy, "decoder.layers.0.mlp.experts.weight1", "GroupedMLP", "torch_dist")


def test_an_older_order_of_queries_is_refused(work):
    legacy = Legacy(work)
    legacy.edit_all(lambda s: s.update(checkpoint_version=1.0))
    refuse(legacy, "checkpoint_version is 1")


class Foreign:
    pass


def test_a_foreign_global_is_named_with_the_way_out(work, monkeypatch):
    legacy = Legacy(work)
    argparse.Foreign = Foreign  # any module that a reader would have to import
    Foreign.__module__, Foreign.__qualname__ = "argparse", "Foreign"
    legacy.edit_all(lambda s: setattr(s["args"], "thing", Foreign()))
    done = ferry("digest", legacy.path)
    assert done.returncode == 2 and "argparse.Foreign" in done.stderr and "nothing was executed" in done.stderr
    code, path = shlex.split(done.stderr.split("python3 -c ")[1])
    assert path == str(legacy.file("00_000"))
    for folder in sorted(legacy.folder.iterdir()):
        monkeypatch.setattr(sys, "argv", ["-c", str(folder / "model_optim_rng.pt")])
        exec(code, {})  # what the hint says, for each file
    assert digest_of(legacy.path) == digest_of(DATA / "hf_llama/hf")


@pytest.mark.parametrize("cut", [0, 100, -1, -3000])
def test_a_truncated_file_is_named(work, cut):
    legacy = Legacy(work)
    path = legacy.file("01_001")
    path.write_bytes(path.read_bytes()[:cut])
    refuse(legacy, "mp_rank_01_001/model_optim_rng.pt")


def test_a_flipped_bit_is_found_by_the_checksum(work):
    legacy = Legacy(work)
    path = legacy.file("01_001")
    data = bytearray(path.read_bytes())
    tensor = torch.load(path, weights_only=False)["model"]["decoder.layers.1.mlp.linear_fc1.weight"]
    data[data.index(tensor.view(torch.uint8).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)
    refuse(legacy, "mp_rank_01_001/model_optim_rng.pt", "CRC-32", "decoder.layers.3.mlp.linear_fc1.weight")
