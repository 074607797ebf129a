"""Gemma 4, dense (with a second embedding) and with experts: its layers of global attention have heads of another size, whose keys are their
values, and Megatron-Bridge stacks layers by their kind. tests/data/bridge_models has what Megatron-Bridge makes of both by its own conversion."""
import json
import shutil

import pytest

from bridge_reference import as_bridge, of_bridge, stored
from support import DATA, FERRY, iteration_folder, refuse, run_ok, tree
from tiny_models import load_hf_sd

LAYOUTS = {  # a model and the options of layouts that it is written in
    "gemma4_text": (["--tp", 2, "--pp", 2], ["--tp", 4, "--pp", 3], ["--pp", 6]),
    "gemma4": (["--tp", 2, "--ep", 4, "--etp", 1], ["--tp", 2, "--pp", 3, "--ep", 2], ["--ep", 2]),
}
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]


def hf_of(name):
    return DATA / f"hf_{name}/hf"


@pytest.mark.parametrize("name,layout", CASES)
def test_writes_what_megatron_bridge_makes_in_any_layout(name, layout, work):
    run_ok("convert", hf_of(name), work / "megatron", *layout, "--make-vocab-size-divisible-by", 1)
    wanted = {key: digest for key, digest in of_bridge(name, "megatron").items() if "tower." not in key and "embed_" not in key}
    found = stored(work / "megatron")
    embedding = "embedding.word_embeddings.weight"
    found[embedding] = found[embedding][:wanted[embedding]["shape"][0]]  # as wide as a multiple of TP
    assert as_bridge(found, wanted) == wanted


@pytest.mark.parametrize("name,layout", CASES)
def test_comes_back_byte_for_byte(name, layout, work):
    hf = hf_of(name)
    run_ok("convert", hf, work / "megatron", *layout)
    run_ok("verify", hf, work / "megatron")
    run_ok("convert", work / "megatron", work / "relaid", "--to", "megatron", "--tp", 2)
    for folder in ("megatron", "relaid"):
        run_ok("convert", work / folder, work / f"{folder}-back")
        assert tree(work / f"{folder}-back") == tree(hf)
    run_ok("convert", work / "relaid", work / "archive", "--to", "h5")
    run_ok("verify", hf, work / "archive")


def test_reads_what_megatron_bridge_makes(work):
    """Without a sidecar: Megatron's arguments do not say the sizes of two kinds of attention. With experts: test_megatron_layouts.py."""
    hf = hf_of("gemma4_text")
    run_ok("convert", hf, work / "megatron", "--tp", 2)
    shutil.rmtree(iteration_folder(work / "megatron") / "ferry")
    refuse("convert", work / "megatron", work / "nothing", words=["the sizes of attention in Gemma 4", "--hf-config"])
    run_ok("convert", work / "megatron", work / "out", "--hf-config", hf)
    wanted = of_bridge("gemma4_text", "exported")
    assert as_bridge(load_hf_sd(str(work / "out")), wanted) == wanted


def test_both_spellings_of_the_configuration_are_read(work):
    """transformers 5.17 writes what single layers have of their own, files of the hub name the heads of global attention."""
    config = json.loads((hf_of("gemma4_text") / "config.json").read_text())
    of_layers = config.pop("per_layer_config")
    assert set(of_layers) == {"2", "5"}
    hub = {**config, "global_head_dim": of_layers["2"]["head_dim"], "num_global_key_value_heads": of_layers["2"]["num_key_value_heads"]}
    shutil.copytree(hf_of("gemma4_text"), work / "hub")
    (work / "hub/config.json").write_text(json.dumps(hub))
    run_ok("convert", work / "hub", work / "megatron", "--tp", 2)
    assert run_ok("digest", work / "megatron").stdout.split()[0] == run_ok("digest", hf_of("gemma4_text")).stdout.split()[0]


@pytest.mark.parametrize("name,change,words", [
    ("gemma4_text", {"num_kv_shared_layers": 2}, ["num_kv_shared_layers is 2", "not handled"]),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "all"]),
    ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 12}}}, ["per_layer_config of 1", "sliding_attention"]),
    ("gemma4_text", {"per_layer_config": {"2": {"head_dim": 12}}}, ["per_layer_config of 5", "full_attention"]),
    ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 20},
     ["enable_moe_block beside hidden_size_per_layer_input"]),
    ("gemma4_text", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, ["rope_type", "linear", "proportional"]),
])
def test_what_no_megatron_model_holds_is_refused_by_name(name, change, words, work):
    shutil.copytree(hf_of(name), work / "hf")
    config = json.loads((hf_of(name) / "config.json").read_text())
    (work / "hf/config.json").write_text(json.dumps({**config, **change}))
    refuse("convert", work / "hf", work / "megatron", words=words)


@pytest.mark.skipif(not (FERRY.parent / "ferry-torch").exists(), reason="this build has no models: configure it with -Dtorch_root")
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_no_module_computes_is_refused_by_name(name):
    refuse("generate", hf_of(name), "--prompt-ids", "1,2,3", "--max-tokens", 1,
           words=["converted, but not computed", "attention of two sizes"])
