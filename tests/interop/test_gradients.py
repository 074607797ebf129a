"""The backward of our models beside Hugging Face's autograd, at every kind of parallelism: the error of each parameter's gradient
against one in fp64 is at most twice Hugging Face's own, and a second run gives the same bits (gradient_tool sees to that)."""
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support import DATA, FERRY, HERE

TOOL = Path(FERRY).parents[1] / "tests" / "gradient_tool"
DENSE = ["llama", "qwen2", "qwen2_tied", "qwen3"]
EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "moonlight"]

# alignment, tp, sequence parallel, pp, cp, ep, etp, dtype: pairs of settings rather than their product. Mixtures of experts run in
# bf16 only where logits are Hugging Face's own: another rounding can send a token to another expert.
ALONE = [("bitwise", 1, 0, 1, 1, 1, 1, "bfloat16"), ("fast", 1, 0, 1, 1, 1, 1, "float32")]
DENSE_MESHES = [("fast", 2, 0, 1, 1, 1, 1, "float32"), ("fast", 2, 1, 2, 1, 1, 1, "bfloat16"), ("bitwise", 2, 1, 1, 2, 1, 1, "float32"),
                ("bitwise", 2, 0, 2, 2, 1, 1, "bfloat16")]
EXPERT_MESHES = [("fast", 2, 0, 1, 1, 1, 1, "float32"), ("fast", 2, 1, 1, 1, 2, 2, "float32"), ("bitwise", 2, 1, 1, 1, 2, 2, "float32"),
                 ("bitwise", 1, 0, 1, 2, 2, 1, "bfloat16"), ("fast", 2, 0, 1, 1, 2, 1, "float32"), ("bitwise", 2, 1, 1, 2, 4, 1, "float32")]


@functools.lru_cache(maxsize=None)
def reference(model, dtype):
    file = Path(tempfile.gettempdir()) / f"ferry_gradients_{os.getpid()}_{model}_{dtype}.safetensors"
    subprocess.run([sys.executable, HERE / "hf_reference.py", DATA / f"hf_{model}" / "hf", file, "--dtype", dtype, "--gradients",
                    "--lengths", "24,40,17"], check=True, capture_output=True)
    return file


@pytest.fixture(scope="module", autouse=True)
def remove_references():
    yield
    for file in Path(tempfile.gettempdir()).glob(f"ferry_gradients_{os.getpid()}_*"):
        file.unlink()


def settings(models, meshes):
    return [pytest.param(model, mesh, id="-".join(map(str, (model, *mesh)))) for i, model in enumerate(models)
            for mesh in ALONE + meshes[i % 2::2]]


@pytest.mark.skipif(not TOOL.exists(), reason="this build has no models: configure it with -Dtorch_root")
@pytest.mark.parametrize("model, mesh", settings(DENSE, DENSE_MESHES) + settings(EXPERTS, EXPERT_MESHES))
def test_gradients_are_as_good_as_hugging_faces(model, mesh):
    alignment, *sizes, dtype = mesh
    run = subprocess.run([TOOL, DATA / f"hf_{model}" / "hf", reference(model, dtype), reference(model, "float64"), alignment,
                          *map(str, sizes), dtype], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    keys = {row["key"] for row in rows}
    assert any("linear_qkv" in key or "linear_kv_up" in key for key in keys) and "embedding.word_embeddings.weight" in keys
    worse = [row for row in rows if not row["ours"] <= 2 * row["theirs"] + 1e-7]
    assert not worse, worse[:5]
