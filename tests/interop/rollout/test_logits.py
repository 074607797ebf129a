"""Compares Ferry's models with transformers, bit for bit: `ferry verify --logits` over families, formats and meshes.

Regime: transformers 5.17.0 and torch 2.11.0 on the host, eager attention, default experts, one unpadded sequence of at least 16 tokens
at a time, of GPT-OSS a multiple of 16. bf16 at any size; fp32 if MKL takes the kernel with Ferry's order (`ferry verify --numerics --dtype fp32` tells), at lengths
where Hugging Face agrees with itself, and if each expert gets no token or at least 12."""
import functools
import json
import re
import os
import shutil
import subprocess
import sys
import time

import pytest

import hf_reference
from meshes import covering, layout_of, name_of, prediction_layers, spread
from ranks import free_port
from support import DATA, FERRY, HERE, PEERS, ferry, ferry_json, llama_config, run_ok, skip_where_transformers_differs, write_hf
from tiny_models import make_hybrid_of_four_heads, make_longrope, make_seeing

TORCH = FERRY.parent / "ferry-torch"
pytestmark = pytest.mark.skipif(not TORCH.exists(), reason="this build has no models: configure it with -Dtorch_root")

DENSE = ["llama", "qwen2", "qwen2_tied", "qwen3", "seed_oss", "smollm3", "olmo2", "olmo3", "glm4", "phi3", "granite", "ernie4_5", "gemma3_text", "gemma2", "ministral3", "qwen3_vl",
         "gemma3", "mistral3", "qwen2_5_vl"]
EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "moonlight", "glm4_moe", "glm4_moe_lite", "olmoe", "minimax_m2", "ernie4_5_moe",
           "kimi_k25"]
SIX_EXPERTS = ["gpt_oss", "qwen3_vl_moe"]
HYBRID, HYBRID_EXPERTS = ["qwen3_5"], ["qwen3_next", "qwen3_5_moe"]  # gated delta nets, whose two key heads one of TP and CP shares out

# Every pair of values of two axes occurs in some setting. The sizes are those of verify's flags; vpp: chunks of a stage.
DENSE_MESHES = covering(dict(tp=(1, 2, 4), pp=(1, 2), vpp=(1, 2), cp=(1, 2), sp=(False, True), packed=(False, True)),
                        lambda mesh: mesh["vpp"] == 1 or mesh["pp"] > 1)
EXPERT_MESHES = covering(dict(tp=(1, 2, 4), etp=(1, 2, 4), ep=(1, 2, 4), pp=(1, 2), cp=(1, 2), sp=(False, True), packed=(False, True)))
SIX_MESHES = covering(dict(tp=(1, 2, 4), etp=(1, 2, 4), ep=(1, 2, 3), pp=(1, 2), cp=(1, 2), sp=(False, True), packed=(False, True)))
TWO_HEADS = lambda mesh: mesh["tp"] * mesh["cp"] <= 2
HYBRID_MESHES = covering(dict(tp=(1, 2), pp=(1, 2), cp=(1, 2), sp=(False, True), packed=(False, True)), TWO_HEADS)
HYBRID_EXPERT_MESHES = covering(dict(tp=(1, 2), etp=(1, 2, 4), ep=(1, 2, 4), pp=(1, 2), cp=(1, 2), sp=(False, True), packed=(False, True)), TWO_HEADS)


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    folder = tmp_path_factory.mktemp("references")

    @functools.lru_cache(maxsize=None)
    def make(checkpoint, dtype="bfloat16", lengths=None, layers=True):
        lengths = lengths or ("32,64,16" if "gpt_oss" in str(checkpoint) else "24,64,16")
        file = folder / f"{abs(hash((str(checkpoint), dtype, lengths)))}.safetensors"
        hf_reference.main([str(checkpoint), str(file), "--dtype", dtype, "--lengths", lengths, *(["--layers"] if layers else [])])
        return file
    return make


def hf(model):
    return DATA / f"hf_{model}" / "hf"


