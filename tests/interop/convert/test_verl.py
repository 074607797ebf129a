"""Ferry reads checkpoints as verl lays them out: FSDP states by rank, written by real torch on four ranks, and dist_ckpt
folders of real megatron-core. Old and new layouts, found from the run's root, a step's folder or the actor's."""
import os
import shutil

import pytest
import torch

from sharded_runs import OF_MODULES, WORLD, sharded_runs
from support import DATA, described, digest_of, ferry, ferry_json, hf_tensors, refuse_to_convert, run_ok


def hf(model):
    return DATA / f"hf_{model}/hf"


def copy_config(model, folder, weights=False):
    folder.mkdir(parents=True, exist_ok=True)
    for path in hf(model).iterdir():
        if weights or path.suffix != ".safetensors":
            shutil.copy(path, folder)


def verl(work, case, model="llama", layout="v1", step=5, config="huggingface", copy=True):
    """work/run/global_step_5/actor as verl's checkpoint managers leave it."""
    root = work / "run"
    actor = root / f"global_step_{step}" / "actor"
    base = actor / "model" if layout == "v2" else actor
    base.mkdir(parents=True)
    if case.startswith("dist"):
        shutil.copytree(DATA / "llama_tp2pp2_local", base / "dist_ckpt", ignore=shutil.ignore_patterns("sha256.json"))
    elif case != "weights":
        for path in (sharded_runs() / case).iterdir():
            (shutil.copy if copy else os.symlink)(path, base / path.name)
    copy_config(model, base if config == "." else base / config, weights=case == "weights")
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    (root / f"global_step_{step}" / "data.pt").write_bytes(b"of the data loader")
    return root


@pytest.mark.parametrize("case, model", [("fsdp2_llama", "llama"), ("hsdp_llama", "llama"), ("fsdp1_llama", "llama"), ("fsdp1_mesh_llama", "llama"),
                                         *((f"fsdp2_{model}", model) for model in OF_MODULES)])
def test_fsdp_states_hold_the_weights_that_were_sharded(case, model, work):
    """FSDP1 and FSDP2, replicas, rows that do not divide evenly, ranks without rows, names and experts of transformers' modules: the names
    and experts of files come of them."""
    root = verl(work, case, model)
    assert digest_of(root) == digest_of(hf(model))
    run_ok("convert", root, work / "megatron")
    assert (work / "megatron/iter_0000005/.metadata").exists()
    run_ok("convert", work / "megatron", work / "back")
    assert described(hf_tensors(work / "back")) == described(hf_tensors(hf(model)))
    assert (work / "back/config.json").read_bytes() == (hf(model) / "config.json").read_bytes()


@pytest.mark.parametrize("layout", ["v1", "v2"])
@pytest.mark.parametrize("case", ["fsdp2_llama", "dist", "weights"])
def test_every_folder_of_a_run_leads_there(case, layout, work):
    root = verl(work, case, layout=layout)
    want = digest_of(hf("llama"))
    assert digest_of(root) == want
    assert digest_of(root / "global_step_5") == want
    assert digest_of(root / "global_step_5/actor") == want
    assert digest_of(root, "--iteration", 5) == want
    if case == "dist":
        assert digest_of(next(root.rglob("dist_ckpt"))) == want
    report = ferry_json("inspect", root)
    assert len(report["tensors"]) > 5


def test_configuration_beside_the_files_as_older_releases_have_it(work):
    assert digest_of(verl(work, "fsdp2_llama", config=".")) == digest_of(hf("llama"))


def test_a_dist_ckpt_is_converted_to_hugging_face(work):
    run_ok("convert", verl(work, "dist"), work / "hf")
    assert described(hf_tensors(work / "hf")) == described(hf_tensors(hf("llama")))
    assert (work / "hf/config.json").read_bytes() == (hf("llama") / "config.json").read_bytes()


def test_weights_for_hugging_face_go_before_a_dist_ckpt_that_may_lack_them(work):
    root = verl(work, "weights")
    (root / "global_step_5/actor/dist_ckpt").mkdir()
    (root / "global_step_5/actor/dist_ckpt/.metadata").write_bytes(b"of the optimizer")
    assert digest_of(root) == digest_of(hf("llama"))


