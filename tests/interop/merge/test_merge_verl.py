"""LoRA checkpoints of verl's FSDP trainers: verl 0.9.1's own checkpoint manager saves them on four ranks (save_lora_with_verl.py), and verl's own merger and
PEFT say what is in them."""
import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support import (DATA, HERE, described, digest_of, ferry_json, hf_tensors, llama_config, llama_shapes, random_tensors, refuse, run_ok, tree, verls_merger,
                     write_hf)
from tiny_models import hf_configs

peft = pytest.importorskip("peft", reason="PEFT makes the adapters")
from transformers import Qwen3MoeForCausalLM  # noqa: E402

CONFIG = llama_config(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=300)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"r": 4, "lora_alpha": 6, "target_modules": ALL}
JOBS = {
    "fsdp2": {"fsdp": 2, "lora": LORA},
    "fsdp1": {"fsdp": 1, "mesh": True, "lora": LORA},
    "head": {"fsdp": 1, "mesh": True, "lora": {**LORA, "target_modules": ["q_proj", "lm_head"]}},
    "hsdp": {"fsdp": 2, "hsdp": True, "lora": {"r": 3, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]}},
    "bf16": {"fsdp": 2, "dtype": "bfloat16", "lora": {"r": 8, "lora_alpha": 8, "target_modules": ["o_proj", "up_proj"]}},
    "shards": {"fsdp": 1, "lora": LORA},  # ShardedTensors, of which verl's merger of today reads none
    "alone": {"fsdp": 2, "lora_only": True, "lora": LORA},
    "alone1": {"fsdp": 1, "mesh": True, "lora_only": True, "lora": LORA},
    "whole": {"fsdp": 1, "mesh": True, "lora": {**LORA, "modules_to_save": ["lm_head"]}},
    "dora": {"fsdp": 2, "lora": {**LORA, "use_dora": True}},
    "experts": {"fsdp": 2, "lora_only": True, "base": "moe",
                "lora": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}},
    "down": {"fsdp": 2, "lora_only": True, "base": "moe",
             "lora": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}},
}
MERGED = ["fsdp2", "fsdp1", "head", "hsdp", "bf16"]
WORLD = 4
WEIGHTS = "adapter_model.safetensors"


