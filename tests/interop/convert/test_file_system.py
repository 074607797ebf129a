"""Files that change, links, folders of others, permissions: no mixed model, nothing of anybody else's lost or given away."""
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from support import FERRY, ferry, llama_config, llama_shapes, random_tensors, run_ok, safetensors_bytes, sha256, tree, write_hf

WIDE = llama_config(hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8,
                    vocab_size=4000)
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same model with other numbers, twice, in Hugging Face's form and in Megatron's."""
    folder = tmp_path_factory.mktemp("sources")
    for name, seed in (("a", 1), ("b", 2)):
        write_hf(folder / name, WIDE, random_tensors(llama_shapes(WIDE), seed), shards=3)
        run_ok("convert", folder / name, folder / f"{name}-megatron", "--tp", 2)
    yield folder
    shutil.rmtree(folder)


def refused(*arguments, says):
    done = run_ok(*arguments, code=2)
    for word in [says] if isinstance(says, str) else says:
        assert str(word) in done.stderr, done.stderr
    assert "/proc/self" not in done.stderr, done.stderr
    return done


# --------------------------------------------------------------------------------------- a source that changes meanwhile


def stopped_while_copying(source, target, *options):
    """A run that has copied something, and stands still."""
    run = subprocess.Popen([FERRY, "convert", source, target, "--threads", "1", *options], stdout=subprocess.DEVNULL,
                           stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 30
    while time.monotonic() < until and run.poll() is None:
        if any(p.stat().st_size > 100 for p in target.parent.rglob(".*.ferry/journal")):
            run.send_signal(signal.SIGSTOP)
            return run
    run.kill()
    pytest.fail(f"was over before it could be stopped: {run.communicate()[1]}")


def rename_over(a, b):
    last = sorted(a.glob("*.safetensors"))[-1]
    os.replace(b / last.relative_to(a), last)


def rewrite_in_place(a, b):
    last = sorted([*a.glob("*.safetensors"), *a.rglob("*.distcp")])[-1]
    times = last.stat()
    with open(last, "r+b") as file:
        file.write((b / last.relative_to(a)).read_bytes())
    os.utime(last, ns=(times.st_atime_ns, times.st_mtime_ns))  # only ctime tells


def exchange_folders(a, b):
    a.rename(a.with_name("away"))
    b.rename(a)


def exchange_tokenizer(a, b):
    (b / "tokenizer.json").write_text('{"of": "another model"}')
    os.replace(b / "tokenizer.json", a / "tokenizer.json")


CHANGES = [("", change) for change in (rename_over, rewrite_in_place, exchange_folders, exchange_tokenizer)]
CHANGES += [("-megatron", change) for change in (rewrite_in_place, exchange_folders)]


@pytest.mark.parametrize("form, change", CHANGES)
def test_a_source_that_changes_publishes_nothing(form, change, sources, work):
    for name in "ab":
        shutil.copytree(sources / f"{name}{form}", work / name)
    run = stopped_while_copying(work / "a", work / "out")
    change(work / "a", work / "b")
    run.send_signal(signal.SIGCONT)
    errors = run.communicate(timeout=60)[1]
    assert run.returncode == 2 and ("replaced by another file" in errors or "changed by someone" in errors), errors
    assert not [p for p in (work / "out", work / "out/release") if (p / "config.json").exists() or (p / ".metadata").exists()]


# ------------------------------------------------------------------------------------------------------------ overwrite


def litter(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")


@pytest.mark.parametrize("to, name", [("hf", "thesis.tex"), ("hf", "src/a.c"), ("hf", "checkpoint-500/model.safetensors"),
                                      ("hf", "adapter_model.safetensors"), ("hf", ".git/HEAD"), ("megatron", "mine/notes"),
                                      ("megatron", "ferry/hf/notes"), ("megatron", "__0_0.distcp.orig"), ("h5", "notes"),
                                      ("h5", "model.safetensors")])
def test_overwrite_refuses_what_no_conversion_writes(to, name, work):
    write_hf(work / "hf")
    run_ok("convert", work / "hf", work / "out", "--to", to)
    target = work / "out/release" if to == "megatron" else work / "out"
    litter(target / name)
    before = tree(work / "out")
    refused("convert", work / "hf", work / "out", "--to", to, "--overwrite", says=[target, name.split("/")[0], "not overwritten"])
    assert tree(work / "out") == before
    refused("convert", work / "hf", work / "out", "--to", to, "--overwrite", "--dry-run", says=name.split("/")[0])


def test_overwrite_refuses_a_project_with_a_config(work):
    write_hf(work / "hf")
    (work / "proj").mkdir()
    (work / "proj/config.json").write_text('{"port": 8080}')
    refused("convert", work / "hf", work / "proj", "--to", "hf", "--overwrite", says="holds no weights")
    (work / "proj/model.safetensors").write_bytes(safetensors_bytes({}))
    refused("convert", work / "hf", work / "proj", "--to", "hf", "--overwrite", says="config.json of a model")
    assert (work / "proj/config.json").read_text() == '{"port": 8080}'


def test_overwrite_refuses_another_kind_of_checkpoint(work):
    write_hf(work / "hf")
    run_ok("convert", work / "hf", work / "out", "--to", "h5")
    refused("convert", work / "hf", work / "out", "--to", "hf", "--overwrite", says="weights.h5")


def test_overwrite_refuses_weights_that_another_program_called_so(work):
    write_hf(work / "hf")
    (work / "keras").mkdir()
    (work / "keras/weights.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(2000))
    before = tree(work / "keras")
    for options in ([], ["--dry-run"]):
        refused("convert", work / "hf", work / "keras", "--to", "h5", "--overwrite", *options,
                says="weights.h5, which is no file of an archive")
    assert tree(work / "keras") == before


# ------------------------------------------------------------------------------------------------------- working folder


def victim_of(work):
    litter(work / "victim/letter")
    litter(work / "victim/output/letter")
    return tree(work / "victim")


def test_a_link_in_place_of_the_working_folder(work):
    write_hf(work / "hf")
    before = victim_of(work)
    (work / ".o.ferry").symlink_to("victim")
    for options in ([], ["--resume"]):
        refused("convert", work / "hf", work / "o", "--to", "hf", *options, says=[work / ".o.ferry", "symbolic link"])
    assert tree(work / "victim") == before and not (work / "o").exists()


@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_a_working_folder_of_somebody_else(options, work):
    write_hf(work / "hf")
    folder = work / ".o.ferry"
    convert = ["convert", work / "hf", work / "o", "--to", "hf", *options]
    folder.mkdir()
    folder.chmod(0o777)
    refused(*convert, says=[folder, "can be written by other users"])
    folder.chmod(0o755)
    litter(folder / "letter")
    refused(*convert, says=[folder, "was not made by ferry"])
    (folder / "letter").unlink()
    if os.geteuid() == 0:
        os.chown(folder, 1234, 1234)
        refused(*convert, says=[folder, "belongs to another user"])
        os.chown(folder, 0, 0)
    run_ok(*convert)  # an empty one of this user's is taken
    assert tree(work / "o") == tree(work / "hf") and not folder.exists()


@pytest.mark.parametrize("name", ["letter", "output/letter", "output/deep/letter"])
def test_files_of_the_user_in_a_working_folder(name, sources, work):
    """Files that an interrupted run has left go, others that lie there do not."""
    run = stopped_while_copying(sources / "a", work / "o", "--to", "hf")
    run.kill()
    run.communicate()
    litter(work / ".o.ferry" / name)
    for options in ([], ["--resume"]):
        refused("convert", sources / "a", work / "o", "--to", "hf", *options, says=[work / ".o.ferry" / name, "was not made by ferry"])
        assert (work / ".o.ferry" / name).read_text() == "mine"
    (work / ".o.ferry" / name).unlink()
    run_ok("convert", sources / "a", work / "o", "--to", "hf")
    assert tree(work / "o") == tree(sources / "a")


def test_a_working_folder_that_is_exchanged_meanwhile(sources, work):
    """The published files are those that were written and proved, wherever the name leads by then."""
    run = stopped_while_copying(sources / "a", work / "o", "--to", "hf")
    assert stat.S_IMODE((work / ".o.ferry").stat().st_mode) == 0o700
    (work / ".o.ferry").rename(work / "away")
    shutil.copytree(work / "away", work / ".o.ferry")
    litter(work / ".o.ferry/output/config.json")
    run.send_signal(signal.SIGCONT)
    errors = run.communicate(timeout=60)[1]
    assert run.returncode == 0, errors
    assert tree(work / "o") == tree(sources / "a")
    assert (work / ".o.ferry/output/config.json").read_text() == "mine"


# --------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_damaged_bytes_in_a_working_folder_are_made_anew(to, sources, work):
    run = stopped_while_copying(sources / "a", work / "o", "--to", to)
    run.kill()
    run.communicate()
    for path in work.rglob("*.ferry/output/*"):
        if path.is_file() and path.stat().st_size > 1 << 16:
            with open(path, "r+b") as file:
                file.write(bytes(path.stat().st_size))
    done = run_ok("convert", sources / "a", work / "o", "--to", to, "--resume", "--json")
    assert json.loads(done.stdout)["redone"]
    run_ok("verify", sources / "a", work / "o")


# ----------------------------------------------------------------------------------------------- before the first byte


def no_leftovers(work, *names):
    assert sorted(p.name for p in work.iterdir()) == sorted(names)


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_target_that_is_a_link_to_nothing(dry, work):
    write_hf(work / "hf")
    (work / "o").symlink_to("nowhere")
    for to in ("hf", "megatron"):
        refused("convert", work / "hf", work / "o", "--to", to, *dry, says=[work / "o", "nowhere"])
    no_leftovers(work, "hf", "o")


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_companions_that_are_too_large_for_an_archive(dry, work):
    write_hf(work / "hf")
    with open(work / "hf/large.txt", "wb") as file:
        file.truncate(300 << 20)
    refused("convert", work / "hf", work / "o", "--to", "h5", *dry, says=["large.txt", "256 MiB"])
    no_leftovers(work, "hf")


def test_large_companions_are_streamed(work):
    """There and back with two of 48 MB, in 56 MB of memory."""
    import resource
    write_hf(work / "hf")
    for i in range(2):
        with open(work / f"hf/large{i}.txt", "wb") as file:
            file.truncate(48 << 20)
            file.seek(i << 20)
            file.write(b"here")
    limit = lambda: resource.setrlimit(resource.RLIMIT_DATA, (56 << 20, 56 << 20))
    for source, target in (("hf", "megatron"), ("megatron", "back")):
        run_ok("convert", work / source, work / target, "--max-memory", "16MiB", "--threads", 1, preexec_fn=limit)
    assert tree(work / "back") == tree(work / "hf")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_companion_that_cannot_be_read(work):
    write_hf(work / "hf")
    (work / "hf/tokenizer.json").chmod(0)
    for dry in ([], ["--dry-run"]):
        refused("convert", work / "hf", work / "o", *dry, says="tokenizer.json")
    no_leftovers(work, "hf")


# ---------------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("to", ["hf", "megatron", "h5"])
def test_companions_that_are_links(to, work):
    write_hf(work / "hf")
    litter(work / "secret")
    convert = ["convert", work / "hf", work / "o", "--to", to]
    (work / "hf/vocab.txt").symlink_to(work / "secret")
    refused(*convert, says=["vocab.txt", work / "secret", "--follow-symlinks"])
    no_leftovers(work, "hf", "secret")
    run_ok(*convert, "--follow-symlinks")
    shutil.rmtree(work / "o")
    (work / "hf/vocab.txt").unlink()
    (work / "hf/vocab.txt").symlink_to("nowhere")
    for options in ([], ["--follow-symlinks"]):
        refused(*convert, *options, says=["vocab.txt", "nowhere"])
    (work / "hf/vocab.txt").unlink()
    (work / "hf/vocab.txt").symlink_to("tokenizer.json")  # inside
    run_ok(*convert)


def test_a_sidecar_that_leads_outside(work):
    write_hf(work / "hf")
    litter(work / "secret")
    run_ok("convert", work / "hf", work / "m")
    sidecar = work / "m/release/ferry"
    data = (sidecar / "hf/tokenizer.json").read_bytes()
    (work / "elsewhere").write_bytes(data)  # so that its digest is right
    (sidecar / "hf/tokenizer.json").unlink()
    (sidecar / "hf/tokenizer.json").symlink_to(work / "elsewhere")
    refused("convert", work / "m", work / "o", says=["tokenizer.json", work / "elsewhere"])
    (sidecar / "hf/tokenizer.json").unlink()
    (sidecar / "hf/tokenizer.json").write_bytes(data)
    (sidecar / "hf").rename(work / "hf-files")
    (sidecar / "hf").symlink_to(work / "hf-files")
    refused("convert", work / "m", work / "o", says=[work / "hf-files"])


def test_blobs_of_a_cache_are_inside_and_those_of_others_outside(work):
    write_hf(work / "plain")
    for link, good in (("../../blobs/x", True), ("../../../other/blobs/x", False), ("../../refs/x", False)):
        base = work / "models--a--b"
        snapshot = base / "snapshots/0123"
        shutil.copytree(work / "plain", snapshot)
        litter((snapshot / link).resolve())
        (snapshot / "vocab.txt").symlink_to(link)
        done = ferry("convert", snapshot, work / "o", "--to", "hf")
        assert (done.returncode == 0) == good, (link, done.stderr)
        for folder in (base, work / "o", work / "other"):
            shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------- temporary names, files that are there


def test_temporary_names_are_not_followed(work):
    write_hf(work / "hf")
    litter(work / "victim")
    (work / "manifest.ferry-tmp").symlink_to("victim")
    run_ok("digest", work / "hf", "--output", work / "manifest")
    (work / "m").mkdir()
    (work / f"m/{TRACKER}.ferry-tmp").symlink_to("../victim")
    run_ok("convert", work / "hf", work / "m")
    assert (work / "victim").read_text() == "mine"
    assert (work / "m" / TRACKER).read_text() == "release"


@pytest.mark.parametrize("command", [["digest", "hf", "--output"], ["diff", "hf", "hf", "--html"]])
def test_a_report_replaces_only_reports(command, work):
    write_hf(work / "hf")
    arguments = [work / a if a == "hf" else a for a in command]
    weights = sha256((work / "hf/model.safetensors").read_bytes())
    refused(*arguments, work / "hf/model.safetensors", says=["model.safetensors", "--overwrite"])
    assert sha256((work / "hf/model.safetensors").read_bytes()) == weights
    litter(work / "letter")
    (work / "link").symlink_to("letter")
    for name in ("letter", "link"):
        refused(*arguments, work / name, says=[name, "--overwrite"])
    refused(*arguments, work / "hf", says="not a file")
    run_ok(*arguments, work / "link", "--overwrite")
    assert (work / "letter").read_text() == "mine"
    run_ok(*arguments, work / "link")  # a report of ours by now
    run_ok(*arguments, work / "letter", "--overwrite")
    assert (work / "letter").read_text() != "mine"


# ---------------------------------------------------------------------------------------------------------- permissions


@pytest.mark.parametrize("to", ["hf", "megatron", "h5"])
@pytest.mark.parametrize("file_mode, folder_mode", [(0o600, 0o700), (0o640, 0o750), (0o644, 0o755), (0o444, 0o555)])
def test_permissions_are_never_wider(to, file_mode, folder_mode, work):
    source = work / "hf"
    write_hf(source)
    for path in source.iterdir():
        path.chmod(file_mode)
    source.chmod(folder_mode)
    try:
        run_ok("convert", source, work / "deep/o", "--to", to)
    finally:
        source.chmod(0o755)
    for path in (work / "deep").rglob("*"):
        mode, most = stat.S_IMODE(path.stat().st_mode), folder_mode | 0o700 if path.is_dir() else file_mode
        assert mode & ~most == 0, f"{path}: {mode:o}, the source has {most:o}"
    if file_mode == 0o644:
        assert stat.S_IMODE((work / "deep").stat().st_mode) == 0o755
