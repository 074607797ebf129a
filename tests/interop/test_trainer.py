"""The trainer beside its peers: rates and orders of passes are Megatron-Core's, Adam is torch's to the rounding of fp32, and a run
that Megatron-Core saved goes through our optimizer and back to it bit for bit."""
import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import DATA, FERRY, HERE, PEERS, iteration_folder
from test_training_state import FIXTURES, describe, expected

TOOL = Path(FERRY).parents[1] / "tests" / "trainer_tool"
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="this build has no models: configure it with -Dtorch_root")


def tool(*arguments):
    run = subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def ask_megatron(release, program, question):
    """What a program prints that has `question` and can import a release of megatron-core."""
    run = subprocess.run([sys.executable, "-c", program, json.dumps(question)], capture_output=True, text=True,
                         env={**os.environ, "PYTHONPATH": str(PEERS / release)})
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


RATES = """
import json, sys
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
class Optimizer:
    param_groups = [{"wd_mult": 1.0}]
def rates(style, wsd_style, warmup, decay, wsd_decay, wd_style, wd_steps):
    end_wd = 0.01 if wd_style == "constant" else 0.1
    scheduler = OptimizerParamScheduler(Optimizer(), 1e-5, 1e-3, 1e-4, warmup, decay, style, 0.01, end_wd, wd_steps, wd_style,
                                        wsd_decay_steps=wsd_decay, lr_wsd_decay_style=wsd_style)
    for _ in range(decay + 10):
        yield Optimizer.param_groups[0]["lr"], Optimizer.param_groups[0]["weight_decay"]
        scheduler.step(1)
print(json.dumps([list(rates(*case)) for case in json.loads(sys.argv[1])]))
"""
CASES = [(style, wsd, warmup, 60, 20, wd, 40)
         for style, wsd in [("constant", "linear"), ("linear", "linear"), ("cosine", "linear"), ("inverse-square-root", "linear"),
                            ("WSD", "linear"), ("WSD", "cosine"), ("WSD", "exponential"), ("WSD", "minus_sqrt")]
         for warmup, wd in [(0, "constant"), (7, "linear"), (7, "cosine")]]


@pytest.mark.parametrize("release", ["mc0161", "mc0192"])
def test_rates_are_megatrons(release):
    for case, theirs in zip(CASES, ask_megatron(release, RATES, CASES)):
        ours = tool("schedule", *case)
        assert len(ours) == 70
        for step, (a, b) in enumerate(zip(ours, theirs)):
            assert a == pytest.approx(b, rel=1e-15, abs=0), (case, step)


ORDERS = """
import json, sys
from megatron.core.pipeline_parallel.schedules import get_schedule_table
def order(stages, stage, chunks, micro_batches, forward_only):
    # The loops of forward_backward_pipelining_with(out)_interleaving over Megatron's table.
    table = get_schedule_table(micro_batches, chunks, stages if chunks > 1 else 1)
    warmup = stages - stage - 1
    if chunks > 1:
        warmup = 2 * warmup + (chunks - 1) * stages
    warmup = len(table) if forward_only else min(warmup, len(table))
    forward = [[True, m, c] for m, c in table]
    backward = [[False, m, chunks - 1 - c] for m, c in table]
    steps = forward[:warmup]
    for k in range(len(table) - warmup):
        steps += [forward[warmup + k], backward[k]]
    return steps + ([] if forward_only else backward[len(table) - warmup:])
print(json.dumps([order(*case) for case in json.loads(sys.argv[1])]))
"""


@pytest.mark.parametrize("release", ["mc0161", "mc0192"])
def test_orders_of_passes_are_megatrons(release):
    cases = [(stages, stage, chunks, micro_batches, forward_only)
             for stages, chunks, micro_batches, forward_only in itertools.product((2, 4), (1, 2, 3), (4, 8), (0, 1)) for stage in range(stages)]
    for case, theirs in zip(cases, ask_megatron(release, ORDERS, cases)):
        assert tool("order", *case) == theirs, case


