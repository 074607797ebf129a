"""Models that also see in the layouts in which Megatron's trainers keep them: Megatron-Bridge's, and mbridge's, which verl trains with.

tests/data/bridge_models has the digests of what both make of the same models by their own code, in both directions: bridge_models.py,
mbridge_tower.py. Those of mbridge's Qwen3-VL are those of Megatron-Bridge's; of its Qwen3.5 they are the tower's alone."""
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from bridge_reference import as_bridge, stored
from support import DATA, HERE, PEERS, iteration_folder, refuse, run_ok, tree
from tiny_models import load_hf_sd
from weight_mapping import describe

QWEN = DATA / "hf_qwen2_5_vl_deep/hf"
CASES = {  # the layout, a model and its digests
    "qwen2_5_vl in megatron-bridge": ("megatron-bridge", QWEN, "qwen2_5_vl_deep"),
    "qwen2_5_vl in mbridge": ("mbridge", QWEN, "qwen2_5_vl_mbridge"),
    "qwen3_vl in mbridge": ("mbridge", DATA / "hf_qwen3_vl_deep/hf", "qwen3_vl_deep"),
    "qwen3_vl_moe in mbridge": ("mbridge", DATA / "hf_qwen3_vl_moe/hf", "qwen3_vl_moe"),
    "qwen3_5 in mbridge": ("mbridge", DATA / "hf_qwen3_5_vl/hf", "qwen3_5_vl_mbridge"),
    "qwen3_vl in megatron-bridge": ("megatron-bridge", DATA / "hf_qwen3_vl_deep/hf", "qwen3_vl_deep"),
    "qwen3_vl_moe in megatron-bridge": ("megatron-bridge", DATA / "hf_qwen3_vl_moe/hf", "qwen3_vl_moe"),
    "qwen3_5 in megatron-bridge": ("megatron-bridge", DATA / "hf_qwen3_5_vl/hf", "qwen3_5_vl"),
    "qwen3_5_moe in megatron-bridge": ("megatron-bridge", DATA / "hf_qwen3_5_moe_vl/hf", "qwen3_5_moe_vl"),
    "gemma3 in megatron-bridge": ("megatron-bridge", DATA / "hf_gemma3/hf", "gemma3"),
    "gemma4 in megatron-bridge": ("megatron-bridge", DATA / "hf_gemma4/hf", "gemma4"),
    "gemma4_e2b in megatron-bridge": ("megatron-bridge", DATA / "hf_gemma4_e2b/hf", "gemma4_e2b"),
    "gemma4_e4b in megatron-bridge": ("megatron-bridge", DATA / "hf_gemma4_e4b/hf", "gemma4_e4b"),
}
# transformers 5.17 saves the head of Gemma 3's vision tower, which nothing of the model computes; Megatron-Bridge's has none.
HEAD = "vision_tower.head."
SEEING = ["mistral3", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "gemma4_e2b", "gemma4_e4b", "gemma4_unified", "kimi_k25"]


TOWER = ("vision_model.", "model.visual.")
MBRIDGE_TOWER = "qwen3_5_vl_mbridge"  # the tower alone: the rest of this model is as Megatron-Bridge has it


def of_peer(name, side):
    if name == MBRIDGE_TOWER:
        rest = {key: one for key, one in of_peer("qwen3_5_vl", side).items() if not key.startswith(TOWER)}
        return {**rest, **json.loads((DATA / "bridge_models" / f"{name}.json").read_text())[side]}
    return json.loads((DATA / "bridge_models" / f"{name}.json").read_text())[side]


def without_head(tensors):
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(HEAD)}