def text_config(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    return config.get("text_config", config)


def flags(mesh, checkpoint):
    """-> the options of `ferry verify --logits`, for a model whose layers the stages may share unevenly"""
    config = text_config(checkpoint)
    given = [f"--{axis}={size}" for axis, size in mesh.items() if axis not in ("sp", "packed", "vpp")]
    if mesh["pp"] > 1:
        given.append("--pipeline-model-parallel-layout=" + layout_of(config["num_hidden_layers"], mesh["pp"], mesh.get("vpp", 1),
                                                                     prediction_layers(config)))
    return given + [f"--{switch}" for switch in ("sp", "packed") if mesh[switch]]


def cases(models, meshes, each):
    return [pytest.param(model, mesh, id=f"{model}-{name_of(mesh)}") for model, mesh in spread(models, meshes, each)]


def has_delta_nets(checkpoint):
    return (checkpoint / "config.json").exists() and "linear_attention" in text_config(checkpoint).get("layer_types", ())


def check_equal(checkpoint, reference, *options):
    done = ferry("verify", "--logits", checkpoint, "--reference", reference, "--json", *options)
    if done.returncode == 1 and has_delta_nets(checkpoint):
        report = json.loads(done.stdout)
        alone = json.loads(ferry("verify", "--logits", checkpoint, "--reference", reference, "--json").stdout)
        assert [s["logits"] for s in report["sequences"]] == [s["logits"] for s in alone["sequences"]]  # each mesh is as far from it
        layer = re.fullmatch(r"decoder\.layers\.(\d+)\.self_attention", report["first_difference"]["module"])
        assert layer and text_config(checkpoint)["layer_types"][int(layer[1])] == "linear_attention", report["first_difference"]
        skip_where_transformers_differs(checkpoint, "bf16")  # delta nets compute in fp32 in any dtype
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["equal"] and all(s["logits"]["unequal"] == 0 for s in report["sequences"])
    return report


def test_routers_of_ernie_keep_the_numbers_of_fp32_in_models_of_bf16(references, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file
    shutil.copytree(hf("ernie4_5_moe"), tmp_path / "hf")
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    generator = torch.Generator().manual_seed(3)
    tensors = {name: 0.3 * torch.randn(tensor.shape, generator=generator) if name.endswith("mlp.gate.weight") else tensor
               for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    reference = references(tmp_path / "hf")
    for options in ((), ("--packed",), ("--tp", 2, "--ep", 2)):
        check_equal(tmp_path / "hf", reference, *options)
    run_ok("convert", tmp_path / "hf", tmp_path / "megatron", "--to", "megatron", "--tp", 2, "--ep", 2)
    check_equal(tmp_path / "megatron", reference)


@pytest.mark.parametrize("model", DENSE + EXPERTS + SIX_EXPERTS + HYBRID + HYBRID_EXPERTS)
def test_one_rank_gives_the_bits_of_transformers_in_every_module(model, references):
    for options in ((), ("--packed",)):
        report = check_equal(hf(model), references(hf(model)), *options)
        layers = text_config(hf(model))["num_hidden_layers"]
        for sequence in report["sequences"]:
            assert sequence["logits"]["elements"] > 0
            modules = [module["module"] for module in sequence["modules"]]
            assert modules[0] == "embedding" and modules[-1] == "decoder.final_layernorm" and len(modules) == 3 * layers + 2


@pytest.mark.parametrize("options", [(), ("--packed",), ("--packed", "--tp=2", "--sp", "--cp=2"), ("--packed", "--pp=2")])
def test_each_sequence_turns_by_the_factors_of_its_length(options, references, work):
    """Packs hold sequences of up to as many tokens as longrope's original ones, and longer ones."""
    make_longrope(work / "hf", 32)
    check_equal(work / "hf", references(work / "hf", lengths="24,64,32,33"), *options)


@pytest.mark.parametrize("model, options", [("deepseek_v2", ()), ("deepseek_v3", ("--tp=2", "--cp=2")), ("kimi_k25", ()), ("kimi_k25", ("--tp=2", "--ep=2"))])
def test_latent_attention_has_the_scales_of_yarn(model, options, references, work):
    """Published models of these families have it. Positions lie behind those of the pre-training, too; Kimi's turns all channels at once."""
    shutil.copytree(hf(model), work / "hf")
    config = json.loads((work / "hf/config.json").read_text())
    fast = 1.0 if model == "kimi_k25" else 32.0
    text = config.get("text_config", config)
    for name in ("rope_scaling", "rope_theta"):
        text.pop(name, None)
    text |= {"max_position_embeddings": 512, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "original_max_position_embeddings": 16, "beta_fast": fast, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0}}
    (work / "hf/config.json").write_text(json.dumps(config))
    plain, scaled = references(hf(model)), references(work / "hf")
    assert plain.read_bytes() != scaled.read_bytes()
    check_equal(work / "hf", scaled, *options)


@pytest.mark.parametrize("model, mesh", cases(DENSE, DENSE_MESHES, 3) + cases(EXPERTS, EXPERT_MESHES, 3) + cases(SIX_EXPERTS, SIX_MESHES, 1)
                         + cases(HYBRID, HYBRID_MESHES, 1) + cases(HYBRID_EXPERTS, HYBRID_EXPERT_MESHES, 1))
def test_every_mesh_gives_the_bits_of_transformers(model, mesh, references):
    check_equal(hf(model), references(hf(model)), *flags(mesh, hf(model)))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_of_a_hybrid_that_also_sees(family, references, tmp_path):
    make_seeing(family, tmp_path / "hf")
    for options in ((), ("--tp=2", "--packed")):
        check_equal(tmp_path / "hf", references(tmp_path / "hf"), *options)


@pytest.mark.parametrize("model", HYBRID + HYBRID_EXPERTS)
def test_tensor_and_context_parallel_ranks_share_out_the_heads_of_delta_nets(model, references, tmp_path):
    make_hybrid_of_four_heads(model, tmp_path / "hf")
    for options in (("--tp=2", "--cp=2", "--sp", "--packed"), ("--cp=4",)):
        check_equal(tmp_path / "hf", references(tmp_path / "hf"), *options)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_tensor_parallel_ranks_share_out_query_groups_or_their_queries(groups, references, tmp_path):
    checkpoint = tmp_path / "hf"
    write_hf(checkpoint, llama_config(hidden_size=64, num_key_value_heads=groups))
    for options in (("--tp=2",), ("--tp=4", "--sp", "--packed"), ("--tp=4", "--cp=2")):
        check_equal(checkpoint, references(checkpoint), *options)


@pytest.mark.parametrize("model, options", [("deepseek_v3", ("--pp", 2, "--pipeline-model-parallel-layout", "Et|ttmL")),
                                            ("llama", ("--pp", 2, "--pipeline-model-parallel-layout", "Ettt|tL"))])
def test_uneven_pipelines(model, options, references):
    check_equal(hf(model), references(hf(model)), *options)


@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "deepseek_v3", "qwen3_5"])
def test_fp32_at_the_sizes_of_real_layers(model, references, tmp_path):
    checkpoint = tmp_path / model
    subprocess.run([sys.executable, HERE / "rollout/wide_model.py", model, checkpoint], check=True, capture_output=True)
    # Dense models at all lengths at which transformers agrees with itself; experts where each gets rows enough.
    lengths = {"llama": "16,64,192,400", "qwen3_5": "64,192,448"}.get(model, "192,400")
    reference = references(checkpoint, "float32", lengths)
    numerics = ferry_json("verify", "--numerics", checkpoint, "--dtype", "fp32")
    assert numerics["passed"], numerics["checks"]
    more = {"llama": ("--cp", 2), "qwen3_5": ("--tp", 2, "--cp", 2)}.get(model, ("--cp", 2, "--ep", 2))
    runs = [(), ("--packed", "--tp", 2, "--sp"), more]
    if numerics["equals_transformers"]:
        for options in runs:
            check_equal(checkpoint, reference, *options)
        return
    # MKL chose other kernels than ours for transformers: every mesh is as far from it as every other, by roundings.
    first, *others = [json.loads(ferry("verify", "--logits", checkpoint, "--reference", reference, "--json", *options).stdout)["sequences"]
                      for options in runs]
    for sequences in others:
        assert [s["logits"] for s in sequences] == [s["logits"] for s in first]
    largest = [s["logits"]["largest"] for s in first]
    if model in ("qwen3_moe", "deepseek_v3"):
        # Roundings choose between two experts that are as good as each other, which moves a token and, a little, those that see it.
        assert min(largest) < 1e-4 and all(s["mean_log_prob"] < 0.01 for s in first)
    else:
        assert max(largest) < 1e-4


