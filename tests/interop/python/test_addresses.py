"""The module over S3 (moto's server) in a process that lives on: what changes there is seen, and threads do not disturb one another."""
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file

from servers import serve_faults, serve_files, serve_s3
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


@pytest.mark.parametrize("address", ["gs://bucket/run", "S3://bucket/run", "s3:/bucket/run", "file:///tmp/run"])
def test_addresses_of_other_kinds_are_no_folders(address, work, monkeypatch):
    """A pathlib.Path of an address has one slash less."""
    monkeypatch.chdir(work)
    for act in (lambda: ferry.open(address), lambda: ferry.convert(HF, Path(address), to="hf", progress=False), lambda: ferry.save(address, load_file(HF / "model.safetensors"), like=HF)):
        with pytest.raises(ferry.Error, match="is an address of no known kind"):
            act()
    assert not list(work.iterdir())


def test_a_look_at_a_bucket_does_not_make_later_ones_longer(s3, monkeypatch):
    put(s3, HF, "hf")
    with serve_faults(s3.url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with pytest.raises(ferry.Error):
            ferry.open("s3://bucket")
        del proxy.log[:]
        ferry.open("s3://bucket/hf")
    lists = [request.path for request in proxy.log if "list-type" in request.path]
    assert lists and all("prefix=hf" in path for path in lists)


def test_threads_of_python_run_while_a_server_does_not_answer(work):
    """Several opens at once, from a server that is threads of the same process."""
    with serve_files(DATA) as server, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: ferry.open(f"{server.url}/hf_llama/hf").family, range(16)))
    assert found == ["llama"] * 16


def test_a_file_at_an_address(s3):
    put(s3, HF, "hf")
    want = load_file(HF / "model.safetensors")
    with ferry.safe_open("s3://bucket/hf/model.safetensors", "pt") as opened:
        assert sorted(opened.keys()) == sorted(want)
        assert (opened.get_slice("lm_head.weight")[3:5] == want["lm_head.weight"][3:5]).all()
    found = ferry.load_file("s3://bucket/hf/model.safetensors")
    assert all((found[name] == want[name]).all() for name in want)
