"""Conversions into buckets of S3: boto3 says what is there, a proxy breaks what can break."""
import json
import os
import signal
import subprocess
import threading
import time

import pytest

from servers import serve_faults, serve_s3
from support import FERRY, ferry_json, llama_config, llama_shapes, random_tensors, refuse, run_ok, sha256, tree, write_hf

CONFIG = llama_config(hidden_size=256, intermediate_size=1024, vocab_size=9000)
HF = ("--to", "hf", "--max-shard-size", "1GB")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """17 MB: three parts of a file."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    write_hf(folder, CONFIG, random_tensors(llama_shapes(CONFIG)), shards=2)
    return folder


@pytest.fixture(scope="module")
def server():
    with serve_s3() as s3:
        yield s3


@pytest.fixture
def bucket(server, request):
    """A bucket of the test's own, whose name is `bucket.name`."""
    server.name = f"b{abs(hash(request.node.name))}"
    server.boto.create_bucket(Bucket=server.name)
    yield server


def environment(server, work, **more):
    (work / "tmp").mkdir(exist_ok=True)
    ours = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    return {**ours, "AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "s3_secret",
            "TMPDIR": str(work / "tmp"), "FERRY_HTTP_RETRIES": "2", **more}


def objects(bucket, prefix):
    """{name: sha256} of all objects below the prefix, as boto3 reads them."""
    pages = bucket.boto.get_paginator("list_objects_v2").paginate(Bucket=bucket.name, Prefix=prefix + "/")
    keys = [o["Key"] for page in pages for o in page.get("Contents", [])]
    return {k.removeprefix(prefix + "/"): sha256(bucket.boto.get_object(Bucket=bucket.name, Key=k)["Body"].read()) for k in keys}


def unfinished(bucket):
    return bucket.boto.list_multipart_uploads(Bucket=bucket.name).get("Uploads", [])


def assert_nothing_is_left(bucket, work):
    assert objects(bucket, "out") == {} and unfinished(bucket) == []
    assert list((work / "tmp").rglob("*")) in ([], [work / "tmp" / f"ferry-{os.geteuid()}"])


@pytest.mark.parametrize("options", [HF, ("--tp", "2", "--pp", "2"), ("--to", "hf", "--dtype", "fp32")], ids=["hf", "megatron", "fp32"])
def test_bucket_gets_the_bytes_of_a_folder(options, model, bucket, work):
    report = ferry_json("convert", model, f"s3://{bucket.name}/out", *options, env=environment(bucket, work))
    run_ok("convert", model, work / "local", *options)
    assert report["proved"] and objects(bucket, "out") == tree(work / "local")
    assert "s3_secret" not in json.dumps(report) and unfinished(bucket) == []
    assert not [p for p in (work / "tmp").rglob("*") if p.is_file()]


def test_bucket_to_bucket_and_back(model, bucket, work):
    env = environment(bucket, work)
    run_ok("convert", model, f"s3://{bucket.name}/a", "--tp", "2", env=env)
    run_ok("convert", f"s3://{bucket.name}/a", f"s3://{bucket.name}/b/", env=env)
    assert objects(bucket, "b") == tree(model)
    refuse("convert", f"s3://{bucket.name}/a", f"s3://{bucket.name}/a/release/x", "--to", "hf", words=["is the source, lies in it"], env=env)


def test_checkpoint_appears_last(model, bucket, work):
    with serve_faults(bucket.url) as proxy:
        run_ok("convert", model, f"s3://{bucket.name}/out", "--iteration", "7", env=environment(proxy, work))
        written = [r.path.split("?")[0].split("/")[-1] for r in proxy.log if r.command in ("PUT", "POST")]
    assert written[-3:] == [".metadata", "metadata.json", "latest_checkpointed_iteration.txt"]
    assert max(i for i, name in enumerate(written) if name.endswith(".distcp")) < written.index("config.json")


def test_existing_objects_are_replaced_only_if_asked_and_ours(model, bucket, work):
    env = environment(bucket, work)
    address = f"s3://{bucket.name}/out"
    run_ok("convert", model, address, *HF, env=env)
    before = objects(bucket, "out")
    refuse("convert", model, address, *HF, words=["exists already", "--overwrite"], env=env)
    run_ok("convert", model, address, *HF, "--dtype", "fp16", "--overwrite", env=env)
    after = objects(bucket, "out")
    assert after.keys() == before.keys() and after["model.safetensors"] != before["model.safetensors"]
    bucket.boto.put_object(Bucket=bucket.name, Key="out/notes.txt", Body=b"mine")
    refuse("convert", model, address, *HF, "--overwrite", words=["holds notes.txt, which this conversion does not write"], env=env)
    assert objects(bucket, "out") == {**after, "notes.txt": sha256(b"mine")}


def stays_busy_after(puts):
    def fault(n, request, answer):
        if request.command == "PUT" and "partNumber" in request.path:
            fault.seen += 1
            if fault.seen > puts:
                answer.status, answer.body = 503, b"<Error><Code>SlowDown</Code></Error>"
                answer.set("Content-Length", None)
                answer.set("ETag", None)
    fault.seen = 0
    return fault


