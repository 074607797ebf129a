"""Ferry reads what real releases of megatron-core and of Megatron-Bridge wrote (tests/data)."""
import hashlib
import json
import re
import shutil

import pytest

import oracle
import torch_dist_raw as raw
from tiny_models import load_hf_sd
from weight_mapping import describe, hf_to_megatron, stack_full
from support import DATA, TORCH_NAME, described, ferry, ferry_json, hf_tensors, iteration_folder, run_ok

CASES = sorted(p.parent.name for p in DATA.glob("*/sha256.json"))


class Fixture:
    def __init__(self, name):
        self.path = DATA / name
        self.digests = json.loads((self.path / "sha256.json").read_text())
        self.hf = DATA / self.digests["hf_dir"]
        self.config = json.loads((self.hf / "config.json").read_text())
        checkpoint = raw.Checkpoint(str(iteration_folder(self.path)))
        self.stored = {k: (d, s, c) for k, (d, s, c) in checkpoint.tensors.items()}
        model = {k: checkpoint.tensor(k) for k in self.digests["megatron"]}
        self.model = {k: {"dtype": d, "shape": list(s), "sha256": hashlib.sha256(b).hexdigest()} for k, (d, s, b) in model.items()}
        # An optimizer step came between the Hugging Face weights and the checkpoints that hold optimizer state.
        self.trained = "optim" in name
        if self.digests["arch"]["experts"] or self.digests["arch"].get("linear"):
            # weight_mapping found them equal when it wrote the fixture
            self.as_hf = None if self.trained else {**self.digests["hf"], **self.rounded_norms()}
            return
        to_name = {v: k for k, v in TORCH_NAME.items()}
        mapped = oracle.megatron_to_hf(model, self.config)
        self.as_hf = described({n: (to_name[d], s, b) for n, (d, s, b) in mapped.items()})


    def rounded_norms(self):
        """Norms of delta nets, which Megatron holds less one: what is left of their weights."""
        weights = load_hf_sd(str(self.hf))
        return describe({name: (weight - 1) + 1 for name, weight in weights.items() if name.endswith("linear_attn.norm.weight")})

    def check_hf(self, folder):
        """The tensors that ferry wrote there are those of the checkpoint."""
        if self.as_hf:
            assert described(hf_tensors(folder)) == self.as_hf
            return
        arch = self.digests["arch"]  # the way back, by weight_mapping
        stacked = stack_full(hf_to_megatron(arch, load_hf_sd(str(folder)), self.digests["padded_vocab"]), arch)
        got = describe(stacked)
        rows = {"embedding.word_embeddings.weight", "output_layer.weight"}  # their padding is trained too, and not in Hugging Face
        assert set(got) == set(self.model)
        assert {k: v for k, v in got.items() if k not in rows} == {k: v for k, v in self.model.items() if k not in rows}


@pytest.fixture(scope="module", params=CASES)
def fixture(request):
    return Fixture(request.param)


def test_the_oracles_agree(fixture):
    """The tests below expect the digests that torch and torch_dist_raw found, each on its own."""
    assert fixture.model == fixture.digests["megatron"]
    if not fixture.trained:
        assert fixture.as_hf == {**fixture.digests["hf"], **fixture.rounded_norms()}


def test_converts_to_the_hugging_face_tensors(fixture, work):
    run_ok("convert", fixture.path, work / "hf", "--hf-config", fixture.hf)
    fixture.check_hf(work / "hf")
    for name in ("config.json", "generation_config.json"):
        assert (work / "hf" / name).read_bytes() == (fixture.hf / name).read_bytes()


def test_converts_from_the_iteration_folder_too(fixture, work):
    folder = iteration_folder(fixture.path)
    run_ok("convert", folder, work / "hf", "--hf-config", fixture.hf)
    fixture.check_hf(work / "hf")


def test_verify_compares_with_the_hugging_face_folder(fixture):
    report = run_ok("verify", fixture.path, fixture.hf, "--hf-config", fixture.hf, code=1 if fixture.trained else 0)
    if fixture.trained:
        assert "model." in report.stdout + report.stderr, "a difference has to be named"


