"""Archives: plain h5py reads them by the recipe in docs/formats/hdf5.md, nothing is lost on the way through one, and no
damaged or hostile file passes or does harm."""
import concurrent.futures
import os
import random
import re
import shutil
import struct
import threading
import zlib

import h5py
import numpy
import pytest

from support import DATA, ROOT, ferry, ferry_json, hf_tensors, llama_config, run_ok, tree, write_hf

RECIPE = re.search(r"```python\n(.*?)```", (ROOT / "docs/formats/hdf5.md").read_text(), re.S).group(1)
recipe = {}
exec(RECIPE, recipe)
read_archive = recipe["read_archive"]

HF_FOLDERS = sorted(p.parent for p in DATA.glob("hf_*/hf/config.json"))
CONFIG = llama_config(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=40)
LARGER = llama_config(hidden_size=256, intermediate_size=700, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                      vocab_size=3001)


def as_bytes(tensors):
    return {n: (d, tuple(a.shape), a.tobytes()) for n, (d, a) in tensors.items()}


@pytest.mark.parametrize("hf", HF_FOLDERS, ids=lambda p: p.parent.name)
def test_h5py_reads_every_fixture(hf, work):
    run_ok("convert", hf, work / "h5", "--to", "h5")
    tensors, files = read_archive(work / "h5")
    want = hf_tensors(hf)
    found = as_bytes(tensors)
    assert {n: found[n] for n in found if n in want} == {n: want[n] for n in found}
    tied = set(want) - set(found)  # second copies, which are not stored twice
    assert all(any(want[n] == t for t in found.values()) for n in tied), tied
    for path in hf.iterdir():
        if path.suffix != ".safetensors":
            assert files[f"hf/{path.name}"] == path.read_bytes()


def test_h5py_reads_tensors_in_many_chunks_and_files(work):
    tensors = write_hf(work / "hf", LARGER, shards=2)
    run_ok("convert", work / "hf", work / "h5", "--to", "h5", "--max-shard-size", "2MB")
    assert len(list((work / "h5").glob("weights-*-of-*.h5"))) > 2
    assert as_bytes(read_archive(work / "h5")[0]) == tensors
    with h5py.File(min((work / "h5").glob("*.h5"))) as file:
        assert max(len(list(d.iter_chunks())) for d in file["tensors"].values()) > 1


@pytest.mark.parametrize("hf", HF_FOLDERS, ids=lambda p: p.parent.name)
def test_there_and_back(hf, work):
    run_ok("convert", hf, work / "h5", "--to", "h5")
    run_ok("convert", work / "h5", work / "back")
    assert tree(work / "back") == {n: d for n, d in tree(hf).items()}
    run_ok("verify", hf, work / "h5")


def test_to_megatron_it_is_no_detour(work):
    write_hf(work / "hf", LARGER, shards=2)
    run_ok("convert", work / "hf", work / "h5", "--to", "h5")
    for options in (["--tp", 2], ["--tp", 2, "--pp", 2]):
        run_ok("convert", work / "hf", work / "want", *options)
        run_ok("convert", work / "h5", work / "found", "--to", "megatron", *options)
        assert tree(work / "want") == tree(work / "found")
        run_ok("convert", work / "found", work / "again", "--to", "h5")
        run_ok("verify", work / "again", work / "hf")
        for folder in ("want", "found", "again"):
            shutil.rmtree(work / folder)


def test_threads_and_time_leave_no_trace(work):
    write_hf(work / "hf", LARGER)
    for threads in (1, 4):
        run_ok("convert", work / "hf", work / f"h5-{threads}", "--to", "h5", "--threads", threads)
    assert tree(work / "h5-1") == tree(work / "h5-4")


def test_the_other_commands_read_it(work):
    write_hf(work / "hf", CONFIG)
    run_ok("convert", work / "hf", work / "h5", "--to", "h5")
    run_ok("digest", work / "hf", "--output", work / "manifest")
    run_ok("digest", work / "h5", "--check", work / "manifest", "--tensors-only")
    run_ok("digest", work / "h5/weights.h5", "--check", work / "manifest", "--tensors-only")
    seen, want = ferry_json("inspect", work / "h5"), ferry_json("inspect", work / "hf")
    assert {t["name"]: (t["dtype"], t["shape"]) for t in seen["tensors"]} == \
        {t["name"]: (t["dtype"], t["shape"]) for t in want["tensors"]}
    assert seen["format"] == "archive"
    write_hf(work / "other", CONFIG, seed=1)
    run_ok("verify", work / "other", work / "h5", code=1)


# ------------------------------------------------------------------------------------------------------------- damage


def test_every_fault_is_named(work):
    """Bits, blocks and ends lost, anywhere: all checks fail, without a crash, and say where."""
    write_hf(work / "hf", CONFIG)
    run_ok("convert", work / "hf", work / "h5", "--to", "h5", "--max-shard-size", "6KB")
    files = {p.name: p.read_bytes() for p in (work / "h5").iterdir()}
    assert len(files) > 1
    rng, local, copies = random.Random(3), threading.local(), iter(range(99))

    def fault():
        name = rng.choice(sorted(files))
        data = bytearray(files[name])
        at, kind = rng.randrange(len(data)), rng.randrange(10)
        if kind < 6:
            data[at] ^= 1 << rng.randrange(8)
        elif kind < 8:
            data[at:at + 64] = bytes(len(data[at:at + 64]))
        elif kind < 9:
            del data[at:]
        else:
            data += rng.randbytes(8)
        return name, bytes(data), f"{name} at {at}, kind {kind}"

    def judge(name, data, what):
        if not hasattr(local, "folder"):
            local.folder = work / f"copy{next(copies)}"
            shutil.copytree(work / "h5", local.folder)
        (local.folder / name).write_bytes(data)
        done = ferry("verify", local.folder, work / "hf", timeout=60)
        (local.folder / name).write_bytes(files[name])
        assert done.returncode == 2, what
        assert name in done.stderr, f"{what}: {done.stderr}"

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        faults = [f for f in (fault() for _ in range(250)) if f[1] != files[f[0]]]
        for result in [pool.submit(judge, *f) for f in faults]:
            result.result()


