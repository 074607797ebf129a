"""Qwen3-VL with experts: the experts of a layer are one tensor, transposed on the hub and not where transformers 5 saves it.

tests/data/bridge_models has the digests of what Megatron-Bridge makes of the same model, by its own conversion, in both directions. Those of the tower
are compared in test_megatron_layouts.py."""
import shutil

import pytest
from safetensors.torch import load_file

from bridge_reference import as_bridge, of_bridge, stored
from support import DATA, iteration_folder, refuse, run_ok, tree
from tiny_models import load_hf_sd
from weight_mapping import describe

HF = DATA / "hf_qwen3_vl_moe/hf"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same model as transformers 5 saves it."""
    import transformers
    folder = tmp_path_factory.mktemp("saved") / "hf"
    transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(HF).save_pretrained(folder)
    experts = {name: t.shape for name, t in load_file(folder / "model.safetensors").items() if "layers.0.mlp.experts" in name}
    assert [list(shape) for shape in sorted(experts.values())] == [[6, 40, 24], [6, 48, 40]]
    return folder


def test_writes_what_megatron_bridge_makes(work):
    run_ok("convert", HF, work / "megatron", "--tp", 2, "--ep", 3, "--make-vocab-size-divisible-by", 1)
    wanted = of_bridge("qwen3_vl_moe", "megatron")
    assert as_bridge(stored(work / "megatron"), wanted) == wanted


def test_reads_what_megatron_bridge_exports(work):
    """The vision tower is in the sidecar; without the headers the hub's orientation is written."""
    run_ok("convert", HF, work / "megatron", "--tp", 2)
    run_ok("convert", work / "megatron", work / "out", "--max-shard-size", "40KB")
    assert describe(load_hf_sd(str(work / "out"))) == of_bridge("qwen3_vl_moe", "exported")


@pytest.mark.parametrize("options", [["--tp", 2, "--pp", 2, "--ep", 2], ["--ep", 6]])
@pytest.mark.parametrize("orientation", ["hub", "transformers"])
def test_comes_back_byte_for_byte(orientation, options, saved, work):
    hf = HF if orientation == "hub" else saved
    run_ok("convert", hf, work / "megatron", *options)
    run_ok("convert", work / "megatron", work / "relaid", "--to", "megatron", "--tp", 2)
    run_ok("convert", work / "relaid", work / "back")
    assert tree(work / "back") == tree(hf)
    run_ok("verify", hf, work / "relaid")
    run_ok("convert", work / "relaid", work / "archive", "--to", "h5")
    run_ok("verify", hf, work / "archive")


def test_both_orientations_are_the_same_model(saved, work):
    for source, to in ((HF, "hub"), (saved, "transformers")):
        run_ok("convert", source, work / to, "--tp", 2)
    assert describe(stored(work / "hub")) == describe(stored(work / "transformers"))
    for sides in ((work / "hub", work / "transformers"), (work / "transformers", work / "hub"), (HF, saved), (saved, work / "hub")):
        assert "experts lie otherwise" in run_ok("verify", *sides, "--weights-only").stdout
        run_ok("diff", *sides)


def test_a_lost_vision_tower_is_told(work):
    run_ok("convert", HF, work / "megatron")
    shutil.rmtree(iteration_folder(work / "megatron") / "ferry")
    refuse("convert", work / "megatron", work / "out", "--hf-config", HF, words=["model.visual.", "also sees"])
