#!/usr/bin/env python3
"""Makes the small real checkpoints of tests/data: a tiny Hugging Face model with random weights, and the same weights as
a real release of megatron-core saves them, on the CPU.

tools/setup_peers installs the peers. From the root of the checkout:

    source build/peers/env.sh
    build/peers/bin/python tests/interop/make_mcore_reference.py --list
    build/peers/bin/python tests/interop/make_mcore_reference.py --out /tmp/data --mcore build/peers/mc0192 --cases llama_tp1 qwen3
    build/peers/bin/python tests/interop/make_mcore_reference.py --out /tmp/data --mcore build/peers/mc0161 --suffix _mc0161 --cases llama_tp2pp2

Each case
- builds the Hugging Face model, unless OUT has it, and saves it as bf16 safetensors;
- builds megatron-core's GPTModel with the wanted layout, fills it with the same weights, and compares fp32 logits of the two;
- calls dist_checkpointing.save;
- writes <case>/sha256.json, the digest of every full tensor: `hf`, `megatron` (the keys in the file), `megatron_unstacked`
  (one per layer and expert) and `optimizer_model_space`.
It needs no network.
"""
import argparse
import contextlib
import json
import os
import subprocess
import sys
import warnings

from cpu_stand_ins import install_cpu_patches, install_te_stub
from megatron_model import (assemble, assemble_full, build_model, fill_from_full, forward_logits, init_dist,
                            training_args)
from tiny_models import load_hf_sd, make_hf
from weight_mapping import arch_of, describe, hf_to_megatron, padded_vocab, stack_full

warnings.filterwarnings("ignore")

