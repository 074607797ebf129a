"""Nemotron-H and Nemotron-3: Mamba-2 layers, layers of one module each, experts of a latent width.

tests/data/bridge_models has the digests of what Megatron-Bridge makes of the same model, by its own conversion, in both directions;
test_write_for_megatron.py has megatron-core load what ferry writes, and compares logits."""
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from bridge_reference import as_bridge, of_bridge, stored
from support import DATA, FERRY, TORCH_NAME, hf_tensors, iteration_folder, refuse, run_ok, tree
from tiny_models import load_hf_sd
from weight_mapping import describe

HF = DATA / "hf_nemotron_h/hf"
FP32 = ("mixer.A_log", "mixer.D", "mixer.dt_bias")


def test_writes_what_megatron_bridge_makes(work):
    run_ok("convert", HF, work / "megatron", "--tp", 2, "--ep", 2, "--etp", 1, "--make-vocab-size-divisible-by", 1)
    wanted = of_bridge("nemotron_h", "megatron")
    assert as_bridge(stored(work / "megatron"), wanted) == wanted


def test_reads_what_megatron_bridge_exports(work):
    """Without a sidecar, as a checkpoint of Megatron's is read."""
    run_ok("convert", HF, work / "megatron", "--tp", 2)
    shutil.rmtree(iteration_folder(work / "megatron") / "ferry")
    run_ok("convert", work / "megatron", work / "out", "--hf-config", HF)
    wanted = of_bridge("nemotron_h", "exported")
    assert as_bridge(load_hf_sd(str(work / "out")), wanted) == wanted


@pytest.mark.parametrize("options", [["--tp", 2, "--pp", 5], ["--ep", 4, "--tp", 2], ["--pp", 2, "--num-layers-in-first-pipeline-stage", 1]])
def test_comes_back_byte_for_byte(options, work):
    run_ok("convert", HF, work / "megatron", *options)
    run_ok("convert", work / "megatron", work / "relaid", "--to", "megatron", "--tp", 2)
    run_ok("convert", work / "relaid", work / "back")
    assert tree(work / "back") == tree(HF)
    run_ok("verify", HF, work / "relaid")
    run_ok("convert", work / "relaid", work / "archive", "--to", "h5")
    run_ok("verify", HF, work / "archive")


def test_files_are_split_as_transformers_does(work):
    """Without a sidecar: by the names of the model in memory, the experts of a layer together."""
    import transformers
    transformers.AutoModelForCausalLM.from_pretrained(HF, dtype="float32").save_pretrained(work / "theirs", max_shard_size=40000)
    run_ok("convert", HF, work / "ours", "--to", "hf", "--mtp", "drop", "--dtype", "fp32", "--max-shard-size", 40000)
    files = {side: {file.name: set(load_file(file)) for file in (work / side).glob("*.safetensors")} for side in ("ours", "theirs")}
    assert files["ours"] == files["theirs"]


def test_the_words_of_transformers_are_the_same_model(work):
    shutil.copytree(HF, work / "hf")
    config = json.loads((HF / "config.json").read_text())
    for key in ("hybrid_override_pattern", "mtp_hybrid_override_pattern", "num_hidden_layers"):
        config.pop(key)
    config.update(layers_block_type=["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
                  mtp_layers_block_type=["full_attention", "moe"])
    (work / "hf/config.json").write_text(json.dumps(config))
    for source, to in ((HF, "hub"), (work / "hf", "transformers")):
        run_ok("convert", source, work / to, "--tp", 2)
    assert describe(stored(work / "hub")) == describe(stored(work / "transformers"))


def without_experts(folder):
    """Nemotron-H of 2025 has no experts and no prediction layer."""
    shutil.copytree(HF, folder)
    config = json.loads((HF / "config.json").read_text())
    for key in [key for key in config if "moe" in key or "mtp" in key or "expert" in key]:
        config.pop(key)
    config.update(hybrid_override_pattern="M-*", num_hidden_layers=3, num_nextn_predict_layers=0)
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: t for name, t in load_file(HF / "model.safetensors").items() if not name.startswith(("mtp.", "backbone.layers.3", "backbone.layers.4"))}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_model_without_experts_comes_back(work):
    hf = without_experts(work / "hf")
    run_ok("convert", hf, work / "megatron", "--tp", 2, "--pp", 3)
    run_ok("convert", work / "megatron", work / "back")
    assert tree(work / "back") == tree(hf)
    assert run_ok("convert", work / "megatron", work / "again", "--to", "megatron", "--json")


def test_dropped_prediction_layers_leave_the_model(work):
    run_ok("convert", HF, work / "megatron", "--mtp", "drop")
    assert not [key for key in stored(work / "megatron") if key.startswith("mtp")]
    run_ok("convert", work / "megatron", work / "back")
    assert set(hf_tensors(work / "back")) == {name for name in hf_tensors(HF) if not name.startswith("mtp.")}


def test_decays_and_steps_stay_in_fp32(work):
    run_ok("convert", HF, work / "out", "--to", "hf", "--dtype", "fp16")
    dtypes = {name: TORCH_NAME[tensor[0]] for name, tensor in hf_tensors(work / "out").items()}
    assert {dtype for name, dtype in dtypes.items() if name.endswith(FP32)} == {"float32"}
    assert {dtype for name, dtype in dtypes.items() if not name.endswith((*FP32, "correction_bias"))} == {"float16"}


def test_megatrons_arguments_name_the_family(work):
    run_ok("convert", HF, work / "megatron", "--tp", 2)
    shutil.rmtree(iteration_folder(work / "megatron") / "ferry")
    assert "nemotron_h" in run_ok("inspect", work / "megatron").stdout


def test_groups_are_not_split(work):
    refuse("convert", HF, work / "out", "--tp", 4, words=["--tp 4", "2 groups of Mamba layers cannot be split so"])


@pytest.mark.skipif(not (FERRY.parent / "ferry-torch").exists(), reason="this build has no models: configure it with -Dtorch_root")
def test_no_module_computes_it():
    refuse("generate", HF, "--prompt-ids", "1,2,3", "--max-tokens", 1, words=["are not computed", "Mamba layers"])
