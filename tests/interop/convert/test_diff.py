"""ferry diff against numpy and torch, on a real checkpoint and a copy of it that was changed."""
import re
import shutil
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch

from support import DATA, ITEM_SIZE, ferry, ferry_json, hf_tensors, read_safetensors, run_ok, safetensors_bytes, weight_files

MODELS = {  # and a mesh for it
    "hf_llama": ["--tp", 2, "--pp", 2], "hf_qwen2_tied": ["--tp", 2, "--pp", 2], "hf_qwen3": ["--tp", 2, "--pp", 2],
    "hf_qwen3_5_moe": ["--tp", 2, "--pp", 3], "hf_gpt_oss": ["--tp", 2, "--ep", 2, "--pp", 3], "hf_nemotron_h": ["--tp", 2, "--ep", 2],
    "hf_qwen2_5_vl_deep": ["--tp", 2, "--pp", 2, "--megatron-layout", "mbridge"],
}
TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
XHTML = "{http://www.w3.org/1999/xhtml}"


def elements(tensor):
    dtype, shape, data = tensor
    return torch.frombuffer(bytearray(data), dtype=TORCH[dtype]).reshape(shape)


def change(folder, nonfinite=False):
    """Noise on some projections, the less of it the deeper; a few elements that are not finite."""
    generator = torch.Generator().manual_seed(0)
    for path in weight_files(folder):
        metadata, tensors = read_safetensors(path)
        for name, (dtype, shape, data) in tensors.items():
            if not any(part in name for part in ("q_proj.weight", "up_proj", "embed_tokens")):
                continue
            layer = int(re.search(r"\.(layers|blocks)\.(\d+)\.", name)[2]) if re.search(r"\.(layers|blocks)\.", name) else 3
            values = elements((dtype, shape, data)).clone()
            noise = torch.randn(values.shape, generator=generator) * 0.2 * 10.0 ** -(layer + 1)
            values = (values.float() + noise).to(values.dtype)
            if nonfinite and "layers.1." in name:
                values.view(-1)[3], values.view(-1)[7] = float("nan"), -float("inf")
            tensors[name] = (dtype, shape, values.view(torch.uint8).numpy().tobytes())
        path.write_bytes(safetensors_bytes(tensors, metadata))


def expected(a, b):
    """The numbers that diff shall give for two tensors of 16 or 32 bits, by torch and numpy."""
    integers = {2: np.int16, 4: np.int32}[a.element_size()]
    x, y = (np.frombuffer(t.contiguous().view(torch.uint8).numpy().tobytes(), integers).astype(np.int64) for t in (a, b))
    a, b = a.double().flatten(), b.double().flatten()
    finite = torch.isfinite(a) & torch.isfinite(b)
    lowest = np.int64(np.iinfo(integers).min)
    x, y = (np.where(bits < 0, lowest - bits, bits) for bits in (x, y))  # representable values, counted from zero
    ulps = np.abs(x - y)[finite.numpy()]
    changed = (x != y) | (torch.signbit(a) != torch.signbit(b)).numpy()
    norm = lambda values: torch.linalg.vector_norm(values).item()
    both = changed & finite.numpy()
    return {
        "elements": a.numel(),
        "changed": int(changed.sum()),
        "left_norm": norm(a[torch.isfinite(a)]),
        "right_norm": norm(b[torch.isfinite(b)]),
        "difference_norm": norm((a - b)[finite]),
        "max_difference": (a - b)[finite].abs().max().item() if both.any() else None,
        "max_ulps": int(ulps.max()) if both.any() else None,
        "nans": [int(torch.isnan(a).sum()), int(torch.isnan(b).sum())],
        "infinities": [int(torch.isinf(a).sum()), int(torch.isinf(b).sum())],
        "ulps": ulps,
    }


def bounds(bucket):
    low, _, high = bucket.partition("-")
    return int(low), int(high or low)


@pytest.mark.parametrize("megatron", [False, True], ids=["hf", "megatron"])
@pytest.mark.parametrize("model", MODELS)
def test_the_numbers_are_those_of_torch(model, megatron, work):
    source, tuned = DATA / model / "hf", work / "tuned"
    shutil.copytree(source, tuned)
    change(tuned, nonfinite=not megatron)
    other = tuned
    if megatron:
        other = work / "megatron"
        run_ok("convert", tuned, other, *MODELS[model])
    report = ferry_json("diff", source, other, code=1)
    before, after = hf_tensors(source), hf_tensors(tuned)
    found = {t["name"]: t for t in report["tensors"] if "(padding)" not in t["name"]}
    assert set(found) == {n for n in before if not n.endswith("inv_freq")}
    for name, tensor in found.items():
        want = expected(elements(before[name]), elements(after[name]))
        ulps = want.pop("ulps")
        for key, value in want.items():
            assert tensor[key] == (pytest.approx(value, rel=1e-12) if key.endswith("norm") else value), (name, key)
        for bucket, count in tensor["ulps"].items():
            low, high = bounds(bucket)
            assert count == int(((ulps >= low) & (ulps <= high)).sum()) or low == 0, (name, bucket)
        assert tensor["relative_difference"] == pytest.approx(want["difference_norm"] / want["left_norm"], rel=1e-12)
    assert report["total"]["changed"] == sum(t["changed"] for t in report["tensors"])
    for layer in report["layers"]:
        mine = [t for n, t in found.items() if f".layers.{layer['layer']}." in n]
        assert layer["tensors"] == len(mine) and layer["changed"] == sum(t["changed"] for t in mine)


def test_equal_checkpoints_are_status_0_and_trouble_is_2(work):
    source = DATA / "hf_llama/hf"
    assert ferry_json("diff", source, DATA / "llama_tp2pp2", "--hf-config", source)["identical"]
    assert "equal" in run_ok("diff", source, source).stdout
    run_ok("diff", source, work / "missing", code=2)
    run_ok("diff", source, source, "--include", "nothing.*", code=2)


