"""Our models beside transformers, bit for bit: `ferry verify --logits` over families, formats and meshes.

Regime: transformers 5.17.0 and torch 2.11.0 on the host, eager attention, default experts, one unpadded sequence of at least 16 tokens
at a time. bf16 at any size; fp32 at sizes of real layers, where MKL's products of whole and of sliced weights agree, at lengths where
Hugging Face agrees with itself, and where each expert gets no token or at least 12."""
import functools
import json
import os
import subprocess
import sys

import pytest
from support import DATA, FERRY, HERE, ferry, ferry_json, run_ok

TORCH = FERRY.parent / "ferry-torch"
pytestmark = pytest.mark.skipif(not TORCH.exists(), reason="this build has no models: configure it with -Dtorch_root")

DENSE = ["llama", "qwen2", "qwen2_tied", "qwen3"]
EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "moonlight"]

# Pairs of settings rather than their product.
DENSE_MESHES = ["--tp 2", "--tp 2 --sp --packed", "--pp 2 --packed", "--cp 2", "--tp 2 --cp 2 --sp --packed", "--tp 2 --pp 2 --sp"]
EXPERT_MESHES = ["--ep 2", "--ep 4 --packed", "--tp 2 --etp 1 --sp", "--tp 2 --ep 2 --etp 2 --sp --packed", "--tp 2 --ep 2 --etp 1 --packed",
                 "--cp 2 --ep 2", "--tp 2 --cp 2 --ep 2 --etp 2"]


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    folder = tmp_path_factory.mktemp("references")

    @functools.lru_cache(maxsize=None)
    def make(checkpoint, dtype="bfloat16", lengths="24,64,16", layers=True):
        file = folder / f"{abs(hash((str(checkpoint), dtype, lengths)))}.safetensors"
        subprocess.run([sys.executable, HERE / "hf_reference.py", checkpoint, file, "--dtype", dtype, "--lengths", lengths,
                        *(["--layers"] if layers else [])], check=True, capture_output=True)
        return file
    return make


def hf(model):
    return DATA / f"hf_{model}" / "hf"


def settings(models, meshes, each):
    """Every model meets `each` of the meshes, every mesh several models."""
    return [pytest.param(model, meshes[(i + j * (len(meshes) // each)) % len(meshes)], id=f"{model}{meshes[(i + j * (len(meshes) // each)) % len(meshes)]}".replace(" ", ""))
            for i, model in enumerate(models) for j in range(each)]


def check_equal(checkpoint, reference, *options):
    report = ferry_json("verify", "--logits", checkpoint, "--reference", reference, *options)
    assert report["equal"] and all(s["logits"]["unequal"] == 0 for s in report["sequences"])
    return report


@pytest.mark.parametrize("model", DENSE + EXPERTS)
def test_one_rank_gives_the_bits_of_transformers_in_every_module(model, references):
    for options in ((), ("--packed",)):
        report = check_equal(hf(model), references(hf(model)), *options)
        layers = json.loads((hf(model) / "config.json").read_text())["num_hidden_layers"]
        for sequence in report["sequences"]:
            assert sequence["logits"]["elements"] > 0
            modules = [module["module"] for module in sequence["modules"]]
            assert modules[0] == "embedding" and modules[-1] == "decoder.final_layernorm" and len(modules) == 3 * layers + 2


@pytest.mark.parametrize("model, mesh", settings(DENSE, DENSE_MESHES, 3) + settings(EXPERTS, DENSE_MESHES[:2] + EXPERT_MESHES, 5))
def test_every_mesh_gives_the_bits_of_transformers(model, mesh, references):
    check_equal(hf(model), references(hf(model)), *mesh.split())


@pytest.mark.parametrize("mesh", ["--tp 4 --etp 1 --sp --packed", "--tp 4 --ep 4 --etp 1 --packed", "--tp 4"])
@pytest.mark.parametrize("model", ["deepseek_v2", "deepseek_v3"])
def test_four_tensor_parallel_ranks(model, mesh, references):
    """Of models whose heads are enough: the others have two query groups."""
    check_equal(hf(model), references(hf(model)), *mesh.split())


@pytest.mark.parametrize("model, options", [("deepseek_v3", ("--pp", 2, "--pipeline-model-parallel-layout", "Et|ttmL")),
                                            ("llama", ("--pp", 2, "--pipeline-model-parallel-layout", "Ettt|tL")),
                                            ("qwen3", ("--pp", 2, "--pipeline-model-parallel-layout", "Et|t|t|tL", "--tp", 2, "--sp"))])
def test_uneven_and_interleaved_pipelines(model, options, references):
    check_equal(hf(model), references(hf(model)), *options)


@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "deepseek_v3"])
def test_fp32_at_the_sizes_of_real_layers(model, references, tmp_path):
    subprocess.run([sys.executable, HERE / "wide_model.py", model, tmp_path / model], check=True, capture_output=True)
    # Dense models at all lengths at which transformers agrees with itself; experts where each gets rows enough.
    lengths = "16,64,192,400" if model == "llama" else "192,400"
    reference = references(tmp_path / model, "float32", lengths)
    check_equal(tmp_path / model, reference)
    check_equal(tmp_path / model, reference, "--packed", "--tp", 2, "--sp")
    check_equal(tmp_path / model, reference, "--cp", 2, *(() if model == "llama" else ("--ep", 2)))


@pytest.mark.parametrize("stored", ["llama_tp2pp2", "llama_tp2pp2_mc0131", "llama_singleton"])
def test_models_load_from_megatrons_own_checkpoints(stored, references):
    check_equal(DATA / stored, references(hf("llama")), "--tp", 2, "--hf-config", hf("llama"))


@pytest.mark.parametrize("to", ["megatron", "h5"])
def test_models_load_from_what_we_write(to, references, tmp_path):
    run_ok("convert", hf("qwen3_moe"), tmp_path / "there", "--to", to, *(("--tp", 2, "--ep", 2) if to == "megatron" else ()))
    check_equal(tmp_path / "there", references(hf("qwen3_moe")), "--ep", 2, "--packed")


def test_ranks_of_a_launcher(references):
    """Processes over Gloo, found by what torchrun sets."""
    command = [FERRY, "verify", "--logits", hf("llama"), "--reference", references(hf("llama")), "--tp", 2, "--json"]
    port = 20000 + os.getpid() % 20000
    ranks = [subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                                   "MASTER_PORT": str(port)}) for rank in range(2)]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert json.loads(outputs[0][0])["equal"] and outputs[1][0] == ""