@functools.lru_cache(maxsize=1)
def saved():
    """-> a folder with the actor's folder of every job, its adapter as PEFT saves it (NAME.peft), and the bases"""
    folder = Path(tempfile.mkdtemp(prefix="ferry_verl_lora_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_hf(folder / "llama", {**CONFIG, "dtype": "float32"}, random_tensors(llama_shapes(CONFIG), dtype="F32"))
    torch.manual_seed(1)
    Qwen3MoeForCausalLM(hf_configs()["qwen3_moe"]()).to(torch.float32).save_pretrained(folder / "moe")
    jobs = [{**job, "out": str(folder / name), "peft": str(folder / f"{name}.peft"), "base": str(base_of(name, folder))} for name, job in JOBS.items()]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([sys.executable, HERE / "merge/save_lora_with_verl.py", str(WORLD), folder / "jobs.json"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    return folder


def base_of(name, folder=None):
    return (folder or saved()) / JOBS[name].get("base", "llama")


def copied(name, work):
    """A copy of an actor's folder, whose files may be changed."""
    shutil.copytree(saved() / name, work / name)
    return work / name


def change_ranks(folder, change):
    """Changes what each rank of one that shards nothing holds."""
    for path in folder.glob("model_world_size_*.pt"):
        path.unlink()
    torch.save(change, folder / "model_world_size_1_rank_0.pt")


def settings(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    return config["r"], config["lora_alpha"], set(config["target_modules"]), config["task_type"]


@pytest.fixture(scope="module")
def verls(tmp_path_factory):
    """-> {name of a job: the folder that verl's merger writes of its}"""
    folders = {name: tmp_path_factory.mktemp("verl") / name for name in MERGED}
    for status, said in verls_merger(*(["merge", "--backend", "fsdp", "--local_dir", saved() / name, "--target_dir", folders[name]] for name in MERGED)):
        assert status == 0, said
    return folders


@pytest.mark.parametrize("name", MERGED)
def test_the_model_is_the_one_that_verls_merger_writes(name, verls, work):
    report = ferry_json("convert", saved() / name, work / "hf", "--to", "hf", "--dtype", "bf16")
    assert report["adapter_left_out"] == len(load_file(verls[name] / "lora_adapter" / WEIGHTS)) > 0 and report["proved"]
    assert described(hf_tensors(work / "hf")) == described(hf_tensors(verls[name]))


@pytest.mark.parametrize("name", MERGED)
def test_the_adapter_is_the_one_that_verls_merger_writes(name, verls, work):
    run_ok("convert", saved() / name, work / "adapter", "--base", base_of(name), "--to", "peft", "--dtype", "bf16")
    found, want = load_file(work / "adapter" / WEIGHTS), load_file(verls[name] / "lora_adapter" / WEIGHTS)
    assert found.keys() == want.keys()
    assert [key for key, tensor in want.items() if found[key].dtype != tensor.dtype or not torch.equal(found[key], tensor)] == []
    assert settings(work / "adapter") == settings(verls[name] / "lora_adapter")


@pytest.mark.parametrize("name", [name for name in JOBS if name not in ("head", "whole", "dora", "down")])  # PEFT saves the base's head, too
def test_the_adapter_is_the_one_that_was_trained(name, work):
    """The very factors, in every form, and merged: of FSDP1 and FSDP2, of factors alone, of experts."""
    trained, base = saved() / f"{name}.peft", base_of(name)
    report = ferry_json("convert", saved() / name, work / "peft", "--base", base, "--to", "peft")
    assert report["source_form"] == "verl" and report["proved"]
    assert (work / "peft" / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()
    want = json.loads((trained / "adapter_config.json").read_text())
    found = json.loads((work / "peft/adapter_config.json").read_text())
    assert [found[key] for key in ("r", "lora_alpha", "task_type")] == [want[key] for key in ("r", "lora_alpha", "task_type")]
    assert set(found["target_modules"]) == set(want["target_modules"])
    assert set(found.get("target_parameters") or ()) == set(want.get("target_parameters") or ())
    run_ok("convert", saved() / name, work / "verl", "--base", base, "--to", "verl")
    assert tree(work / "verl/lora_adapter") == tree(work / "peft")
    assert json.loads((work / "verl/lora_train_meta.json").read_text()) == json.loads((saved() / name / "lora_train_meta.json").read_text())
    run_ok("convert", saved() / name, work / "vllm", "--base", base, "--to", "vllm")
    run_ok("convert", trained, work / "vllm_trained", "--base", base, "--to", "vllm")
    assert tree(work / "vllm")[WEIGHTS] == tree(work / "vllm_trained")[WEIGHTS]
    run_ok("merge", base, saved() / name, work / "merged")
    run_ok("merge", base, trained, work / "merged_trained")
    assert tree(work / "merged") == tree(work / "merged_trained") != tree(base)


@pytest.mark.parametrize("layout", [(), ("--tp", "2")])
@pytest.mark.parametrize("name", ["fsdp2", "fsdp1", "shards", "alone"])
def test_megatron_bridge_gets_the_same_factors(name, layout, work):
    for source, target in ((saved() / name, "mb"), (saved() / f"{name}.peft", "mb_trained")):
        run_ok("convert", source, work / target, "--base", base_of(name), "--to", "megatron", *layout)
        run_ok("convert", work / target, work / f"{target}_back", "--base", base_of(name), "--to", "peft")
    assert tree(work / "mb_back") == tree(work / "mb_trained_back")
    assert (work / "mb/iter_0000000/run_config.yaml").read_bytes() == (work / "mb_trained/iter_0000000/run_config.yaml").read_bytes()


def test_first_factors_that_are_shared_are_fused_for_megatron_bridge(work):
    folder = copied("alone", work)
    tensors = load_file(saved() / "alone.peft" / WEIGHTS)
    state = {}
    for name, tensor in tensors.items():
        for one, first in (("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj")):
            if name.endswith(f"{one}.lora_A.weight"):
                tensor = tensors[name.replace(one, first)].clone()
        state[name.replace(".weight", ".default.weight")] = tensor
    change_ranks(folder, state)
    assert ferry_json("convert", folder, work / "mb", "--base", base_of("alone"), "--to", "megatron")["canonical"] is False


def test_the_base_may_be_the_model_beside_it(work):
    run_ok("merge", base_of("fsdp2"), saved() / "fsdp2", work / "merged")
    done = run_ok("merge", saved() / "fsdp2", saved() / "fsdp2", work / "itself", "--to", "hf")
    assert described(hf_tensors(work / "itself")) == described(hf_tensors(work / "merged")) and "left out" not in done.stdout


def test_factors_of_down_alone_are_told_by_their_shapes(work):
    run_ok("convert", saved() / "down", work / "peft", "--base", base_of("down"), "--to", "peft")
    assert (work / "peft" / WEIGHTS).read_bytes() == (saved() / "down.peft" / WEIGHTS).read_bytes()
    assert json.loads((work / "peft/adapter_config.json").read_text())["target_parameters"] == ["mlp.experts.down_proj"]


def test_a_model_beside_an_adapter_is_read_and_said_to_be_without_it(work):
    folder, base = saved() / "fsdp2", base_of("fsdp2")
    assert digest_of(folder) == digest_of(base)
    said = run_ok("verify", base, folder, "--weights-only").stdout
    assert "28 factors of a LoRA adapter were not compared" in said and "equal" in said
    said = run_ok("inspect", folder).stdout
    assert "28 factors of LoRA" in said and "model.layers.0.self_attn.q_proj.weight" in said and "base_layer" not in said
    report = ferry_json("inspect", folder)
    assert report["adapter"] == 28 and len(report["tensors"]) == 21
    said = run_ok("convert", folder, work / "megatron").stdout
    assert "a LoRA adapter of 28 factors was left out" in said and "ferry merge BASE ADAPTER DST" in said
    assert digest_of(work / "megatron") == digest_of(base)


def test_a_step_and_a_run_lead_to_the_adapter(work):
    shutil.copytree(saved() / "fsdp2", work / "run/global_step_7/actor")
    (work / "run/latest_checkpointed_iteration.txt").write_text("7")
    for number, folder in enumerate(("run", "run/global_step_7", "run/global_step_7/actor")):
        run_ok("convert", work / folder, work / f"peft{number}", "--base", base_of("fsdp2"), "--to", "peft")
        assert (work / f"peft{number}" / WEIGHTS).read_bytes() == (saved() / "fsdp2.peft" / WEIGHTS).read_bytes()


def test_an_adapter_alone_is_no_checkpoint(work):
    for command in (("convert", saved() / "alone", work / "out"), ("inspect", saved() / "alone"), ("digest", saved() / "alone")):
        refuse(*command, words=["holds a LoRA adapter without a model", "ferry merge BASE ADAPTER DST"])
    refuse("delta", "make", base_of("fsdp2"), saved() / "fsdp2", work / "out", words=["holds a LoRA adapter beside the model", "ferry merge BASE ADAPTER DST"])


def test_an_alpha_that_nothing_says_has_to_be_named(work):
    folder, base = copied("alone", work), base_of("alone")
    record = folder / "lora_train_meta.json"
    for text in (None, '{"r": 4, "lora_alpha": 0, "task_type": "CAUSAL_LM"}', "{}"):
        record.unlink(missing_ok=True)
        if text:
            record.write_text(text)
        for command in (("convert", folder, work / "out", "--base", base, "--to", "peft"), ("merge", base, folder, work / "out")):
            refuse(*command, words=["no lora_train_meta.json says the adapter's alpha", "--lora-alpha"])
        run_ok("convert", folder, work / "peft", "--base", base, "--to", "peft", "--lora-alpha", "6")
        run_ok("merge", base, folder, work / "merged", "--lora-alpha", "6")
        run_ok("merge", base, work / "peft", work / "again")
        assert tree(work / "merged") == tree(work / "again") and settings(work / "peft")[:2] == (4, 6)
        for made in ("peft", "merged", "again"):
            shutil.rmtree(work / made)


@pytest.mark.parametrize("text, words", [("{", ["lora_train_meta.json"]), ("[4]", ["lora_train_meta.json", "is no object"]),
                                         ('{"r": "4", "lora_alpha": 6}', ["lora_train_meta.json", "r:", "is no number"]),
                                         ('{"r": 4.5, "lora_alpha": 6}', ["lora_train_meta.json", "r: 4.5 is no rank"]),
                                         ('{"r": -4, "lora_alpha": 6}', ["lora_train_meta.json", "r: -4 is no rank"]),
                                         ('{"r": 4, "lora_alpha": true}', ["lora_alpha: true is no number"]),
                                         ('{"r": 4, "lora_alpha": -6}', ["lora_train_meta.json", "alpha"]),
                                         ('{"r": 4, "lora_alpha": 6, "task_type": 3}', ["task_type: 3 is no name"]),
                                         ('{"r": 8, "lora_alpha": 6}', ["lora_train_meta.json", "the rank is 8", "have 4"])])
def test_a_record_that_is_wrong_is_named(text, words, work):
    folder, base = copied("alone", work), base_of("alone")
    (folder / "lora_train_meta.json").write_text(text)
    refuse("convert", folder, work / "out", "--base", base, "--to", "peft", words=words)
    refuse("merge", base, folder, work / "out", words=words)
    assert not (work / "out").exists()


def test_other_parts_of_peft_are_named(work):
    for name, words in (("whole", ["lm_head", "modules_to_save"]), ("dora", ["lora_magnitude_vector", "no factor of a linear layer"])):
        refuse("convert", saved() / name, work / "out", "--base", base_of(name), "--to", "peft", words=words)
        refuse("merge", base_of(name), saved() / name, work / "out", words=words)
    refuse("convert", saved() / "whole", work / "out", words=["lm_head", "modules_to_save"])


def test_ranks_that_lack_something_are_named(work):
    folder, base = copied("alone", work), base_of("alone")
    other = torch.load(saved() / "alone/model_world_size_4_rank_0.pt", weights_only=False)
    key = next(iter(other))
    for name, command in (("lora_A", "convert"), ("lora_B", "merge")):
        state = {name.replace(".weight", ".default.weight"): tensor for name, tensor in load_file(saved() / "alone.peft" / WEIGHTS).items()}
        lost = next(one for one in state if name in one)
        change_ranks(folder, {one: tensor for one, tensor in state.items() if one != lost})
        arguments = (folder, work / "out", "--base", base, "--to", "peft") if command == "convert" else (base, folder, work / "out")
        refuse(command, *arguments, words=[lost.split(".lora_")[0], "one of two factors is missing"])
    assert key.startswith("base_model.model.")
    shutil.rmtree(folder)
    folder = copied("fsdp2", work)
    (folder / "model_world_size_4_rank_2.pt").unlink()
    refuse("merge", base, folder, work / "out", words=["model_world_size_4_rank_2.pt: is missing"])
    refuse("convert", DATA / "hf_llama/hf", work / "out", "--base", base, "--to", "peft", words=["is Hugging Face, expected an adapter"])


@pytest.mark.parametrize("place", ["actor", "actor/model", "actor/model/dist_ckpt"])
def test_an_adapter_of_verl_and_megatron_has_the_alpha_of_its_record(place, work):
    """verl saves no run_config.yaml beside it. The weights of the base may lie in huggingface/."""
    base = base_of("alone")
    run_ok("convert", saved() / "alone.peft", work / "mb", "--base", base, "--to", "megatron", "--tp", "2")
    actor = work / "actor"
    shutil.copytree(work / "mb/iter_0000000", actor / "model/dist_ckpt", ignore=shutil.ignore_patterns("run_config.yaml"))
    shutil.copytree(base, actor / "model/huggingface")
    refuse("convert", actor, work / "out", "--base", base, "--to", "peft", words=["lora_train_meta.json", "--lora-alpha"])
    (work / place / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"}')
    run_ok("merge", base, saved() / "alone.peft", work / "want")
    refuse("convert", actor / "model/dist_ckpt", work / "out", words=["holds a LoRA adapter without a model", "ferry merge BASE ADAPTER DST"])
    for source in (actor, actor / "model", actor / "model/dist_ckpt"):
        run_ok("convert", source, work / "peft", "--base", base, "--to", "peft")
        assert (work / "peft" / WEIGHTS).read_bytes() == (saved() / "alone.peft" / WEIGHTS).read_bytes() and settings(work / "peft")[:2] == (4, 6)
        run_ok("merge", base, source, work / "merged")
        assert tree(work / "merged") == tree(work / "want")
        shutil.rmtree(work / "peft")
        shutil.rmtree(work / "merged")


def merger(*arguments, code=0):
    """-> what python -m ferry.compat.verl says"""
    module = HERE.parent.parent / "build/python"
    if not list(module.glob("ferry/_ferry*.so")):
        pytest.skip("the Python module is not built")
    done = subprocess.run([sys.executable, "-m", "ferry.compat.verl", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env=dict(os.environ, PYTHONPATH=str(module)))
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.mark.parametrize("name", ["fsdp2", "hsdp"])
def test_ferrys_merger_in_place_of_verls_writes_the_adapter_too(name, verls, work):
    common = ["--backend", "fsdp", "--local_dir", saved() / name]
    for _ in range(2):  # the second replaces the first
        assert "lora_adapter: the LoRA adapter, proved" in merger("merge", *common, "--target_dir", work / "merged")
    assert described(hf_tensors(work / "merged")) == described(hf_tensors(verls[name]))
    found, want = work / "merged/lora_adapter", verls[name] / "lora_adapter"
    assert sorted(path.name for path in found.iterdir()) == sorted(path.name for path in want.iterdir())
    assert described(hf_tensors(found)) == described(hf_tensors(want)) and settings(found) == settings(want)
    assert [path.name for path in work.iterdir()] == ["merged"]
    assert merger("test", *common, "--test_hf_dir", verls[name]) == "equal\n"


def test_ferrys_merger_leaves_what_is_there_where_it_fails(work):
    folder = copied("fsdp2", work)
    common = ["merge", "--backend", "fsdp", "--local_dir", folder, "--target_dir", work / "merged"]
    merger(*common)
    before = tree(work / "merged")
    (folder / "lora_train_meta.json").unlink()
    assert "--lora-alpha" in merger(*common, code=2)
    assert tree(work / "merged") == before
    (work / "merged/notes.md").write_text("of someone")
    assert "notes.md" in merger(*common, "--lora-alpha", "6", code=2)
    assert tree(work / "merged/lora_adapter") == {name.split("/")[1]: data for name, data in before.items() if name.startswith("lora_adapter/")}
    (work / "merged/notes.md").unlink()
    merger(*common, "--lora-alpha", "6")
    assert tree(work / "merged") == before
    assert "holds a LoRA adapter without a model" in merger("merge", "--backend", "fsdp", "--local_dir", saved() / "alone", "--target_dir", work / "m", code=2)
