#!/usr/bin/env python3
"""Loads a torch_dist checkpoint of any writer with real megatron-core on the CPU at any TP, PP and EP, and prints one
sha256 per full tensor. tools/setup_peers installs the peers.

    source build/peers/env.sh
    build/peers/bin/python tests/interop/load_with_mcore.py --mcore build/peers/mc0192 --ckpt tests/data/llama_tp2pp2 \\
        --hf tests/data/hf_llama/hf --tp 1 --pp 2 --vpad 256 --expect tests/data/llama_tp2pp2/sha256.json --expect-hf --logits

CKPT is the folder of an iteration or the one that holds latest_checkpointed_iteration.txt. The exit status is 0 only if
all checks passed. --jobs runs many loads in one set of processes: FILE is a JSON list of
objects whose members have the names of the options; --report then receives [{"bad": [...], ...}, ...].
"""
import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import warnings

from cpu_stand_ins import install_cpu_patches, install_mamba_stub, install_te_stub
from megatron_model import assemble, build_model, forget_groups, fork_ranks, forward_logits, import_megatron, init_dist
from weight_mapping import arch_of, describe, hf_to_megatron, padded_vocab, stack_full

warnings.filterwarnings("ignore")

LOGITS_TOLERANCE = 2e-5  # relative to the largest logit: fp32 sums in another order


def resolve(folder):
    tracker = os.path.join(folder, "latest_checkpointed_iteration.txt")
    if os.path.exists(tracker):
        text = open(tracker).read().strip()
        return os.path.join(folder, "release" if text == "release" else f"iter_{int(text):07d}")
    return folder


def release():
    """megatron-core appends the commit of whatever git checkout it lies in: not a part of its version."""
    import megatron.core
    return megatron.core.__version__.split("+")[0]


def prompt(vocab):
    return [(37 * i + 11) % vocab for i in range(24)]


def reference_logits(hf, rank, cache={}):
    """[tokens, vocab] of transformers in fp32, computed by rank 0 only."""
    import torch
    import torch.distributed as dist
    if hf not in cache:
        box = [None]
        if rank == 0:
            from transformers import AutoModelForCausalLM
            model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
            with torch.no_grad():
                box[0] = model(torch.tensor(prompt(model.config.vocab_size))[None]).logits[0].float()
        dist.broadcast_object_list(box, 0)
        cache[hf] = box[0]
    return cache[hf]


def differences(got, expected, what):
    bad = []
    for key, want in expected.items():
        have = got.get(key)
        if have is None:
            bad.append(f"{what}: {key} not in the model")
        elif (have["shape"], have["dtype"]) != (want["shape"], want["dtype"]):
            bad.append(f"{what}: {key} {have['dtype']}{have['shape']}, expected {want['dtype']}{want['shape']}")
        elif have["sha256"] != want["sha256"]:
            bad.append(f"{what}: {key} differs")
    return bad


def load_by_ferry(job, sharded):
    """The Python module fills the shards, and saves them."""
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../build/python"))
    import ferry
    hf_config = None if os.path.exists(os.path.join(job.ckpt, "config.json")) else job.hf
    report = ferry.load_into(job.ckpt, sharded, hf_config=hf_config)
    assert report.bytes > 0 and not report.nonzero_padding
    if job.saved_by_ferry:
        saved = ferry.save_from(job.saved_by_ferry, sharded, like=job.hf)
        assert saved.proved


def sharded_state_dict(chunks, metadata):
    """{"model": ...}, or {"model0": ..., "model1": ...} of the chunks of an interleaved pipeline, as Megatron's trainer names them"""
    def state(chunk):
        try:
            return chunk.sharded_state_dict(metadata=metadata)
        except TypeError:
            return chunk.sharded_state_dict()
    return {"model": state(chunks[0])} if len(chunks) == 1 else {f"model{i}": state(chunk) for i, chunk in enumerate(chunks)}


def load(job, rank):
    """Runs in every rank; rank 0 returns {"bad": [...], ...}."""
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel import random
    forget_groups()
    parallel_state.initialize_model_parallel(job.tp, job.pp, virtual_pipeline_model_parallel_size=job.vpp, expert_model_parallel_size=job.ep,
                                             expert_tensor_parallel_size=job.etp)
    random.initialize_rng_tracker()
    random.get_cuda_rng_tracker().fork = lambda *a, **k: contextlib.nullcontext()

    folder = resolve(job.ckpt)
    arch = arch_of(json.load(open(os.path.join(job.hf, "config.json"))))
    vpad = job.vpad or padded_vocab(arch["vocab"], job.tp, 4)
    uneven = {}
    if job.vpp:
        uneven = dict(virtual_pipeline_model_parallel_size=job.vpp)
    elif job.pp > 1 and arch["layers"] % job.pp:
        uneven = dict(num_layers_in_first_pipeline_stage=arch["layers"] // job.pp)
    te = job.spec == "te"
    dtype = dict(bf16=torch.bfloat16, fp32=torch.float32, fp16=torch.float16)[job.dtype]
    chunks = [build_model(arch, job.tp, job.pp, job.ep, job.etp, dtype, te, vpad, uneven, stage) for stage in (range(job.vpp) if job.vpp else [None])]
    model = torch.nn.ModuleList(chunks)
    for module in model.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # so that an element nobody loaded shows

    common = {} if job.by_ferry else dist_checkpointing.load_common_state_dict(folder)
    metadata = dict(common.get("content_metadata") or {})
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded = sharded_state_dict(chunks, metadata)
    if job.by_ferry:
        load_by_ferry(job, sharded["model"] if len(chunks) == 1 else sharded)
    else:
        loaded = dist_checkpointing.load(sharded, folder, strict=job.strict)
        if isinstance(loaded, tuple):
            loaded = loaded[0]
        for name, chunk in zip(sharded, chunks):
            chunk.load_state_dict(loaded[name], strict=False)
    full = assemble(sharded_state_dict(chunks, metadata))

    bad, error = [], None
    if job.logits:
        reference = reference_logits(job.hf, rank)
        logits = forward_logits(chunks[0].float(), prompt(arch["vocab"]), arch)
        if logits is not None:  # this rank is in the last pipeline stage
            error = ((logits - reference).abs().max() / reference.abs().max()).item()
            if not error < job.tolerance:
                bad.append(f"logits differ from Hugging Face's, relative error {error:.2e}")
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (bad, error))
    if rank != 0:
        return None
    bad = [b for part, _ in gathered for b in part]
    got = describe(full)
    if any(t.isnan().any() for t in full.values() if t.is_floating_point()):
        bad.append("NaN left: not every element was loaded")
    if job.expect:
        bad += differences(got, json.load(open(job.expect))["megatron"], "expect")
    if job.expect_hf:
        from safetensors.torch import load_file
        weights = {}
        for name in sorted(os.listdir(job.hf)):
            if name.endswith(".safetensors"):
                weights.update(load_file(os.path.join(job.hf, name)))
        want = stack_full(hf_to_megatron(arch, weights, vpad, te=te), arch)
        bad += differences(got, describe({k: t.to(full[k].dtype) for k, t in want.items()}), "hf")
    return {"bad": bad, "megatron_core": release(), "folder": folder, "layout": f"TP{job.tp} PP{job.pp} EP{job.ep}",
            "logits_error": max((e for _, e in gathered if e is not None), default=None), "tensors": got,
            "common": {k: v if isinstance(v, (int, float, str, dict)) else type(v).__name__ for k, v in common.items()}}