def with_head(model, head, labels, folder):
    """The body of a fixture, with another head of random weights."""
    import torch
    import transformers
    network = getattr(transformers, f"AutoModelFor{head}Classification").from_pretrained(hf(model), num_labels=labels, dtype=torch.bfloat16)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in network.score.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape))
    network.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model, head, labels, options", [
    ("llama", "Token", 1, "--tp 2 --sp --packed"), ("qwen2_tied", "Token", 3, "--pp 2 --cp 2"), ("qwen3", "Sequence", 1, "--tp 4"),
    ("mixtral", "Sequence", 2, "--ep 2 --packed"), ("moonlight", "Token", 1, "--cp 2 --ep 2")])
def test_value_heads_and_reward_models(model, head, labels, options, references, tmp_path):
    checkpoint = with_head(model, head, labels, tmp_path / "hf")
    for how in ((), options.split()):
        report = check_equal(checkpoint, references(checkpoint), *how)
        assert [s["logits"]["elements"] for s in report["sequences"]] == [length * labels for length in (24, 64, 16)]
    run_ok("convert", checkpoint, tmp_path / "megatron", "--to", "megatron", "--tp", 2, *(("--etp", 1) if model in EXPERTS else ()))
    check_equal(tmp_path / "megatron", references(checkpoint))


