"""Ferry writes the original bytes for Hugging Face if it can know them, else those that transformers would write."""
import json
import shutil

import numpy as np
import pytest

from support import (COMPANIONS, DATA, ferry, hf_tensors, iteration_folder, llama_config, llama_shapes,
                     random_tensors, read_safetensors, run_ok, safetensors_bytes, tree, write_hf)

MODELS = ["hf_llama", "hf_qwen2", "hf_qwen2_tied", "hf_qwen3", "hf_mixtral", "hf_qwen2_moe", "hf_qwen3_moe", "hf_deepseek_v2", "hf_deepseek_v3",
          "hf_moonlight", "hf_glm4_moe", "hf_gpt_oss"]
LAYOUT = ["--tp", 2, "--pp", 2]


def layout_of(model):
    """For models of three layers, two stages that are not alike."""
    return [*LAYOUT, "--num-layers-in-first-pipeline-stage", 1] if model.startswith(("hf_deepseek", "hf_glm4", "hf_gpt_oss")) else LAYOUT


def there_and_back(hf, work, *options):
    run_ok("convert", hf, work / "megatron", *options)
    run_ok("convert", work / "megatron", work / "back")
    return work / "back"


# ------------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize("model", MODELS)
def test_there_and_back_is_the_same_folder(model, work):
    assert tree(there_and_back(DATA / model / "hf", work, *layout_of(model))) == tree(DATA / model / "hf")


def test_there_and_back_keeps_shards_index_and_companions(work):
    write_hf(work / "hf", shards=3)
    assert tree(there_and_back(work / "hf", work, *LAYOUT)) == tree(work / "hf")


def keep(tensors):
    return tensors


def mixed_dtypes(tensors):
    """Norms in fp32, as some trainers save them. Not sorted: safetensors would put the wider dtype first."""
    def widen(name, tensor):
        dtype, shape, data = tensor
        if "norm" not in name:
            return tensor
        return "F32", shape, (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).tobytes()
    return {n: widen(n, t) for n, t in tensors.items()}


HEADERS = {  # files that no writer of today makes, and that are legal all the same
    "in the order of the model": (keep, {}),
    "in reverse": (lambda tensors: dict(reversed(tensors.items())), {}),
    "without metadata": (keep, {"metadata": None}),
    "with more metadata": (keep, {"metadata": {"format": "pt", "note": "a \u00e9 \"quoted\"\n line", "empty": ""}}),
    "metadata at the end": (keep, {"header": lambda h: {**{k: v for k, v in h.items() if k != "__metadata__"}, "__metadata__": h["__metadata__"]}}),
    "header order unlike the data's": (keep, {"header": lambda h: dict(reversed(h.items()))}),
    "mixed dtypes": (mixed_dtypes, {}),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_there_and_back_keeps_the_header_as_it_was(kind, work):
    change, how = HEADERS[kind]
    write_hf(work / "hf")
    (work / "hf/model.safetensors").write_bytes(safetensors_bytes(change(random_tensors(llama_shapes(llama_config()))), **how))
    assert tree(there_and_back(work / "hf", work, *LAYOUT)) == tree(work / "hf")


def test_there_and_back_keeps_a_header_with_blanks(work):
    """The header is text: blanks, and numbers of bytes that are no multiple of eight."""
    write_hf(work / "hf")
    path = work / "hf/model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:8 + size]), indent=3).encode() + b"\n"
    header += b" " * (-(len(header) + 3) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size:])
    assert tree(there_and_back(work / "hf", work, *LAYOUT)) == tree(work / "hf")


def test_threads_and_memory_do_not_show_in_the_bytes(work):
    write_hf(work / "hf", shards=2)
    seen = set()
    for i, options in enumerate((["--threads", 1], ["--threads", 7], ["--threads", 2, "--max-memory", "16MiB"])):
        run_ok("convert", work / "hf", work / f"megatron{i}", *LAYOUT, *options)
        run_ok("convert", work / f"megatron{i}", work / f"back{i}", *options)
        seen.add(json.dumps([tree(work / f"megatron{i}"), tree(work / f"back{i}")]))
    assert len(seen) == 1


