"""Qwen3-Next, Qwen3.5 and Qwen3.6: gated delta nets beside gated attention.

tests/data/bridge_models has the digests of what Megatron-Bridge makes of the same models, by its own conversion, in both directions."""
import shutil

import pytest

from bridge_reference import as_bridge, of_bridge, stored
from support import DATA, hf_tensors, iteration_folder, refuse, run_ok, tree
from tiny_models import load_hf_sd, pack_experts
from weight_mapping import describe

MODELS = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]


@pytest.mark.parametrize("name", MODELS)
def test_writes_what_megatron_bridge_makes(name, work):
    run_ok("convert", DATA / f"hf_{name}/hf", work / "megatron", "--tp", 2, "--make-vocab-size-divisible-by", 1)
    wanted = of_bridge(name, "megatron")
    assert as_bridge(stored(work / "megatron"), wanted) == wanted


@pytest.mark.parametrize("name", MODELS)
def test_reads_what_megatron_bridge_exports(name, work):
    """Without a sidecar, as a checkpoint of Megatron's is read."""
    hf = DATA / f"hf_{name}/hf"
    run_ok("convert", hf, work / "megatron", "--tp", 2)
    shutil.rmtree(iteration_folder(work / "megatron") / "ferry")
    run_ok("convert", work / "megatron", work / "out", "--hf-config", hf)
    wanted = of_bridge(name, "exported")
    got = load_hf_sd(str(work / "out"))
    # Megatron-Bridge rounds the norms that Qwen3.5 has in fp32 to bf16 before it adds one.
    apart = {"lm_head.weight"} if "lm_head.weight" not in got else set()
    if name != "qwen3_next":
        apart |= {key for key in got if key.endswith("linear_attn.norm.weight")}
    assert {k: d for k, d in as_bridge(got, wanted).items() if k not in apart} == {k: d for k, d in wanted.items() if k not in apart}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [["--tp", 2, "--pp", 3], ["--pp", 3, "--num-layers-in-first-pipeline-stage", 1]])
def test_comes_back_byte_for_byte(name, options, work):
    """Also the norms of delta nets, many of which Megatron's dtype cannot hold less one."""
    hf = DATA / f"hf_{name}/hf"
    run_ok("convert", hf, work / "megatron", *options)
    run_ok("convert", work / "megatron", work / "relaid", "--to", "megatron", "--tp", 2)
    run_ok("convert", work / "relaid", work / "back")
    assert tree(work / "back") == tree(hf)
    run_ok("verify", hf, work / "relaid")


def test_what_only_megatron_holds_is_carried_over_as_it_is(work):
    """A norm less one may be near zero, where one more than it has no room for its bits."""
    source = DATA / "qwen3_next_tp2ep2"
    run_ok("convert", source, work / "one", "--to", "megatron", "--tp", 1)
    before, after = stored(source), stored(work / "one")
    assert describe({k: t for k, t in before.items() if "out_norm" in k}) == describe({k: t for k, t in after.items() if "out_norm" in k})
    run_ok("verify", source, work / "one")


def test_a_norm_that_is_not_the_originals_is_refused(work):
    """The sidecar keeps the weights; what Megatron holds has to be those less one."""
    run_ok("convert", DATA / "hf_qwen3_next/hf", work / "megatron")
    folder = iteration_folder(work / "megatron")
    originals = folder / "ferry/derived.safetensors"
    data = bytearray(originals.read_bytes())
    data[-2:] = b"\x00\x40"  # 2.0
    originals.write_bytes(data)
    refuse("convert", work / "megatron", work / "out", words=["linear_attn.norm.weight", "second copy"])


def test_a_prediction_layer_of_packed_experts_is_the_same_model(work):
    """Qwen3.6 packs them, under the architecture of Qwen3.5, which does not."""
    hf = DATA / "hf_qwen3_5_moe/hf"
    shutil.copytree(hf, work / "packed")
    pack_experts(str(work / "packed"), "mtp.")
    names = set(hf_tensors(work / "packed"))
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in names and "mtp.layers.0.mlp.experts.0.gate_proj.weight" not in names
    for source, to in ((hf, "apart"), (work / "packed", "together")):
        run_ok("convert", source, work / to, "--ep", 2)
    assert describe(stored(work / "apart")) == describe(stored(work / "together"))
    run_ok("convert", work / "together", work / "back")
    assert tree(work / "back") == tree(work / "packed")


@pytest.mark.parametrize("name", ["qwen3_5_vl", "qwen3_5_moe_vl"])
def test_a_vision_tower_travels_beside_the_language_model(name, work):
    hf = DATA / f"hf_{name}/hf"
    run_ok("convert", hf, work / "megatron", "--tp", 2, "--pp", 2)
    assert not [key for key in stored(work / "megatron") if "vis" in key]
    run_ok("verify", hf, work / "megatron")
    run_ok("convert", work / "megatron", work / "back")
    assert tree(work / "back") == tree(hf)
    run_ok("convert", work / "megatron", work / "archive", "--to", "h5")
    run_ok("verify", hf, work / "archive")


def test_a_lost_vision_tower_is_told(work):
    hf = DATA / "hf_qwen3_5_vl/hf"
    run_ok("convert", hf, work / "megatron")
    shutil.rmtree(iteration_folder(work / "megatron") / "ferry")
    refuse("convert", work / "megatron", work / "out", "--hf-config", hf, words=["model.visual.", "also sees"])


def test_a_cast_leaves_decays_in_their_dtype(work):
    run_ok("convert", DATA / "hf_qwen3_5/hf", work / "out", "--to", "hf", "--dtype", "bf16")
    dtypes = {name: tensor[0] for name, tensor in hf_tensors(work / "out").items()}
    assert {dtype for name, dtype in dtypes.items() if name.endswith("A_log")} == {"F32"}
    assert {dtype for name, dtype in dtypes.items() if name.endswith("norm.weight")} == {"BF16"}
