"""Real megatron-core and torch.distributed.checkpoint read what ferry writes."""
import json

import pytest

import oracle
import torch_dist_raw as raw
from weight_mapping import arch_of, describe, hf_to_megatron, stack_full
from tiny_models import load_hf_sd
from support import DATA, TORCH_NAME, hf_tensors, iteration_folder, load_with_megatron, run_ok, sha256

# Written how: (Hugging Face model, name, options, rows of the vocabulary tensors)
WRITTEN = {
    "llama_tp2pp2": ("hf_llama", ["--tp", 2, "--pp", 2], 256),
    "llama_uneven": ("hf_llama", ["--tp", 1, "--pp", 2, "--num-layers-in-first-pipeline-stage", 1], 256),
    "qwen2_tp2": ("hf_qwen2", ["--tp", 2], 256),
    "qwen2_tied_pp3": ("hf_qwen2_tied", ["--pp", 3, "--num-layers-in-first-pipeline-stage", 1,
                                         "--num-layers-in-last-pipeline-stage", 1], 256),
    "qwen3_tp2pp2": ("hf_qwen3", ["--tp", 2, "--pp", 2], 256),
    "qwen3_div4": ("hf_qwen3", ["--tp", 2, "--make-vocab-size-divisible-by", 4], 256),
    "mixtral_tp2ep2": ("hf_mixtral", ["--tp", 2, "--ep", 2, "--etp", 1], 256),
    "qwen2_moe_tp2": ("hf_qwen2_moe", ["--tp", 2], 256),
    "qwen3_moe_pp2ep2": ("hf_qwen3_moe", ["--pp", 2, "--ep", 2], 256),
    "deepseek_v3_tp2pp2ep2": ("hf_deepseek_v3", ["--tp", 2, "--pp", 2, "--ep", 2, "--pipeline-model-parallel-layout", "Et|ttmL"], 256),
    "glm4_moe_tp2pp2ep2": ("hf_glm4_moe", ["--tp", 2, "--pp", 2, "--ep", 2, "--pipeline-model-parallel-layout", "Et|ttmL"], 256),
    "glm4_moe_lite_pp2ep2": ("hf_glm4_moe_lite", ["--pp", 2, "--ep", 2, "--pipeline-model-parallel-layout", "Et|tmL"], 128),
    "seed_oss_tp2pp2": ("hf_seed_oss", ["--tp", 2, "--pp", 2], 256),
    "smollm3_tp2pp2": ("hf_smollm3", ["--tp", 2, "--pp", 2], 256),
    "olmo2_tp2pp2": ("hf_olmo2", ["--tp", 2, "--pp", 2], 256),
    "olmo3_tp4": ("hf_olmo3", ["--tp", 4], 512),
    "glm4_tp2pp2": ("hf_glm4", ["--tp", 2, "--pp", 2], 256),
    "phi3_tp2pp2": ("hf_phi3", ["--tp", 2, "--pp", 2], 256),
    "granite_tp2pp2": ("hf_granite", ["--tp", 2, "--pp", 2], 256),
    "ernie4_5_tp2": ("hf_ernie4_5", ["--tp", 2], 256),
    "qwen3_next_tp2pp3ep2": ("hf_qwen3_next", ["--tp", 2, "--pp", 3, "--ep", 2, "--etp", 1], 256),
    "qwen3_5_tp2": ("hf_qwen3_5", ["--tp", 2], 256),
    "qwen3_5_moe_pp3": ("hf_qwen3_5_moe", ["--pp", 3, "--ep", 4], 256),
    "nemotron_h_tp2pp5ep2": ("hf_nemotron_h", ["--tp", 2, "--pp", 5, "--ep", 2, "--etp", 1], 256),
    "gpt_oss_tp2ep3": ("hf_gpt_oss", ["--tp", 2, "--ep", 3, "--etp", 2], 256),
    "deepseek_v2_ep4": ("hf_deepseek_v2", ["--ep", 4], 256),
    "moonlight_ep2": ("hf_moonlight", ["--tp", 2, "--ep", 2], 256),
    "llama_iteration": ("hf_llama", ["--tp", 2, "--iteration", 7, "--make-vocab-size-divisible-by", 1], 250),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """{case: checkpoint folder}, written once for all tests here."""
    folder = tmp_path_factory.mktemp("written")
    for case, (hf, options, _) in WRITTEN.items():
        run_ok("convert", DATA / hf / "hf", folder / case, *options)
    return {case: folder / case for case in WRITTEN}


@pytest.mark.parametrize("case", WRITTEN)
def test_every_byte_is_where_the_format_says(case, written):
    """torch_dist_raw, which shares no code with ferry, finds the same weights."""
    hf, _, vocab_rows = WRITTEN[case]
    checkpoint = raw.Checkpoint(str(iteration_folder(written[case])))
    tensors = {k: checkpoint.tensor(k) for k in checkpoint.tensors}
    assert tensors["embedding.word_embeddings.weight"][1][0] == vocab_rows
    config = json.loads((DATA / hf / "hf/config.json").read_text())
    oracle.megatron_state(written[case])  # raises where chunks overlap or leave a gap
    arch = arch_of(config)
    if arch["experts"] or arch.get("linear") or arch["post_norms"] or arch["one_qkv"]:
        weights = load_hf_sd(str(DATA / hf / "hf"))
        full = stack_full(hf_to_megatron(arch, weights, vocab_rows), arch)
        assert {k: (d, list(s), sha256(b)) for k, (d, s, b) in tensors.items()} == \
            {k: (t["dtype"], t["shape"], t["sha256"]) for k, t in describe(full).items()}
        return
    want = {n: (TORCH_NAME[d], s, b) for n, (d, s, b) in hf_tensors(DATA / hf / "hf").items()}
    assert oracle.megatron_to_hf(tensors, config) == want
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if key in tensors:
            _, (rows, hidden), data = tensors[key]
            assert not any(data[config["vocab_size"] * hidden * 2:]), f"{key}: padding rows hold something"


def test_the_tracker_names_what_was_written(written):
    assert (written["llama_tp2pp2"] / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert (written["llama_iteration"] / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert (written["llama_iteration"] / "iter_0000007/metadata.json").exists()


@pytest.mark.parametrize("case", ["llama_tp2pp2", "qwen3_tp2pp2"])
def test_chunks_are_those_of_the_asked_layout(case, written):
    """One chunk per tensor-parallel rank (fc1: one for the gate and one for the up projection of each) and layer."""
    checkpoint = raw.Checkpoint(str(iteration_folder(written[case])))
    chunks = {k: len(c) for k, (_, _, c) in checkpoint.tensors.items()}
    layers = 4
    assert chunks["decoder.layers.mlp.linear_fc1.weight"] == layers * 2 * 2
    assert chunks["decoder.layers.mlp.linear_fc2.weight"] == layers * 2
    assert chunks["decoder.layers.self_attention.linear_qkv.weight"] == layers * 2
    assert chunks["decoder.layers.mlp.linear_fc1.layer_norm_weight"] == layers
    assert chunks["embedding.word_embeddings.weight"] == 2


@pytest.mark.parametrize("case", WRITTEN)
def test_torch_distributed_checkpoint_reads_the_same_bytes(case, written):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    folder = str(iteration_folder(written[case]))
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    state = {k: torch.full(m.size, float("nan"), dtype=m.properties.dtype)
             for k, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    checkpoint = raw.Checkpoint(folder)
    assert set(state) == set(checkpoint.tensors)
    for key, tensor in state.items():
        dtype, shape, data = checkpoint.tensor(key)
        assert (str(tensor.dtype), tuple(tensor.shape)) == ("torch." + dtype, shape), key
        assert sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()) == sha256(data), key


def test_torch_loads_the_common_state_without_trusting_it(written):
    """weights_only=True refuses a pickle that could run code: ferry's needs nothing but argparse.Namespace."""
    import argparse

    import torch
    with torch.serialization.safe_globals([argparse.Namespace]):
        common = torch.load(iteration_folder(written["qwen2_tied_pp3"]) / "common.pt", weights_only=True)
    assert common["checkpoint_version"] == 3.0
    arguments = common["args"]
    assert (arguments.num_layers, arguments.hidden_size, arguments.num_attention_heads, arguments.num_query_groups) == (4, 32, 4, 2)
    assert (arguments.pipeline_model_parallel_size, arguments.padded_vocab_size) == (3, 256)
    assert arguments.add_qkv_bias and not arguments.untie_embeddings_and_output_weights


def layouts(release):
    return [(1, 1), (2, 2)] if release == "mc0131" else [(1, 1), (2, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("release", ["mc0131", "mc0161", "mc0192"])
def test_megatron_core_loads_it_at_any_layout(release, written, work):
    """All keys are found, every element arrives, and the loaded model computes the logits of transformers."""
    jobs, cases = [], []
    mixtures = {"mixtral_tp2ep2": [(1, 1, 2, 1), (2, 2, 1, 2)], "qwen2_moe_tp2": [(1, 1, 1, 1), (2, 1, 1, 2)],
                "qwen3_moe_pp2ep2": [(1, 1, 2, 1), (1, 2, 1, 1)], "deepseek_v3_tp2pp2ep2": [(1, 1, 2, 1), (2, 2, 1, 2)],
                "glm4_moe_tp2pp2ep2": [(1, 1, 2, 1), (2, 2, 1, 2)],
                "deepseek_v2_ep4": [(1, 1, 2, 1)], "moonlight_ep2": [(1, 1, 2, 1)]}
    newer = ()
    if release == "mc0192":
        newer = ("seed_oss_tp2pp2", "smollm3_tp2pp2", "ernie4_5_tp2", "glm4_tp2pp2", "olmo2_tp2pp2", "phi3_tp2pp2", "granite_tp2pp2")
        mixtures["glm4_moe_lite_pp2ep2"] = [(2, 1, 2, 1)]
        mixtures["gpt_oss_tp2ep3"] = [(1, 1, 2, 1), (2, 1, 2, 1)]  # experts with biases are not split there
    if release == "mc0131":
        mixtures.pop("qwen2_moe_tp2")  # its shared experts' gate is set up in another way there
    if release == "mc0192":
        mixtures.pop("moonlight_ep2")  # builds a norm of the queries that Hugging Face does not have
    for case, shapes in mixtures.items():
        hf, _, vocab_rows = WRITTEN[case]
        for tp, pp, ep, etp in shapes:
            cases.append(f"{case} at TP{tp} PP{pp} EP{ep}")
            # DeepSeek-V2 chooses groups of experts by their best, Megatron-Core by their sum.
            jobs.append(dict(ckpt=str(written[case]), hf=str(DATA / hf / "hf"), tp=tp, pp=pp, ep=ep, etp=etp, vpad=vocab_rows,
                             expect_hf=True, logits=case != "deepseek_v2_ep4"))
    if release == "mc0192":
        # Loaded in fp32, as Qwen3.5 and Nemotron-H hold some. A norm less one was rounded to bf16 for Qwen3-Next.
        for case, shapes in {"qwen3_next_tp2pp3ep2": [(2, 1, 2, 1)], "qwen3_5_tp2": [(1, 1, 1, 1)], "qwen3_5_moe_pp3": [(2, 1, 2, 1)],
                             "nemotron_h_tp2pp5ep2": [(2, 1, 2, 1)]}.items():
            for tp, pp, ep, etp in shapes:
                cases.append(f"{case} at TP{tp} PP{pp} EP{ep}")
                jobs.append(dict(ckpt=str(written[case]), hf=str(DATA / WRITTEN[case][0] / "hf"), tp=tp, pp=pp, ep=ep, etp=etp, vpad=256,
                                 dtype="fp32", expect_hf=True, logits=True, tolerance=5e-3 if "next" in case else 2e-5))
    for case in ("llama_tp2pp2", "llama_uneven", "qwen2_tp2", "qwen2_tied_pp3", "qwen3_tp2pp2", *newer):
        hf, _, vocab_rows = WRITTEN[case]
        if release != "mc0192" and case == "llama_uneven":
            continue
        for tp, pp in {"glm4_tp2pp2": layouts("mc0131"), "olmo2_tp2pp2": [(1, 1), (1, 2)]}.get(case, layouts(release)):
            cases.append(f"{case} at TP{tp} PP{pp}")
            # Megatron-Core has no field for the factor of what joins Granite's stream.
            jobs.append(dict(ckpt=str(written[case]), hf=str(DATA / hf / "hf"), tp=tp, pp=pp, vpad=vocab_rows,
                             expect_hf=True, logits=not case.startswith("granite")))
    report = load_with_megatron(release, jobs, cases, work)
    assert all(r["megatron_core"].split("+")[0].replace(".", "") == release[2:] for r in report)
    errors = {case: r["logits_error"] for case, r in zip(cases, report) if r["logits_error"] is not None}
    assert max(error for case, error in errors.items() if "qwen3_next" not in case) < 2e-5
    assert all(r["common"]["checkpoint_version"] == 3.0 for r in report)
