"""Deltas: slime's versions as slime's trainer and its engines make and read them, sparse patches as vLLM applies them, and runs that
are killed. The rules of both peers are written down here once more, in numpy: slime's module needs Ray and a GPU, vLLM's a GPU."""
import ctypes
import ctypes.util
import json
import random
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
import zstandard

from support import DATA, FERRY, ROOT, ferry_json, hf_tensors, llama_config, llama_shapes, peak_kib, random_tensors, refuse, run_ok, \
    safetensors_bytes, tree, write_hf

CONFIG = llama_config(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                      vocab_size=20000)
INDEX = "model.safetensors.index.json"


class Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


xxhash = ctypes.CDLL(ctypes.util.find_library("xxhash") or "libxxhash.so.0")
xxhash.XXH3_128bits.restype = Hash128
xxhash.XXH3_128bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]


def xxh3_128(data):
    found = xxhash.XXH3_128bits(data, len(data))
    return f"{found.high:016x}{found.low:016x}"


def trained(tensors, seed, share=0.02):
    """The tensors after a step: a share of their elements is another, most by one unit in the last place."""
    generator = np.random.default_rng(seed)
    after = {}
    for name, (dtype, shape, data) in tensors.items():
        bits = np.frombuffer(data, "<u2").copy()
        at = generator.random(bits.size) < share
        bits[at] += generator.choice(np.array([1, 0xFFFF, 0x0101], "<u2"), int(at.sum()))
        after[name] = (dtype, shape, bits.tobytes())
    return after


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Checkpoints v0 to v3, each a step after the one before."""
    folder = tmp_path_factory.mktemp("versions")
    tensors = random_tensors(llama_shapes(CONFIG))
    for version in range(4):
        write_hf(folder / f"v{version}", CONFIG, tensors, shards=2)
        tensors = trained(tensors, version)
    yield folder
    shutil.rmtree(folder)


# ---------------------------------------------------------------------------------------------------------- slime


def slime_apply(checkpoint, version_folder):
    """Changes the tensors of a checkpoint in place, as slime's engines do with /pull_weights."""
    metadata = json.loads((version_folder / INDEX).read_text())["metadata"]
    assert metadata["compression_format"] == "zstd" and metadata["checksum_format"] == "xxh3-128"
    changed = 0
    for path in version_folder.glob("*.safetensors"):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + size])
        checksums = header.pop("__metadata__", {})
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            frame = data[8 + size + begin:8 + size + end]
            dtype, shape, old = checkpoint[name]
            if metadata["delta_encoding"] == "xor":
                difference = zstandard.ZstdDecompressor().stream_reader(frame).read(len(old))
                new = (np.frombuffer(old, np.uint8) ^ np.frombuffer(difference, np.uint8)).tobytes()
            else:
                raw = zstandard.ZstdDecompressor().decompress(frame)
                count = int.from_bytes(raw[:4], "little")
                region = np.frombuffer(old, np.uint8).copy()
                region[np.frombuffer(raw[4:4 + 4 * count], "<u4")] = np.frombuffer(raw[4 + 4 * count:], np.uint8)
                new = region.tobytes()
            assert xxh3_128(new) == checksums[name], name
            checkpoint[name] = (dtype, shape, new)
            changed += 1
    return changed


def slime_publish(before, after, folder, version, encoding, files):
    """Writes a version as slime's ranks do: the tensors that changed, spread over files, and an index."""
    folder.mkdir(parents=True)
    parts, weight_map = [{} for _ in range(files)], {}
    checksums = [{} for _ in range(files)]
    for i, name in enumerate(after):
        old, new = (np.frombuffer(t[name][2], np.uint8) for t in (before, after))
        mask = old != new
        if not mask.any():
            continue
        if encoding == "xor":
            raw = (new ^ old).tobytes()
        else:
            at = np.flatnonzero(mask).astype("<u4")
            raw = np.array([at.size], "<u4").tobytes() + at.tobytes() + new[mask].tobytes()
        frame = zstandard.ZstdCompressor(level=1).compress(raw)
        parts[i % files][name] = ("U8", (len(frame),), frame)
        checksums[i % files][name] = xxh3_128(new.tobytes())
        weight_map[name] = f"model-{i % files:05d}-of-{files:05d}.safetensors"
    for i in range(files):
        (folder / f"model-{i:05d}-of-{files:05d}.safetensors").write_bytes(safetensors_bytes(parts[i], checksums[i]))
    (folder / INDEX).write_text(json.dumps({"metadata": {
        "version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding, "compression_format": "zstd",
        "checksum_format": "xxh3-128"}, "weight_map": weight_map}))


