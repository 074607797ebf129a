"""`ferry train sft` when something breaks: every rank ends with status 2, rank 0 says why, the last checkpoint is whole, and the run goes on
from it by itself."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

import ppo_run
from ranks import TORCH_PROGRAM, address_spaces, finish, lose, memory_limit, start_training, wait_for
from sft_run import BATCH, WORDS, conversations, losses, settings, start_ranks, train, write_model, write_rows
from support import Mounted, run_ok

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")
SAVING = {"checkpoint.save_freq": 1, "engine.dtype": "bfloat16"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    write_model(folder / "model")
    write_rows(folder / "train.jsonl", conversations())
    return folder


@pytest.fixture(scope="module")
def whole(world):
    """The losses of the run that nothing happens to."""
    return train(world, world / "whole", 2, **SAVING)


def latest(run):
    return int((run / "latest_checkpointed_iteration.txt").read_text())


def assert_whole(run, working=()):
    """The checkpoint that the tracker names can be read, and nothing is half there; but a rank 0 that was killed leaves what it worked on."""
    run_ok("digest", run)
    folders = {path.name for path in run.iterdir() if path.is_dir()} - {"tensorboard", "timeline"} - set(working)
    assert folders == {f"iter_{step:07}" for step in range(1, latest(run) + 1)}


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk(background, world, whole, work):
    """A file system of two and a half checkpoints."""
    size = sum(path.stat().st_size for path in (world / "whole/iter_0000001").iterdir())
    with Mounted(work / "disk", f"size={5 * size // 2}") as disk:
        arguments = settings(world, disk / "run", **SAVING, **{"checkpoint.async_save": background})
        done = finish(start_ranks(2, arguments))
        assert [status for status, _ in done] == [2, 2], done
        said = done[0][1]
        assert str(disk) in said and ".distcp" in said and "byte" in said and "No space left on device" in said, said
        assert "are needed" in said and "free" in said, said
        assert latest(disk / "run") == 2
        assert_whole(disk / "run")
        subprocess.run(["mount", "-o", f"remount,size={20 * size}", disk], check=True)
        assert train(world, disk / "run", 2, **SAVING) == whole


def test_records_that_are_refused_are_named(world, work):
    (status, said), = finish(start_ranks(1, settings(world, work / "run", **{"data.max_length": 2})))
    assert status == 2 and "more than data.max_length of 2" in said and f"while reading {world}/train.jsonl: line 1\n" in said, said
    write_rows(work / "others.jsonl", [{"text": "no messages"}] * 3)
    (status, said), = finish(start_ranks(1, settings(world, work / "run", **{"data.train_files": [str(work / "others.jsonl")]})))
    assert status == 2 and "less than one batch" in said and f"the first malformed one is {work}/others.jsonl: line 1: " in said, said


def test_ranks_whose_settings_differ_are_named(world, work):
    """They would wait for each other until nccl_timeout (ten minutes): micro-batches of more tokens are fewer of them."""
    arguments = settings(world, work / "run")
    for status, said in finish(start_ranks(4, arguments, own={3: ["data.max_token_len_per_gpu=192"]})):
        assert status == 2 and "data.max_token_len_per_gpu is 96 on ranks 0-2, 192 on rank 3" in said, said
    assert not (work / "run").exists()


def test_a_disk_that_is_full_of_the_checkpoint(world, whole, work):
    """hf_model, which is made of the checkpoint, does not fit beside it."""
    size = sum(path.stat().st_size for path in (world / "whole/iter_0000001").iterdir())
    with Mounted(work / "disk", f"size={size + 2**17}") as disk:
        arguments = settings(world, disk / "run", **SAVING, **{"trainer.total_training_steps": 1, "checkpoint.save_hf": True})
        (status, said), = finish(start_ranks(1, arguments))
        assert status == 2 and "No space left on device" in said and f"while saving {disk}/run/hf_model" in said, said
        assert "the same command goes on from it" in said and "--resume" not in said, said
        assert latest(disk / "run") == 1


@pytest.mark.parametrize("algorithm", ["sft", "ppo"])
def test_a_save_that_was_killed_behind_its_last_rename(algorithm, world, work):
    """The newest iteration is there, and nothing else that a save does: the run that goes on from it, over already or not, does the rest."""
    settings_of, role = settings, ""
    if algorithm == "ppo":
        world, settings_of, role = ppo_run.write_world(work), ppo_run.settings, "actor"
    run, before = work / "run", work / "before"
    saving = {"checkpoint.save_freq": 1, "checkpoint.save_hf": True, "checkpoint.keep_last": 2, "checkpoint.keep_every": 4}

    def go(steps):
        done = finish(start_training(2, algorithm, settings_of(world, run, **saving, **{"trainer.total_training_steps": steps})))
        assert [status for status, _ in done] == [0, 0], done
    for steps, following in [(3, 3), (4, 5)]:  # the run is over, or goes on
        go(steps - 1)
        shutil.copytree(run, before)
        go(steps)
        folder, old = run / role, before / role
        for step in range(1, steps):  # as they were
            if (old / f"iter_{step:07}").exists() and not (folder / f"iter_{step:07}").exists():
                shutil.copytree(old / f"iter_{step:07}", folder / f"iter_{step:07}")
        shutil.copy(old / "latest_checkpointed_iteration.txt", folder)
        shutil.rmtree(folder / "hf_model")
        shutil.copytree(old / "hf_model", folder / "hf_model")
        shutil.copytree(old / f"iter_{steps - 1:07}", folder / ".iter_0000001.superseded")
        for name in (".iter_0000001.ferry", f".iter_{steps:07}.ferry"):  # of one that is gone, and of one that is there
            (folder / name).mkdir(mode=0o700)
            (folder / name / "ferry-work").write_text("ferry-work-1\n")
        go(following)
        assert int((folder / "latest_checkpointed_iteration.txt").read_text()) == following
        assert {path.name for path in folder.iterdir() if "iter" in path.name and path.is_dir()} == {
            f"iter_{step:07}" for step in range(1, following + 1) if step > following - 2 or step % 4 == 0}
        assert not list(folder.glob(".hf_model.*"))
        run_ok("verify", folder, folder / "hf_model")
        shutil.rmtree(before)


@pytest.mark.parametrize("what, lost", [(signal.SIGKILL, 3), (signal.SIGSTOP, 0)], ids=["killed", "hangs"])
def test_a_rank_that_is_killed_or_hangs(what, lost, world, work):
    """The run has four ranks, two on each axis of the mesh."""
    arguments = settings(world, work / "run", **SAVING, **{"engine.tensor_model_parallel_size": 2, "trainer.nccl_timeout": 10,
                                                          "trainer.total_training_steps": 10000})
    ranks = start_ranks(4, arguments)

    def trouble():
        wait_for((work / "run/latest_checkpointed_iteration.txt").exists, ranks[0])
        ranks[lost].send_signal(what)

    done = lose(ranks, lost, trouble)
    assert f"missing: rank {lost} " in done[min(done)], done  # and no other
    last = latest(work / "run")
    assert_whole(work / "run", [f".iter_{step:07}.ferry" for step in (last, last + 1)])


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A step whose every buffer is of many MiB."""
    folder = tmp_path_factory.mktemp("large")
    write_model(folder / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=2, head_dim=64, vocab_size=16384,
                max_position_embeddings=4096)
    question, answer = ({"role": role, "content": " ".join(WORDS * count)} for role, count in (("user", 1), ("assistant", 39)))
    write_rows(folder / "train.jsonl", [{"messages": [question, answer]}] * BATCH)
    return folder