def page(work, *arguments, code=1):
    run_ok("diff", *arguments, "--html", work / "page.html", "-q", code=code)
    text = (work / "page.html").read_text()
    return text, ElementTree.fromstring(text.split("\n", 1)[1])


def test_the_page_is_well_formed_and_needs_nothing_else(work):
    source, tuned = DATA / "hf_llama/hf", work / "a & <b> \"c\""
    shutil.copytree(source, tuned)
    change(tuned, nonfinite=True)
    text, root = page(work, source, tuned)
    assert text.startswith("<!DOCTYPE html>\n")
    assert not list(root.iter(XHTML + "script")) and not list(root.iter(XHTML + "link"))
    for element in root.iter():
        for key, value in element.attrib.items():
            assert key not in ("src", "href", "onclick", "onload") and "url(" not in value
    assert "url(" not in text and "@import" not in text and "prefers-color-scheme: dark" in text
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    assert any(tuned.name in "".join(e.itertext()) for e in root.iter(XHTML + "td"))
    maps = [e for e in root.iter(XHTML + "svg") if e.get("class") == "heat"]
    assert len(maps) == 2
    layers, columns = 4, 9
    for one in maps:
        cells = list(one.iter(XHTML + "rect"))
        assert len(cells) == layers * (columns + 1)  # and the whole layer's
        titles = [c.find(XHTML + "title").text for c in cells]
        assert any(t.startswith("model.layers.1.mlp.up_proj.weight\nchanged: ") and "1 NaN" in t for t in titles)
        for cell, title in zip(cells, titles):
            assert ("s0" in cell.get("class").split()) == ("equal: " in title), title


def test_the_page_of_equal_checkpoints_and_of_strangers(work):
    source = DATA / "hf_llama/hf"
    _, root = page(work, source, source, code=0)
    assert all("s0" in r.get("class") for s in root.iter(XHTML + "svg") if s.get("class") == "heat" for r in s.iter(XHTML + "rect"))
    text, _ = page(work, source, DATA / "hf_qwen3/hf")
    assert "is on the right only" in text


def test_experts_have_a_map_of_their_own(work):
    source, tuned = DATA / "hf_qwen3_moe/hf", work / "tuned"
    shutil.copytree(source, tuned)
    for path in weight_files(tuned):
        metadata, tensors = read_safetensors(path)
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, bytes(len(data)))
        path.write_bytes(safetensors_bytes(tensors, metadata))
    text, root = page(work, source, tuned)
    maps = [e for e in root.iter(XHTML + "svg") if e.get("class") == "experts"]
    assert len(maps) == 2 and text.count("Layers and their experts") == 2
    for one in maps:
        cells = [(c.find(XHTML + "title").text, c.get("class")) for c in one.iter(XHTML + "rect")]
        assert len(cells) == 2 * 4
        assert [t.split(":")[0] for t, c in cells if c != "s0"] == ["layer 1, expert 2"]
        assert sum(": equal, relative difference 0" in t for t, _ in cells) == 7
    report = ferry_json("diff", source, tuned, code=1)
    assert [t["name"] for t in report["tensors"] if t["changed"]] == [name]


def test_a_part_that_was_converted_equals_that_part_of_its_source(work):
    source, globs = DATA / "hf_qwen3_moe/hf", ["--include", "*.experts.[12].*", "--include", "*.mlp.gate.*"]
    megatron = work / "megatron"
    run_ok("convert", source, megatron, "--ep", 2)
    for name, of in {"part": source, "again": megatron}.items():
        report = ferry_json("convert", of, work / name, "--to", "hf", *globs)
        assert report["part"] == [{"include": [globs[1], globs[3]], "exclude": []}]
    part = hf_tensors(work / "part")
    assert len(part) == 2 * (2 * 3 + 1) and hf_tensors(work / "again") == part
    assert part == {n: t for n, t in hf_tensors(source).items() if n in part}
    assert ferry_json("diff", source, work / "part", *globs)["identical"]
    assert len(ferry_json("verify", megatron, work / "part", code=1)["tensors"]) == 45 - len(part)
    run_ok("verify", megatron, work / "part", *globs)
    run_ok("digest", work / "part", "--output", work / "manifest")
    run_ok("digest", source, "--check", work / "manifest")
    refused = run_ok("convert", source, work / "no", "--include", "*.experts.9.*", "--include", "*.mlp.*", code=2)
    assert "--include '*.experts.9.*': matches no tensor" in refused.stderr and not (work / "no").exists()


def test_a_part_is_compared_alone(work):
    source, tuned = DATA / "hf_llama/hf", work / "tuned"
    shutil.copytree(source, tuned)
    change(tuned)
    untouched = ["--include", "model.layers.*", "--exclude", "*.q_proj.*", "--exclude", "*.up_proj.*"]
    run_ok("diff", source, tuned, *untouched)
    run_ok("verify", source, tuned, *untouched)
    names = {t["name"] for t in ferry_json("diff", source, tuned, "--include", "*.layers.2.*", code=1)["tensors"]}
    assert len(names) == 9 and all(n.startswith("model.layers.2.") for n in names)


def test_the_most_changed_come_first_if_asked(work):
    source, tuned = DATA / "hf_llama/hf", work / "tuned"
    shutil.copytree(source, tuned)
    change(tuned)
    lines = run_ok("diff", source, tuned, "--sort", "changed", code=1).stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("tensor "))
    relative = [float(line.split()[5]) for line in lines[start + 1:lines.index("", start)]]
    assert len(relative) == 9 and relative == sorted(relative, reverse=True)
