#!/usr/bin/env python3
"""Merges an adapter of Megatron-Bridge by Megatron-Bridge's own LoRAMerge, on the tensors that megatron-core reads, and compares with a checkpoint
that `ferry merge` wrote. Adapter and checkpoint are those of one tensor parallel rank.

    build/peers/bin/python tests/interop/merge/merge_with_bridge.py MC0192 MB062 BASE ADAPTER MERGED ALPHA GROUPS

MC0192 and MB062 are folders of megatron-core and Megatron-Bridge, GROUPS counts query groups. Prints JSON: how many parameters the adapter changes,
how many others there are, and by how much the furthest element differs."""
import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cpu_stand_ins import install_cpu_patches
from megatron_model import init_dist
from read_with_mcore import apart


def rows_of(rows, part, count, groups):
    """-> those `count` of a merged parameter's rows that are one of query, key and value, or of gate and up"""
    if part in ("adapter_gate", "adapter_up"):
        return rows.chunk(2)[part == "adapter_up"]
    by_group = rows.reshape(groups, -1)
    width = count // groups
    begin = {"adapter_q": 0, "adapter_k": by_group.shape[1] - 2 * width, "adapter_v": by_group.shape[1] - width}[part]
    return by_group[:, begin:begin + width].reshape(-1)


def main():
    import torch
    mcore, bridge, base, adapter, merged, alpha, groups = sys.argv[1:]
    sys.path.insert(0, os.path.abspath(mcore))
    install_cpu_patches()
    spec = importlib.util.spec_from_file_location("lora_merge", Path(bridge) / "megatron/bridge/peft/lora_merge.py")
    lora_merge = importlib.util.module_from_spec(spec)
    with tempfile.TemporaryDirectory() as store:
        init_dist(0, 1, store + "/store")
        spec.loader.exec_module(lora_merge)
        from megatron.core import dist_checkpointing
        base, adapter, merged = [
            dict(apart({k: t for k, t in dist_checkpointing.load_plain_tensors(folder).items() if isinstance(t, torch.Tensor)}))
            for folder in (base, adapter, merged)]
        changed, furthest = set(), 0.0
        for name, first in adapter.items():
            match = re.fullmatch(r"(.+)\.adapter\.(?:(adapter_\w+)\.)?linear_in\.weight", name)
            if not match:
                continue
            key, part = match[1] + ".weight", match[2]
            second = adapter[name.replace("linear_in", "linear_out")]
            rows = torch.arange(len(base[key]))
            if part:
                rows = rows_of(rows, part, len(second), int(groups))
            want = lora_merge.LoRAMerge().merge(base[key][rows].float(), second.float(), first.float(), float(alpha), len(first), tp_group=None)
            changed.add(key)
            furthest = max(furthest, (merged[key][rows].float() - want).abs().max().item())
        others = base.keys() - changed
        assert base.keys() == merged.keys() and all(torch.equal(base[key], merged[key]) for key in others)
        print(json.dumps({"changed": len(changed), "others": len(others), "furthest": furthest}))
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
