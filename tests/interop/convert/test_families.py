"""Families of which there is no checkpoint of megatron-core's: each converts both ways, and what Ferry writes is what Megatron-Bridge makes of the
same weights (tests/data/bridge), under one of the names that it knows, as megatron-core reads it.

No two sizes of these models are alike, so that a transpose or an exchange of tensors shows."""
import json
import os
import shutil
import subprocess
import sys

import pytest

from support import DATA, FERRY, HERE, PEERS, iteration_folder, refuse, refuse_to_convert, run_ok, tree
from tiny_models import load_hf_sd
from weight_mapping import arch_of, describe, hf_to_megatron

TP_PP = ["--tp", 2, "--pp", 2]
TP_EP = ["--tp", 2, "--ep", 4, "--etp", 1]
PP_EP = ["--pp", 2, "--ep", 2, "--tp", 2, "--pipeline-model-parallel-layout", "Et|tmL"]

FAMILIES = {  # name: options. Families without a file in tests/data/bridge are held against weight_mapping.py
    "seed_oss": TP_PP, "smollm3": TP_PP, "olmo2": TP_PP, "olmo3": TP_PP, "glm4": TP_PP, "phi3": TP_PP, "granite": TP_PP, "ernie4_5": TP_PP, "gemma2": ["--tp", 2], "gemma3_text": TP_PP,
    "ernie4_5_moe": TP_EP, "olmoe": TP_EP, "minimax_m2": TP_EP,
    "mistral3": TP_PP, "qwen2_5_vl": TP_PP, "qwen3_vl": TP_PP, "gemma3": TP_PP, "kimi_k25": TP_EP,
    "glm4_moe_lite": PP_EP, "glm_moe_dsa": PP_EP, "bailing_moe_v2": PP_EP,
}
ALIASES = {  # another model_type with the tensors of a family, and what its config.json says besides
    "ministral3": ("llama", {"architectures": ["Ministral3ForCausalLM"]}),
    "kimi_k2": ("deepseek_v3", {"architectures": ["DeepseekV3ForCausalLM"], "scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
    "deepseek_v32": ("glm_moe_dsa", {"architectures": ["DeepseekV32ForCausalLM"]}),
    "bailing_moe": ("bailing_moe_v2", {}),  # as Ling 2 is published
}
NOT_COMPUTED = {"glm_moe_dsa": "sparse attention", "bailing_moe_v2": "experts' results"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{family: Hugging Face folder}, also of the aliases"""
    found = {name: DATA / f"hf_{name}" / "hf" for name in FAMILIES}
    for name, (of, changes) in ALIASES.items():
        found[name] = tmp_path_factory.mktemp("aliases") / name
        shutil.copytree(DATA / f"hf_{of}" / "hf", found[name])
        config = json.loads((found[name] / "config.json").read_text())
        (found[name] / "config.json").write_text(json.dumps({**config, "model_type": name, **changes}))
    return found


def layout(name):
    of = ALIASES.get(name, (name,))[0]
    others = {"llama": TP_PP, "deepseek_v3": ["--tp", 2, "--pp", 2, "--ep", 2, "--pipeline-model-parallel-layout", "Et|ttmL"]}
    return {**FAMILIES, **others}[of]


@pytest.fixture(scope="module")
def written(folders, tmp_path_factory):
    """{family: Megatron checkpoint}, written once for all tests here."""
    to = tmp_path_factory.mktemp("written")
    for name, hf in folders.items():
        run_ok("convert", hf, to / name, *layout(name))
    return {name: to / name for name in folders}


@pytest.fixture(scope="module")
def read(written):
    """{family: {key: (dtype, shape, sha256)}} as megatron-core's reader finds them."""
    paths = {name: str(iteration_folder(folder)) for name, folder in written.items()}
    done = subprocess.run([sys.executable, HERE / "read_with_mcore.py", PEERS / "mc0192", *paths.values()], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=300, env=dict(os.environ, GLOO_SOCKET_IFNAME="lo"))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: found[path] for name, path in paths.items()}


@pytest.mark.parametrize("name", [*FAMILIES, *ALIASES])
def test_there_and_back_is_the_same_folder(name, folders, written, tmp_path):
    run_ok("convert", written[name], tmp_path / "back")
    assert tree(tmp_path / "back") == tree(folders[name])


@pytest.mark.parametrize("name", [*FAMILIES, *ALIASES])
def test_megatron_core_reads_what_megatron_bridge_makes(name, folders, read):
    of = ALIASES.get(name, (name,))[0]
    reference = DATA / "bridge" / f"{of}.json"
    if reference.exists():
        want = json.loads(reference.read_text())["tensors"]
    else:
        arch = arch_of(json.loads((folders[name] / "config.json").read_text()))
        full = describe(hf_to_megatron(arch, load_hf_sd(str(folders[name])), arch["vocab"]))
        want = {key: [t["dtype"], t["shape"], t["sha256"]] for key, t in full.items()}
    assert {key: want.get(key) for key in read[name]} == read[name]
    # Everything is there: under another name of the same tensor, or in fp32.
    assert {tuple(map(str, t[1:])) for t in want.values()} == {tuple(map(str, t[1:])) for t in read[name].values()}


def test_no_two_tensors_of_a_layer_have_the_same_bytes(read):
    """The test above stands on it: digests tell the tensors apart."""
    for name, tensors in read.items():
        if name in FAMILIES:
            digests = [t[2] for t in tensors.values()]
            assert len(set(digests)) == len(digests), name


def test_ling_1_is_not_taken_for_ling_2(work):
    """Both call themselves bailing_moe, and their classes differ."""
    shutil.copytree(DATA / "hf_bailing_moe_v2/hf", work / "hf")
    config = json.loads((work / "hf/config.json").read_text())
    (work / "hf/config.json").write_text(json.dumps({**config, "model_type": "bailing_moe", "architectures": ["BailingMoeForCausalLM"]}))
    refuse_to_convert(work, work / "hf", 'the model_type "bailing_moe" is not known')


@pytest.mark.skipif(not (FERRY.parent / "ferry-torch").exists(), reason="this build has no models: configure it with -Dtorch_root")
@pytest.mark.parametrize("name", NOT_COMPUTED)
def test_what_no_module_computes_is_refused_by_name(name, folders):
    refuse("generate", folders[name], "--prompt-ids", "1,2,3", "--max-tokens", 1, words=[name, "are not computed", NOT_COMPUTED[name]])
