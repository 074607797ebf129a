"""The backward of our models beside Hugging Face's autograd, at every kind of parallelism: the error of each parameter's gradient
against one in fp64 is at most twice Hugging Face's own, and a second run gives the same bits (gradient_tool sees to that)."""
import functools
import json
import subprocess
from pathlib import Path

import pytest

import hf_reference
from meshes import covering, layout_of, name_of, spread
from support import DATA, FERRY

TOOL = Path(FERRY).parents[1] / "tests" / "gradient_tool"
DENSE = ["llama", "qwen2", "qwen2_tied", "qwen3"]
EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "moonlight"]

# Every pair of values of two axes occurs in some setting. Mixtures of experts run in bf16 only where logits are Hugging Face's own:
# another rounding can send a token to another expert.
AXES = dict(alignment=("fast", "bitwise"), dtype=("float32", "bfloat16"), tp=(1, 2, 4), sp=(False, True), pp=(1, 2), cp=(1, 2))
DENSE_MESHES = covering(AXES | dict(vpp=(1, 2)), lambda mesh: mesh["vpp"] == 1 or mesh["pp"] > 1)
EXPERT_MESHES = covering(AXES | dict(ep=(1, 2, 4), etp=(1, 2, 4)), lambda mesh: (mesh["alignment"], mesh["dtype"]) != ("fast", "bfloat16"))


def checkpoint_of(model):
    return DATA / f"hf_{model}" / "hf"


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gradients")

    @functools.lru_cache(maxsize=None)
    def make(model, dtype):
        file = folder / f"{model}_{dtype}.safetensors"
        hf_reference.main([str(checkpoint_of(model)), str(file), "--dtype", dtype, "--gradients", "--lengths", "24,40,17"])
        return file
    return make


def cases(models, meshes, each):
    return [pytest.param(model, mesh, id=f"{model}-{name_of(mesh)}") for model, mesh in spread(models, meshes, each)]


@pytest.mark.skipif(not TOOL.exists(), reason="this build has no models: configure it with -Dtorch_root")
@pytest.mark.parametrize("model, mesh", cases(DENSE, DENSE_MESHES, 2) + cases(EXPERTS, EXPERT_MESHES, 2))
def test_gradients_are_as_good_as_hugging_faces(model, mesh, references):
    config = json.loads((checkpoint_of(model) / "config.json").read_text())
    layout = "" if mesh["pp"] == 1 else layout_of(config["num_hidden_layers"], mesh["pp"], mesh.get("vpp", 1),
                                                  config.get("num_nextn_predict_layers", 0))
    sizes = [mesh["tp"], int(mesh["sp"]), mesh["pp"], mesh["cp"], mesh.get("ep", 1), mesh.get("etp", mesh["tp"])]
    run = subprocess.run([TOOL, checkpoint_of(model), references(model, mesh["dtype"]), references(model, "float64"), mesh["alignment"],
                          *map(str, sizes), mesh["dtype"], layout], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    keys = {row["key"] for row in rows}
    assert any("linear_qkv" in key or "linear_kv_up" in key for key in keys) and "embedding.word_embeddings.weight" in keys
    worse = [row for row in rows if not row["ours"] <= 2 * row["theirs"] + 1e-7]
    assert not worse, worse[:5]