def test_failed_conversion_removes_what_it_sent(model, bucket, work):
    with serve_faults(bucket.url, stays_busy_after(1)) as proxy:
        said = refuse("convert", model, f"s3://{bucket.name}/out", *HF, words=["SlowDown", "was removed"], env=environment(proxy, work))
    assert "s3_secret" not in said
    assert_nothing_is_left(bucket, work)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_signal_ends_a_conversion_while_the_store_is_silent(number, model, bucket, work):
    """... within seconds, and what was sent is removed."""
    silent = threading.Event()

    def fault(n, request, answer):
        if "partNumber=2" in request.path:
            silent.set()
            time.sleep(8)
    with serve_faults(bucket.url, fault) as proxy:
        command = [FERRY, "convert", model, f"s3://{bucket.name}/out", *HF, "--threads", "1"]
        running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(proxy, work))
        assert silent.wait(60)
        begun = time.monotonic()
        running.send_signal(number)
        said = running.communicate(timeout=60)[1]
        assert time.monotonic() - begun < 6 and running.returncode == 2 and "interrupted" in said
    assert_nothing_is_left(bucket, work)


def test_interrupted_conversion_is_resumed_by_parts(model, bucket, work):
    address = f"s3://{bucket.name}/out"
    with serve_faults(bucket.url, stays_busy_after(1)) as proxy:
        refuse("convert", model, address, *HF, "--resume", "--threads", "1", words=["stays in the store"], env=environment(proxy, work))
    assert len(unfinished(bucket)) == 1 and objects(bucket, "out") == {}
    with serve_faults(bucket.url) as proxy:
        report = ferry_json("convert", model, address, *HF, "--resume", env=environment(proxy, work))
        parts = [r for r in proxy.log if r.command == "PUT" and "partNumber" in r.path]
    assert report["resumed_bytes"] > 0 and len(parts) < 3
    run_ok("convert", model, work / "local", *HF)
    assert objects(bucket, "out") == tree(work / "local") and unfinished(bucket) == []


def test_uploads_of_a_killed_run_are_removed_by_the_next(model, bucket, work):
    left = bucket.boto.create_multipart_upload(Bucket=bucket.name, Key="out/model.safetensors")["UploadId"]
    others = bucket.boto.create_multipart_upload(Bucket=bucket.name, Key="out/other.safetensors")["UploadId"]
    run_ok("convert", model, f"s3://{bucket.name}/out", *HF, env=environment(bucket, work))
    assert [u["UploadId"] for u in unfinished(bucket)] == [others] and left != others


def test_bytes_that_the_store_spoils_are_found_before_the_checkpoint_appears(model, bucket, work):
    def fault(n, request, answer):
        if request.command == "GET" and request.path.endswith("out/model.safetensors") and len(answer.body) > 200000:
            answer.body = answer.body[:-1] + bytes([answer.body[-1] ^ 1])
    with serve_faults(bucket.url, fault) as proxy:
        refuse("convert", model, f"s3://{bucket.name}/out", *HF, words=["what was written is not what was read"],
               env=environment(proxy, work))
        assert not [r for r in proxy.log if r.command == "PUT" and r.path.endswith("config.json")]
    assert_nothing_is_left(bucket, work)


def test_parts_are_checked_by_their_crc32_where_the_store_knows_it(model, bucket, work):
    with serve_faults(bucket.url, checks="crc32") as proxy:
        run_ok("convert", model, f"s3://{bucket.name}/out", *HF, env=environment(proxy, work))
        parts = [r for r in proxy.log if "partNumber" in r.path]
    assert len(parts) == 3 and all(r.headers["x-amz-checksum-crc32"] and not r.headers["Content-MD5"] for r in parts)
    run_ok("convert", model, work / "local", *HF)
    assert objects(bucket, "out") == tree(work / "local") and unfinished(bucket) == []


@pytest.mark.parametrize("checks, header", [("crc32", "x-amz-checksum-crc32"), ("md5", "Content-MD5")])
def test_part_that_is_damaged_on_its_way_is_refused(checks, header, model, bucket, work):
    def spoil(request, sent):
        return sent[:-1] + bytes([sent[-1] ^ 1]) if "partNumber=2" in request.path else sent

    with serve_faults(bucket.url, spoil=spoil, checks=checks) as proxy:
        refuse("convert", model, f"s3://{bucket.name}/out", *HF, words=["BadDigest"], env=environment(proxy, work))
        assert all(r.headers[header] for r in proxy.log if "partNumber=2" in r.path)
    assert_nothing_is_left(bucket, work)


def test_lost_answers_of_the_store_are_no_failure(model, bucket, work):
    """The store did what it was asked to, and the connection broke before it could say so."""
    lost = set()

    def fault(n, request, answer):
        what = (request.command, request.path.split("?")[0], "partNumber" in request.path)
        if request.command in ("PUT", "POST") and "uploads" not in request.path and what not in lost:
            lost.add(what)
            answer.body, answer.cut = b"x" * 100, 10
            answer.set("Content-Length", "100")
    with serve_faults(bucket.url, fault) as proxy:
        run_ok("convert", model, f"s3://{bucket.name}/out", *HF, env=environment(proxy, work))
    run_ok("convert", model, work / "local", *HF)
    assert len(lost) >= 3 and objects(bucket, "out") == tree(work / "local")


def test_bucket_itself_is_refused(model, bucket, work):
    refuse("convert", model, f"s3://{bucket.name}", words=["is a bucket: name a folder"], env=environment(bucket, work))


def test_dry_run_sends_nothing(model, bucket, work):
    with serve_faults(bucket.url) as proxy:
        run_ok("convert", model, f"s3://{bucket.name}/out", *HF, "--dry-run", env=environment(proxy, work))
        assert not [r for r in proxy.log if r.command in ("PUT", "POST", "DELETE")]