def test_one_of_several_steps_is_chosen(work):
    root = verl(work, "fsdp2_llama", step=5)
    shutil.copytree(root / "global_step_5", root / "global_step_10")
    norm = root / "global_step_10/actor"
    for path in norm.glob("model_world_size_*"):
        state = torch.load(path, weights_only=False)
        state["model.norm.weight"].to_local().add_(1)
        torch.save(state, path)
    assert digest_of(root) == digest_of(hf("llama")), "the tracker says 5"
    assert digest_of(root, "--iteration", 10) != digest_of(hf("llama"))
    done = ferry("digest", root, "--iteration", 7)
    assert done.returncode == 2 and "5" in done.stderr and "10" in done.stderr


# ---------------------------------------------------------------------------------------------------------- bad input


def rank_file(root, rank):
    return root / f"global_step_5/actor/model_world_size_{WORLD}_rank_{rank}.pt"


def edit(path, change):
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_missing_rank_is_named(work, rank):
    root = verl(work, "fsdp2_llama")
    rank_file(root, rank).unlink()
    refuse_to_convert(work, root, f"model_world_size_4_rank_{rank}.pt: is missing")


def test_files_of_two_world_sizes_are_refused(work):
    root = verl(work, "fsdp2_llama")
    rank_file(root, 3).rename(rank_file(root, 3).with_name("model_world_size_8_rank_3.pt"))
    refuse_to_convert(work, root, "world sizes 4 and 8")


def test_a_rank_twice_leaves_a_hole(work):
    root = verl(work, "fsdp2_llama")
    shutil.copy(rank_file(root, 0), rank_file(root, 2))
    refuse_to_convert(work, root, "lm_head.weight", "[0:63, 0:32]", "2 times")


def test_a_rank_of_another_model_is_refused(work):
    root = verl(work, "fsdp2_llama")
    edit(rank_file(root, 2), lambda s: s.pop("model.norm.weight"))
    refuse_to_convert(work, root, "rank_2.pt: lacks model.norm.weight", "rank_0.pt holds")


def test_a_replica_that_differs_is_refused(work):
    root = verl(work, "hsdp_llama")
    edit(rank_file(root, 3), lambda s: s["model.norm.weight"].to_local().add_(1))
    refuse_to_convert(work, root, "model.norm.weight", "second copy", "rank_1.pt", "rank_3.pt")


def test_a_plain_tensor_is_held_against_those_of_other_ranks(work):
    """Buffers are saved whole by every rank."""
    root = verl(work, "fsdp2_llama")
    value = torch.linspace(0, 1, 32, dtype=torch.bfloat16)
    for rank in range(WORLD):
        edit(rank_file(root, rank), lambda s: s.update({"model.norm.weight": value}))
    run_ok("digest", root)
    edit(rank_file(root, 1), lambda s: s.update({"model.norm.weight": value + 1}))
    refuse_to_convert(work, root, "model.norm.weight", "second copy", "rank_0.pt", "rank_1.pt")


@pytest.mark.parametrize("cut", [0, 1000, -1])
def test_a_truncated_file_is_named(work, cut):
    root = verl(work, "fsdp2_llama")
    path = rank_file(root, 1)
    path.write_bytes(path.read_bytes()[:cut])
    refuse_to_convert(work, root, "model_world_size_4_rank_1.pt")


def test_a_configuration_is_asked_for(work):
    root = verl(work, "fsdp2_llama")
    shutil.rmtree(root / "global_step_5/actor/huggingface")
    refuse_to_convert(work, root, "config.json", "--hf-config")
    assert digest_of(root, "--hf-config", hf("llama")) == digest_of(hf("llama"))


def test_a_root_without_steps_says_what_was_looked_for(work):
    root = verl(work, "fsdp2_llama")
    shutil.rmtree(root / "global_step_5")
    refuse_to_convert(work, root, "is not there")