def test_every_layout_leads_back(work):
    write_hf(work / "hf", llama_config(num_hidden_layers=5))
    want = tree(work / "hf")
    for i, layout in enumerate(([1, 1], [4, 1], [1, 5], [2, 5], [4, 5], [1, 2, 4], [2, 3, 1, 1])):
        options = ["--tp", layout[0], "--pp", layout[1]]
        if len(layout) > 2:
            options += ["--num-layers-in-first-pipeline-stage", layout[2]]
        if len(layout) > 3:
            options += ["--num-layers-in-last-pipeline-stage", layout[3]]
        run_ok("convert", work / "hf", work / f"megatron{i}", *options)
        run_ok("convert", work / f"megatron{i}", work / f"back{i}")
        assert tree(work / f"back{i}") == want, layout


def test_a_megatron_checkpoint_can_be_cut_again(work):
    """Megatron to Megatron: the same weights, and the way back is still the same folder."""
    write_hf(work / "hf")
    run_ok("convert", work / "hf", work / "first", "--tp", 2, "--pp", 2)
    run_ok("convert", work / "first", work / "second", "--to", "megatron", "--tp", 4, "--pp", 1)
    run_ok("verify", work / "first", work / "second")
    run_ok("convert", work / "second", work / "back")
    assert tree(work / "back") == tree(work / "hf")


# --------------------------------------------------------------------------------------- as transformers would write


def without_sidecar(hf, work, *options):
    """A Megatron checkpoint as somebody else would have written it."""
    run_ok("convert", hf, work / "megatron", *options)
    shutil.rmtree(iteration_folder(work / "megatron") / "ferry")
    return work / "megatron"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """save(model, max_shard_size) -> the folder that transformers' save_pretrained makes of it."""
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("saved")

    def save(hf, max_shard_size=None):
        target = folder / str(len(list(folder.iterdir())))
        model = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype="auto")
        model.save_pretrained(target, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
        return target
    return save


def weights(folder):
    return {n: d for n, d in tree(folder).items() if n.startswith("model")}


# 10KB: one tensor alone is larger than a shard may be. 64KB: some layers share a shard.
@pytest.mark.parametrize("max_shard_size", [None, "10KB", "20KB", "64KB"])
# transformers drops the prediction layers of DeepSeek-V3 and GLM-4.5, which ferry keeps.
@pytest.mark.parametrize("model", [m for m in MODELS if m not in ("hf_deepseek_v3", "hf_glm4_moe")])
def test_canonical_files_are_those_of_save_pretrained(model, max_shard_size, saved, work):
    hf = DATA / model / "hf"
    megatron = without_sidecar(hf, work, *layout_of(model))
    # Without weights: of those the dtype of a router's bias would be taken, which transformers widens to fp32.
    shutil.copytree(hf, work / "config", ignore=shutil.ignore_patterns("*.safetensors"))
    run_ok("convert", megatron, work / "out", "--hf-config", work / "config", *(["--max-shard-size", max_shard_size] if max_shard_size else []))
    want = weights(saved(hf, max_shard_size))
    assert weights(work / "out") == want
    assert (len(want) > 1) == bool(max_shard_size)


def test_canonical_order_of_shards_with_more_than_ten_layers(saved, work):
    """layers.10 comes after layers.9 in the shards, and before layers.2 in the header of one file."""
    config = llama_config(num_hidden_layers=12, hidden_size=16, intermediate_size=24, num_key_value_heads=2)
    write_hf(work / "hf", config, shards=2)
    megatron = without_sidecar(work / "hf", work)
    run_ok("convert", megatron, work / "out", "--hf-config", work / "hf", "--max-shard-size", "12KB")
    assert weights(work / "out") == weights(saved(work / "hf", "12KB"))


def test_canonical_files_of_a_checkpoint_that_megatron_wrote(saved, work):
    run_ok("convert", DATA / "llama_tp2pp2", work / "out", "--hf-config", DATA / "hf_llama/hf", "--max-shard-size", "20KB")
    assert weights(work / "out") == weights(saved(DATA / "hf_llama/hf", "20KB"))


def test_canonical_order_of_mixed_dtypes_is_that_of_safetensors(work):
    """safetensors puts wider dtypes first, then goes by name."""
    from safetensors.torch import load_file, save_file
    write_hf(work / "hf")
    (work / "hf/model.safetensors").write_bytes(safetensors_bytes(mixed_dtypes(random_tensors(llama_shapes(llama_config())))))
    run_ok("convert", without_sidecar(work / "hf", work), work / "out", "--hf-config", work / "hf")
    save_file(load_file(work / "hf/model.safetensors"), work / "want.safetensors", metadata={"format": "pt"})
    assert (work / "out/model.safetensors").read_bytes() == (work / "want.safetensors").read_bytes()


def test_companions_come_from_hf_config_where_there_is_no_sidecar(work):
    write_hf(work / "hf")
    run_ok("convert", without_sidecar(work / "hf", work), work / "out", "--hf-config", work / "hf")
    for name in [*COMPANIONS, "config.json"]:
        assert (work / "out" / name).read_bytes() == (work / "hf" / name).read_bytes(), name


# --------------------------------------------------------------------------------------------- the readers' view


@pytest.mark.parametrize("model", MODELS)
def test_transformers_computes_the_same_with_what_comes_back(model, work):
    import torch
    import transformers
    hf = DATA / model / "hf"
    run_ok("convert", without_sidecar(hf, work, *layout_of(model)), work / "out", "--hf-config", hf, "--max-shard-size", "30KB")
    load = lambda path: transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    before, after = load(hf), load(work / "out")
    want, got = before.state_dict(), after.state_dict()
    assert want.keys() == got.keys()
    for name in want:
        assert want[name].dtype == got[name].dtype and torch.equal(want[name], got[name]), name
    reference = json.loads((hf.parent / "hf_logits.json").read_text())
    ids = torch.tensor(reference["ids"])[None]
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)
        last = after.float()(ids).logits[0, -1]
    assert torch.allclose(last, torch.tensor(reference["logits_last"]), rtol=0, atol=2e-5 * last.abs().max().item())


