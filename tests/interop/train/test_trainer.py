"""The trainer beside its peers: rates and orders of passes are Megatron-Core's, Adam is torch's to the rounding of fp32. (A run that
Megatron-Core saved goes through our optimizer and back to it in test_training_state.py; whole runs are in test_sft.py.)"""
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import free_port
from support import FERRY, PEERS

TOOL = Path(FERRY).parents[1] / "tests" / "trainer_tool"
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="this build has no models: configure it with -Dtorch_root")


def tool(*arguments):
    run = subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


MEGATRON = """
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

question = json.loads(sys.argv[1])
print(json.dumps({"rates": [list(rates(*case)) for case in question["rates"]], "orders": [order(*case) for case in question["orders"]]}))
"""
CASES = [(style, wsd, warmup, 60, 20, wd, 40)
         for style, wsd in [("constant", "linear"), ("linear", "linear"), ("cosine", "linear"), ("inverse-square-root", "linear"),
                            ("WSD", "linear"), ("WSD", "cosine"), ("WSD", "exponential"), ("WSD", "minus_sqrt")]
         for warmup, wd in [(0, "constant"), (7, "linear"), (7, "cosine")]]


ORDERS = [(stages, stage, chunks, micro_batches, forward_only)
          for stages, chunks, micro_batches, forward_only in itertools.product((2, 4), (1, 2, 3), (4, 8), (0, 1)) for stage in range(stages)]


@pytest.fixture(scope="module")
def ours():
    return {"rates": tool("schedules", json.dumps(CASES)), "orders": tool("orders", json.dumps(ORDERS))}


@pytest.mark.parametrize("release", ["mc0161", "mc0192"])
def test_rates_and_orders_of_passes_are_megatrons(release, ours):
    run = subprocess.run([sys.executable, "-c", MEGATRON, json.dumps({"rates": CASES, "orders": ORDERS})], capture_output=True, text=True,
                         env={**os.environ, "PYTHONPATH": str(PEERS / release)})
    assert run.returncode == 0, run.stderr[-2000:]
    theirs = json.loads(run.stdout.splitlines()[-1])
    for case, mine, rates in zip(CASES, ours["rates"], theirs["rates"], strict=True):
        assert len(mine) == 70
        for step, (a, b) in enumerate(zip(mine, rates)):
            assert a == pytest.approx(b, rel=1e-15, abs=0), (case, step)
    for case, mine, order in zip(ORDERS, ours["orders"], theirs["orders"], strict=True):
        assert mine == order, case


@pytest.mark.parametrize("decoupled", [0, 1])
def test_adam_is_torchs_to_the_rounding_of_fp32(decoupled):
    """torch's next step from the state after our last one: a master by 2 units in the last place of itself and of its change, moments by 2."""
    import torch
    run = tool("adam", 30, decoupled, "fp32")
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


@pytest.mark.parametrize("decoupled", [0, 1])
def test_moments_in_bf16_are_transformer_engines(decoupled):
    """The formula of its AdamFunctorMaster (common/multi_tensor/adam.cu) in torch, in fp64: moments are widened, the parameter is updated with
    moments that are not rounded yet, then they are rounded once, to half a unit in the last place."""
    import torch
    run = tool("adam", 30, decoupled, "bf16")
    beta1, beta2, eps, lr, decay = 0.9, 0.999, 1e-8, run["lr"], run["weight_decay"]
    param = torch.tensor(run["initial"])
    m, v = torch.zeros_like(param), torch.zeros_like(param)
    for number, step in enumerate(run["steps"], 1):
        r_g, r_p, r_m, r_v = (x.double() for x in (torch.tensor(step["grad"]), param, m, v))
        if not decoupled:
            r_g = r_g + decay * r_p
        r_m = beta1 * r_m + (1 - beta1) * r_g
        r_v = beta2 * r_v + (1 - beta2) * r_g * r_g
        update = (r_m / (1 - beta1 ** number)) / ((r_v / (1 - beta2 ** number)).sqrt() + eps)
        if decoupled:
            update = update + decay * r_p
        after = r_p - lr * update
        param, m, v = (torch.tensor(step[key]) for key in ("param", "exp_avg", "exp_avg_sq"))
        assert ((param - after).abs() <= 2.0 ** -22 * (r_p.abs() + (lr * update).abs()) + 2.0 ** -19 * (lr * update).abs()).all()
        for ours, exact in ((m, r_m), (v, r_v)):
            assert torch.equal(ours.bfloat16().float(), ours)
            assert ((ours - exact).abs() <= (2.0 ** -8 + 2.0 ** -20) * exact.abs() + 2.0 ** -22 * r_g.abs()).all()


def train(processes, mesh, device="cpu", dtype="fp32", steps=3):
    """The output of rank 0 of a run of several processes, started as torchrun does."""
    port = free_port()
    ranks = [subprocess.Popen([TOOL, "train", device, dtype, str(steps), *map(str, mesh)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1",
                                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}) for rank in range(processes)]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * processes, [error[-1000:] for _, error in outputs]
    return json.loads(outputs[0][0])


def test_processes_train_as_one_does():
    """Over Gloo here; by hand over NCCL: train(4, (2, 2, 1, 1), "cuda", "bf16")."""
    alone = train(1, (1, 1, 1, 1))
    assert alone[2]["loss"] < alone[0]["loss"] and all(step["grad_norm"] > 0 for step in alone)  # both batches come again
    steps, again = (train(4, (2, 2, 1, 1)) for _ in range(2))
    for ours, theirs in zip(steps, alone):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5) and ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert [(step["loss"], step["grad_norm"]) for step in again] == [(step["loss"], step["grad_norm"]) for step in steps]