def test_heads_that_do_not_fit_are_refused(references, tmp_path):
    checkpoint = with_head("llama", "Token", 2, tmp_path / "value")
    refused("250 logits", "labels: 2", arguments=(checkpoint, "--reference", references(hf("llama"))))
    refused("2 logits", "vocabulary of 250", arguments=(hf("llama"), "--reference", references(checkpoint)))
    other = with_head("llama", "Token", 3, tmp_path / "three")
    refused("3 logits", "labels: 2", arguments=(checkpoint, "--reference", references(other)))
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForQuestionAnswering"]}))
    refused("score.", arguments=(checkpoint, "--reference", references(other)))
    with pytest.raises(SystemExit, match="LlamaForQuestionAnswering"):
        hf_reference.main([str(checkpoint), str(tmp_path / "reference")])


PREDICTED_TOLERANCE = 2e-6  # relative to the largest logit: fp32 sums in another order


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe"])
def two_predictions(request, tmp_path_factory):
    """A model with a second prediction layer: the first one's weights, shuffled."""
    import torch
    from safetensors.torch import load_file, save_file
    folder = tmp_path_factory.mktemp("predictions") / "hf"
    shutil.copytree(hf(request.param), folder)
    config = json.loads((folder / "config.json").read_text())
    first = f"model.layers.{config['num_hidden_layers']}."
    weights = load_file(folder / "model.safetensors")
    for key in [key for key in weights if key.startswith(first)]:
        shared = "embed_tokens" in key or "shared_head.head" in key
        weights[key.replace(first, f"model.layers.{config['num_hidden_layers'] + 1}.")] = (
            weights[key].clone() if shared else weights[key].flip(0).contiguous())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 2}))
    return folder


