"""A training state goes from one Megatron layout to another, bit for bit, whatever form it was saved in."""
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torch_dist_raw as raw
from support import DATA, FERRY, HERE, PEERS, ferry, ferry_json, iteration_folder, run_ok, save_from_ranks, sha256

# Fixture: (folder of config.json, layouts that it is converted to)
LLAMA = [["--tp", 2], ["--tp", 1, "--pp", 2], ["--tp", 2, "--pp", 4]]
FIXTURES = {
    "llama_optim_full": ("hf_llama", LLAMA),
    "llama_optim_dp": ("hf_llama", LLAMA),
    "llama_optim_fsms": ("hf_llama", LLAMA),
    "llama_optim_zero": ("hf_llama", LLAMA),
    "qwen2_tied_optim_dp": ("hf_qwen2_tied", [["--tp", 2, "--pp", 2], ["--pp", 4]]),
    "mixtral_optim_dp": ("hf_mixtral", [["--tp", 2, "--ep", 2, "--etp", 1], ["--pp", 2, "--ep", 4], ["--tp", 2]]),
    "deepseek_v3_optim_dp": ("hf_deepseek_v3", [["--ep", 2], ["--tp", 2, "--pp", 3, "--ep", 4, "--etp", 2]]),
}
KEEP_ROWS = ["--make-vocab-size-divisible-by", 256]  # the fixtures' vocabularies are padded to 256 rows whatever TP is


def describe(folder):
    """{key: dtype, shape, sha256} of every full tensor of a torch_dist folder, by code that shares nothing with ferry."""
    checkpoint = raw.Checkpoint(str(folder))
    return {key: dict(zip(("dtype", "shape", "sha256"), (t[0], list(t[1]), sha256(t[2]))))
            for key, t in ((key, checkpoint.tensor(key)) for key in checkpoint.tensors)}


def expected(fixture):
    digests = json.loads((DATA / fixture / "sha256.json").read_text())
    state = {key.replace(".fp32_param.", ".param."): value for key, value in digests["optimizer_model_space"].items()}
    return {**digests["megatron"], **state}


