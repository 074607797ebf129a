"""Archives at addresses: read by ranges in every command that takes one, and written into buckets of S3 once they are whole."""
import pytest

from servers import serve_faults, serve_files
from support import digest_of, ferry_json, random_tensors, llama_shapes, refuse, run_ok, tree, write_hf
from test_remote_changes import put
from test_remote_target import (CONFIG, bucket, environment, objects, server, stays_busy_after,  # noqa: F401
                                unfinished)

SPLIT = ("--to", "h5", "--max-shard-size", "6MB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """hf: 17 MB; h5: the archive of it in several files; one: in one."""
    folder = tmp_path_factory.mktemp("archive")
    write_hf(folder / "hf", CONFIG, random_tensors(llama_shapes(CONFIG)), shards=2)
    run_ok("convert", folder / "hf", folder / "h5", *SPLIT)
    run_ok("convert", folder / "hf", folder / "one", "--to", "h5")
    assert len(list((folder / "h5").iterdir())) > 2
    return folder


def is_chunk(request):
    return request.path.endswith(".h5") and "bytes=0-" not in request.headers.get("Range", "")


def test_commands_read_an_archive_by_ranges(folder, work):
    with serve_files(folder) as files:
        address = f"{files.url}/h5"
        assert ferry_json("inspect", address)["parameters"] == ferry_json("inspect", folder / "h5")["parameters"]
        assert digest_of(address) == digest_of(folder / "hf")
        for command in ("verify", "diff"):
            run_ok(command, address, folder / "hf")
        run_ok("convert", address, work / "hf")
        assert tree(work / "hf") == tree(folder / "hf")
        run_ok("delta", "make", address, folder / "hf", work / "delta")
        run_ok("delta", "apply", address, work / "delta", work / "applied", "--to", "hf")
        run_ok("verify", work / "applied", folder / "hf")


def test_inspect_reads_the_trailer_and_the_index_alone(folder):
    size = (folder / "one/weights.h5").stat().st_size
    with serve_files(folder) as files, serve_faults(files.url) as proxy:
        run_ok("inspect", f"{proxy.url}/one")
        spans = [r.headers["Range"].removeprefix("bytes=").split("-") for r in proxy.log if r.path.endswith(".h5") and r.command == "GET"]
    assert spans and sum(int(last) + 1 - int(first) for first, last in spans) < size / 20


def test_archive_of_one_file_is_found_by_its_name(folder, work):
    with serve_files(folder, lists=False) as files:
        run_ok("convert", f"{files.url}/one", work / "out")
    assert tree(work / "out") == tree(folder / "hf")


def test_cut_connections_in_an_archive_are_resumed(folder):
    cuts = []

    def fault(n, request, answer):
        if is_chunk(request) and len(answer.body) > 100000 and len(cuts) < 5:
            answer.cut = 70000
            cuts.append(n)
    with serve_files(folder) as files, serve_faults(files.url, fault) as proxy:
        assert digest_of(f"{proxy.url}/h5") == digest_of(folder / "hf")
    assert len(cuts) == 5


def test_archive_that_is_replaced_midway_is_an_error(folder, work):
    seen = []

    def fault(n, request, answer):
        if is_chunk(request) and len(answer.body) > 100000:
            seen.append(n)
            if len(seen) > 3:
                answer.set("ETag", '"another"')
    with serve_files(folder) as files, serve_faults(files.url, fault) as proxy:
        refuse("convert", f"{proxy.url}/one", work / "out", words=["weights.h5", "was changed by someone else while it was read"])
    assert not (work / "out").exists()


@pytest.mark.parametrize("name", ["h5", "one"])
def test_bucket_gets_the_archive_of_a_folder(name, folder, bucket, work):
    env = environment(bucket, work)
    address = f"s3://{bucket.name}/out"
    report = ferry_json("convert", folder / "hf", address, *(SPLIT if name == "h5" else SPLIT[:2]), env=env)
    assert report["proved"] and objects(bucket, "out") == tree(folder / name) and unfinished(bucket) == []
    assert not [p for p in (work / "tmp").rglob("*") if p.is_file()]
    run_ok("convert", address, f"s3://{bucket.name}/back", "--to", "hf", env=env)
    assert objects(bucket, "back") == tree(folder / "hf")


def test_file_that_makes_it_an_archive_appears_last_and_goes_first(folder, bucket, work):
    put(bucket, folder / "h5", "out")
    last = max(tree(folder / "h5"))
    with serve_faults(bucket.url) as proxy:
        env = environment(proxy, work)
        refuse("convert", folder / "hf", f"s3://{bucket.name}/out", *SPLIT, words=["exists already", "--overwrite"], env=env)
        before = len(proxy.log)
        run_ok("convert", folder / "hf", f"s3://{bucket.name}/out", *SPLIT, "--overwrite", "--dtype", "fp16", env=env)
        changes = [(r.command, r.path.split("?")[0].split("/")[-1]) for r in proxy.log[before:] if r.command in ("PUT", "POST", "DELETE")]
    assert changes[0] == ("DELETE", last) and changes[-1][1] == last
    assert len(objects(bucket, "out")) == len(tree(folder / "h5"))
    run_ok("convert", folder / "hf", work / "local", *SPLIT, "--dtype", "fp16")
    assert objects(bucket, "out") == tree(work / "local")


def test_archive_that_cannot_be_sent_leaves_nothing_or_is_resumed(folder, bucket, work):
    address = f"s3://{bucket.name}/out"
    with serve_faults(bucket.url, stays_busy_after(0)) as proxy:
        refuse("convert", folder / "hf", address, *SPLIT[:2], words=["SlowDown", "the same command with --resume goes on"],
               env=environment(proxy, work))
    assert objects(bucket, "out") == {} and unfinished(bucket) == []
    run_ok("convert", folder / "hf", address, *SPLIT[:2], "--resume", env=environment(bucket, work))
    assert objects(bucket, "out") == tree(folder / "one")
    assert not [p for p in (work / "tmp").rglob("*") if p.is_file()]


def test_store_that_lies_about_what_it_took_is_found(folder, bucket, work):
    def spoil(request, sent):
        return sent[:-1] + bytes([sent[-1] ^ 1]) if "partNumber=1" in request.path else sent
    with serve_faults(bucket.url, spoil=spoil, checks="crc32") as proxy:
        refuse("convert", folder / "hf", f"s3://{bucket.name}/out", *SPLIT[:2], words=["BadDigest"], env=environment(proxy, work))
    assert objects(bucket, "out") == {} and unfinished(bucket) == []
