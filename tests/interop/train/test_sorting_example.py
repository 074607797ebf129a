"""docs/examples/sorting: its files run as they are, but for fewer and smaller steps from an untrained model."""
import json
import subprocess
import sys

import pytest

from ranks import TORCH_PROGRAM
from support import ROOT, run_ok

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")

EXAMPLE = ROOT / "docs/examples/sorting"
SMALL = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.model.path=task/model",
         "trainer.total_training_steps=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sorting")
    subprocess.run([sys.executable, EXAMPLE / "make_task.py", folder / "task"], check=True)
    held_out = (folder / "task/val.jsonl").read_text().splitlines(keepends=True)
    (folder / "task/val.jsonl").write_text("".join(held_out[:8]))
    return folder


def train(folder, algorithm, *more, code=0):
    return run_ok("train", algorithm, "--config", EXAMPLE / f"{algorithm}.toml", *SMALL, *more, "--quiet", cwd=folder, code=code)


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algorithm, more", [("grpo", []), ("ppo", ["trainer.critic_warmup=2"])])
def test_ratio_is_one_and_the_rollout_is_the_trainer(folder, algorithm, more):
    train(folder, algorithm, "actor_rollout_ref.actor.recompute_old_log_prob=true", *more)  # so that there are two to compare
    steps = [line["data"] for line in lines(folder / algorithm) if "critic/score/mean" in line["data"]]
    assert len(steps) == 2
    for name in ("rollout_corr/kl", "training/rollout_probs_diff_max"):
        assert [step[name] for step in steps] == [0, 0]
    for name in ("actor/ppo_kl", "actor/pg_clipfrac"):
        assert [step.get(name) for step in steps] == [None if more else 0, 0]
    assert (folder / algorithm / "actor/hf_model/model.safetensors").exists()


def test_numbers_of_a_step_are_written_before_its_checkpoint(folder):
    """So a run that dies between the two does the step again, and none is missing."""
    run = folder / "interrupted"
    run.mkdir()
    (run / "actor").write_text("in the way of checkpoints")
    more = ["checkpoint.save_freq=1", f"trainer.default_local_dir={run}"]
    train(folder, "grpo", *more, code=2)
    (broken_off,) = [line for line in lines(run) if line["step"] == 1]
    (run / "actor").unlink()
    train(folder, "grpo", *more)
    first, of_save, *_ = [line for line in lines(run) if line["step"] == 1]
    timed = ("perf/", "timing_")
    untimed = [{name: value for name, value in line["data"].items() if not name.startswith(timed)} for line in (broken_off, first)]
    assert untimed[0] == untimed[1] and untimed[0]["critic/score/mean"] is not None
    assert set(of_save["data"]) == {"timing_s/save_checkpoint"}