@pytest.mark.parametrize("release", ["mc0161", "mc0192"])
def test_prediction_layers_compute_what_megatron_core_does(release, two_predictions, tmp_path):
    reference = tmp_path / "reference.safetensors"
    made = subprocess.run([sys.executable, HERE / "megatron_reference.py", "--mcore", PEERS / release, two_predictions, reference],
                          capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    from safetensors.torch import load_file
    stored = load_file(reference)
    for options in ("--alignment fast", "--tp 2 --sp --packed", "--cp 2 --ep 2 --packed", "--pp 2 --pipeline-model-parallel-layout Et|ttmmL"):
        report = ferry_json("verify", "--logits", two_predictions, "--reference", reference, *options.split(), code=1)
        for i, sequence in enumerate(report["sequences"]):
            outputs = {module["module"]: module for module in sequence["modules"]} | {"logits": sequence["logits"]}
            assert set(outputs) == {"logits", "mtp.layers.0", "mtp.layers.1"}
            for name, output in outputs.items():
                theirs = stored[f"logits.{i}" if name == "logits" else f"predicted.{i}.{name}"]
                behind = 0 if name == "logits" else int(name[-1]) + 1
                assert output["elements"] == theirs[behind:].numel() and output["finite"]
                assert output["largest"] < PREDICTED_TOLERANCE * theirs.abs().max().item(), name
    refused("mtp.layers.0", "0 such layers", arguments=(without_predictions(two_predictions, tmp_path), "--reference", reference))
    refused("prediction layer 0", "loss", arguments=(two_predictions, "--reference", reference, "--pp", 2,
                                                     "--pipeline-model-parallel-layout", "Ettmm|tL"))


def without_predictions(checkpoint, folder):
    from safetensors.torch import load_file, save_file
    config = json.loads((checkpoint / "config.json").read_text())
    weights = load_file(checkpoint / "model.safetensors")
    kept = {key: tensor for key, tensor in weights.items() if not key.startswith(("model.layers.3.", "model.layers.4."))}
    (folder / "plain").mkdir()
    save_file(kept, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    (folder / "plain" / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    return folder / "plain"


@pytest.mark.parametrize("stored", ["llama_tp2pp2", "llama_tp2pp2_mc0131", "llama_singleton"])
def test_models_load_from_megatrons_own_checkpoints(stored, references):
    check_equal(DATA / stored, references(hf("llama")), "--tp", 2, "--hf-config", hf("llama"))


def test_gemma_3_as_older_config_files_say_it_and_in_megatrons_words(references, tmp_path):
    checkpoint = tmp_path / "hf"
    shutil.copytree(hf("gemma3_text"), checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    for key in ("rope_parameters", "layer_types", "_sliding_window_pattern"):
        del config[key]
    config |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 2}
    (checkpoint / "config.json").write_text(json.dumps(config))
    check_equal(checkpoint, references(checkpoint), "--tp", 2)
    run_ok("convert", checkpoint, tmp_path / "megatron", "--tp", 2, "--pp", 2)
    check_equal(tmp_path / "megatron", references(checkpoint))
    shutil.rmtree(tmp_path / "megatron/release/ferry")
    refused("gemma3_text", "--hf-config", arguments=(tmp_path / "megatron", "--reference", references(checkpoint)))


@pytest.mark.parametrize("to", ["megatron", "h5"])
def test_models_load_from_what_we_write(to, references, tmp_path):
    run_ok("convert", hf("qwen3_moe"), tmp_path / "there", "--to", to, *(("--tp", 2, "--ep", 2) if to == "megatron" else ()))
    check_equal(tmp_path / "there", references(hf("qwen3_moe")), "--ep", 2, "--packed")


@pytest.mark.parametrize("more", [(), ("--dtype", "fp32")], ids=["bf16", "fp32"])
def test_a_hybrid_computes_from_a_checkpoint_that_has_rounded_a_norm_less_one(more, references, tmp_path):
    """Megatron's `out_norm` less one is rounded; beside it lies what was lost."""
    run_ok("convert", hf("qwen3_next"), tmp_path / "there", "--tp", 2)
    if more:
        run_ok("convert", tmp_path / "there", tmp_path / "cast", *more)
        run_ok("convert", hf("qwen3_next"), tmp_path / "expected", "--to", "hf", *more)
        run_ok("verify", tmp_path / "cast", tmp_path / "expected")
    else:
        check_equal(tmp_path / "there", references(hf("qwen3_next")), "--tp", 2)


def launch(size, port, *arguments_of_ranks):
    """[(exit status, stdout, stderr)] of `ferry verify --logits` as ranks of a launcher, found by what torchrun sets."""
    environment = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [subprocess.Popen([str(FERRY), "verify", "--logits", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
             for rank, arguments in enumerate(arguments_of_ranks)]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs)]


def test_ranks_of_a_launcher(references):
    """Processes over Gloo."""
    command = (hf("llama"), "--reference", references(hf("llama")), "--tp", 2, "--json")
    first, second = launch(2, free_port(), command, command)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert json.loads(first[1])["equal"] and second[1] == ""


def test_ranks_that_are_no_multiple_of_the_mesh_are_refused(references):
    command = (hf("llama"), "--reference", references(hf("llama")), "--tp", 2)
    for code, out, err in launch(3, free_port(), *[command] * 3):
        assert code == 2 and not out and "3 ranks are no multiple of tp 2" in err


@pytest.mark.parametrize("when", ["before it meets the others", "while they compute"])
def test_a_rank_that_dies_is_named(when, references):
    """Rank 1 fails alone; rank 0 waits for it as long as it was told at most, and says for whom."""
    start = time.monotonic()
    command = (hf("llama"), "--tp", 2, "--timeout", 4, "--reference")
    # A reference of another model is found out once the mesh stands.
    other = "/nowhere" if when.startswith("before") else references(hf("qwen3"))
    waits, dies = launch(2, free_port(), (*command, references(hf("llama"))), (*command, other))
    assert dies[0] == 2 and waits[0] == 2 and not waits[1], (waits, dies)
    assert "missing: rank 1" in waits[2] or "does not reach the others" in waits[2], waits[2]
    assert time.monotonic() - start < 60


def test_fast_differs_and_the_first_difference_is_named(references, tmp_path):
    page = tmp_path / "page.html"
    report = ferry_json("verify", "--logits", hf("llama"), "--reference", references(hf("llama")), "--alignment", "fast", "--tp", 2,
                        "--html", page, code=1)
    assert not report["equal"] and report["first_difference"]["module"].startswith("decoder.layers.0")
    assert report["sequences"][0]["largest_log_prob"] > 0
    assert "Not equal" in page.read_text() and "decoder.layers.0.self_attention" in page.read_text()


def test_a_changed_weight_is_found_where_it_acts(references, tmp_path):
    from safetensors.torch import load_file, save_file
    shutil.copytree(hf("qwen3"), tmp_path / "changed")
    weights = load_file(tmp_path / "changed" / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][3, 5] *= 4
    save_file(weights, tmp_path / "changed" / "model.safetensors", metadata={"format": "pt"})
    report = ferry_json("verify", "--logits", tmp_path / "changed", "--reference", references(hf("qwen3")), code=1)
    assert report["first_difference"]["module"] == "decoder.layers.2.mlp"


def test_weights_that_are_not_finite_are_named(references, tmp_path):
    from safetensors.torch import load_file, save_file
    shutil.copytree(hf("llama"), tmp_path / "nan")
    weights = load_file(tmp_path / "nan" / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"][7, 11] = float("nan")
    save_file(weights, tmp_path / "nan" / "model.safetensors", metadata={"format": "pt"})
    done = ferry("verify", "--logits", tmp_path / "nan", "--reference", references(hf("llama")), "--pp", 2, "--tp", 2)
    assert done.returncode == 1 and "NaN or Inf" in done.stderr and "decoder.layers.3.mlp.linear_fc2.weight" in done.stderr
    refused("decoder.layers.3.mlp.linear_fc2.weight", "NaN or Inf",
            arguments=(tmp_path / "nan", "--reference", references(hf("llama")), "--pp", 2, "--tp", 2, "--finite"))


def refused(*words, arguments):
    done = ferry("verify", "--logits", *arguments)
    assert done.returncode == 2 and not done.stdout, done.stdout
    for word in words:
        assert word in done.stderr, done.stderr


def odd_groups(folder):
    write_hf(folder / "odd", llama_config(hidden_size=96, num_attention_heads=12, num_key_value_heads=3))
    return folder / "odd"


def test_meshes_that_do_not_fit_are_refused(references, tmp_path):
    reference = references(hf("llama"))
    refused("3", "heads", arguments=(hf("llama"), "--reference", reference, "--tp", 3))
    refused("3 query groups", "tp 4", arguments=(odd_groups(tmp_path), "--reference", reference, "--tp", 4))
    refused("experts.linear_fc1.weight", "etp 5", arguments=(hf("qwen3_moe"), "--reference", references(hf("qwen3_moe")), "--etp", 5))
    refused("layers", arguments=(hf("llama"), "--reference", reference, "--pp", 3))
    refused("no experts", arguments=(hf("llama"), "--reference", reference, "--ep", 2))
    refused("2 key heads of linear attention", "tp 2", "cp 2", arguments=(hf("qwen3_5"), "--reference", references(hf("qwen3_5")), "--tp", 2, "--cp", 2))
    refused("key heads of linear attention", "tp 3", arguments=(hf("qwen3_5"), "--reference", references(hf("qwen3_5")), "--tp", 3))
    refused("experts", arguments=(hf("mixtral"), "--reference", references(hf("mixtral")), "--ep", 3))


def test_a_reference_of_another_model_is_refused(references, tmp_path):
    refused("vocabulary", arguments=(hf("llama"), "--reference", references(hf("qwen3"), layers=False)))
    (tmp_path / "no").write_bytes(b"none")
    refused("no", arguments=(hf("llama"), "--reference", tmp_path / "no"))
    refused("no reference", arguments=(hf("llama"), "--reference", hf("llama") / "model.safetensors"))


def test_a_checkpoint_of_another_shape_is_refused(references, tmp_path):
    reference = references(hf("llama"))
    shutil.copytree(hf("llama"), tmp_path / "other")
    config = json.loads((hf("llama") / "config.json").read_text())
    for changed, words in (({"intermediate_size": 64}, ("mlp.", "48", "64")), ({"num_hidden_layers": 5}, ("model.layers.4.",)),
                           ({"num_hidden_layers": 3}, ("model.layers.3.",)), ({"vocab_size": 260}, ("lm_head.weight", "250", "260"))):
        (tmp_path / "other" / "config.json").write_text(json.dumps({**config, **changed}))
        refused(*words, arguments=(tmp_path / "other", "--reference", reference, "--tp", 2))
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    refused("ffn_hidden_size is 48", arguments=(DATA / "llama_tp2pp2", "--hf-config", tmp_path / "other", "--reference", reference, "--tp", 2))