def print_result(result):
    print(f"megatron-core {result['megatron_core']} loaded {result['folder']} at {result['layout']}")
    print("common state:", result["common"])
    for key, t in result["tensors"].items():
        print(t["sha256"], t["dtype"], tuple(t["shape"]), key)
    if result["logits_error"] is not None:
        print(f"logits: relative error {result['logits_error']:.2e} to Hugging Face's")
    print("RESULT", "OK" if not result["bad"] else "MISMATCH " + "; ".join(result["bad"]), flush=True)


def worker(options, jobs, rank, world, store):
    init_dist(rank, world, store)
    import torch
    import torch.distributed as dist
    torch.serialization.add_safe_globals([argparse.Namespace])
    with contextlib.suppress(Exception):
        from megatron.core.safe_globals import register_safe_globals
        register_safe_globals()
    results = []
    for job in jobs:
        started = time.monotonic()
        result = load(job, rank)
        dist.barrier()
        if rank == 0:
            results.append({**result, "seconds": round(time.monotonic() - started, 2)})
            if options.report:
                json.dump(results, open(options.report, "w"), indent=1)
            else:
                print_result(result)
    box = [any(r["bad"] for r in results)]
    dist.broadcast_object_list(box, 0)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if box[0] else 0


def job_parser():
    p = argparse.ArgumentParser(add_help=False)
    p.add_argument("--ckpt", help="the checkpoint")
    p.add_argument("--hf", help="Hugging Face folder; config.json describes the model, weights are read for --logits and --expect-hf")
    for size in ("tp", "pp", "ep", "etp"):
        p.add_argument("--" + size, type=int, default=1)
    p.add_argument("--vpp", type=int, help="chunks of each pipeline stage (interleaved)")
    p.add_argument("--vpad", type=int, help="rows of the model's vocabulary tensors (default: the next multiple of 4 TP)")
    p.add_argument("--spec", default="te", choices=["te", "local"], help="te is what training uses")
    p.add_argument("--dtype", default="bf16")
    p.add_argument("--strict", default="assume_ok_unexpected", help="as dist_checkpointing.load takes it")
    p.add_argument("--expect", help="a sha256.json of make_mcore_reference.py to compare with")
    p.add_argument("--expect-hf", action="store_true", help="compare with the weights in --hf, mapped to Megatron")
    p.add_argument("--by-ferry", action="store_true", help="ferry.load_into() fills the model, not megatron-core")
    p.add_argument("--saved-by-ferry", metavar="FOLDER", help="... and ferry.save_from() saves it there")
    p.add_argument("--logits", action="store_true", help="run the model in fp32 and compare with transformers")
    p.add_argument("--tolerance", type=float, default=LOGITS_TOLERANCE, help="of --logits, relative to the largest one")
    return p


def main():
    p = argparse.ArgumentParser(parents=[job_parser()], description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mcore", help="folder that contains megatron/core")
    p.add_argument("--jobs", metavar="FILE", help="many loads in one go")
    p.add_argument("--report", metavar="FILE", help="write the results there as JSON instead of printing them")
    options = p.parse_args()
    jobs = [options]
    if options.jobs:
        jobs = [argparse.Namespace(**{**vars(job_parser().parse_args([])), **job}) for job in json.load(open(options.jobs))]
    if options.mcore:
        sys.path.insert(0, os.path.abspath(options.mcore))
    install_cpu_patches()
    install_te_stub()  # the local spec ignores it
    install_mamba_stub()
    import_megatron()

    # A job that needs fewer ranks than the largest one runs as data-parallel replicas.
    world = max(max(job.tp * job.pp, job.pp * job.ep * job.etp) for job in jobs)
    with tempfile.TemporaryDirectory() as folder:
        status, said = fork_ranks(world, folder, lambda rank: worker(options, jobs, rank, world, folder + "/store"))
    sys.stderr.write(said[-4000:])
    sys.exit(status)


if __name__ == "__main__":
    main()