CASES = {  # name: (hf model, tp, pp, ep, etp, dp, spec, save options)
    "llama_tp1":          ("llama", 1, 1, 1, 1, 1, "te", {}),
    "llama_tp2pp2":       ("llama", 2, 2, 1, 1, 1, "te", {}),
    "llama_tp2pp2_local": ("llama", 2, 2, 1, 1, 1, "local", {"plain": True}),
    "llama_dp2_fullypar": ("llama", 1, 1, 1, 1, 2, "te", {"fully_parallel": True, "rng": True}),
    "qwen2":              ("qwen2", 2, 1, 1, 1, 1, "te", {}),
    "qwen2_tied_pp2":     ("qwen2_tied", 1, 2, 1, 1, 1, "te", {}),
    "qwen3":              ("qwen3", 2, 1, 1, 1, 1, "te", {}),
    "mixtral_ep2":        ("mixtral", 1, 1, 2, 1, 1, "te", {}),
    "mixtral_ep2_seqmlp": ("mixtral", 1, 1, 2, 1, 1, "local", {}),
    "qwen2moe_tp2":       ("qwen2_moe", 2, 1, 1, 2, 1, "te", {}),
    "qwen3moe_ep2":       ("qwen3_moe", 1, 1, 2, 1, 1, "te", {}),
    "deepseek_v3_ep2":    ("deepseek_v3", 1, 1, 2, 1, 1, "te", {}),
    "deepseek_v3_tp2pp2": ("deepseek_v3", 2, 2, 1, 2, 1, "te", {"pp_first": 1}),
    # only megatron-core <= 0.18 builds Moonlight (q_lora_rank None) as HF defines it: use --mcore mc0182
    "moonlight_tp1":      ("moonlight", 1, 1, 1, 1, 1, "te", {}),
    "glm4_moe_tp2ep2":    ("glm4_moe", 2, 1, 2, 1, 1, "te", {}),
    "qwen3_next_tp2ep2":  ("qwen3_next", 2, 1, 2, 1, 1, "te", {}),
    "qwen3_5_tp2":        ("qwen3_5", 2, 1, 1, 1, 1, "te", {}),
    "gpt_oss_tp2ep2":     ("gpt_oss", 2, 1, 2, 1, 1, "te", {}),
    "gpt_oss_local_pp2":  ("gpt_oss", 1, 2, 1, 1, 1, "local", {"pp_first": 1}),
    "llama_singleton":    ("llama", 2, 1, 1, 1, 1, "te", {"singleton": True}),
    "mixtral_singleton":  ("mixtral", 1, 1, 2, 1, 1, "te", {"singleton": True}),
    "llama_optim_full":   ("llama", 2, 1, 1, 1, 2, "te", {"optim": "fully_reshardable"}),
    "llama_optim_dp":     ("llama", 2, 1, 1, 1, 2, "te", {"optim": "dp_reshardable"}),
    "mixtral_optim_full": ("mixtral", 1, 1, 2, 1, 2, "te", {"optim": "fully_reshardable"}),
    "llama_optim_zero":   ("llama", 2, 1, 1, 1, 2, "te", {"optim": "dp_zero_gather_scatter", "rng": True}),
    "mixtral_optim_dp":   ("mixtral", 2, 1, 2, 1, 2, "te", {"optim": "dp_reshardable", "rng": True}),
    "qwen2_tied_optim_dp": ("qwen2_tied", 2, 2, 1, 1, 1, "te", {"optim": "dp_reshardable", "bucket_size": 5000}),
    "deepseek_v3_optim_dp": ("deepseek_v3", 1, 2, 2, 1, 2, "te", {"optim": "dp_reshardable", "pp_first": 1}),
    # --mcore mc0131: N-D flattened optimizer tensors, mcore_data + all_local_plans in .metadata (as older torch leaves them)
    "llama_optim_fsms":   ("llama", 2, 1, 1, 1, 2, "te", {"optim": "fully_sharded_model_space", "oldtorch": True}),
    # --ckpt-format zarr: --mcore mc0131, and zarr 2.18.3 with numcodecs 0.13.1, asciitree, fasteners, tensorstore on PYTHONPATH
    "llama_zarr_tp2pp2": ("llama", 2, 2, 1, 1, 1, "te", {"zarr": True}),
    "mixtral_zarr_ep2": ("mixtral", 1, 1, 2, 1, 1, "te", {"zarr": True}),
    # --ckpt-format torch
    "llama_legacy_tp2pp2": ("llama", 2, 2, 1, 1, 1, "te", {"legacy": True}),
    "llama_legacy_local_pp2": ("llama", 1, 2, 1, 1, 1, "local", {"legacy": True}),
    "qwen2_tied_legacy_pp2": ("qwen2_tied", 1, 2, 1, 1, 1, "te", {"legacy": True}),
    "mixtral_legacy_ep2": ("mixtral", 1, 1, 2, 1, 1, "te", {"legacy": True}),
    "mixtral_legacy_local_ep2": ("mixtral", 1, 1, 2, 1, 1, "local", {"legacy": True}),
    "qwen2moe_legacy_tp2ep2": ("qwen2_moe", 2, 1, 2, 1, 1, "te", {"legacy": True}),
    "deepseek_v3_legacy_tp2pp2": ("deepseek_v3", 2, 2, 1, 2, 1, "te", {"legacy": True, "pp_first": 1}),
}
ITER = 10


