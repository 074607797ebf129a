"""The command line refuses, and says so: options without effect, unknown words, names that act on a terminal
or in a shell, memory that runs out."""
import json
import os
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess

import pytest

from support import DATA, FERRY, ferry, llama_config, refuse, run_ok, safetensors_bytes, tree, write_hf

MEGATRON = DATA / "llama_tp2pp2"
HF = DATA / "hf_llama/hf"


# ---------------------------------------------------------------------------------------------- options without effect

LAYOUT = [["--tp", "2"], ["--pp", "2"], ["--vpp", "2"], ["--ep", "2"], ["--etp", "1"], ["--make-vocab-size-divisible-by", "64"],
          ["--num-layers-in-first-pipeline-stage", "1"], ["--num-layers-in-last-pipeline-stage", "1"],
          ["--account-for-embedding-in-pipeline-split"], ["--account-for-loss-in-pipeline-split"],
          ["--pipeline-model-parallel-layout", "Et*4L"]]


@pytest.mark.parametrize("target", [["--to", "hf"], ["--to", "h5"], []], ids=["hf", "h5", "default"])
@pytest.mark.parametrize("option", LAYOUT, ids=lambda o: o[0].strip("-"))
def test_a_layout_of_files_that_are_none_of_megatrons(option, target, work):
    refuse("convert", MEGATRON, work / "out", *target, *option, words=[option[0], "no effect", "--to megatron"])
    assert not list(work.iterdir())


@pytest.mark.parametrize("source, options, word", [
    (HF, ["--max-shard-size", "1MB"], "--max-shard-size"),
    (HF, ["--no-save-optim"], "--no-save-optim"),
    (MEGATRON, ["--no-save-optim"], "--no-save-optim"),
    (HF, ["--to", "hf", "--iteration", "5"], "--iteration"),
    (HF, ["--dry-run", "--resume"], "--resume"),
    (HF, ["--to", "hf", "--keep-fp8"], "--keep-fp8"),
    (MEGATRON, ["--to", "h5", "--keep-fp8"], "--keep-fp8"),
], ids=["shards_of_megatron", "optimizer_of_hf", "optimizer_to_hf", "iteration_of_hf", "resumed_dry_run", "no_fp8", "no_fp8_of_megatron"])
def test_other_options_without_effect(source, options, word, work):
    refuse("convert", source, work / "out", *options, words=[word, "no effect"])
    assert not list(work.iterdir())


def test_options_that_exclude_each_other(work):
    refuse("diff", HF, HF, "--sort", "changed", "--json", words=["--sort", "--json", "ferry diff --help"])
    (work / "metrics.jsonl").write_text('{"step": 1, "data": {"x": 1.0}}\n')
    for option in (["--json"], ["--step", "1"], ["-o", "page.html"], ["--samples", "s"]):
        refuse("report", work, "--curve", "x", "--svg", work / "x.svg", *option, words=["--curve"])
    assert not (work / "x.svg").exists()


@pytest.mark.parametrize("kind", ["hf", "iteration", "archive"])
def test_a_checkpoint_is_not_hidden_by_an_iteration_in_it(kind, work):
    if kind == "hf":
        shutil.copytree(HF, work / "there")
    elif kind == "iteration":
        shutil.copytree(MEGATRON / "iter_0000010", work / "there")
    else:
        run_ok("convert", HF, work / "there", "--to", "h5")
    before = tree(work / "there")
    refuse("convert", HF, work / "there", "--to", "megatron", words=["there: ", "release", "hide"])
    assert tree(work / "there") == before
    assert sorted(p.name for p in work.iterdir()) == ["there"]


# ------------------------------------------------------------------------------------------------- which file is loaded


def test_a_single_file_beside_an_index_is_what_transformers_loads(work):
    write_hf(work / "hf", shards=3)
    write_hf(work / "other", seed=1)
    shutil.copy(work / "other/model.safetensors", work / "hf")
    for command in (["convert", work / "hf", work / "out"], ["verify", work / "hf", work / "hf"], ["digest", work / "hf"]):
        refuse(*command, words=["model.safetensors", "model.safetensors.index.json", "transformers"])