def convert(fixture, target, *options, source=None):
    hf, _ = FIXTURES[fixture]
    rows = KEEP_ROWS if options[0] != "--tp" or options[1] == 1 else ["--make-vocab-size-divisible-by", 256 // options[1]]
    return ferry_json("convert", source or DATA / fixture, target, "--to", "megatron", "--hf-config", DATA / hf / "hf", *options, *rows)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_every_form_becomes_fully_reshardable(fixture, work):
    """Each tensor of the model and of the optimizer has the digest that megatron-core itself gives in model space."""
    for index, layout in enumerate(FIXTURES[fixture][1]):
        report = convert(fixture, work / str(index), *layout)
        assert report["optimizer"] == ["exp_avg", "exp_avg_sq", "param"] and report["training_state_left_out"] == 0
        assert describe(iteration_folder(work / str(index))) == expected(fixture), layout
        if index > 0:  # and on from there, to where the first conversion led
            convert(fixture, work / "back", *FIXTURES[fixture][1][0], source=work / str(index))
            assert describe(iteration_folder(work / "back")) == expected(fixture), layout
            shutil.rmtree(work / "back")


# Ranks that hold masters and moments beside their weights save them so that Megatron's own optimizer takes them.
SAVED = {"llama_optim_dp": ["tp=4", "div=64"], "mixtral_optim_dp": ["tp=2", "ep=2", "etp=1", "div=128"]}


@pytest.mark.parametrize("fixture", SAVED)
def test_ranks_save_what_they_hold(fixture, work):
    save_from_ranks(DATA / fixture, work / "saved", *SAVED[fixture], "optim=1")
    assert describe(iteration_folder(work / "saved")) == expected(fixture)


@pytest.mark.parametrize("fixture", ["llama_optim_dp", "llama_optim_zero", "mixtral_optim_dp"])
def test_the_run_goes_along(fixture, work):
    """Iteration, arguments, scheduler and the optimizer's steps are those of the source; the layout is the new one."""
    convert(fixture, work / "out", "--tp", 1)
    old = raw.Checkpoint(str(iteration_folder(DATA / fixture))).common()
    new = raw.Checkpoint(str(iteration_folder(work / "out"))).common()
    assert new["iteration"] == old["iteration"] == 10
    assert new["opt_param_scheduler"] == old["opt_param_scheduler"]
    assert new["num_floating_point_operations_so_far"] == old["num_floating_point_operations_so_far"]
    optimizers = [new["optimizer"]] if "optimizer" in new["optimizer"] else [new["optimizer"][i] for i in (0, 1)]
    assert len(optimizers) == (2 if fixture.startswith("mixtral") else 1)
    for optimizer in optimizers:
        assert optimizer["param_state_sharding_type"] == "fully_reshardable"
        assert {group["step"] for group in optimizer["optimizer"]["param_groups"]} == {1}
    assert new["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    changed = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1, "world_size": 1,
               "data_parallel_size": 1, "make_vocab_size_divisible_by": 256, "no_save_rng": True}
    for key, value in old["args"].state.items():
        assert new["args"].state[key] == changed.get(key, value), key


@pytest.mark.parametrize("fixture", ["llama_optim_zero", "mixtral_optim_dp"])
def test_rng_goes_along_where_ranks_stay(fixture, work):
    old = raw.Checkpoint(str(iteration_folder(DATA / fixture)))
    keys = [key for key in old.objects if key.startswith("rng_state/")]
    assert len(keys) == 2
    report = convert(fixture, work / "same", "--tp", 2)
    assert report["rng"]
    new = raw.Checkpoint(str(iteration_folder(work / "same")))
    assert {key: bytes(new.blob(key)) for key in keys} == {key: bytes(old.blob(key)) for key in keys}
    assert new.common()["args"].state["no_save_rng"] is False
    report = convert(fixture, work / "other", "--tp", 1)
    assert not report["rng"] and "rng_state was left out: it is that of TP 2, PP 1" in report["training_notes"]
    new = raw.Checkpoint(str(iteration_folder(work / "other")))
    assert not [key for key in new.objects if key.startswith("rng_state")]
    assert new.common()["args"].state["no_save_rng"] is True


def test_the_model_alone(work):
    """--no-save-optim, and every conversion to Hugging Face."""
    report = ferry_json("convert", DATA / "llama_optim_dp", work / "alone", "--to", "megatron", "--no-save-optim")
    assert report["training_state_left_out"] == 12 and report["optimizer"] == []
    checkpoint = raw.Checkpoint(str(iteration_folder(work / "alone")))
    assert not [key for key in checkpoint.tensors if "optimizer" in key]
    common = checkpoint.common()
    assert common["args"].state["no_save_optim"] is True and "optimizer" not in common and "opt_param_scheduler" not in common
    report = ferry_json("convert", DATA / "llama_optim_dp", work / "hf", "--hf-config", DATA / "hf_llama/hf")
    assert report["training_state_left_out"] == 12


def test_verify_compares_optimizers_in_model_space(work):
    """Whatever their forms; and a difference in a moment alone is a difference."""
    run_ok("verify", DATA / "llama_optim_dp", DATA / "llama_optim_full")
    run_ok("verify", DATA / "llama_optim_dp", DATA / "llama_optim_fsms")
    convert("llama_optim_dp", work / "out", "--tp", 1, "--pp", 2)
    done = run_ok("verify", DATA / "llama_optim_dp", work / "out")
    assert "compared 128 tensors" in done.stdout and "entries of training state" not in done.stdout, done.stdout
    report = ferry_json("verify", DATA / "llama_optim_dp", DATA / "llama_optim_zero", code=1)
    assert "optimizer.state.exp_avg_sq.decoder.layers.3.mlp.linear_fc2.weight" in json.dumps(report)
    run_ok("convert", work / "out", work / "alone", "--to", "megatron", "--no-save-optim", "--pp", 2)
    done = run_ok("verify", work / "out", work / "alone")
    assert "27 entries of training state (optimizer, RNG) were not compared" in done.stdout


def patched(source, target, name, old, new):
    """A copy of a fixture with bytes replaced in one of its files."""
    subprocess.run(["cp", "-r", "--no-preserve=mode", str(source), str(target)], check=True)
    path = iteration_folder(target) / name
    data = path.read_bytes()
    assert data.count(old) > 0 and len(old) == len(new)
    path.write_bytes(data.replace(old, new))
    return target


REFUSED = {
    "kind": ("llama_optim_dp", ".metadata", b"bucket_idx_0.exp_avg_sq", b"bucket_idx_0.momentumBf",
             "the optimizer keeps momentumBf"),
    "rank": ("llama_optim_dp", ".metadata", b"dp_group_idx_1.gbuf", b"dp_group_idx_3.gbuf",
             "the optimizer's buckets of model parallel rank 1 are missing"),
    "model": ("llama_optim_full", ".metadata", b"optimizer.state.exp_avg.output_layer", b"optimizer.state.exp_avg.0utput_layer",
              "the model has no 0utput_layer.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(case, work):
    fixture, name, old, new, message = REFUSED[case]
    source = patched(DATA / fixture, work / "source", name, old, new)
    done = ferry("convert", source, work / "out", "--to", "megatron")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (work / "out").exists()
    run_ok("convert", source, work / "out", "--to", "megatron", "--no-save-optim")


def test_masters_in_another_order_are_refused(work):
    """Nothing but the weights themselves says which parameter is where: two of one size that are exchanged show."""
    source = work / "source"
    subprocess.run(["cp", "-r", "--no-preserve=mode", str(DATA / "llama_optim_dp"), str(source)], check=True)
    folder = iteration_folder(source)
    checkpoint = raw.Checkpoint(str(folder))
    key = next(k for k in checkpoint.tensors if k.endswith("dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)."
                                                           "bucket_idx_0.param"))
    first, second = [checkpoint.store[(key, (at,))] for at in (4096, 6464)]  # two norms
    data = bytearray((folder / first[0]).read_bytes())
    one, two = data[first[1]:first[1] + first[2]], data[second[1]:second[1] + second[2]]
    assert len(one) == len(two) and one != two
    data[first[1]:first[1] + first[2]], data[second[1]:second[1] + second[2]] = two, one
    (folder / first[0]).write_bytes(data)
    done = ferry("convert", source, work / "out", "--to", "megatron")
    assert done.returncode == 2 and "is not the master of the weights" in done.stderr, done.stderr
    assert "--no-save-optim" in done.stderr


RESUMED = {  # fixture: (layout it is converted to, layout it is loaded at)
    "llama_optim_dp": (["--tp", 1, "--pp", 2], dict(tp=1, pp=2, ep=1, etp=1)),
    "llama_optim_fsms": (["--tp", 2, "--pp", 2], dict(tp=2, pp=2, ep=1, etp=1)),
    "llama_optim_zero": (["--tp", 1], dict(tp=1, pp=4, ep=1, etp=1)),
    "mixtral_optim_dp": (["--pp", 2, "--ep", 2], dict(tp=1, pp=2, ep=2, etp=1)),
    "deepseek_v3_optim_dp": (["--ep", 4], dict(tp=1, pp=1, ep=4, etp=1)),
}


TRAINER = Path(FERRY).parents[1] / "tests" / "trainer_tool"
RESAVED = {  # fixture: (mesh of our trainer, through whose optimizer it goes: tp, pp, ep, etp, dp; layout it is loaded at)
    "llama_optim_dp": ((2, 1, 1, 2, 2), dict(tp=1, pp=2, ep=1, etp=1)),
    "qwen2_tied_optim_dp": ((1, 2, 1, 1, 2), dict(tp=2, pp=2, ep=1, etp=1)),
    "mixtral_optim_dp": ((2, 1, 2, 1, 2), dict(tp=1, pp=2, ep=2, etp=1)),
    "deepseek_v3_optim_dp": ((1, 3, 2, 1, 2), dict(tp=1, pp=1, ep=4, etp=1)),
}


def resave(fixture, to):
    """Masters and moments of Megatron's, in the shards of our optimizer's ranks, saved from there: every digest is the old one."""
    done = subprocess.run([TRAINER, "resave", DATA / fixture, to, *map(str, RESAVED[fixture][0]), DATA / FIXTURES[fixture][0] / "hf"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert describe(iteration_folder(to)) == expected(fixture), fixture


@pytest.mark.parametrize("release", ["mc0161", "mc0192"])
def test_megatron_core_resumes(release, work):
    """The real DistributedOptimizer takes every master and moment, in another layout than they were saved in; also those that our trainer
    saved, where this build has one."""
    jobs = []
    for fixture, (_, mesh) in RESAVED.items():
        if TRAINER.exists() and (release == "mc0192" or fixture == "mixtral_optim_dp"):
            resave(fixture, work / f"{fixture}_trained")
            jobs.append(dict(ckpt=str(work / f"{fixture}_trained"), hf=str(DATA / FIXTURES[fixture][0] / "hf"),
                             expect=str(DATA / fixture / "sha256.json"), vpad=256, **mesh))
    for fixture, (layout, mesh) in RESUMED.items():
        if release == "mc0161" and fixture not in ("llama_optim_dp", "mixtral_optim_dp"):
            continue
        convert(fixture, work / fixture, *layout)
        folders = [work / fixture]
        if fixture in SAVED:
            folders.append(work / f"{fixture}_saved")
            save_from_ranks(DATA / fixture, folders[-1], *SAVED[fixture], "optim=1")
        jobs += [dict(ckpt=str(folder), hf=str(DATA / FIXTURES[fixture][0] / "hf"),
                      expect=str(DATA / fixture / "sha256.json"), vpad=256, **mesh) for folder in folders]
    (work / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([sys.executable, HERE / "resume_with_mcore.py", "--mcore", PEERS / release, "--jobs", work / "jobs.json",
                           "--report", work / "report.json"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert (work / "report.json").exists(), done.stdout[-3000:]
    report = json.loads((work / "report.json").read_text())
    assert len(report) == len(jobs) and [r["bad"] for r in report] == [[]] * len(jobs)
    assert all(set(r["step"]) == {1} and r["num_steps"] == 4 and r["iteration"] == 10 for r in report)
