"""Adapters of Megatron-Bridge merged by `ferry merge` and by Megatron-Bridge's LoRAMerge, and beside the same adapters of PEFT."""
import json
import os
import subprocess
import sys

import pytest

from support import HERE, PEERS, ferry_json, refuse, run_ok, tree
from test_convert_adapter import ALL, CONFIG, base, make_adapter, share_first_factors  # noqa: F401
from test_merge_experts import EXPERTS, make_adapter as make_experts_adapter, make_base


def merge_with_bridge(base, adapter, merged, alpha, groups):
    done = subprocess.run([sys.executable, HERE / "merge/merge_with_bridge.py", PEERS / "mc0192", PEERS / "mb062", base, adapter, merged, str(alpha),
                           str(groups)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ, GLOO_SOCKET_IFNAME="lo"))
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["canonical", "fused"])
def test_weights_are_those_of_megatron_bridge(base, work, kind):  # noqa: F811
    make_adapter(base, work / "peft", r=4, lora_alpha=6, target_modules=ALL)
    if kind == "fused":
        share_first_factors(work / "peft")
    run_ok("convert", work / "peft", work / "mb", "--base", base, "--to", "megatron")
    run_ok("convert", base, work / "base")
    run_ok("merge", work / "base", work / "mb", work / "merged", "--to", "megatron", "--pp", "2")
    found = merge_with_bridge(work / "base/release", work / "mb/iter_0000000", work / "merged/release", 6, CONFIG["num_key_value_heads"])
    assert found["changed"] == 4 * CONFIG["num_hidden_layers"] and found["others"] > 0
    assert found["furthest"] < 1e-6


@pytest.mark.parametrize("kind", ["canonical", "fused"])
def test_an_adapter_merges_alike_in_every_form(base, work, kind):  # noqa: F811
    make_adapter(base, work / "peft", r=4, lora_alpha=6, target_modules=ALL)
    if kind == "fused":
        share_first_factors(work / "peft")
    run_ok("merge", base, work / "peft", work / "merged")
    run_ok("convert", base, work / "base", "--pp", "2")
    run_ok("convert", work / "peft", work / "verl", "--base", base, "--to", "verl")
    forms = {"verl": ()}
    for layout in (("--tp", "1"), ("--tp", "2", "--pp", "2")):
        run_ok("convert", work / "peft", work / "".join(layout), "--base", base, "--to", "megatron", *layout)
        forms["".join(layout)] = layout
    for form in forms:
        run_ok("merge", base, work / form, work / "from_hf")
        run_ok("merge", work / "base", work / form, work / "from_megatron", "--to", "hf", "--overwrite", "--threads", "3")
        assert tree(work / "from_hf") == tree(work / "from_megatron") == tree(work / "merged"), form
        run_ok("merge", work / "base", work / form, work / "to_megatron", "--tp", "2", "--overwrite")
        run_ok("verify", work / "to_megatron", work / "merged")
        for folder in ("from_hf", "from_megatron", "to_megatron"):
            subprocess.run(["rm", "-r", work / folder], check=True)


def test_grouped_experts(work):
    model_class = make_base("qwen3_moe", work / "base")
    make_experts_adapter(model_class, work / "base", work / "peft", EXPERTS)
    run_ok("convert", work / "peft", work / "mb", "--base", work / "base", "--to", "megatron", "--ep", "2")
    run_ok("convert", work / "base", work / "megatron")
    report = ferry_json("merge", work / "base", work / "mb", work / "merged")["adapter"]
    assert report["tensors"] == 2 * (1 + 3 * 4)
    run_ok("merge", work / "base", work / "peft", work / "want")
    assert tree(work / "merged") == tree(work / "want")
    run_ok("merge", work / "megatron", work / "mb", work / "to", "--to", "megatron", "--ep", "2")
    found = merge_with_bridge(work / "megatron/release", work / "mb/iter_0000000", work / "to/release", 6, 1)
    assert found["changed"] == 2 * (1 + 2 * 4) and found["furthest"] < 1e-6


def test_an_alpha_that_nothing_says(base, work):  # noqa: F811
    make_adapter(base, work / "peft", r=4, lora_alpha=6, target_modules=["o_proj"])
    run_ok("convert", work / "peft", work / "mb", "--base", base, "--to", "megatron")
    (work / "mb/iter_0000000/run_config.yaml").unlink()
    refuse("merge", base, work / "mb", work / "out", words=["run_config.yaml", "--lora-alpha"])
    assert not (work / "out").exists()
    run_ok("merge", base, work / "mb", work / "out", "--lora-alpha", "6")
    run_ok("merge", base, work / "peft", work / "want")
    assert tree(work / "out") == tree(work / "want")
    refuse("merge", base, work / "peft", work / "other", "--lora-alpha", "6", words=["adapter_config.json", "--lora-alpha"])
    refuse("merge", base, base, work / "other", words=["an adapter of PEFT", "Megatron-Bridge"])
