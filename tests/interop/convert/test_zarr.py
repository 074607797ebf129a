"""Ferry reads what megatron-core 0.13.1 wrote with its zarr backend."""
import json
import resource
import shutil

import pytest

from support import DATA, described, digest_of, ferry_json, hf_tensors, iteration_folder, refuse_to_convert, run_ok

CASES = sorted(p.parent.name for p in (DATA / "zarr").glob("*/sha256.json"))
KEY = "decoder.layers.mlp.linear_fc2.weight"


def facts(case):
    return json.loads((DATA / "zarr" / case / "sha256.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_holds_the_weights_that_megatron_core_saved(case, work):
    hf = DATA / facts(case)["hf_dir"]
    assert digest_of(DATA / "zarr" / case) == digest_of(hf)
    run_ok("convert", DATA / "zarr" / case, work / "hf", "--hf-config", hf)
    assert described(hf_tensors(work / "hf")) == facts(case)["hf"]
    run_ok("convert", iteration_folder(DATA / "zarr" / case), work / "megatron", "--to", "megatron", "--tp", 2)
    run_ok("verify", work / "megatron", hf)


@pytest.mark.parametrize("case", CASES)
def test_inspect_lists_the_arrays(case):
    listed = {t["name"]: t["shape"] for t in ferry_json("inspect", DATA / "zarr" / case)["tensors"]}
    assert listed == {k: t["shape"] for k, t in facts(case)["megatron"].items()}


def test_many_files_are_opened_though_few_are_allowed():
    limit = dict(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (32, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
    run_ok("digest", DATA / "zarr/llama_zarr_tp2pp2", "--tensors-only", **limit)


class Zarr:
    def __init__(self, work):
        self.path = work / "zarr"
        shutil.copytree(DATA / "zarr/llama_zarr_tp2pp2", self.path)
        self.folder = iteration_folder(self.path)

    def describe(self, **changes):
        path = self.folder / KEY / ".zarray"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_chunks_at_the_end_may_be_cut_by_the_shape(work):
    """Chunks of 3 layers for 4: the last one holds two that do not count."""
    zarr = Zarr(work)
    folder = zarr.folder / KEY
    halves = [b"".join((folder / f"{i}.0.{t}").read_bytes() for i in range(4)) for t in (0, 1)]
    size = len(halves[0]) // 4
    for path in folder.glob("*.0.*"):
        path.unlink()
    for t in (0, 1):
        (folder / f"0.0.{t}").write_bytes(halves[t][:3 * size])
        (folder / f"1.0.{t}").write_bytes(halves[t][3 * size:] + b"\1" * (2 * size))
    description = json.loads((folder / ".zarray").read_text())
    zarr.describe(chunks=[3, *description["chunks"][1:]])
    assert digest_of(zarr.path) == digest_of(DATA / "hf_llama/hf")


def refuse(zarr, *words):
    refuse_to_convert(zarr.path.parent, zarr.path, *words, options=("--to", "megatron"))


def test_a_missing_chunk_is_named(work):
    zarr = Zarr(work)
    (zarr.folder / KEY / "2.0.1").unlink()
    refuse(zarr, f"{KEY}/2.0.1: is missing")


def test_a_surplus_chunk_is_refused(work):
    zarr = Zarr(work)
    (zarr.folder / KEY / "4.0.0").write_bytes(b"x")
    refuse(zarr, KEY, "9 chunks")


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b"x", lambda d: b""])
def test_a_chunk_of_another_size_is_named(work, change):
    zarr = Zarr(work)
    path = zarr.folder / KEY / "2.0.1"
    path.write_bytes(change(path.read_bytes()))
    refuse(zarr, f"{KEY}/2.0.1", "bytes")


@pytest.mark.parametrize("changes, word", [
    (dict(compressor={"id": "blosc"}), "compressor"), (dict(filters=[{"id": "delta"}]), "filters"), (dict(order="F"), "order"),
    (dict(zarr_format=3), "zarr_format"), (dict(dtype=">f4"), "dtype"), (dict(dtype=7), "dtype"), (dict(chunks=[0, 32, 24]), "chunks"),
    (dict(chunks=[1, 32]), "chunks"), (dict(shape=[4, 32, -1]), "shape"), (dict(shape=[1 << 62, 1 << 62, 4]), "shape"),
    (dict(shape=[1 << 40, 32, 48]), "missing"), (dict(shape="x"), "shape"), (dict(shape=[4, 32, 48.5]), "shape"),
    (dict(dimension_separator="/"), "dimension_separator"), (dict(shape=[4, 32, 47]), "expected [4, 32, 48]"),
], ids=str)
def test_descriptions_that_lie_are_refused(work, changes, word):
    zarr = Zarr(work)
    zarr.describe(**changes)
    refuse(zarr, KEY, word)


def test_a_missing_array_is_named(work):
    zarr = Zarr(work)
    shutil.rmtree(zarr.folder / KEY)
    refuse(zarr, "linear_fc2.weight", "missing")


def test_another_backend_is_refused(work):
    zarr = Zarr(work)
    (zarr.folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    refuse(zarr, "torch_dist", "metadata.json")
