"""Options, sources and targets that ferry convert refuses, with exit status 2 and an error that says which."""
import json
import os
import signal
import subprocess

import pytest

from refusals import refuse
from support import DATA, FERRY, ferry, tree, write_hf

OPTIONS = {
    "--tp that does not divide the heads": (["--tp", 3], ["3"]),
    "--tp 0": (["--tp", 0], ["--tp"]),
    "--tp -1": (["--tp", -1], ["--tp"]),
    "--tp with letters": (["--tp", "two"], ["--tp"]),
    "--pp that does not divide the layers": (["--pp", 3], ["3"]),
    "more stages than layers": (["--pp", 5], ["5"]),
    "first stage larger than the model": (["--pp", 2, "--num-layers-in-first-pipeline-stage", 4], ["4"]),
    "the embedding counts as a layer of the only stage": (["--account-for-embedding-in-pipeline-split"], ["has no effect"]),
    "chunks that do not divide the layers": (["--pp", 2, "--vpp", 3], ["--vpp 3", "1, 2"]),
    "--dtype of no float": (["--dtype", "int8"], ["--dtype"]),
    "--to of no format": (["--to", "onnx"], ["--to"]),
    "--iteration with letters": (["--iteration", "latest"], ["--iteration"]),
    "--max-memory of no size": (["--max-memory", "lots"], ["--max-memory"]),
    "--threads 0": (["--threads", 0], ["--threads"]),
    "unknown option": (["--frobnicate"], ["--frobnicate"]),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_bad_option(case, work):
    options, words = OPTIONS[case]
    write_hf(work / "hf")
    refuse(work, work / "hf", words, *options)


@pytest.mark.parametrize("command, wanted", [("digest", "--output"), ("diff", "--html")])
def test_overwrite_without_a_file(command, wanted, work):
    write_hf(work / "hf")
    done = ferry(command, *[work / "hf"] * (1 + (command == "diff")), "--overwrite")
    assert done.returncode == 2 and wanted in done.stderr


def test_a_file_above_the_limit_of_the_shell_is_an_error(work):
    write_hf(work / "hf")
    done = subprocess.run(["bash", "-c", f"ulimit -f 8; exec {FERRY} convert {work}/hf {work}/out --to hf"], capture_output=True, text=True,
                          preexec_fn=lambda: signal.signal(signal.SIGXFSZ, signal.SIG_DFL))
    assert done.returncode == 2 and "File too large" in done.stderr
    assert not (work / "out").exists()


def test_bad_shard_size(work):
    refuse(work, DATA / "llama_tp1", ["--max-shard-size"], "--hf-config", DATA / "hf_llama/hf", "--max-shard-size", "5 parrots")


def test_source_that_does_not_exist(work):
    refuse(work, work / "nowhere", ["nowhere"])


def test_source_that_is_no_checkpoint(work):
    (work / "empty").mkdir()
    refuse(work, work / "empty", ["empty"])
    (work / "file").write_bytes(b"text")
    refuse(work, work / "file", ["file"])


@pytest.mark.parametrize("target", ["hf", "hf/", "hf/../hf", "link", "hf/inside"])
def test_source_equal_to_target(target, work):
    write_hf(work / "hf")
    (work / "link").symlink_to("hf")
    before = tree(work / "hf")
    for options in ([], ["--overwrite"], ["--resume"]):
        done = ferry("convert", work / "hf", f"{work}/{target}", *options)
        assert done.returncode == 2 and "error:" in done.stderr, done.stderr
        assert tree(work / "hf") == before, "the source was changed"


def test_target_that_exists_is_left_alone(work):
    write_hf(work / "hf")
    done = ferry("convert", work / "hf", work / "megatron", "--tp", 2)
    before = tree(work / "megatron")
    done = ferry("convert", work / "hf", work / "megatron", "--tp", 1)
    assert done.returncode == 2 and "--overwrite" in done.stderr, done.stderr
    assert tree(work / "megatron") == before
    (work / "notes").mkdir()
    (work / "notes/todo").write_text("keep me")
    done = ferry("convert", work / "megatron", work / "notes")
    assert done.returncode == 2 and tree(work / "notes").keys() == {"todo"}, done.stderr


def test_missing_arguments_are_a_usage_error():
    for arguments in ([], ["convert"], ["convert", "a"], ["frobnicate"], ["verify", "a"], ["inspect"], ["digest"]):
        done = ferry(*arguments)
        assert done.returncode == 2 and done.stderr, arguments


def test_json_reports_an_error_with_its_kind(work):
    write_hf(work / "hf")
    (work / "hf/config.json").unlink()
    done = ferry("convert", work / "hf", work / "out", "--json")
    assert done.returncode == 2
    assert "config.json" in json.dumps(json.loads(done.stdout or done.stderr))


def test_output_that_nobody_reads(work):
    """A closed pipe is no reason to end by a signal with a checkpoint half written."""
    write_hf(work / "hf")
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([FERRY, "inspect", work / "hf"], stdout=write, stderr=subprocess.DEVNULL, restore_signals=False, timeout=30)
    os.close(write)
    assert done.returncode in (0, 2)
