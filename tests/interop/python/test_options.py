"""The functions of the module ferry take the options of the program's subcommands: the lists are compared, and those that came last are tried."""
import inspect
import re
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import DATA, FERRY, ferry_json, llama_config, llama_shapes, random_tensors, run_ok, tree, write_hf

ferry = pytest.importorskip("ferry", reason="the Python module is not built")

REPORTS = {"json": "a dataclass is returned", "help": "docstrings"}
QUIET = {**REPORTS, "quiet": "progress=False"}
WRITES = {"output": "Manifest.text is what the file holds", "overwrite": "no file is written", "check": "ferry.check"}
PAGES = {"sort": "DiffReport.tensors is a list", "html": "the page is the program's", "overwrite": "no file is written"}
ADAPTERS = {"base": "ferry.convert_adapter", "lora_alpha": "ferry.convert_adapter"}
RENAMED = {"no_ranks": "ranks", "tensors_only": "files"}

# function -> subcommand, and its options that the function lacks, each with the reason
FUNCTIONS = {
    "convert": ("convert", {**QUIET, **ADAPTERS}),
    "verify": ("verify", QUIET),
    "diff": ("diff", {**QUIET, **PAGES}),
    "digest": ("digest", {**QUIET, **WRITES}),
    "inspect": ("inspect", REPORTS),
    "merge": ("merge", QUIET),
    "split": ("split", {**QUIET, "tensors": "SplitReport.tensors is a list"}),
    "delta_make": ("delta make", QUIET),
    "delta_apply": ("delta apply", QUIET),
    "delta_verify": ("delta verify", QUIET),
}


def options_of(command):
    """The first long name of each option in the subcommand's --help: --tp of --tp,--tensor-model-parallel-size."""
    text = subprocess.run([FERRY, *command.split(), "--help"], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = [re.search(r"--([a-z0-9-]+)", line)[1].replace("-", "_") for line in text.splitlines() if re.match(r"  -", line)]
    assert len(found) > 4
    return {RENAMED.get(name, name) for name in found}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_takes_the_options_of_its_subcommand(function):
    command, absent = FUNCTIONS[function]
    options = options_of(command)
    keywords = {name for name, one in inspect.signature(getattr(ferry, function)).parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}
    assert options - keywords - absent.keys() == set(), "the function lacks these options"
    assert keywords - options == {"progress"} & keywords, "the program lacks these options"
    assert absent.keys() - options == set(), "these exceptions are no options"


def test_adapters_and_manifests_have_functions_with_the_options_that_mean_something_there():
    keywords = {name: set(inspect.signature(getattr(ferry, name)).parameters) for name in ("convert", "convert_adapter", "digest", "check")}
    assert keywords["convert_adapter"] - keywords["convert"] == {"base", "lora_alpha"}
    assert keywords["check"] - keywords["digest"] == {"manifest"}


@pytest.mark.parametrize("layout", ["language-model", "megatron-bridge", "mbridge"])
def test_a_tower_is_kept_where_the_program_keeps_it(layout, work):
    hf = DATA / "hf_qwen2_5_vl/hf"
    ferry.convert(hf, work / "one", megatron_layout=layout)
    run_ok("convert", hf, work / "other", "--megatron-layout", layout)
    assert tree(work / "one") == tree(work / "other")
    assert ferry.verify(hf, work / "one")


def test_prediction_layers_are_dropped(work):
    hf = DATA / "hf_glm4_moe/hf"
    assert "model.layers.3.eh_proj.weight" in load_file(hf / "model.safetensors")
    ferry.convert(hf, work / "one", to="hf", mtp="drop")
    assert not any(name.startswith("model.layers.3.") for name in load_file(next((work / "one").glob("*.safetensors"))))
    with pytest.raises(ferry.Error, match="prediction layers") as error:
        ferry.convert(DATA / "hf_llama/hf", work / "two", mtp="drop")
    assert error.value.kind == "usage" and not (work / "two").exists()


@pytest.mark.parametrize("option, known", [("megatron_layout", "language-model, megatron-bridge, mbridge, slime"), ("mtp", "keep, drop, error"),
                                           ("quantize", "fp8-block, fp8-block-lossless, mxfp4")])
def test_a_name_that_is_not_known_is_refused_with_those_that_are(option, known, work):
    with pytest.raises(ferry.Error) as error:
        ferry.convert(DATA / "hf_llama/hf", work / "out", **{option: "banana"})
    assert error.value.kind == "usage" and error.value.message == f"{option}=banana: is none of {known}"


def test_a_manifest_is_held_against_a_checkpoint(work):
    hf = DATA / "hf_llama/hf"
    manifest = work / "manifest.json"
    manifest.write_text(ferry.digest(hf).text)
    report = ferry.check(hf, manifest)
    assert report and report.files_compared and report.differences == [] and report.model == ferry.digest(hf).model
    ferry.convert(hf, work / "megatron", tp=2)
    assert ferry.check(work / "megatron", manifest) and not ferry.check(work / "megatron", manifest).files_compared
    weights = load_file(hf / "model.safetensors")
    write_hf(work / "other", seed=3)
    weights["model.norm.weight"][0] += 1
    save_file(weights, work / "other/model.safetensors", {"format": "pt"})
    (work / "other/config.json").write_bytes((hf / "config.json").read_bytes())
    found = ferry.check(work / "other", manifest, files=False)
    assert not found and not found.files_compared and any("model.norm.weight" in line for line in found.differences)
    said = subprocess.run([FERRY, "digest", work / "other", "--check", manifest, "--tensors-only", "--json"], stdout=subprocess.PIPE, text=True)
    assert said.returncode == 1 and f'"{found.differences[0]}"' in said.stdout
    with pytest.raises(ferry.Error) as error:
        ferry.check(hf, hf / "config.json")
    assert error.value.kind == "corrupt"


def test_an_adapter_is_converted_as_the_program_converts_it(work):
    config = llama_config(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=300)
    write_hf(work / "base", {**config, "dtype": "float32"}, random_tensors(llama_shapes(config), dtype="F32"))
    adapter = work / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"]}')
    names = [f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_{part}.weight" for layer in (0, 1) for part in "AB"]
    torch.manual_seed(1)
    save_file({name: torch.randn((2, 64) if "lora_A" in name else (64, 2)) for name in names}, adapter / "adapter_model.safetensors", {"format": "pt"})
    report = ferry.convert_adapter(adapter, work / "one", base=work / "base", to="megatron", tp=2)
    said = ferry_json("convert", adapter, work / "other", "--base", work / "base", "--to", "megatron", "--tp", 2)
    assert tree(work / "one") == tree(work / "other")
    assert (report.source_form, report.target_form, report.factors, report.proved) == ("PEFT", "Megatron-Bridge", 4, True)
    assert report.parameters == said["parameters"] == 4 * 2 * 64
    ferry.convert_adapter(work / "one", work / "back", base=work / "base", to="peft")
    back, first = (load_file(folder / "adapter_model.safetensors") for folder in (work / "back", adapter))
    assert back.keys() == first.keys() and all(torch.equal(back[name], first[name]) for name in first)
    with pytest.raises(ferry.Error) as error:
        ferry.convert_adapter(adapter, work / "two", base=work / "base", to="hf")
    assert error.value.message == "to=hf: is none of peft, megatron, verl, vllm, sglang"
