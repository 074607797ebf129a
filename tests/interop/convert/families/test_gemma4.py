"""Gemma 4, dense (with a second embedding; E2B and E4B, whose last layers share keys and values) and with experts: its layers of global attention have
heads of another size, whose keys may be their values, and Megatron-Bridge stacks layers by their kind. tests/data/bridge_models has what Megatron-Bridge
makes of them by its own conversion. Gemma 4 12B, which also goes by names of its own (gemma4_unified), is given to it as a Gemma 4."""
import json
import shutil

import pytest

from bridge_reference import as_bridge, of_bridge, stored
from support import DATA, FERRY, iteration_folder, refuse, run_ok, tree
from tiny_models import gemma4_text, load_hf_sd

LAYOUTS = {  # a model and the options of layouts that it is written in
    "gemma4_text": (["--tp", 2, "--pp", 2], ["--tp", 4, "--pp", 3], ["--pp", 6]),
    "gemma4": (["--tp", 2, "--ep", 4, "--etp", 1], ["--tp", 2, "--pp", 3, "--ep", 2], ["--ep", 2]),
    "gemma4_e2b": (["--tp", 2, "--pp", 2], ["--tp", 4, "--pp", 3]),
    "gemma4_e4b": (["--tp", 4, "--pp", 2], ["--tp", 2, "--pp", 3]),
    "gemma4_unified": (["--tp", 2, "--pp", 2], ["--tp", 4, "--pp", 3], ["--pp", 6]),
}
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]


def hf_of(name):
    return DATA / f"hf_{name}/hf"


@pytest.fixture(scope="module")
def unified_text(tmp_path_factory):
    """The language model of Gemma 4 12B, as transformers' class for it alone saves it"""
    import torch
    import transformers as T
    T.logging.set_verbosity_error()
    seeing = T.Gemma4UnifiedForConditionalGeneration.from_pretrained(hf_of("gemma4_unified"))
    alone = T.Gemma4UnifiedForCausalLM(seeing.config.text_config).to(torch.bfloat16)
    alone.model.load_state_dict(seeing.model.language_model.state_dict())
    folder = tmp_path_factory.mktemp("unified_text") / "hf"
    alone.save_pretrained(folder)
    return folder


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


@pytest.mark.parametrize("name", ["gemma4_text", "gemma4_unified"])
def test_reads_what_megatron_bridge_makes(name, unified_text, work):
    """Without a sidecar: Megatron's arguments do not say the sizes of two kinds of attention. With experts: test_megatron_layouts.py."""
    hf = unified_text if name == "gemma4_unified" else hf_of(name)
    run_ok("convert", hf, work / "megatron", "--tp", 2)
    run_ok("convert", work / "megatron", work / "back")
    assert tree(work / "back") == tree(hf)
    shutil.rmtree(iteration_folder(work / "megatron") / "ferry")
    refuse("convert", work / "megatron", work / "nothing", words=["the sizes of attention in Gemma 4", "--hf-config"])
    run_ok("convert", work / "megatron", work / "out", "--hf-config", hf)
    wanted = of_bridge(name, "exported")
    assert as_bridge(load_hf_sd(str(work / "out")), wanted) == wanted


def test_projectors_of_gemma_4_12b_lie_beside_what_megatron_bridge_makes(work):
    """In its layout, by the rules of Gemma 4's towers. Without a sidecar the names are those that transformers saves."""
    import torch
    hf = hf_of("gemma4_unified")
    run_ok("convert", hf, work / "megatron", "--tp", 2, "--megatron-layout", "megatron-bridge", "--make-vocab-size-divisible-by", 1)
    weights, found = load_hf_sd(str(hf)), stored(work / "megatron")
    beside = {key: tensor for key, tensor in found.items() if not key.startswith("language_model.")}
    wanted = of_bridge("gemma4_unified", "megatron")
    assert as_bridge({key.removeprefix("language_model."): tensor for key, tensor in found.items() if key not in beside}, wanted) == wanted
    assert {f"model.{key}" for key in beside} == {name for name in weights if ".language_model." not in name}
    assert all(torch.equal(tensor, weights[f"model.{key}"]) for key, tensor in beside.items())
    shutil.rmtree(iteration_folder(work / "megatron") / "ferry")
    (work / "alone").mkdir()
    shutil.copy(hf / "config.json", work / "alone")
    run_ok("convert", work / "megatron", work / "out", "--hf-config", work / "alone")
    back = load_hf_sd(str(work / "out"))
    assert back.keys() == weights.keys() and all(torch.equal(tensor.bfloat16(), weights[name]) for name, tensor in back.items())