def test_safetensors_opens_every_file(work):
    from safetensors import safe_open
    write_hf(work / "hf", shards=2)
    run_ok("convert", without_sidecar(work / "hf", work), work / "out", "--hf-config", work / "hf", "--max-shard-size", "20KB")
    index = json.loads((work / "out/model.safetensors.index.json").read_text())
    seen = {}
    for path in sorted((work / "out").glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            assert file.metadata() == {"format": "pt"}
            seen |= {name: path.name for name in file.keys()}
    assert seen == index["weight_map"]
    assert hf_tensors(work / "out") == hf_tensors(work / "hf")


# --------------------------------------------------------------------------------------------------------- dtypes

NUMPY = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
SHORT = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
LARGEST = {"BF16": 0x7F7F7FFF, "F16": 0x477FEFFF}  # the largest fp32 values that still round to a finite number


def as_torch(dtype, bits):
    import torch
    name = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    return torch.from_numpy(bits.view({2: np.int16, 4: np.int32}[bits.itemsize]).copy()).view(name)


def bits_of(tensor):
    import torch
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy().view({2: np.uint16, 4: np.uint32}[tensor.element_size()])


def hard_values(source, target, count):
    """Bit patterns of `source`: every 16-bit one; of fp32 random ones, ties, their neighbours, denormals, infinities, NaN."""
    generator = np.random.default_rng(3)
    if source != "F32":
        bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    else:
        patterns = generator.integers(0, 1 << 32, 60000, dtype=np.uint64).astype(np.uint32)
        dropped = 16 if target == "BF16" else 13
        near_tie = (patterns[:20000] & ~np.uint32((1 << dropped) - 1)) | np.uint32(1 << (dropped - 1))
        small = generator.integers(0, 0x39000000, 20000, dtype=np.uint64).astype(np.uint32)  # to fp16: denormals, and down to zero
        special = np.array([0, 1, 0x007FFFFF, 0x00800000, 0x33000000, 0x33000001, 0x33800000, 0x387FC000, 0x387FE000, 0x38800000,
                            0x7F800000, LARGEST.get(target, 0x7F7FFFFF), 0x7FC00000, 0x7F800001], np.uint32)
        bits = np.concatenate([patterns, near_tie, near_tie + np.uint32(1), near_tie - np.uint32(1), small, special, special | np.uint32(1 << 31)])
    values = as_torch(source, bits)
    import torch
    torch_target = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[target]
    overflows = values.isfinite() & ~values.to(torch_target).isfinite()
    bits = bits[~overflows.numpy()]
    assert len(bits) > 1000
    return np.resize(bits, count)


@pytest.mark.parametrize("way", ["to_megatron", "to_hf"])
@pytest.mark.parametrize("source,target", [(s, t) for s in NUMPY for t in NUMPY if s != t])
def test_casts_round_as_torch_does(source, target, way, work):
    """Bit for bit. Of NaN only that it stays one: which NaN torch makes depends on the vector unit and on the position."""
    import torch
    config = llama_config(num_hidden_layers=2, vocab_size=1000, hidden_size=64, intermediate_size=96)
    shapes = llama_shapes(config)
    count = sum(int(np.prod(s)) for s in shapes.values())
    bits, tensors, at = hard_values(source, target, count), {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tensors[name] = (source, shape, bits[at:at + size].astype(NUMPY[source]).tobytes())
        at += size
    write_hf(work / "hf", config, tensors)
    if way == "to_megatron":
        run_ok("convert", work / "hf", work / "megatron", *LAYOUT, "--dtype", SHORT[target])
        run_ok("convert", work / "megatron", work / "out", "--hf-config", work / "hf")
    else:
        run_ok("convert", work / "hf", work / "megatron", *LAYOUT)
        run_ok("convert", work / "megatron", work / "out", "--dtype", SHORT[target])
    got = hf_tensors(work / "out")
    assert got.keys() == tensors.keys()
    torch_target = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[target]
    for name, (dtype, shape, data) in got.items():
        assert (dtype, shape) == (target, shapes[name]), name
        before = as_torch(source, np.frombuffer(tensors[name][2], NUMPY[source]))
        after = np.frombuffer(data, NUMPY[target])
        number = ~before.isnan().numpy()
        want = bits_of(before.to(torch_target))
        wrong = np.flatnonzero(number & (after != want))
        assert not len(wrong), f"{name}[{wrong[0]}]: {bits_of(before)[wrong[0]]:x} became {after[wrong[0]]:x}, torch says {want[wrong[0]]:x}"
        assert as_torch(target, after).isnan().numpy()[~number].all(), f"{name}: a NaN became a number"


@pytest.mark.parametrize("source,target,bits", [
    ("F32", "BF16", 0x7F7F8000), ("F32", "BF16", 0xFF7FFFFF), ("F32", "F16", 0x477FF000), ("F32", "F16", 0xC7FFFFFF), ("BF16", "F16", 0x4780)])
def test_a_cast_that_would_overflow_is_refused(source, target, bits, work):
    config = llama_config(num_hidden_layers=1)
    tensors = random_tensors(llama_shapes(config), dtype=source)
    name = "model.layers.0.mlp.up_proj.weight"
    values = np.frombuffer(tensors[name][2], NUMPY[source]).copy()
    values[777] = bits
    tensors[name] = (source, tensors[name][1], values.tobytes())
    write_hf(work / "hf", config, tensors)
    done = ferry("convert", work / "hf", work / "megatron", "--dtype", SHORT[target])
    assert done.returncode == 2 and name in done.stderr, done.stderr
    assert not (work / "megatron").exists()


def test_a_cast_is_not_undone_by_the_sidecar(work):
    """After --dtype the original bytes are gone: the way back keeps the values of the cast, in its dtype."""
    write_hf(work / "hf", tensors=random_tensors(llama_shapes(llama_config()), dtype="F32"))
    run_ok("convert", work / "hf", work / "megatron", "--dtype", "bf16")
    run_ok("convert", work / "megatron", work / "out")
    assert {t[0] for t in hf_tensors(work / "out").values()} == {"BF16"}
    assert read_safetensors(work / "out/model.safetensors")[0] == {"format": "pt"}