def test_engines_of_slime_read_what_is_written(versions, work):
    for version in (1, 2):
        run_ok("delta", "make", versions / f"v{version - 1}", versions / f"v{version}", work / "deltas", "--to", "slime")
    tensors = hf_tensors(versions / "v0")
    for version in (1, 2):
        folder = work / "deltas" / f"weight_v{version:06d}"
        metadata = json.loads((folder / INDEX).read_text())["metadata"]
        assert (metadata["version"], metadata["base_version"]) == (f"{version:06d}", f"{version - 1:06d}")
        want = hf_tensors(versions / f"v{version}")
        changed = sum(tensors[name] != want[name] for name in want)
        assert slime_apply(tensors, folder) == changed
        assert tensors == want


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("files", [1, 3])
def test_versions_of_slime_are_read(versions, work, encoding, files):
    for version in (1, 2, 3):
        slime_publish(*(hf_tensors(versions / f"v{version - i}") for i in (1, 0)), work / "deltas" / f"weight_v{version:06d}", version,
                      encoding, files)
    run_ok("delta", "apply", versions / "v0", work / "deltas", work / "new")
    assert tree(work / "new") == tree(versions / "v3")


def test_a_version_of_slime_that_changes_nothing(versions, work):
    """A step with a learning rate of zero, between two others."""
    for before, after in ((0, 1), (1, 1), (1, 2)):
        run_ok("delta", "make", versions / f"v{before}", versions / f"v{after}", work / "deltas", "--to", "slime")
    assert len(json.loads((work / "deltas/weight_v000002" / INDEX).read_text())["weight_map"]) == 0
    run_ok("delta", "inspect", work / "deltas/weight_v000002")
    run_ok("delta", "apply", versions / "v0", work / "deltas", work / "new")
    assert tree(work / "new") == tree(versions / "v2")


def test_a_version_of_slime_that_leaves_a_gap(versions, work):
    run_ok("delta", "make", versions / "v0", versions / "v1", work / "deltas", "--to", "slime")
    refuse("delta", "make", versions / "v1", versions / "v2", work / "deltas", "--to", "slime", "--version", "3", words=["--version 3", "version 1 is the last"])


def test_a_version_of_slime_that_was_damaged(versions, work):
    slime_publish(*(hf_tensors(versions / f"v{i}") for i in (0, 1)), work / "weight_v000001", 1, "xor", 1)
    path = work / "weight_v000001/model-00000-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    refuse("delta", "verify", versions / "v0", work / "weight_v000001", words=["weight_v000001"])


@pytest.mark.parametrize("key, value, words", [
    ("checksum_format", "blake3", ["checksum_format", "blake3"]), ("compression_format", "lz4", ["compression_format", "lz4"]),
    ("delta_encoding", "sub", ["encoding", "sub"]), ("version", "one", ["version", "one"]), ("base_version", 0, ["base_version"])])
def test_a_version_of_slime_of_another_kind(versions, work, key, value, words):
    slime_publish(*(hf_tensors(versions / f"v{i}") for i in (0, 1)), work / "weight_v000001", 1, "xor", 1)
    index = json.loads((work / "weight_v000001" / INDEX).read_text())
    index["metadata"][key] = value
    (work / "weight_v000001" / INDEX).write_text(json.dumps(index))
    refuse("delta", "inspect", work / "weight_v000001", words=words)


# ----------------------------------------------------------------------------------------------------------- vLLM