def test_transformers_computes_gemma_4_12b_as_a_gemma_4(unified_text):
    import torch
    import transformers as T
    own = T.Gemma4UnifiedForCausalLM.from_pretrained(unified_text, dtype=torch.float32).eval()
    other = T.Gemma4ForCausalLM(T.Gemma4TextConfig(**gemma4_text(num_global_key_value_heads=1, hidden_size_per_layer_input=0))).eval()
    other.load_state_dict(own.state_dict())
    ids = torch.arange(20)[None] * 3 % 80 + 4
    with torch.no_grad():
        assert torch.equal(own(input_ids=ids).logits, other(input_ids=ids).logits)


def megatron_files(folder):
    """The files that a job of Megatron reads, with its arguments"""
    return {name: content for name, content in tree(folder).items() if "ferry/" not in str(name)}


def test_what_config_json_leaves_out_is_what_the_class_of_transformers_takes(work):
    import torch
    import transformers as T
    sizes = dict(hidden_size=2, intermediate_size=3, num_hidden_layers=7)
    T.Gemma4UnifiedForCausalLM(T.Gemma4UnifiedTextConfig(**sizes)).to(torch.bfloat16).save_pretrained(work / "said")
    config = json.loads((work / "said/config.json").read_text())
    own = {key: config[key] for key in ("architectures", "dtype", "model_type")}
    hub = dict(hidden_size_per_layer_input=0, enable_moe_block=False, num_experts=None)
    for folder, words in {"unsaid": {}, "hub": hub, "other": {"sliding_window": 512}}.items():
        shutil.copytree(work / "said", work / folder)
        (work / folder / "config.json").write_text(json.dumps({**own, **sizes, **words}))
    for folder in ("said", "unsaid", "hub", "other"):
        run_ok("convert", work / folder, work / f"{folder}-megatron")
    files = megatron_files(work / "said-megatron")
    assert megatron_files(work / "unsaid-megatron") == files and megatron_files(work / "hub-megatron") == files
    assert megatron_files(work / "other-megatron") != files


def test_layers_are_named_in_as_many_digits_as_the_last(work):
    import torch
    import transformers as T
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 4
    config = T.Gemma4TextConfig(**gemma4_text(num_hidden_layers=12, layer_types=layers, hidden_size_per_layer_input=0))
    T.Gemma4ForCausalLM(config).to(torch.bfloat16).save_pretrained(work / "hf")
    assert set(json.loads((work / "hf/config.json").read_text())["per_layer_config"]) == {"02", "05", "08", "11"}
    run_ok("convert", work / "hf", work / "megatron", "--tp", 2)
    run_ok("convert", work / "megatron", work / "back")
    assert tree(work / "back") == tree(work / "hf")


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


def shared_weights(folder):
    return sorted(name for name in load_hf_sd(str(folder)) if ".layers.4.self_attn." in name and ".o_proj." not in name)


