"""Deltas and adapters at addresses, read and written there: what lies in a bucket is what a folder gets."""
import json

import numpy as np
import pytest

from servers import serve_faults, serve_files
from support import ferry_json, llama_shapes, random_tensors, refuse, run_ok, safetensors_bytes, tree, write_hf
from test_remote_target import CONFIG, assert_nothing_is_left, bucket, environment, objects, server, unfinished  # noqa: F401

PART = 8 << 20


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A model, and what a step made of it: all elements of most tensors, so that the delta is larger than a part."""
    folder = tmp_path_factory.mktemp("steps")
    before = random_tensors(llama_shapes(CONFIG))
    after = random_tensors(llama_shapes(CONFIG), seed=1)
    write_hf(folder / "v0", CONFIG, before)
    write_hf(folder / "v1", CONFIG, {**after, "model.norm.weight": before["model.norm.weight"]}, shards=2)
    (folder / "v1/generation_config.json").write_text('{"temperature": 0.6}')
    return folder


def put(bucket, folder, name):
    for path in folder.rglob("*"):
        if path.is_file():
            bucket.boto.upload_file(str(path), bucket.name, f"{name}/{path.relative_to(folder)}")
    return f"s3://{bucket.name}/{name}"


def test_delta_is_made_applied_and_verified_in_a_bucket(steps, bucket, work):
    env = environment(bucket, work)
    v0, v1 = (put(bucket, steps / name, name) for name in ("v0", "v1"))
    out = f"s3://{bucket.name}/out"
    report = ferry_json("delta", "make", v0, v1, f"{out}/", env=env)
    run_ok("delta", "make", steps / "v0", steps / "v1", work / "local")
    assert objects(bucket, "out") == tree(work / "local") and unfinished(bucket) == []
    assert report["delta"] == out and (work / "local/delta.safetensors").stat().st_size > PART
    assert ferry_json("delta", "inspect", out, env=env)[0]["result_model"] == report["result_model"]
    run_ok("delta", "verify", v0, out, env=env)
    run_ok("delta", "verify", steps / "v0", out, env=env)
    refuse("delta", "verify", v1, out, words=["it is a delta of another base"], env=env)
    run_ok("delta", "apply", v0, out, f"s3://{bucket.name}/applied", "--max-shard-size", "1GB", env=env)
    run_ok("delta", "apply", steps / "v0", work / "local", work / "applied", "--max-shard-size", "1GB")
    assert objects(bucket, "applied") == tree(work / "applied")
    run_ok("verify", f"s3://{bucket.name}/applied", steps / "v1", env=env)
    refuse("delta", "make", v0, v1, out, words=["exists already"], env=env)


def test_slime_versions_are_numbered_and_chained_in_a_bucket(steps, bucket, work):
    env = environment(bucket, work)
    versions = f"s3://{bucket.name}/versions"
    for base, new in (("v0", "v1"), ("v1", "v0")):
        run_ok("delta", "make", steps / base, steps / new, versions, "--to", "slime", env=env)
        run_ok("delta", "make", steps / base, steps / new, work / "versions", "--to", "slime")
    assert objects(bucket, "versions") == tree(work / "versions")
    run_ok("delta", "apply", steps / "v0", versions, work / "out", env=env)
    run_ok("verify", work / "out", steps / "v0")
    run_ok("delta", "apply", steps / "v0", f"{versions}/weight_v000001", work / "one", env=env)
    run_ok("verify", work / "one", steps / "v1", "--weights-only")  # slime has no other files


def test_delta_is_read_from_a_web_server(steps, work):
    run_ok("delta", "make", steps / "v0", steps / "v1", work / "delta")
    with serve_files(work) as files, serve_files(steps) as models:
        run_ok("delta", "apply", f"{models.url}/v0", f"{files.url}/delta", work / "out")
        run_ok("delta", "make", f"{models.url}/v0", f"{models.url}/v1", work / "again")
        refuse("delta", "make", steps / "v0", steps / "v1", f"{files.url}/new", words=["is written to a folder or to S3"])
    run_ok("verify", work / "out", steps / "v1")
    assert tree(work / "again") == tree(work / "delta")


def test_failed_delta_leaves_nothing_in_the_bucket(steps, bucket, work):
    def fault(n, request, answer):
        if request.command == "PUT" and request.path.endswith("out/ferry-delta.json"):
            answer.status, answer.body = 503, b"<Error><Code>SlowDown</Code></Error>"
            answer.set("Content-Length", None)
            answer.set("ETag", None)
    with serve_faults(bucket.url, fault) as proxy:
        refuse("delta", "make", steps / "v0", steps / "v1", f"s3://{bucket.name}/out", words=["SlowDown"], env=environment(proxy, work))
        sent = [r.path.split("?")[0].split("/")[-1] for r in proxy.log if r.command == "PUT"]
    assert sent.index("ferry-delta.json") > sent.index("delta.safetensors")
    assert_nothing_is_left(bucket, work)


@pytest.fixture
def adapter(work):
    generator = np.random.default_rng(3)
    shapes = llama_shapes(CONFIG)
    tensors = {}
    for name, (rows, columns) in ((name, shape) for name, shape in shapes.items() if "o_proj" in name):
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        for part, shape in (("lora_A", [2, columns]), ("lora_B", [rows, 2])):
            tensors[f"{prefix}.{part}.weight"] = ("F32", shape, generator.standard_normal(shape).astype("<f4").tobytes())
    folder = work / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"]}))
    return folder


@pytest.mark.parametrize("form, options", [("peft", ()), ("verl", ()), ("vllm", ()), ("megatron", ("--tp", "2"))])
def test_adapter_is_converted_from_a_bucket_into_a_bucket(form, options, steps, adapter, bucket, work):
    env = environment(bucket, work)
    base, source = put(bucket, steps / "v0", "base"), put(bucket, adapter, "adapter")
    run_ok("convert", source, f"s3://{bucket.name}/out", "--base", base, "--to", form, *options, env=env)
    run_ok("convert", adapter, work / "local", "--base", steps / "v0", "--to", form, *options)
    assert objects(bucket, "out") == tree(work / "local")
    run_ok("convert", f"s3://{bucket.name}/out", work / "back", "--base", base, "--to", "peft", env=env)
    assert tree(work / "back")["adapter_model.safetensors"] == tree(adapter)["adapter_model.safetensors"]


def test_adapter_is_merged_and_split_in_a_bucket(steps, adapter, bucket, work):
    env = environment(bucket, work)
    base, source = put(bucket, steps / "v0", "base"), put(bucket, adapter, "adapter")
    run_ok("merge", base, source, f"s3://{bucket.name}/merged", env=env)
    run_ok("merge", steps / "v0", adapter, work / "merged")
    assert objects(bucket, "merged") == tree(work / "merged")
    run_ok("split", base, f"s3://{bucket.name}/merged", f"s3://{bucket.name}/split", "--rank", "2", env=env)
    run_ok("split", steps / "v0", work / "merged", work / "split", "--rank", "2")
    assert objects(bucket, "split") == tree(work / "split")
