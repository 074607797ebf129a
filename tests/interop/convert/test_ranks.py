"""One conversion by several processes, as torchrun, srun and mpirun start them: the same bytes, one publication."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import DATA, FERRY, llama_config, run_ok, tree, write_hf

LARGE = llama_config(hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
                     head_dim=64, vocab_size=16000)
LAUNCHERS = {
    "torchrun": lambda rank, size: {"RANK": rank, "WORLD_SIZE": size},
    "mpirun": lambda rank, size: {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size},
    "srun": lambda rank, size: {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": size},
}


def start(rank, size, *arguments, launcher="torchrun"):
    environment = {**os.environ, **{k: str(v) for k, v in LAUNCHERS[launcher](rank, size).items()}}
    return subprocess.Popen([str(FERRY), *map(str, arguments)], env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)


def run_ranks(size, *arguments, launcher="torchrun"):
    ranks = [start(rank, size, *arguments, launcher=launcher) for rank in range(size)]
    return [(rank, *rank.communicate(timeout=120)) for rank in ranks]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """About 80 MB, so that every rank has many tasks; and what one process makes of it."""
    folder = tmp_path_factory.mktemp("ranks")
    write_hf(folder / "hf", LARGE, shards=3)
    run_ok("convert", folder / "hf", folder / "megatron", "--tp", 2, "--pp", 2)
    run_ok("convert", folder / "megatron", folder / "back")
    return folder


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_four_processes_give_the_bytes_of_one(launcher, large, work):
    done = run_ranks(4, "convert", large / "hf", work / "megatron", "--tp", 2, "--pp", 2, "--json", launcher=launcher)
    assert [rank.returncode for rank, *_ in done] == [0] * 4, done
    assert json.loads(done[0][1])["ranks"] == 4 and [out for _, out, _ in done[1:]] == [""] * 3  # rank 0 tells for all
    assert tree(work / "megatron") == tree(large / "megatron")
    done = run_ranks(3, "convert", work / "megatron", work / "back", launcher=launcher)
    assert [rank.returncode for rank, *_ in done] == [0] * 3, done
    assert tree(work / "back") == tree(large / "back") == tree(large / "hf")
    assert sorted(os.listdir(work)) == ["back", "megatron"]  # no working folder is left


@pytest.mark.parametrize("model, options", [
    ("hf_deepseek_v3/hf", ["--tp", 2, "--ep", 2]),
    ("llama_optim_dp", ["--to", "megatron", "--tp", 1, "--pp", 2]),
    ("hf_qwen2_tied/hf", ["--dtype", "fp32"]),
    ("hf_qwen3_5_moe/hf", ["--tp", 2, "--ep", 2]),
    ("hf_gpt_oss/hf", ["--tp", 2, "--ep", 2]),
    ("hf_gpt_oss/hf", ["--to", "hf", "--quantize", "mxfp4"]),
    ("hf_nemotron_h/hf", ["--tp", 2, "--ep", 2]),
    ("hf_qwen2_5_vl_deep/hf", ["--tp", 2, "--megatron-layout", "mbridge"]),
    ("hf_qwen3_5_moe_vl/hf", ["--tp", 2, "--megatron-layout", "megatron-bridge"]),
])
def test_small_models_have_ranks_without_work(model, options, work):
    run_ok("convert", DATA / model, work / "one", *options)
    done = run_ranks(4, "convert", DATA / model, work / "four", *options)
    assert [rank.returncode for rank, *_ in done] == [0] * 4, done
    assert tree(work / "four") == tree(work / "one")


def test_torchrun_starts_it(large, work):
    """The real launcher, as the manual shows it."""
    torchrun = Path(sys.executable).parent / "torchrun"
    done = subprocess.run([torchrun, "--no-python", "--nproc-per-node", "4", "--master-port", "29633", str(FERRY), "convert",
                           str(large / "hf"), str(work / "megatron"), "--tp", "2", "--pp", "2", "-q"],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:]
    assert tree(work / "megatron") == tree(large / "megatron")


def broken_off(ranks, folder, rank, kill):
    """Ends ranks as a launcher does, once each has copied something, and kills `rank` if told so. Ranks are held from there on, so that they are not
    done before."""
    journals = [folder / ".release.ferry" / ("journal" if r == 0 else f"journal.{r}") for r in range(len(ranks))]
    running = set(range(len(ranks)))
    until = time.monotonic() + 60
    while running and time.monotonic() < until:
        for at_work in [r for r in running if journals[r].exists() and journals[r].stat().st_size > 200]:
            ranks[at_work].send_signal(signal.SIGSTOP)
            running.remove(at_work)
        time.sleep(0.001)
    assert not running, f"ranks {running} copied nothing"
    if kill:
        ranks[rank].kill()
    for one in ranks:
        one.send_signal(signal.SIGTERM)
        one.send_signal(signal.SIGCONT)
    codes = [one.wait(timeout=60) for one in ranks]
    assert 0 not in codes, "all was done before the ranks were stopped"
    assert not (folder / "release").exists()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_rank_is_resumed(lost, large, work):
    """One rank is killed while it copies; the others say so and stop. The second run does what is missing."""
    arguments = ["convert", large / "hf", work / "out", "--tp", 2, "--pp", 2]
    broken_off([start(rank, 4, *arguments) for rank in range(4)], work / "out", lost, kill=True)
    done = run_ranks(4, *arguments, "--resume", "--json")
    assert [rank.returncode for rank, *_ in done] == [0] * 4, done
    assert tree(work / "out") == tree(large / "megatron")


def test_the_number_of_ranks_may_change_on_resume(large, work):
    arguments = ["convert", large / "hf", work / "out", "--tp", 2, "--pp", 2]
    broken_off([start(rank, 4, *arguments) for rank in range(4)], work / "out", 3, kill=False)
    run_ok("convert", large / "hf", work / "out", "--tp", 2, "--pp", 2, "--resume")
    assert tree(work / "out") == tree(large / "megatron")


def test_a_rank_that_fails_stops_the_others(large, work):
    """One is given another command: all end, and nothing is published."""
    ranks = [start(rank, 3, "convert", large / "hf", work / "out", "--tp", 2 if rank < 2 else 1) for rank in range(3)]
    done = [(rank.wait(timeout=60), rank.communicate()[1]) for rank in ranks]
    assert [code for code, _ in done] == [2] * 3, done
    assert "rank 2 was not given what rank 0 was" in done[2][1]
    assert "rank 2 failed" in done[0][1]
    assert not (work / "out/release").exists()


def test_what_ranks_cannot_do(large, work):
    done = run_ranks(2, "convert", large / "hf", work / "archive", "--to", "h5")
    assert [rank.returncode for rank, *_ in done] == [2] * 2
    assert "an archive is written by one process" in done[0][2]
    for option in ("--no-ranks", "--dry-run"):
        rank = start(0, 2, "convert", large / "hf", work / option, option)
        assert rank.wait(timeout=60) == 0, rank.communicate()
    rank = start(5, 4, "convert", large / "hf", work / "never")
    assert rank.wait(timeout=60) == 2 and "there is no such rank" in rank.communicate()[1]