def test_sparse_patches_as_vllm_applies_them(versions, work):
    run_ok("delta", "make", versions / "v0", versions / "v1", work / "patch", "--to", "vllm")
    data = (work / "patch/patch.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    shapes = json.loads(json.loads(data[8:8 + size])["__metadata__"]["shapes"])
    import safetensors.torch
    import torch
    patches, tensors = safetensors.torch.load(data), hf_tensors(versions / "v0")
    assert {name.rpartition(".")[0] for name in patches} == set(shapes)
    for name, shape in shapes.items():
        indices, values = patches[name + ".indices"], patches[name + ".values"]
        assert indices.dtype == torch.int32 and indices.shape == values.shape and values.dtype == torch.bfloat16
        assert not values.isnan().any() and (indices[1:] > indices[:-1]).all() and indices[-1] < np.prod(shape)
        # load_checkpoint_weight_patches: a tensor of NaN takes the values; the weight stays where it is NaN.
        staged = torch.full((int(np.prod(shape)),), float("nan"), dtype=torch.bfloat16).index_copy_(0, indices.long(), values)
        dtype, _, old = tensors[name]
        weight = torch.frombuffer(bytearray(old), dtype=torch.bfloat16)
        merged = torch.where(staged.isnan(), weight, staged)
        tensors[name] = (dtype, tuple(shape), merged.view(torch.uint8).numpy().tobytes())
    assert tensors == hf_tensors(versions / "v1")


# ---------------------------------------------------------------------------------------------------------- Ferry


def test_the_recipe_of_the_format_reads_a_delta(versions, work):
    run_ok("delta", "make", versions / "v0", versions / "v2", work / "delta")
    recipe = {}
    exec(re.search(r"```python\n(.*?)```", (ROOT / "docs/formats/delta.md").read_text(), re.S).group(1), recipe)
    tensors = hf_tensors(versions / "v0")
    want = hf_tensors(versions / "v2")
    for name, change in recipe["read_delta"](work / "delta"):
        dtype, shape, old = tensors[name]
        tensors[name] = (dtype, shape, change(old))
    assert tensors == want


def test_between_layouts_of_megatron_core(work):
    run_ok("convert", DATA / "hf_llama/hf", work / "tp2", "--tp", "2")
    shutil.copytree(DATA / "hf_llama/hf", work / "new")
    for path in (work / "new").glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        size = int.from_bytes(data[:8], "little")
        for at in range(8 + size, len(data), 97):
            data[at] ^= 3
        path.write_bytes(data)
    run_ok("convert", work / "new", work / "pp2", "--pp", "2")
    report = ferry_json("delta", "make", work / "tp2", work / "pp2", work / "delta")
    assert report["base_model"] == ferry_json("digest", work / "tp2", "--tensors-only")["model"]
    run_ok("delta", "apply", work / "tp2", work / "delta", work / "back", "--to", "hf")
    assert tree(work / "back") == tree(work / "new")
    run_ok("delta", "apply", DATA / "hf_llama/hf", work / "delta", work / "ep", "--to", "megatron", "--tp", "2", "--pp", "2")
    run_ok("verify", work / "ep", work / "new")


def test_a_chain_of_slime_over_transposed_experts_keeps_to_the_memory(work):
    """Megatron-Core's experts lie transposed: elements come slab by slab, and a frame is decoded from front to back."""
    config = json.loads((DATA / "hf_gpt_oss/hf/config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    wider = {32: 1024, 64: 1024, 128: 2048}
    shapes = {name: tuple(wider.get(size, size) for size in shape) for name, (_, shape, _) in hf_tensors(DATA / "hf_gpt_oss/hf").items()
              if ".layers." not in name or ".layers.0." in name}
    tensors = random_tensors(shapes)
    write_hf(work / "v0", config, tensors)
    for version in range(3):
        tensors = trained(tensors, version)
        write_hf(work / f"v{version + 1}", config, tensors)
        run_ok("delta", "make", work / f"v{version}", work / f"v{version + 1}", work / "slime", "--to", "slime")
    run_ok("convert", work / "v0", work / "base", "--ep", "2")
    for to, most in (("hf", 72), ("h5", 132)):  # MiB; chunks of an archive take more
        peak = peak_kib("delta", "apply", work / "base", work / "slime", work / to, "--to", to, "--quiet", "--max-memory", "128MiB", "--threads", "8")
        assert peak < most * 1024, f"{to}: {peak} KiB"
    assert tree(work / "hf") == tree(work / "v3")
    run_ok("verify", work / "h5", work / "v3")


def test_damage_is_named(versions, work):
    run_ok("delta", "make", versions / "v0", versions / "v1", work / "delta")
    path = work / "delta/delta.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10] + bytes([whole[-10] ^ 1]) + whole[-9:])
    refuse("delta", "apply", versions / "v0", work / "delta", work / "new", words=["chunk", "CRC-32", "delta.safetensors"])
    assert not (work / "new").exists()
    path.write_bytes(whole[:-1])
    refuse("delta", "inspect", work / "delta", words=["delta.safetensors"])
    path.write_bytes(whole)
    manifest = work / "delta/ferry-delta.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"base": "', '"base": "0', 1))
    refuse("delta", "inspect", work / "delta", words=["ferry-delta.json"])
    manifest.write_text("{}")
    refuse("delta", "inspect", work / "delta", words=["format"])


def test_another_base_is_named_by_its_digest(versions, work):
    run_ok("delta", "make", versions / "v0", versions / "v1", work / "delta")
    said = refuse("delta", "verify", versions / "v1", work / "delta", words=["another base", "was made from"])
    digests = ferry_json("digest", versions / "v1", "--tensors-only")["tensors"]
    assert any(entry["digest"] in said for entry in digests.values())


@pytest.mark.parametrize("dtype, way, words", [("fp32", "slime", ["the frame ends", "of a base of another dtype"]), ("fp32", "ferry", ["is fp32", "bf16"]),
                                               ("fp16", "slime", ["a delta of another base"])])
def test_a_base_of_another_dtype_is_named(versions, work, dtype, way, words):
    run_ok("delta", "make", versions / "v0", versions / "v1", work / "delta", "--to", way)
    run_ok("convert", versions / "v0", work / "base", "--to", "hf", "--dtype", dtype)
    refuse("delta", "apply", work / "base", work / "delta", work / "out", words=words)
    assert not (work / "out").exists()


def test_a_delta_of_quantised_weights_on_others_is_named(versions, work):
    for version in (0, 1):
        run_ok("convert", versions / f"v{version}", work / f"fp8_v{version}", "--to", "hf", "--quantize", "fp8-block")
    run_ok("delta", "make", work / "fp8_v0", work / "fp8_v1", work / "delta")
    refuse("delta", "apply", versions / "v0", work / "delta", work / "out", words=["changes quantised weights", "has none"])
    run_ok("delta", "apply", work / "fp8_v0", work / "delta", work / "out")


@pytest.mark.parametrize("arguments", [("make", "v0", "v1"), ("apply", "v0", "v1"), ("apply", "v0"), ("verify", "v0"), ("inspect",)])
def test_too_few_or_wrong_arguments(versions, work, arguments):
    refuse("delta", arguments[0], *(versions / a for a in arguments[1:]))


# --------------------------------------------------------------------------------------------------------- killed

LARGE = llama_config(hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=8,
                     vocab_size=8000)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large_delta")
    tensors = random_tensors(llama_shapes(LARGE))
    write_hf(folder / "base", LARGE, tensors, shards=3)
    write_hf(folder / "new", LARGE, trained(tensors, 1, 0.3), shards=3)
    run_ok("delta", "make", folder / "base", folder / "new", folder / "delta")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("way", ["make", "slime", "apply"])
def test_a_killed_run_publishes_nothing_and_the_next_one_is_whole(large, work, way):
    arguments = {"make": ["make", large / "base", large / "new", work / "out"],
                 "slime": ["make", large / "base", large / "new", work / "out", "--to", "slime"],
                 "apply": ["apply", large / "base", large / "delta", work / "out"]}[way]
    target = work / "out/weight_v000001" if way == "slime" else work / "out"
    started = time.monotonic()
    run_ok("delta", *arguments)
    seconds = time.monotonic() - started
    want = tree(target)
    if way == "apply":
        assert want == tree(large / "new")
    generator = random.Random(way)
    for _ in range(6):
        shutil.rmtree(target)
        process = subprocess.Popen([FERRY, "delta", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(generator.random() * seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if target.exists():
            assert tree(target) == want
        else:
            run_ok("delta", *arguments)
            assert tree(target) == want