def test_a_rank_that_dies_is_named(references):
    """Rank 1 fails at once; rank 0 waits for it as long as it was told, and says for whom."""
    port = 20000 + (os.getpid() + 7) % 20000
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [FERRY, "verify", "--logits", hf("llama"), "--tp", "2", "--timeout", "4", "--reference"]
    dies = subprocess.Popen([*command, "/nowhere"], env={**environment, "RANK": "1"}, stderr=subprocess.PIPE, text=True)
    waits = subprocess.run([*command, references(hf("llama"))], env={**environment, "RANK": "0"}, capture_output=True, text=True, timeout=60)
    assert dies.wait(timeout=30) == 2
    assert waits.returncode == 2 and not waits.stdout
    assert "rank" in waits.stderr and ("missing: rank 1" in waits.stderr or "does not reach the others" in waits.stderr), waits.stderr


def test_fast_differs_and_the_first_difference_is_named(references, tmp_path):
    page = tmp_path / "page.html"
    report = ferry_json("verify", "--logits", hf("llama"), "--reference", references(hf("llama")), "--alignment", "fast", "--tp", 2,
                        "--html", page, code=1)
    assert not report["equal"] and report["first_difference"]["module"].startswith("decoder.layers.0")
    assert report["sequences"][0]["largest_log_prob"] > 0
    assert "Not equal" in page.read_text() and "decoder.layers.0.self_attention" in page.read_text()


def test_a_changed_weight_is_found_where_it_acts(references, tmp_path):
    from safetensors.torch import load_file, save_file
    import shutil
    shutil.copytree(hf("qwen3"), tmp_path / "changed")
    weights = load_file(tmp_path / "changed" / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][3, 5] *= 4
    save_file(weights, tmp_path / "changed" / "model.safetensors", metadata={"format": "pt"})
    report = ferry_json("verify", "--logits", tmp_path / "changed", "--reference", references(hf("qwen3")), code=1)
    assert report["first_difference"]["module"] == "decoder.layers.2.mlp"


def test_weights_that_are_not_finite_are_named(references, tmp_path):
    from safetensors.torch import load_file, save_file
    import shutil
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


def test_meshes_that_do_not_fit_are_refused(references):
    reference = references(hf("llama"))
    refused("3", "heads", arguments=(hf("llama"), "--reference", reference, "--tp", 3))
    refused("query groups", arguments=(hf("llama"), "--reference", reference, "--tp", 4))
    refused("layers", arguments=(hf("llama"), "--reference", reference, "--pp", 3))
    refused("no experts", arguments=(hf("llama"), "--reference", reference, "--ep", 2))
    refused("experts", arguments=(hf("mixtral"), "--reference", references(hf("mixtral")), "--ep", 3))


def test_a_reference_of_another_model_is_refused(references, tmp_path):
    refused("vocabulary", arguments=(hf("llama"), "--reference", references(hf("qwen3"), layers=False)))
    (tmp_path / "no").write_bytes(b"none")
    refused("no", arguments=(hf("llama"), "--reference", tmp_path / "no"))
    refused("no reference", arguments=(hf("llama"), "--reference", hf("llama") / "model.safetensors"))