@pytest.mark.parametrize("decoupled", [0, 1])
def test_adam_is_torchs_to_the_rounding_of_fp32(decoupled):
    """From the state after our last step, torch's next step: a master by 2 units in the last place of itself and of its change, moments by 2."""
    import torch
    run = tool("adam", 30, decoupled)
    param = torch.tensor(run["initial"]).requires_grad_()
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)([param], lr=run["lr"], weight_decay=run["weight_decay"], foreach=False)
    unit = 2.0 ** -23
    for step in run["steps"]:
        before = param.detach().clone()
        param.grad = torch.tensor(step["grad"])
        optimizer.step()
        state = optimizer.state[param]
        ours = {key: torch.tensor(step[key]) for key in ("param", "exp_avg", "exp_avg_sq")}
        change = (param.detach() - before).abs()
        # A moment's terms may cancel: its rounding is that of the greater of them.
        of_grad = param.grad.abs() + (0 if decoupled else run["weight_decay"] * before.abs())
        assert ((ours["param"] - param.detach()).abs() <= 2 * unit * (before.abs() + change) + 8 * unit * change).all()
        assert ((ours["exp_avg"] - state["exp_avg"]).abs() <= 2 * unit * (state["exp_avg"].abs() + of_grad)).all()
        assert ((ours["exp_avg_sq"] - state["exp_avg_sq"]).abs() <= 4 * unit * state["exp_avg_sq"]).all()
        with torch.no_grad():
            param.copy_(ours["param"])
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(ours[key])


RESAVED = {  # fixture: (mesh of ours: tp, pp, ep, etp, dp; mesh of Megatron-Core)
    "llama_optim_dp": ((2, 1, 1, 2, 2), dict(tp=1, pp=2, ep=1, etp=1)),
    "qwen2_tied_optim_dp": ((1, 2, 1, 1, 2), dict(tp=2, pp=2, ep=1, etp=1)),
    "mixtral_optim_dp": ((2, 1, 2, 1, 2), dict(tp=1, pp=2, ep=2, etp=1)),
    "deepseek_v3_optim_dp": ((1, 3, 2, 1, 2), dict(tp=1, pp=1, ep=4, etp=1)),
}


@pytest.mark.parametrize("release", ["mc0161", "mc0192"])
def test_megatron_core_resumes_from_our_optimizer(release, work):
    """Masters and moments of Megatron's, in the shards of our ranks, saved from there: every digest is the old one, and Megatron
    resumes with them."""
    jobs = []
    for fixture, (ours, theirs) in RESAVED.items():
        if release == "mc0161" and fixture != "mixtral_optim_dp":
            continue
        tool("resave", DATA / fixture, work / fixture, *ours, DATA / FIXTURES[fixture][0] / "hf")
        assert describe(iteration_folder(work / fixture)) == expected(fixture), fixture
        jobs.append(dict(ckpt=str(work / fixture), hf=str(DATA / FIXTURES[fixture][0] / "hf"), expect=str(DATA / fixture / "sha256.json"),
                         vpad=256, **theirs))
    (work / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([sys.executable, HERE / "resume_with_mcore.py", "--mcore", PEERS / release, "--jobs", work / "jobs.json",
                           "--report", work / "report.json"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert (work / "report.json").exists(), done.stdout[-3000:]
    report = json.loads((work / "report.json").read_text())
    assert [r["bad"] for r in report] == [[]] * len(jobs)
    assert all(set(r["step"]) == {1} and r["num_steps"] == 4 and r["iteration"] == 10 for r in report)


MESHES = {  # tp, pp, vpp, ep of a world of so many processes
    "alone": (1, (1, 1, 1, 1)), "dp2": (2, (1, 1, 1, 1)), "pp2_vpp2": (2, (1, 2, 2, 1)), "tp2_pp2": (4, (2, 2, 1, 1)),
}


def train(processes, mesh, device="cpu", dtype="fp32", steps=3):
    """What rank 0 of a run of processes, as torchrun starts them, prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [subprocess.Popen([TOOL, "train", device, dtype, str(steps), *map(str, mesh)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1",
                                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}) for rank in range(processes)]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * processes, [error[-1000:] for _, error in outputs]
    return json.loads(outputs[0][0])


def test_processes_train_as_one_does():
    """Over Gloo here; by hand over NCCL: train(2, (1, 2, 2, 1), "cuda", "bf16")."""
    alone = train(*MESHES["alone"])
    assert alone[2]["loss"] < alone[0]["loss"] and all(step["grad_norm"] > 0 for step in alone)  # both batches come again
    for name, (processes, mesh) in MESHES.items():
        steps = train(processes, mesh)
        for ours, theirs in zip(steps, alone):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5) and ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4), name
    again = train(processes, mesh)
    assert [(step["loss"], step["grad_norm"]) for step in again] == [(step["loss"], step["grad_norm"]) for step in steps], name