@pytest.mark.parametrize("name,hub", [("gemma4_e2b", []), ("gemma4_e4b", ["k_norm", "k_proj", "v_proj"])])
def test_layers_without_keys_of_their_own_get_what_nothing_computes_with(name, hub, work):
    """Files of transformers lack the weights, those of the hub hold them; Megatron's layers have them either way, and Megatron-Bridge leaves them as
    they began. --hf-config says which files are wanted."""
    import torch
    assert [part.split(".")[-2] for part in shared_weights(hf_of(name))] == sorted([*hub, "q_norm", "q_proj"])
    run_ok("convert", hf_of(name), work / "megatron", "--tp", 2, "--megatron-layout", "megatron-bridge")
    if not hub:
        found = stored(work / "megatron")
        layer = "language_model.decoder.layers.4.self_attention_sliding."
        qkv = found[layer + "linear_qkv.weight"].reshape(4, 4, 8, 24)  # groups of 2 queries, a key, a value
        assert qkv[:, :2].any() and not qkv[:, 2:].any()
        assert torch.equal(found[layer + "k_layernorm.weight"], torch.ones(8, dtype=torch.bfloat16))
    iteration = iteration_folder(work / "megatron")
    shutil.rmtree(iteration / "ferry")
    run_ok("convert", work / "megatron", work / "out", "--hf-config", hf_of(name))
    assert shared_weights(work / "out") == shared_weights(hf_of(name))
    other = hf_of("gemma4_e2b")
    (work / "alone").mkdir()
    shutil.copy(hf_of(name) / "config.json", work / "alone")
    out = run_ok("convert", work / "megatron", work / "plain", "--hf-config", work / "alone")
    assert shared_weights(work / "plain") == shared_weights(other)
    assert ("padding" in out.stdout + out.stderr) == bool(hub)  # what is lost is said


def test_transformers_computes_the_same_with_and_without_unused_weights(work):
    import torch
    import transformers as T
    run_ok("convert", hf_of("gemma4_e4b"), work / "megatron", "--tp", 2, "--megatron-layout", "megatron-bridge")
    shutil.rmtree(iteration_folder(work / "megatron") / "ferry")
    (work / "alone").mkdir()
    shutil.copy(hf_of("gemma4_e4b") / "config.json", work / "alone")
    run_ok("convert", work / "megatron", work / "out", "--hf-config", work / "alone")
    assert len(load_hf_sd(str(work / "out"))) < len(load_hf_sd(str(hf_of("gemma4_e4b"))))
    T.logging.set_verbosity_error()
    ids = torch.arange(20)[None] * 3 % 80 + 4
    logits = []
    for folder in (hf_of("gemma4_e4b"), work / "out"):
        model = T.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(model(input_ids=ids).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("name,change,words", [
    ("gemma4_text", {"num_kv_shared_layers": 6}, ["num_kv_shared_layers is 6", "0 to 5"]),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "all"]),
    ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 12}}}, ["per_layer_config of 1", "sliding_attention"]),
    ("gemma4_text", {"per_layer_config": {"2": {"head_dim": 12}}}, ["per_layer_config of 5", "full_attention"]),
    ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 20},
     ["enable_moe_block beside hidden_size_per_layer_input"]),
    ("gemma4_text", {"enable_moe_block": True, "use_double_wide_mlp": True}, ["enable_moe_block beside num_kv_shared_layers or use_double_wide_mlp"]),
    ("gemma4_text", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, ["rope_type", "linear", "proportional"]),
    ("gemma4_text", {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0}}},
     ["the factor 2"]),
    ("gemma4_text", {"per_layer_config": {"06": {"head_dim": 12}}}, ["per_layer_config of 6", "no layer"]),
    ("gemma4_unified", {"enable_moe_block": True}, ["text_config: enable_moe_block is true"]),
    ("gemma4_unified", {"hidden_size_per_layer_input": 10}, ["text_config: hidden_size_per_layer_input is 10"]),
    ("gemma4_unified", {"attention_bias": True}, ["text_config: attention_bias is true"]),
    ("gemma4_unified", {"use_bidirectional_attention": "all"}, ["text_config: use_bidirectional_attention", "all"]),
])
def test_what_no_megatron_model_holds_is_refused_by_name(name, change, words, work):
    shutil.copytree(hf_of(name), work / "hf")
    config = json.loads((hf_of(name) / "config.json").read_text())
    config.get("text_config", config).update(change)
    (work / "hf/config.json").write_text(json.dumps(config))
    refuse("convert", work / "hf", work / "megatron", words=words)


@pytest.mark.skipif(not (FERRY.parent / "ferry-torch").exists(), reason="this build has no models: configure it with -Dtorch_root")
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_no_module_computes_is_refused_by_name(name):
    refuse("generate", hf_of(name), "--prompt-ids", "1,2,3", "--max-tokens", 1,
           words=["are not computed", "attention of two sizes"])