def seen_by_megatron_core(folders):
    """{name: folder} -> {name: {key: (dtype, shape, sha256)}} as megatron-core's reader finds them."""
    paths = {name: str(iteration_folder(folder)) for name, folder in folders.items()}
    done = subprocess.run([sys.executable, HERE / "read_with_mcore.py", PEERS / "mc0192", *paths.values()], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=300, env=dict(os.environ, GLOO_SOCKET_IFNAME="lo"))
    assert done.returncode == 0, done.stderr[-3000:]
    read = json.loads(done.stdout.splitlines()[-1])
    return {name: read[path] for name, path in paths.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """-> {case: folder}, {case: what megatron-core finds there}"""
    work = tmp_path_factory.mktemp("written")
    folders = {case: work / case.replace(" ", "-") for case in CASES}
    for case, (layout, hf, _) in CASES.items():
        run_ok("convert", hf, folders[case], "--tp", 2, "--pp", 2, "--make-vocab-size-divisible-by", 1, "--megatron-layout", layout)
    return folders, seen_by_megatron_core(folders)


@pytest.mark.parametrize("case", CASES)
def test_writes_what_the_peer_makes(case, written):
    folders, found = written
    wanted = of_peer(CASES[case][2], "megatron")
    assert as_bridge(without_head(stored(folders[case])), wanted) == wanted
    seen = {re.sub(r"experts\.experts\.\d+\.", "experts.experts.", key) for key in found[case]}
    assert set(without_head(dict.fromkeys(seen))) == set(wanted)


@pytest.mark.parametrize("case", CASES)
def test_reads_what_the_peer_makes(case, work):
    """Without a sidecar: the layout is recognised by its keys, and the configuration named."""
    layout, hf, name = CASES[case]
    run_ok("convert", hf, work / "megatron", "--tp", 2, "--megatron-layout", layout)
    shutil.rmtree(iteration_folder(work / "megatron") / "ferry")
    run_ok("convert", work / "megatron", work / "out", "--hf-config", hf)
    wanted = of_peer(name, "exported")
    assert as_bridge(without_head(load_hf_sd(str(work / "out"))), wanted) == wanted
    run_ok("verify", hf, work / "megatron", "--hf-config", hf)
    refuse("convert", work / "megatron", work / "nothing", words=["also sees", "--hf-config"])


@pytest.mark.parametrize("case", CASES)
def test_comes_back_byte_for_byte(case, work):
    layout, hf, _ = CASES[case]
    run_ok("convert", hf, work / "megatron", "--tp", 2, "--megatron-layout", layout)
    run_ok("convert", work / "megatron", work / "relaid", "--to", "megatron", "--pp", 2)  # the layout stays
    assert set(stored(work / "relaid")) == set(stored(work / "megatron"))
    run_ok("convert", work / "relaid", work / "alone", "--to", "megatron", "--megatron-layout", "language-model")
    run_ok("convert", hf, work / "usual", "--tp", 2)
    assert set(stored(work / "alone")) == set(stored(work / "usual"))
    for folder in ("relaid", "alone"):
        run_ok("convert", work / folder, work / f"{folder}-back")
        assert tree(work / f"{folder}-back") == tree(hf)
        run_ok("verify", hf, work / folder)
    run_ok("convert", work / "relaid", work / "archive", "--to", "h5")
    run_ok("verify", hf, work / "archive")


@pytest.mark.parametrize("name", ["mistral3", "kimi_k25"])
def test_writes_the_tower_that_the_mappings_of_megatron_bridge_make(name, work):
    """Its mapping classes alone, without a model; test_families.py has the language models."""
    run_ok("convert", DATA / f"hf_{name}/hf", work / "megatron", "--tp", 2, "--megatron-layout", "megatron-bridge")
    wanted = json.loads((DATA / "bridge" / f"{name}.json").read_text())["tower"]
    found = {key: [t["dtype"], t["shape"], t["sha256"]] for key, t in describe(stored(work / "megatron")).items() if not key.startswith("language_model.")}
    assert found == wanted


@pytest.mark.parametrize("name", ["hf_qwen3_vl_deep", "hf_qwen3_vl_moe"])
def test_both_layouts_of_qwen3_vl_are_one(name, work):
    for layout in ("megatron-bridge", "mbridge"):
        run_ok("convert", DATA / name / "hf", work / layout, "--tp", 2, "--megatron-layout", layout)
    assert tree(work / "mbridge") == tree(work / "megatron-bridge")


def test_one_layout_becomes_the_other(work):
    run_ok("convert", QWEN, work / "one", "--megatron-layout", "megatron-bridge")
    run_ok("convert", work / "one", work / "other", "--to", "megatron", "--tp", 2, "--megatron-layout", "mbridge", "--make-vocab-size-divisible-by", 1)
    assert describe(stored(work / "other")) == of_peer("qwen2_5_vl_mbridge", "megatron")


@pytest.mark.parametrize("name", SEEING)
def test_towers_that_megatron_bridge_has_a_place_for_come_back(name, work):
    hf = DATA / f"hf_{name}/hf"
    run_ok("convert", hf, work / "megatron", "--tp", 2, "--megatron-layout", "megatron-bridge")
    assert not (iteration_folder(work / "megatron") / "ferry/derived.safetensors").exists()
    run_ok("convert", work / "megatron", work / "back")
    assert tree(work / "back") == tree(hf)


def test_what_has_no_such_layout_is_refused(work):
    refuse("convert", DATA / "hf_llama/hf", work / "out", "--megatron-layout", "megatron-bridge", words=["--megatron-layout megatron-bridge", "llama"])
    refuse("convert", DATA / "hf_gemma3/hf", work / "out", "--megatron-layout", "mbridge", words=["--megatron-layout mbridge", "gemma3"])
    refuse("convert", QWEN, work / "out", "--to", "hf", "--megatron-layout", "mbridge", words=["--megatron-layout", "has no effect"])


def test_a_part_of_a_stack_is_refused(work):
    refuse("convert", QWEN, work / "out", "--megatron-layout", "mbridge", "--exclude", "visual.blocks.1.mlp.up_proj.weight",
           words=["visual.blocks.1.mlp.up_proj.weight", "is missing"])
