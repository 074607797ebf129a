"""Real megatron-core loads what ranks saved from their memory, each its own shards into one checkpoint."""
import pytest

import oracle
from support import DATA, iteration_folder, load_with_megatron, run_ok, save_from_ranks

# Saved how: (Hugging Face model, the ranks, layouts to load it at: TP, PP, EP, ETP)
SAVED = {
    "llama_tp2pp2": ("hf_llama", ["tp=2", "pp=2"], [(1, 1, 1, 1), (2, 2, 1, 2)]),
    "llama_tp4": ("hf_llama", ["tp=4"], [(4, 1, 1, 4), (2, 1, 1, 2)]),  # more ranks than query groups
    "qwen3_moe_tp4ep2": ("hf_qwen3_moe", ["tp=4", "ep=2", "etp=2"], [(4, 1, 2, 2)]),
    "llama_rows_vpp2_dp2": ("hf_llama", ["tp=2", "pp=2", "vpp=2", "dp=2", "rows=1"], [(1, 1, 1, 1), (2, 1, 1, 2)]),
    "qwen2_tied_pp2": ("hf_qwen2_tied", ["pp=2"], [(1, 1, 1, 1), (1, 2, 1, 1)]),
    "qwen3_tp2": ("hf_qwen3", ["tp=2"], [(1, 2, 1, 1)]),
    "mixtral_tp2ep2": ("hf_mixtral", ["tp=2", "ep=2", "etp=1"], [(1, 1, 2, 1), (2, 2, 1, 2)]),
    "qwen3_moe_ep4_rows": ("hf_qwen3_moe", ["tp=2", "ep=4", "etp=1", "rows=1"], [(1, 1, 2, 1)]),
    "deepseek_v3_tp2pp2ep2": ("hf_deepseek_v3", ["tp=2", "pp=2", "ep=2", "first=1"], [(1, 1, 2, 1)]),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{case: checkpoint folder}, saved once for all tests here."""
    folder = tmp_path_factory.mktemp("saved")
    for case, (hf, ranks, _) in SAVED.items():
        save_from_ranks(DATA / hf / "hf", folder / case, *ranks)
    return {case: folder / case for case in SAVED}


@pytest.mark.parametrize("case", SAVED)
def test_it_is_the_same_model(case, saved):
    run_ok("verify", saved[case], DATA / SAVED[case][0] / "hf")
    oracle.megatron_state(saved[case])  # raises where chunks overlap or leave a gap


def test_each_rank_wrote_what_it_holds_the_main_replica_of(saved):
    folder = iteration_folder(saved["llama_rows_vpp2_dp2"])
    # The stages of two ranks each, twice because of data parallelism: 0 and 1, 4 and 5 hold main replicas.
    assert sorted(p.name for p in folder.glob("*.distcp")) == [f"__{rank}_0.distcp" for rank in (0, 1, 4, 5)]


@pytest.mark.parametrize("release", ["mc0161", "mc0192"])
def test_megatron_core_loads_it_at_any_layout(release, saved, work):
    """All keys are found, every element arrives, and the loaded model computes the logits of transformers."""
    jobs, cases = [], []
    for case, (hf, _, layouts) in SAVED.items():
        for tp, pp, ep, etp in layouts:
            cases.append(f"{case} at TP{tp} PP{pp} EP{ep}")
            jobs.append(dict(ckpt=str(saved[case]), hf=str(DATA / hf / "hf"), tp=tp, pp=pp, ep=ep, etp=etp, vpad=256,
                             expect_hf=True, logits=True))
    report = load_with_megatron(release, jobs, cases, work)
    assert max(r["logits_error"] for r in report if r["logits_error"] is not None) < 2e-5