def one_step(large, run):
    return settings(large, run, **{"data.max_length": 2048, "data.max_token_len_per_gpu": 2048, "engine.recompute_granularity": "none",
                                   "trainer.total_training_steps": 1, "trainer.logger": []})


def test_memory_that_is_not_there(large, work):
    """Less and less address space: each buffer in turn does not fit. What is said to fit fits."""
    arguments = one_step(large, work / "run")
    peak = max(address_spaces(start_ranks(1, arguments)))
    said, fits, expected = {}, {}, False

    def complete():
        return {"activations", "logits"} < set(said) and set(said) & {"parameters", "gradients", "masters and moments"} and expected

    # Threads change what fits below a limit, too: a buffer that no limit met may lie between two of them.
    for first in (100, 160, 130, 190):
        for limit in range(peak - first, 0, -120):
            shutil.rmtree(work / "run", ignore_errors=True)
            status, text = finish(start_ranks(1, arguments, {0: memory_limit(limit)}))[0]
            if status == 0:  # what the C library reserves for threads may be less
                continue
            if status == 127 or "error:" not in text:  # not even the libraries fit
                break
            assert status == 2 and "out of memory" in text, (limit, text)
            if "out of memory for " not in text:  # of a reader or a thread, which has no buffer's name
                continue
            buffer = text.partition("out of memory for ")[2].removeprefix("the ").split(",")[0].split(" of ")[0]
            said.setdefault(buffer, text)
            expected = expected or "memory     rank 0: micro-batches of up to 2048 tokens may need " in text
            if "what would fit: data.max_token_len_per_gpu=" in text.partition("hint: ")[2]:
                fits.setdefault(limit, text.partition("hint: ")[2].partition("what would fit: ")[2].partition(";")[0].split())
        if complete():
            break
    assert complete(), (said, expected)  # `expected`: before the first step of some run
    limit, overrides = max(fits.items())
    shutil.rmtree(work / "run", ignore_errors=True)
    done = finish(start_ranks(1, arguments + overrides, {0: memory_limit(limit)}))
    assert done[0][0] == 0, (limit, overrides, done)