def test_an_index_of_the_single_file(work):
    write_hf(work / "hf")
    header = json.loads((work / "hf/model.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    index = {"metadata": {}, "weight_map": {n: "model.safetensors" for n in header if n != "__metadata__"}}
    (work / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    run_ok("convert", work / "hf", work / "out")


def test_weights_that_the_configuration_names(work):
    write_hf(work / "hf", config=llama_config(transformers_weights="other.safetensors"))
    refuse("convert", work / "hf", work / "out", words=["transformers_weights", "other.safetensors"])
    (work / "hf/model.safetensors").rename(work / "hf/other.safetensors")
    run_ok("convert", work / "hf", work / "out")


# ----------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("words, expected", [
    (["convrt", "a", "b"], ["convrt", "did you mean convert?", "ferry --help"]),
    (["frobnicate"], ["frobnicate", "convert, inspect", "see ferry --help"]),
    ([], ["see ferry --help"]),
    (["verify", "a"], ["see ferry verify --help"]),
    (["digest", "--bogus", "a"], ["--bogus", "see ferry digest --help"]),
    (["convert", HF, "out", "--max-memory", "lots"], ["--max-memory lots", "see ferry convert --help"]),
], ids=lambda w: "_".join(map(str, w[:1])) or None)
def test_what_was_meant_and_where_to_look(words, expected):
    refuse(*words, words=expected)


@pytest.mark.parametrize("model, options, expected", [
    ("llama", ["--tp", "3"], "possible: --tp 1, 2, 4\n"),
    ("mixtral", ["--ep", "3"], "possible: --ep 1, 2, 4\n"),
    ("mixtral", ["--etp", "7"], "possible: --etp 1, 2, 3, 4, 6, 8, 12, 16, 24, 48\n"),
], ids=["tp", "ep", "etp"])
def test_a_size_that_does_not_divide_names_those_that_do(model, options, expected, work):
    done = refuse("convert", DATA / f"hf_{model}/hf", work / "out", *options, words=["cannot be split so"])
    assert done.endswith(expected), done
    for size in expected.split("--")[1].split(" ", 1)[1].strip().split(", "):
        run_ok("convert", DATA / f"hf_{model}/hf", work / "out", options[0], size, "--dry-run")


def test_a_hint_that_is_pasted_runs_nothing_else(work):
    folder = work / "m$(touch PWN)`touch PWN`';touch PWN;'"
    folder.mkdir()
    (folder / "config.json").write_bytes((HF / "config.json").read_bytes())
    # The format before torch 1.6 begins with its magic number.
    (folder / "pytorch_model.bin").write_bytes(bytes.fromhex("80028a0a6cfc9c46f9206aa85019") + b"\x80\x02" * 20)
    said = refuse("convert", folder, work / "out", words=["python3 -c"])
    command = "python3 -c" + said.split("python3 -c")[1].split("\n")[0]
    assert shlex.split(command)[-1] == str(folder / "pytorch_model.bin")
    subprocess.run(["bash", "-c", command.replace("python3 -c", "echo", 1)], cwd=work, stdout=subprocess.DEVNULL, check=True)
    assert not (work / "PWN").exists()


def test_names_do_nothing_to_a_terminal(work):
    name = "model.\x1b[2J\x1b]0;title\x07\nerror: \u202e" + "n" * 1_000_000
    write_hf(work / "hf", companions={})
    (work / "hf/model.safetensors").write_bytes(safetensors_bytes({name: ("BF16", (2,), b"1234")}))
    for command in (["convert", work / "hf", work / "out"], ["inspect", work / "hf"]):
        done = ferry(*command)
        said = done.stdout + done.stderr
        assert "\x1b" not in said and "\x07" not in said and "\u202e" not in said
        assert "\\x1b[2J" in said and len(said) < 20_000
    done = ferry("convert", work / "hf", work / "out", "--json")
    assert json.loads(done.stdout)["error"]["kind"] == "layout"


def test_paths_that_are_not_utf_8(work):
    folder = os.fsencode(work) + b"/h\xff"
    shutil.copytree(os.fsencode(HF), folder)
    done = subprocess.run([FERRY, b"inspect", folder, b"--json"], stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout)["path"].endswith("h\ufffd")
    done = subprocess.run([FERRY, b"convert", folder + b"x", b"out", b"--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["kind"] == "not_found"
    assert b"h\\xffx: is not there" in done.stderr


def test_what_the_system_refuses_names_the_path(work):
    (work / "loop").symlink_to(work / "loop")
    assert "loop: cannot be examined: Too many levels" in refuse("inspect", work / "loop")
    assert "File name too long" in refuse("inspect", work / ("n" * 300))
    for path in (work / "loop", work / ("n" * 300)):
        assert "filesystem error" not in refuse("convert", HF, path)


@pytest.mark.parametrize("lost, words", [
    ("weights-00001-of-00003.h5", ["weights-00001-of-00003.h5", "missing"]),
    ("weights-00003-of-00003.h5", ["weights-00003-of-00003.h5", "missing"]),
])
def test_a_missing_file_of_an_archive_is_named(lost, words, work):
    run_ok("convert", HF, work / "archive", "--to", "h5", "--max-shard-size", "40KB")
    assert sorted(p.name for p in (work / "archive").iterdir())[-1] == "weights-00003-of-00003.h5"
    (work / "archive" / lost).unlink()
    refuse("inspect", work / "archive", words=words)


def test_missing_shards_are_said_as_such(work):
    write_hf(work / "hf", shards=3)
    (work / "hf/model.safetensors.index.json").unlink()
    refuse("inspect", work / "hf", words=["3 safetensors files", "incomplete"])
    for i in (1, 3):
        (work / f"hf/model-0000{i}-of-00003.safetensors").unlink()
    refuse("inspect", work / "hf", words=["model-00002-of-00003.safetensors alone", "incomplete"])
    shutil.copytree(MEGATRON, work / "megatron")
    (work / "megatron/iter_0000010/.metadata").unlink()
    refuse("inspect", work / "megatron", words=["iter_0000010/.metadata"])
    refuse("inspect", work / "megatron/iter_0000010", words=["iter_0000010/.metadata"])


@pytest.mark.parametrize("arguments, words", [
    (["inspect", ""], '"": names no checkpoint'),
    (["convert", "", "OUT"], '"": names no checkpoint'),
    (["convert", HF, ""], '"": names no target'),
    (["delta", "make", HF, HF, ""], '"": names no target'),
    (["digest", HF, "--output", ""], "--output: is empty"),
    (["digest", HF, "--check", ""], "--check: is empty"),
    (["diff", HF, HF, "--html", ""], "--html: is empty"),
    (["inspect", MEGATRON, "--iteration", ""], '--iteration : is neither a number nor "release"'),
    (["inspect", MEGATRON, "--hf-config", ""], "--hf-config: is empty"),
    (["verify", HF, HF, "--left-iteration", "x"], '--left-iteration x: is neither a number nor "release"'),
    (["convert", HF, "OUT", "--max-memory", "0.5"], "--max-memory 0.5: is not a size"),
    (["plan", "--ranks", "0"], "--ranks: Value 0 not in range 1 to 1000000"),
], ids=lambda value: " ".join(map(str, value[-2:])) if isinstance(value, list) else "")
def test_a_value_that_says_nothing(arguments, words, work):
    refuse(*(work / "out" if one == "OUT" else one for one in arguments), words=[words])
    assert not list(work.iterdir())


# ------------------------------------------------------------------------------------------------------ standard files


def shell(*arguments, to):
    command = f"exec {' '.join(shlex.quote(str(one)) for one in (FERRY, *arguments))} {to}"
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("to", [">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_a_conversion_needs_no_standard_files(to, work):
    assert shell("convert", HF, work / "out", "--tp", "1", to=to).returncode == 0
    run_ok("verify", HF, work / "out")
    assert shell("inspect", work / "nothing", to=to).returncode == 2


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_an_answer_that_cannot_be_written_is_trouble(options, work):
    done = shell("inspect", HF, *options, to=">/dev/full")
    assert done.returncode == 2 and re.fullmatch(r"error: .*: No space left on device\n(hint: the command was carried out.*\n)?", done.stderr)


def test_a_conversion_whose_report_cannot_be_written_says_that_it_is_published(work):
    done = shell("convert", HF, work / "out", "--to", "hf", "-q", "--json", to=">/dev/full")
    assert done.returncode == 2 and "hint: the command was carried out, its answer alone is lost: a target is published" in done.stderr
    run_ok("verify", HF, work / "out")


def test_a_delta_that_cannot_be_written_is_called_by_its_name(work):
    def allow_short_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    refuse("delta", "make", HF, HF, work / "delta", words=[f"{work}/.delta.ferry/output/ferry-delta.json"], preexec_fn=allow_short_files)
    assert not list(work.iterdir())


# ------------------------------------------------------------------------------------------------------------- memory


def limited(mebibytes):
    size = mebibytes << 20
    return dict(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size)), timeout=60)


def test_a_header_of_numbers_is_refused_in_little_memory(work):
    write_hf(work / "hf", companions={})
    text = b'{"a":[' + b"0," * 45_000_000 + b"0]}"
    (work / "hf/model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    for command in (["inspect", work / "hf"], ["convert", work / "hf", work / "out"]):
        refuse(*command, words=["model.safetensors", "memory"], **limited(700))
    assert "out of memory" in refuse("inspect", work / "hf", **limited(250))


@pytest.mark.parametrize("mebibytes", [24, 32, 44, 50, 56, 60, 96, 160])
def test_want_of_memory_is_an_error_wherever_it_strikes(mebibytes, work):
    """Also while something is taken down, and in threads."""
    entry = {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}
    for i, text in enumerate((json.dumps([{}] * 200_000), json.dumps({f"t{i}": entry for i in range(20_000)}))):
        write_hf(work / f"hf{i}", companions={})
        (work / f"hf{i}/model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text.encode())
        assert "error: " in refuse("inspect", work / f"hf{i}", **limited(mebibytes))
    for target, published in (("megatron", "megatron/release"), ("h5", "h5")):
        done = ferry("convert", HF, work / target, "--to", target, "--threads", "8", **limited(mebibytes))
        assert done.returncode in (0, 2) and ("error: " in done.stderr) == (done.returncode == 2)
        assert (work / published).exists() == (done.returncode == 0)


# -------------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("options, expected", [([], " 1 thread,"), (["--threads", "3"], " 3 threads,")])
def test_threads_are_as_many_as_the_cores_that_the_process_may_use(options, expected, work):
    core = {min(os.sched_getaffinity(0))}
    done = run_ok("convert", HF, work / "out", *options, "--dry-run", preexec_fn=lambda: os.sched_setaffinity(0, core))
    assert expected in done.stdout, done.stdout


# ------------------------------------------------------------------------------------------------------ shared libraries

@pytest.mark.parametrize("name", ["ferry", "ferry-torch"])
def test_a_program_needs_no_shared_library_of_fmt_or_json(name):
    """It runs where they are not installed."""
    program = FERRY.parent / name
    if not program.exists():
        pytest.skip(f"{name} is not built")
    dynamic = subprocess.run(["readelf", "--dynamic", "--wide", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    libraries = re.findall(r"\(NEEDED\).*\[([^\]]+)\]", dynamic)
    assert "libc.so.6" in libraries
    assert [library for library in libraries if re.search("fmt|json|tomlplusplus|CLI11|curl", library)] == []