def test_verify_finds_the_same_weights_in_another_layout(work):
    for left, right in (("llama_tp1", "llama_tp2pp2"), ("llama_tp2pp2_mc0131", "llama_singleton"), ("llama_tp2pp2_local", "llama_tp2pp2_mc0161")):
        run_ok("verify", DATA / left, DATA / right, "--hf-config", DATA / "hf_llama/hf")


def test_digest_writes_a_manifest_that_it_checks(fixture, work):
    run_ok("digest", fixture.path, "--output", work / "manifest", "--hf-config", fixture.hf)
    run_ok("digest", fixture.path, "--check", work / "manifest", "--hf-config", fixture.hf)
    ferry_json("digest", fixture.path, "--hf-config", fixture.hf)


def test_digests_are_those_of_the_weights_whatever_the_format_and_layout():
    """A tensor's digest is one of its Hugging Face bytes: padding, stacking and sharding do not show in it."""
    for hf, cases in (("hf_llama", ("llama_tp1", "llama_tp2pp2", "llama_tp2pp2_local", "llama_tp2pp2_mc0131", "llama_tp2pp2_mc0161", "llama_singleton")),
                      ("hf_qwen2", ("qwen2",)), ("hf_qwen2_tied", ("qwen2_tied_pp2",)), ("hf_qwen3", ("qwen3",)),
                      ("hf_mixtral", ("mixtral_ep2", "mixtral_ep2_mc0161", "mixtral_ep2_seqmlp", "mixtral_singleton")),
                      ("hf_qwen2_moe", ("qwen2moe_tp2",)), ("hf_qwen3_moe", ("qwen3moe_ep2",)), ("hf_moonlight", ("moonlight_tp1",)),
                      ("hf_glm4_moe", ("glm4_moe_tp2ep2",)), ("hf_gpt_oss", ("gpt_oss_tp2ep2", "gpt_oss_bridge")),
                      ("hf_deepseek_v3", ("deepseek_v3_ep2", "deepseek_v3_ep2_mc0161", "deepseek_v3_tp2pp2"))):
        want = ferry_json("digest", DATA / hf / "hf")
        copies = {n for n in hf_tensors(DATA / hf / "hf") if n.startswith("model.layers.3.") and ("embed_tokens" in n or "head.head" in n)}
        assert set(want["tensors"]) == set(hf_tensors(DATA / hf / "hf")) - copies
        for case in cases:
            # One holds no arguments; those of latent attention lack its sizes; a biased router is wider in Megatron than here.
            nameless = ("--hf-config", DATA / hf / "hf") if case.endswith(("_local", "_bridge")) or hf in ("hf_moonlight", "hf_deepseek_v3", "hf_glm4_moe") else ()
            got = ferry_json("digest", DATA / case, *nameless)
            assert (got["model"], got["tensors"]) == (want["model"], want["tensors"]), case


@pytest.mark.parametrize("model, options", [
    ("hf_qwen3_next", ["--tp", 2, "--ep", 2]), ("hf_qwen3_5", ["--tp", 2]), ("hf_qwen3_5_moe", ["--tp", 2, "--ep", 2]),
    ("hf_nemotron_h", ["--tp", 2, "--ep", 2]), ("hf_gpt_oss", ["--tp", 2, "--ep", 2]),
    ("hf_qwen2_5_vl_deep", ["--tp", 2, "--megatron-layout", "mbridge"]), ("hf_qwen3_5_moe_vl", ["--tp", 2, "--megatron-layout", "megatron-bridge"])])
def test_digests_are_those_of_the_weights_in_every_format_that_is_written(model, options, work):
    hf = DATA / model / "hf"
    want = ferry_json("digest", hf)
    assert set(want["tensors"]) == set(hf_tensors(hf))
    for to, how in {"megatron": options, "archive": ["--to", "h5"], "files": ["--to", "hf", "--max-shard-size", "20KB"]}.items():
        run_ok("convert", hf, work / to, *how)
        got = ferry_json("digest", work / to)
        assert (got["model"], got["tensors"]) == (want["model"], want["tensors"]), to