def make_optimizer(model, bucket_size=None):
    """DDP + DistributedOptimizer on CPU, one step with random gradients; several buckets if their size is given."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    old = torch.Tensor.type
    def type_(self, *a, **k):   # DistributedOptimizer insists on torch.cuda.*Tensor
        r = old(self, *a, **k)
        return r if a or k else "torch.cuda." + r.split(".")[-1]
    torch.Tensor.type = type_
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=bucket_size is not None,
        bucket_size=bucket_size), model)
    ddp.ddp_config.overlap_grad_reduce = False   # which is what makes buckets; the gradients here are reduced at once
    opt = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-4, bf16=True, params_dtype=torch.bfloat16,
                                                 use_distributed_optimizer=True, clip_grad=0.0), [ddp])
    for i, p in enumerate(model.parameters()):
        # a tied embedding has one gradient on both stages; replicas on other tensor parallel ranks have one anyway
        torch.manual_seed(1 if getattr(p, "shared_embedding", False) else 2 + i)
        if hasattr(p, "main_grad"):
            p.main_grad.copy_(torch.randn_like(p.main_grad))
    ddp.finish_grad_sync()
    opt.step()
    return opt


def state_of_parameters(optim, model_sharded):
    """-> the fully_reshardable form of sharded_state_dict, parameter by parameter, where data parallel groups have one rank.
    megatron-core 0.19 takes parameters of all buckets but the first from the wrong place if buckets end in padding."""
    from dataclasses import replace
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
    state = []
    for base in nested_values(extract_sharded_tensors_and_factories(model_sharded)[0]):
        for kind, flat in optim.chained_optimizers[0]._get_main_param_and_optimizer_states(base.data).items():
            if kind == "step":
                continue
            data = flat.reshape(base.data.shape)
            dtype = {} if isinstance(base, ShardedTensorFactory) else {"dtype": data.dtype}
            state.append(replace(base, key=f"optimizer.state.{kind}.{base.key}", data=data, **dtype))
    return {"state": state}


def worker(w):
    import torch
    install_cpu_patches()
    hf_name, tp, pp, ep, etp, dp, spec, opt = CASES[w.case]
    if spec == "te":
        install_te_stub()
    world = w.world
    init_dist(w.rank, world, w.store)
    import torch.distributed as dist
    import megatron.core
    from megatron.core import parallel_state as ps, dist_checkpointing as dc
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    ps.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
                                 **({"create_gloo_process_groups": True} if opt.get("optim") else {}))
    from megatron.core.tensor_parallel import random as mrandom
    mrandom.initialize_rng_tracker()
    tr = mrandom.get_cuda_rng_tracker()
    tr._is_initialized = True
    tr.fork = lambda *a, **k: contextlib.nullcontext()

    case_dir = os.path.join(w.out, w.case + w.suffix)
    hf = os.path.join(w.out, "hf_" + hf_name, "hf")
    a = arch_of(json.load(open(hf + "/config.json")))
    te = spec == "te"
    div = 4
    vpad = padded_vocab(a["vocab"], tp, div) if not opt.get("vpad") else opt["vpad"]
    full = hf_to_megatron(a, load_hf_sd(hf), vpad, te=te)
    stacked = stack_full(full, a)
    extra = {}
    if opt.get("pp_first"):
        extra = dict(num_layers_in_first_pipeline_stage=opt["pp_first"])
    model = build_model(a, tp, pp, ep, etp, torch.float32, te, vpad, extra)
    # In fp32, in which a norm's weight less one is exact.
    used = fill_from_full(model, stack_full(hf_to_megatron(a, {k: t.float() for k, t in load_hf_sd(hf).items()}, vpad, te=te), a))
    alls = [None] * world
    dist.all_gather_object(alls, sorted(used))
    missing = set(stacked) - set(x for u in alls for x in u)
    assert not missing, f"never loaded: {missing}"

    ref = json.load(open(os.path.join(w.out, "hf_" + hf_name, "hf_logits.json")))
    lg = forward_logits(model, ref["ids"], a)
    err = None
    if lg is not None:
        r = torch.tensor(ref["logits_last"])
        err = ((lg[-1] - r).abs().max() / r.abs().max()).item()
        assert err < 2e-5, f"{w.case}: logits differ from HF, rel err {err}"
    errs = [None] * world
    dist.all_gather_object(errs, err)

    # the dtype a real bf16 training run would hold: everything bf16, router.expert_bias stays fp32
    model = model.bfloat16()
    for mod in model.modules():
        if hasattr(mod, "_maintain_float32_expert_bias"):
            mod._maintain_float32_expert_bias()
    for name, parameter in model.named_parameters():
        if any(name.endswith(k[k.index("self_attention."):]) for k, t in full.items() if "self_attention." in k and t.dtype == torch.float32):
            parameter.data = parameter.data.float()
    fill_from_full(model, stacked)  # exact values again (fp32 expert_bias would have been rounded)

    d = case_dir if opt.get("plain") else os.path.join(case_dir, f"iter_{ITER:07d}")
    if w.rank == 0:
        os.makedirs(d, exist_ok=True)
    dist.barrier()
    optim = make_optimizer(model, opt.get("bucket_size")) if opt.get("optim") else None
    meta = {"singleton_local_shards": bool(opt.get("singleton")), "chained_optim_avoid_prefix": True}
    if optim:
        meta["distrib_optim_sharding_type"] = opt["optim"]
        if opt["optim"] == "fully_reshardable":
            meta["distrib_optim_fully_reshardable_mem_efficient"] = False
    meta_model = dict(meta, dp_cp_group=ps.get_data_parallel_group(with_context_parallel=True))
    model_sd = model.sharded_state_dict(metadata=meta_model)
    if opt.get("plain"):
        state = model_sd  # what libraries that call dist_checkpointing directly do: model keys at top level
    else:
        state = {"args": training_args(a, tp, pp, ep, vpad, ITER, world=world, dp=dp, div=div,
                                       etp=etp, pp_first=opt.get("pp_first"),
                                       optim=bool(optim), rng=bool(opt.get("rng"))), "checkpoint_version": 3.0,
                 "iteration": ITER, "model": model_sd, "num_floating_point_operations_so_far": 0}
        if optim:
            from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
            state["optimizer"] = optim.sharded_state_dict(state, metadata=meta_model)
            sch = OptimizerParamScheduler(optim, init_lr=0.0, max_lr=1e-2, min_lr=1e-4, lr_warmup_steps=2, lr_decay_steps=100,
                                          lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=100,
                                          wd_incr_style="constant")
            sch.step(4)
            state["opt_param_scheduler"] = sch.state_dict()
        if opt.get("rng"):
            import numpy as np, random
            random.seed(1); np.random.seed(1); torch.manual_seed(1)
            rng = [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(),
                    "torch_rng_state": torch.get_rng_state(), "cuda_rng_state": torch.cuda.get_rng_state(),
                    "rng_tracker_states": {"model-parallel-rng": torch.cuda.get_rng_state()}}]
            state["rng_state"] = ShardedObject("rng_state", rng, (pp, tp), (ps.get_pipeline_model_parallel_rank(),
                                               ps.get_tensor_model_parallel_rank()),
                                               replica_id=ps.get_data_parallel_rank(with_context_parallel=True))
    kw = {}
    strat = None
    if opt.get("fully_parallel"):
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
        strat = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1),
                                                 ps.get_data_parallel_group(with_context_parallel=True))
    if opt.get("zarr"):
        from megatron.core.dist_checkpointing.strategies.zarr import ZarrSaveShardedStrategy
        strat = ZarrSaveShardedStrategy("zarr", 1)
    if not opt.get("plain"):
        kw["content_metadata"] = meta
    # megatron records str(checkpoint_dir) in .metadata (storage_meta.checkpoint_id): keep it free of local paths
    cwd = os.getcwd(); os.chdir(w.out)
    if opt.get("legacy"):   # --ckpt-format torch : one file per model-parallel rank (dp rank 0)
        n = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}" + (f"_{ps.get_pipeline_model_parallel_rank():03d}" if pp > 1 else "") \
            + (f"_{ps.get_expert_model_parallel_rank():03d}" if ep > 1 else "")
        os.makedirs(os.path.join(d, n), exist_ok=True)
        state["model"] = model.state_dict_for_save_checkpoint()
        state["args"].ckpt_format, state["args"].use_dist_ckpt = "torch", False
        torch.save(state, os.path.join(d, n, "model_optim_rng.pt"))
    else:
        if opt.get("oldtorch"):   # older torch (Metadata without .version) pickled the object itself, so ad-hoc attributes survived
            import pickle
            from torch.distributed.checkpoint import filesystem as F
            def finish(self, metadata, results):
                metadata.storage_data = {r.index: r.storage_data for l in results for r in l}
                metadata.storage_meta = self.storage_meta()
                pickle.dump(metadata, open(str(self.path) + "/.metadata", "wb"))
            F._FileSystemWriter.finish = finish
        dc.save(state, os.path.relpath(d, w.out), strat, **kw)
    os.chdir(cwd)
    got = assemble_full(model, meta_model)
    got_opt = {}
    if optim:   # model-space view of the optimizer, whatever format was saved
        mm = dict(meta_model, distrib_optim_fully_reshardable_mem_efficient=False)
        if opt["optim"] != "fully_sharded_model_space":
            mm["distrib_optim_sharding_type"] = "fully_reshardable"
        msd = {"model": model.sharded_state_dict(metadata=mm)}
        got_opt = assemble(state_of_parameters(optim, msd) if opt.get("bucket_size") else
                           optim.sharded_state_dict(msd, metadata=mm))
    if w.rank == 0:
        if not opt.get("plain"):
            open(os.path.join(case_dir, "latest_checkpointed_iteration.txt"), "w").write(str(ITER))
        if not optim and not opt.get("singleton"):
            for k, t in stacked.items():
                assert torch.equal(got[k], t.to(got[k].dtype)), k
        json.dump({"case": w.case, "megatron_core": megatron.core.__version__.split("+")[0], "torch": torch.__version__, "spec": spec,
                   "tp": tp, "pp": pp, "ep": ep, "etp": etp, "dp": dp, "padded_vocab": vpad, "arch": a,
                   "hf_dir": "hf_" + hf_name + "/hf", "logits_rel_err_vs_hf": max(e for e in errs if e is not None),
                   "hf": describe(load_hf_sd(hf)), "megatron": describe(got), "optimizer_model_space": describe(got_opt),
                   "megatron_unstacked": {} if optim else describe({k: v.to(torch.float32 if k.endswith("expert_bias") else torch.bfloat16)
                                                   for k, v in full.items()})},
                  open(os.path.join(case_dir, "sha256.json"), "w"), indent=0, sort_keys=True)
        print(f"[ok] {w.case}: mcore {megatron.core.__version__} world {world} rel_err {max(e for e in errs if e is not None):.1e} "
              f"keys {len(got)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", default="fixtures")
    p.add_argument("--mcore", help="directory that contains megatron/core (else the installed one)")
    p.add_argument("--cases", nargs="*")
    p.add_argument("--suffix", default="", help="appended to the case directory names (e.g. _mc0161)")
    p.add_argument("--list", action="store_true")
    p.add_argument("--verbose", action="store_true")
    for x in ("--case", "--store"):
        p.add_argument(x)
    for x in ("--rank", "--world"):
        p.add_argument(x, type=int)
    w = p.parse_args()
    w.out = os.path.abspath(w.out)
    if w.mcore:
        sys.path.insert(0, os.path.abspath(w.mcore))
    if w.list:
        print("\n".join(CASES)); return
    if w.case:
        return worker(w)
    os.makedirs(w.out, exist_ok=True)
    import shutil, tempfile
    bad = []
    for case in w.cases or CASES:
        hf_name, tp, pp, ep, etp, dp, spec, opt = CASES[case]
        world = max(tp * pp * dp, pp * ep * etp)
        hd = os.path.join(w.out, "hf_" + hf_name)
        if not os.path.exists(hd + "/hf_logits.json"):
            os.makedirs(hd, exist_ok=True)
            make_hf(hf_name, hd)
        shutil.rmtree(os.path.join(w.out, case + w.suffix), ignore_errors=True)
        os.makedirs(os.path.join(w.out, case + w.suffix))
        with tempfile.TemporaryDirectory() as td:
            env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", CUDA_DEVICE_MAX_CONNECTIONS="1",
                       RANK="0", TOKENIZERS_PARALLELISM="false", GLOO_SOCKET_IFNAME="lo")
            ps = []
            for r in range(world):
                cmd = [sys.executable, os.path.abspath(__file__), "--out", w.out, "--case", case, "--rank", str(r),
                       "--world", str(world), "--store", td + "/store", "--suffix=" + w.suffix] + (["--mcore", w.mcore] if w.mcore else [])
                ps.append(subprocess.Popen(cmd, env=dict(env, RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(world)),
                                           stdout=None, stderr=None if w.verbose else open(td + f"/err{r}", "w")))
            rcs = [q.wait() for q in ps]
            if any(rcs):
                bad.append(case)
                print(f"[FAIL] {case} {rcs}")
                for r in range(world):
                    t = "" if w.verbose else open(td + f"/err{r}").read()
                    if rcs[r] and "closed by peer" not in t and "Connection reset" not in t:
                        print(t[-2500:]); break
    if bad:
        sys.exit("failed: " + " ".join(bad))


if __name__ == "__main__":
    main()