def test_a_damaged_tensor_is_named_and_nothing_published(work):
    write_hf(work / "hf", LARGER)
    run_ok("convert", work / "hf", work / "h5", "--to", "h5")
    chunks = [(t["name"], c) for t in ferry_json("inspect", work / "h5")["tensors"] for c in t["chunks"]]
    slab = {c["offset"] for n, c in chunks if n.endswith("norm.weight")}  # one chunk, which names its first and last tensor
    path = work / "h5/weights.h5"
    good = path.read_bytes()
    for name, chunk in random.Random(4).sample(chunks, 8):
        data = bytearray(good)
        data[chunk["offset"] + chunk["length"] // 2] ^= 4
        path.write_bytes(data)
        done = run_ok("convert", work / "h5", work / "out", code=2)
        named = "slabs/BF16[0:1280] of model.layers.0.input_layernorm.weight to model.norm.weight" if chunk["offset"] in slab else name
        assert named in done.stderr and "weights.h5" in done.stderr and "CRC-32" in done.stderr, done.stderr
        assert not (work / "out").exists()
        run_ok("digest", work / "h5", code=2)


# ------------------------------------------------------------------------------------------------------------ hostile


def seal(path):
    """A trailer with right checksums for whatever h5py has made of a file, its datasets taken as they are."""
    with h5py.File(path) as file:
        datasets = [d for group in ("tensors", "slabs") for d in file.get(group, {}).values() if isinstance(d, h5py.Dataset) and d.chunks]
        places = [(c.byte_offset, c.size) for d in datasets for c in (d.id.get_chunk_info(i) for i in range(d.id.get_num_chunks()))]
        index = file["index"]
        begin, end = index.id.get_offset(), index.id.get_offset() + index.size
    data = path.read_bytes()
    trailer, at, gaps = b"", 0, []
    for offset, size in places:
        trailer += struct.pack("<QI", offset, size) + data[offset:offset + 4]
    for offset, size in sorted(places) + [(len(data), 0)]:
        if offset > at:
            gaps.append(zlib.crc32(data[at:offset]))
        at = offset + size
    trailer += b"".join(struct.pack("<I", gap) for gap in gaps) + struct.pack("<QQQQ", len(places), len(gaps), begin, end)
    path.write_bytes(data + trailer + struct.pack("<II", zlib.crc32(trailer), 0) + b"FerryH51")


def strip(path):
    """The HDF5 file alone."""
    data = path.read_bytes()
    places, gaps = struct.unpack_from("<QQ", data, len(data) - 48)
    path.write_bytes(data[:len(data) - 48 - 16 * places - 4 * gaps])


def test_h5py_may_rewrite_it_but_not_unnoticed(work):
    write_hf(work / "hf", CONFIG)
    run_ok("convert", work / "hf", work / "h5", "--to", "h5")
    path = work / "h5/weights.h5"
    want = path.read_bytes()
    strip(path)
    seal(path)
    assert path.read_bytes() == want, "the trailer is not as the manual has it"
    with h5py.File(path, "r+") as file:
        file.attrs["note"] = "mine"
    done = run_ok("verify", work / "h5", work / "hf", code=2)
    assert "weights.h5" in done.stderr


def test_links_and_filters_of_a_hostile_file_are_not_followed(work):
    """An archive whose datasets lie in another file, or whose filter wants a plugin: no byte of either is touched."""
    write_hf(work / "hf", CONFIG)
    run_ok("convert", work / "hf", work / "h5", "--to", "h5")
    path = work / "h5/weights.h5"
    strip(path)
    name = "model.embed_tokens.weight"
    with h5py.File(work / "secret.h5", "w") as other:
        other["secret"] = numpy.zeros((40, 16), numpy.uint16)
    with h5py.File(path, "r+") as file:
        group = file["tensors"] if name in file["tensors"] else file["slabs"]
        where = name if name in group else "BF16"
        del group[where]
        group[where] = h5py.ExternalLink(str(work / "secret.h5"), "secret")
    seal(path)
    plugins = work / "plugins"
    plugins.mkdir()
    (work / "secret.h5").unlink()
    for trap in (work / "secret.h5", plugins / "libfilter.so"):
        os.mkfifo(trap)  # whoever opens it waits for ever
    done = ferry("digest", work / "h5", env={**os.environ, "HDF5_PLUGIN_PATH": str(plugins)}, timeout=60)
    assert done.returncode == 2 and "weights.h5" in done.stderr


def test_files_of_another_archive_are_not_mixed_in(work):
    for seed, name in ((0, "a"), (1, "b")):
        write_hf(work / f"hf-{name}", CONFIG, seed=seed)
        run_ok("convert", work / f"hf-{name}", work / name, "--to", "h5", "--max-shard-size", "6KB")
    first = min((work / "a").iterdir()).name
    shutil.copy(work / "b" / first, work / "a" / first)
    done = run_ok("verify", work / "a", work / "hf-a", code=2)
    assert first in done.stderr and "another archive" in done.stderr
    (work / "a" / first).unlink()
    run_ok("digest", work / "a", code=2)