def test_a_rank_out_of_memory(large, work):
    """Wherever it runs out, while it makes groups or a thread of a library is started, too, it says so, and the other repeats it."""
    peak = max(address_spaces(start_ranks(2, one_step(large, work / "run"))))
    runs = {limit: start_ranks(2, one_step(large, work / f"run{limit}"), {1: memory_limit(limit)})
            for limit in range(peak - 1100, peak - 50, 150)}
    causes = set()
    for limit, (other, own) in runs.items():
        (status, said), = finish([own])
        joined = status == 0 or "while running as rank 1 of 2" in said
        if not joined:  # not even its libraries fit
            other.kill()
        (other_status, other_said), = finish([other], timeout=10)
        if not joined or status == other_status == 0:  # what the C library reserves for threads may be less
            continue
        cause = said.partition("error: ")[2].splitlines()[0]
        assert status == other_status == 2 and "out of memory" in cause, (limit, said, other_said)
        assert f"rank 1, which failed: {cause}" in other_said, (limit, said, other_said)
        causes.add(cause.partition(": ")[0])
    assert len(causes) >= 3, causes


def test_torchrun_restarts_it(world, whole, work):
    """One rank kills itself after a checkpoint, once. torchrun starts all again, and nobody sees it in the losses."""
    run = work / "run"
    script = (f'"$@" & child=$!; if [ "$RANK/$TORCHELASTIC_RESTART_COUNT" = 1/0 ]; then '
              f'until [ -e {run}/iter_0000002 ]; do sleep 0.01; done; kill -9 $child; fi; wait $child')
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone", "--nproc-per-node=2",
                           "--max-restarts=1", "bash", "-c", script, "ferry", TORCH_PROGRAM, "train", "sft", *settings(world, run, **SAVING)],
                          capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed    after step" in done.stderr
    assert losses(run) == whole
    run_ok("verify", run, world / "whole")


def test_weights_that_are_not_finite_are_named(world, work):
    """The first module whose output is not finite; after ten such steps the run ends."""
    from safetensors.torch import load_file, save_file
    shutil.copytree(world / "model", work / "model")
    tensors = load_file(work / "model/model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][3, 5] = float("inf")
    save_file(tensors, work / "model/model.safetensors", {"format": "pt"})
    shutil.copy(world / "train.jsonl", work)
    for parallel in ({}, {"engine.pipeline_model_parallel_size": 2}):
        shutil.rmtree(work / "run", ignore_errors=True)
        done = finish(start_ranks(max(1, len(parallel) * 2), settings(work, work / "run", **parallel, **{"trainer.total_epochs": 3})))
        assert {status for status, _ in done} == {2}, done
        assert "step 1: the output of decoder.layers.2.mlp, and so the loss, is not finite; nothing was updated (1 so far)" in done[0][1], done
        assert "no finite gradient in 10 steps in a row" in done[0][1], done
    steps = [json.loads(line)["data"] for line in (work / "run/metrics.jsonl").read_text().splitlines()]
    assert [step["train/skipped"] for step in steps] == list(range(1, 10))
