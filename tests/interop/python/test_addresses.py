"""The module over S3 (moto's server) in a process that lives on: what changes there is seen, and threads do not disturb one another."""
from concurrent.futures import ThreadPoolExecutor

import pytest
from safetensors.torch import load_file

from servers import serve_s3
from support import DATA

ferry = pytest.importorskip("ferry", reason="the Python module is not built")
HF = DATA / "hf_llama/hf"


@pytest.fixture
def s3(monkeypatch, work):
    with serve_s3() as server:
        server.boto.create_bucket(Bucket="bucket")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("TMPDIR", str(work))
        yield server


def put(server, folder, key):
    """... by another program"""
    for path in sorted(folder.iterdir()):
        server.boto.upload_file(str(path), "bucket", f"{key}/{path.name}")


def test_a_checkpoint_that_appears_and_is_replaced_is_seen(s3):
    with pytest.raises(ferry.Error, match="is not there"):
        ferry.open("s3://bucket/hf")
    put(s3, HF, "hf")
    old = ferry.open("s3://bucket/hf")
    assert old.digest().model == ferry.digest(HF).model
    for one in s3.boto.list_objects_v2(Bucket="bucket")["Contents"]:
        s3.boto.delete_object(Bucket="bucket", Key=one["Key"])
    put(s3, DATA / "hf_mixtral/hf", "hf")
    assert ferry.open("s3://bucket/hf").family == "mixtral"
    assert ferry.inspect("s3://bucket/hf").family == "mixtral"
    with pytest.raises(ferry.Error):  # and never the new bytes for the old ones
        dict(old.tensors())


def test_conversions_into_buckets_run_side_by_side(s3):
    def convert(i):
        return ferry.convert(HF, f"s3://bucket/out{i}", tp=1 + i % 2, threads=1, progress=False)

    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(convert, range(8)))
    assert all(report.proved for report in reports)
    assert all(ferry.verify(HF, f"s3://bucket/out{i}", progress=False) for i in range(8))


def test_a_model_in_memory_is_saved_into_a_bucket(s3):
    report = ferry.save("s3://bucket/saved", load_file(HF / "model.safetensors"), like=HF, to="megatron", tp=2, progress=False)
    assert report.proved and ferry.verify(HF, "s3://bucket/saved", progress=False)


def test_addresses_are_refused_where_a_folder_is_needed(work, monkeypatch):
    from ferry.compat.megatron_bridge import AutoBridge
    monkeypatch.chdir(work)
    for write in (lambda: ferry.save_from("s3://bucket/out", {}, like=HF), lambda: AutoBridge.import_ckpt(HF, "s3://bucket/out")):
        with pytest.raises(ferry.Error, match="s3://bucket/out: .* into a folder of this machine") as error:
            write()
        assert error.value.kind == "usage" and not list(work.iterdir())