def test_digests_of_mxfp4_are_those_of_what_it_stands_for(work):
    run_ok("convert", DATA / "hf_gpt_oss/hf", work / "mxfp4", "--to", "hf", "--quantize", "mxfp4")
    want = ferry_json("digest", work / "mxfp4")
    for to, how in {"megatron": ["--tp", 2, "--ep", 3], "archive": ["--to", "h5"], "bf16": ["--to", "hf"]}.items():
        run_ok("convert", work / "mxfp4", work / to, *how)
        got = ferry_json("digest", work / to)
        assert (got["model"], got["tensors"]) == (want["model"], want["tensors"]), to
    assert any("experts.gate_up_proj" in name for name in want["tensors"]) and want["model"] != ferry_json("digest", DATA / "hf_gpt_oss/hf")["model"]


@pytest.mark.parametrize("name", ["qwen3_next_tp2ep2", "qwen3_5_tp2"])
def test_digests_of_norms_that_megatron_rounded_are_its_own(name):
    """Another's checkpoint has no sidecar that keeps the weights: of the norm of a delta net it holds less one, and of others all."""
    fixture = Fixture(name)
    want, got = (ferry_json("digest", of)["tensors"] for of in (fixture.hf, fixture.path))
    rounded = {key for key, digest in fixture.rounded_norms().items() if digest != fixture.digests["hf"][key]}
    assert rounded and set(want) == set(got) and {key for key in want if want[key] != got[key]} == rounded


def test_digest_check_names_the_file_that_changed(work):
    shutil.copytree(DATA / "llama_tp1", work / "copy")
    run_ok("digest", work / "copy", "--output", work / "manifest")
    file = next((work / "copy").glob("iter_*/__0_0.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    done = ferry("digest", work / "copy", "--check", work / "manifest")
    assert done.returncode in (1, 2)  # the archive's own CRC-32 finds it first
    assert "__0_0.distcp" in done.stdout + done.stderr


def test_inspect_lists_every_tensor_as_it_is_stored(fixture):
    listed = {t["name"]: t for t in ferry_json("inspect", fixture.path)["tensors"]}
    for key, want in fixture.digests["megatron"].items():
        assert listed[key]["shape"] == want["shape"], key
        assert TORCH_NAME.get(listed[key]["dtype"], listed[key]["dtype"]) == want["dtype"], key
    assert set(fixture.stored) <= set(listed), "optimizer tensors are listed as well"
    for key, (_, _, chunks) in fixture.stored.items():
        stored = sorted((tuple(c["offsets"]), tuple(c["sizes"])) for c in listed[key]["chunks"])
        assert stored == sorted(chunks), key


def test_inspect_tells_the_model(fixture):
    """Tensors say what the arguments do not, or it is left away; with a configuration it is all there."""
    want = ferry_json("inspect", fixture.hf)
    got = ferry_json("inspect", fixture.path)
    if got["family"]:
        assert got["family"] == want["family"]
        same = [k for k in got["config"] if k not in ("rotary_base", "layernorm_epsilon", "max_position_embeddings")]
        assert {k: got["config"][k] for k in same} == {k: want["config"][k] for k in same}
    assert got["parameters"] in (None, want["parameters"])
    named = ferry_json("inspect", fixture.path, "--hf-config", fixture.hf)
    assert (named["parameters"], named["config"]) == (want["parameters"], want["config"])
    for options in ([], ["--hf-config", fixture.hf]):
        text = run_ok("inspect", fixture.path, *options).stdout
        assert not re.search(r"\b1 [a-z ]*[a-z]s\b|\b0[ ,+]", text), text


def test_inspect_filters_by_glob():
    names = [t["name"] for t in ferry_json("inspect", DATA / "llama_tp1", "--filter", "*linear_fc1*")["tensors"]]
    assert names and all("linear_fc1" in n for n in names)
