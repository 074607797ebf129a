"""Runs that are killed, run out of space, or meet another run: the target is the old checkpoint, the new one, or none."""
import copy
import os
import random
import shutil
import signal
import subprocess
import time

import pytest

from support import DATA, FERRY, Mounted, ferry, llama_config, llama_shapes, peak_kib, random_tensors, run_ok, tree, write_hf
from tiny_models import make_hf, make_wrapped

LARGE = llama_config(hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=8,
                     vocab_size=8000)
TRACKER = "latest_checkpointed_iteration.txt"


EXPERTS = {**llama_config(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
                          vocab_size=4000), "model_type": "mixtral", "num_local_experts": 16, "num_experts_per_tok": 2}
EXPERTS["architectures"] = ["MixtralForCausalLM"]


def expert_shapes(config):
    """The dense model's, with experts in place of each layer's feed-forward."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    shapes = {name: shape for name, shape in llama_shapes(config).items() if ".mlp." not in name}
    for i in range(config["num_hidden_layers"]):
        moe = f"model.layers.{i}.block_sparse_moe."
        shapes[moe + "gate.weight"] = (config["num_local_experts"], hidden)
        for e in range(config["num_local_experts"]):
            shapes |= {f"{moe}experts.{e}.w{w}.weight": (hidden, ffn) if w == 2 else (ffn, hidden) for w in (1, 2, 3)}
    return shapes


FAMILIES = {  # larger sizes of tiny models, and a layout for them
    "qwen3_5_moe": (dict(hidden_size=256, moe_intermediate_size=512, num_experts=24, vocab_size=4000), ["--tp", "2", "--pp", "3", "--ep", "2", "--etp", "1"]),
    "gpt_oss": (dict(hidden_size=256, intermediate_size=512, num_local_experts=32, vocab_size=4000), ["--tp", "2", "--pp", "3", "--ep", "2", "--etp", "1"]),
    "nemotron_h": (dict(hidden_size=512, intermediate_size=8192, moe_intermediate_size=512, moe_latent_size=256, n_routed_experts=48, vocab_size=8000),
                   ["--tp", "2", "--ep", "2", "--etp", "1"]),
    "qwen2_5_vl": (dict(hidden_size=512, intermediate_size=12288, vocab_size=8000,
                        vision=dict(depth=6, hidden_size=240, intermediate_size=1024, num_heads=6, out_hidden_size=512)),
                   ["--tp", "2", "--pp", "2", "--megatron-layout", "mbridge"]),
}


def make_family(name, folder):
    """The larger model in folder/hf, in three files; gpt_oss in MXFP4 in folder/mxfp4, and its weights in bf16 in folder/hf, in one."""
    sizes, _ = FAMILIES[name]
    if name == "qwen2_5_vl":
        make_wrapped(name, str(folder / "made/hf"), **sizes)
    else:
        make_hf(name, str(folder / "made"), **sizes)
    made = folder / "made/hf"
    if name == "gpt_oss":
        run_ok("convert", made, folder / "mxfp4", "--to", "hf", "--quantize", "mxfp4")
        run_ok("convert", folder / "mxfp4", folder / "hf", "--to", "hf")
    else:
        run_ok("convert", made, folder / "hf", "--to", "hf", "--max-shard-size", str((made / "model.safetensors").stat().st_size // 2))
    shutil.rmtree(folder / "made")


class Large:
    """A checkpoint of 50 to 120 MB in all formats, and how long each direction takes; `make` leaves it in folder/hf."""
    def __init__(self, folder, make, layout=("--tp", "2", "--pp", "2")):
        self.folder = folder
        make(folder)
        self.options = {"megatron": [*layout], "back": [], "archive": ["--to", "h5", "--max-shard-size", "10MB"],
                        "from_archive": []}
        self.source = {"megatron": folder / ("mxfp4" if (folder / "mxfp4").exists() else "hf"), "back": folder / "megatron", "archive": folder / "hf",
                       "from_archive": folder / "archive"}
        self.seconds = {}
        for way in self.options:
            started = time.monotonic()
            run_ok("convert", self.source[way], folder / way, *self.options[way])
            self.seconds[way] = time.monotonic() - started
        self.want = {way: tree(folder / way) for way in self.options}

    def start(self, way, target, *options):
        return subprocess.Popen([FERRY, "convert", self.source[way], target, *self.options[way], *options],
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    yield Large(folder, lambda folder: write_hf(folder / "hf", LARGE, random_tensors(llama_shapes(LARGE)), shards=3))
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    yield Large(folder, lambda folder: write_hf(folder / "hf", EXPERTS, random_tensors(expert_shapes(EXPERTS)), shards=3),
                ("--tp", "2", "--pp", "2", "--ep", "2", "--etp", "1"))
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """{family: its larger model}, each made when it is first asked for"""
    folder = tmp_path_factory.mktemp("families")

    class Made(dict):
        def __missing__(self, name):
            (folder / name).mkdir()
            self[name] = Large(folder / name, lambda to: make_family(name, to), FAMILIES[name][1])
            return self[name]
    yield Made()
    shutil.rmtree(folder)


@pytest.fixture
def model(request):
    """The larger model that a test names: large, experts or one of FAMILIES."""
    return request.getfixturevalue("families")[request.param] if request.param in FAMILIES else request.getfixturevalue(request.param)


def published(target):
    """True if a reader would take what lies there for a checkpoint."""
    return (target / TRACKER).exists() or (target / "config.json").exists() or bool(list(target.glob("weights*.h5")))


@pytest.mark.parametrize("model", ["large", "experts", *FAMILIES], indirect=True)
def test_there_and_back_of_a_larger_checkpoint(model):
    assert model.want["back"] == model.want["from_archive"] == tree(model.folder / "hf")


# ------------------------------------------------------------------------------------------------------------- killed


def killed_somewhere(large, way, target, share):
    run = large.start(way, target)
    time.sleep(share * large.seconds[way])
    run.kill()
    run.communicate()
    assert run.returncode in (0, -signal.SIGKILL)
    return run.returncode == 0


def interrupted(large, way, target, by=signal.SIGKILL):
    """Leaves a run that was stopped while it copied: nothing published, its working folder beside the target. Returns what it said."""
    there = target / "release" if way == "megatron" else target
    for _ in range(50):
        run = large.start(way, target)
        while run.poll() is None and not list(there.parent.glob(f".{there.name}.ferry/journal")):
            pass
        run.send_signal(by)
        said = run.communicate()[1]
        if not there.exists() and list(there.parent.glob(f".{there.name}.ferry/journal")):
            assert run.returncode == (-by if by == signal.SIGKILL else 2), said
            return said
        shutil.rmtree(target, ignore_errors=True)
    pytest.fail("every run was over before it was stopped")


KILLS = {"large": 12, "experts": 6, **dict.fromkeys(FAMILIES, 3)}


@pytest.mark.parametrize("model, kill", [(model, kill) for model, kills in KILLS.items() for kill in range(kills)], indirect=["model"])
def test_killed_and_resumed_gives_the_same_bytes(model, kill, work):
    large, way = model, ("megatron", "back", "archive")[kill % 3]
    share = random.Random(kill).uniform(0.05, 1.0)
    finished = killed_somewhere(large, way, work / "out", share)
    if published(work / "out"):
        there = {name: digest for name, digest in tree(work / "out").items() if ".ferry/" not in name}
        assert there == large.want[way], "killed, and a half checkpoint stands at the target"
    if not finished:
        run_ok("convert", large.source[way], work / "out", *large.options[way], "--resume")
    assert tree(work / "out") == large.want[way]
    assert [p.name for p in work.iterdir()] == ["out"], "something was left beside the target"


def test_killed_and_run_anew_gives_the_same_bytes(large, work):
    """Without --resume what a killed run left behind is in nobody's way."""
    interrupted(large, "megatron", work / "out")
    run_ok("convert", large.source["megatron"], work / "out", *large.options["megatron"])
    assert tree(work / "out") == large.want["megatron"]


def test_an_interruption_says_what_was_left_and_how_to_go_on(large, work):
    said = interrupted(large, "back", work / "out", signal.SIGINT)
    assert "error: interrupted" in said, said
    assert f"{work}/.out.ferry holds what was done" in said and "--resume" in said, said
    run_ok("convert", large.source["back"], work / "out", *large.options["back"], "--resume")
    assert tree(work / "out") == large.want["back"]


def test_resume_of_a_run_that_was_over_proves_it(large, work):
    run_ok("convert", large.source["megatron"], work / "out", *large.options["megatron"])
    run_ok("convert", large.source["megatron"], work / "out", *large.options["megatron"], "--resume")
    assert tree(work / "out") == large.want["megatron"]
    other = run_ok("convert", large.source["megatron"], work / "out", "--tp", 1, "--resume", code=2)
    assert "not what this run would write" in other.stderr
    weights = max((work / "out/release").glob("*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    run_ok("convert", large.source["megatron"], work / "out", *large.options["megatron"], "--resume", code=2)


def test_resume_after_publication_takes_the_last_steps(large, work):
    """Killed between the rename and the tracker: the folder is there, and the tracker and the cleaning up are not."""
    run_ok("convert", large.source["megatron"], work / "out", *large.options["megatron"])
    (work / "out" / TRACKER).unlink()
    left = work / "out/.release.ferry"
    left.mkdir(mode=0o700)
    (left / "ferry-work").write_text("ferry-work-1\n")
    status = (work / "out/release").stat()
    (left / "publishing").write_text(f"{status.st_dev} {status.st_ino}\n")
    done = run_ok("convert", large.source["megatron"], work / "out", *large.options["megatron"], code=2)
    assert "--resume" in done.stderr
    run_ok("convert", large.source["megatron"], work / "out", *large.options["megatron"], "--resume")
    assert tree(work / "out") == large.want["megatron"]


def test_resume_of_a_run_that_was_never_begun(large, work):
    run_ok("convert", large.source["back"], work / "out", "--resume")
    assert tree(work / "out") == large.want["back"]


def test_resume_with_another_layout_mixes_nothing(large, work):
    interrupted(large, "megatron", work / "out")
    done = ferry("convert", large.source["megatron"], work / "out", "--tp", 4, "--resume")
    if done.returncode:
        assert not published(work / "out")
        run_ok("convert", large.source["megatron"], work / "out", "--tp", 4)
    run_ok("convert", large.source["megatron"], work / "want", "--tp", 4)
    assert tree(work / "out") == tree(work / "want")


def test_resume_after_the_source_changed_mixes_nothing(large, work):
    shutil.copytree(large.folder / "hf", work / "hf")
    mine = copy.copy(large)
    mine.source = {"megatron": work / "hf"}
    interrupted(mine, "megatron", work / "out")
    for path in (work / "hf").glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        for at in range(len(data) // 2, len(data), 4096):
            data[at] ^= 1
        path.write_bytes(data)
    done = ferry("convert", work / "hf", work / "out", "--tp", 2, "--pp", 2, "--resume")
    if done.returncode:
        assert not published(work / "out")
        run_ok("convert", work / "hf", work / "out", "--tp", 2, "--pp", 2)
    run_ok("convert", work / "hf", work / "want", "--tp", 2, "--pp", 2)
    assert tree(work / "out") == tree(work / "want")


@pytest.mark.parametrize("way", ["megatron", "back", "archive"])
def test_resume_does_not_trust_bytes_that_a_crash_lost(way, large, work):
    """The log of a killed run says that pieces are written; after a loss of power the disk may say otherwise."""
    interrupted(large, way, work / "out")
    files = [p for p in work.rglob("*") if p.suffix in (".distcp", ".safetensors", ".h5") and p.stat().st_size > 1 << 20]
    for path in files:
        with open(path, "r+b") as file:
            for at in range(0, path.stat().st_size - 4096, 1 << 20):
                file.seek(at)
                file.write(bytes(4096))
    done = ferry("convert", large.source[way], work / "out", *large.options[way], "--resume")
    if done.returncode:
        assert not published(work / "out")
        run_ok("convert", large.source[way], work / "out", *large.options[way])
    assert tree(work / "out") == large.want[way]


def test_killed_while_overwriting_leaves_the_old_or_the_new(large, work):
    run_ok("convert", DATA / "hf_llama/hf", work / "megatron")
    old = tree(work / "megatron")
    for share in (0.4, 0.8, 0.95):
        run = large.start("megatron", work / "megatron", "--overwrite")
        time.sleep(share * large.seconds["megatron"])
        run.kill()
        run.communicate()
        now = {n: d for n, d in tree(work / "megatron").items() if n in old or n in large.want["megatron"]}
        assert now in (old, large.want["megatron"])
        if now != old:
            break


# ------------------------------------------------------------------------------------------------- overwrite, siblings


def test_overwrite_replaces_the_whole_checkpoint(work):
    write_hf(work / "hf", seed=1)
    write_hf(work / "other", llama_config(num_hidden_layers=2), shards=3, seed=2)
    run_ok("convert", work / "hf", work / "megatron", "--tp", 2)
    run_ok("convert", work / "other", work / "megatron", "--overwrite")
    run_ok("convert", work / "other", work / "want")
    assert tree(work / "megatron") == tree(work / "want")
    run_ok("convert", work / "hf", work / "m2")
    run_ok("convert", work / "megatron", work / "out")
    run_ok("convert", work / "m2", work / "out", "--overwrite")
    assert tree(work / "out") == tree(work / "hf")


def test_overwrite_with_a_bad_source_keeps_the_old(work):
    write_hf(work / "hf")
    run_ok("convert", work / "hf", work / "megatron")
    before = tree(work / "megatron")
    (work / "hf/model.safetensors").write_bytes((work / "hf/model.safetensors").read_bytes()[:-10])
    run_ok("convert", work / "hf", work / "megatron", "--overwrite", code=2)
    assert tree(work / "megatron") == before


def test_other_iterations_are_not_touched(work):
    write_hf(work / "hf")
    run_ok("convert", work / "hf", work / "megatron", "--iteration", 5)
    before = tree(work / "megatron/iter_0000005")
    run_ok("convert", work / "hf", work / "megatron", "--iteration", 6, "--tp", 2)
    assert tree(work / "megatron/iter_0000005") == before
    assert (work / "megatron" / TRACKER).read_text() == "6"
    run_ok("verify", work / "megatron/iter_0000005", work / "megatron/iter_0000006")


def test_two_runs_into_one_target(large, work):
    runs = [large.start("megatron", work / "out") for _ in range(2)]
    errors = [run.communicate()[1] for run in runs]
    codes = sorted(run.returncode for run in runs)
    assert codes in ([0, 0], [0, 2]), errors
    assert tree(work / "out") == large.want["megatron"]
    assert [p.name for p in work.iterdir()] == ["out"], "something was left beside the target"


# -------------------------------------------------------------------------------------------------------- file systems


@pytest.mark.parametrize("way", ["megatron", "back", "archive"])
def test_full_disk(way, large, work):
    with Mounted(work / "disk", "size=20m") as disk:
        done = ferry("convert", large.source[way], disk / "out", *large.options[way])
        assert done.returncode == 2 and "error:" in done.stderr
        assert str(disk) in done.stderr and "space" in done.stderr, done.stderr
        assert not published(disk / "out")
    assert not list((work / "disk").iterdir())


def test_disk_that_fills_up_while_overwriting_keeps_the_old(large, work):
    with Mounted(work / "disk", "size=20m") as disk:
        run_ok("convert", DATA / "hf_llama/hf", disk / "megatron")
        before = tree(disk / "megatron")
        run_ok("convert", large.source["megatron"], disk / "megatron", "--overwrite", code=2)
        assert {n: d for n, d in tree(disk / "megatron").items() if n in before} == before


def test_read_only_target(work):
    write_hf(work / "hf")
    if os.geteuid() != 0:
        (work / "locked").mkdir(mode=0o555)
        done = ferry("convert", work / "hf", work / "locked/out")
        assert done.returncode == 2 and str(work / "locked") in done.stderr, done.stderr
        return
    with Mounted(work / "locked", "ro") as locked:  # permissions do not stop root
        done = ferry("convert", work / "hf", locked / "out")
        assert done.returncode == 2 and str(locked) in done.stderr, done.stderr


def test_limit_on_the_size_of_files(large, work):
    """EFBIG, as a quota or a file system without large files answers."""
    import resource
    done = subprocess.run([FERRY, "convert", large.source["megatron"], work / "out"], capture_output=True, text=True, timeout=60,
                          restore_signals=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)))
    assert done.returncode == 2 and "error:" in done.stderr, done.stderr
    assert not published(work / "out")


def test_links_as_in_the_hugging_face_cache(work):
    """snapshots/<commit>/ holds links into blobs/: a checkpoint like any other, and what is written holds files."""
    write_hf(work / "plain", shards=2)
    snapshot, blobs = work / "models--a--b/snapshots/0123", work / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in (work / "plain").iterdir():
        shutil.copy(path, blobs / f"blob-of-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-of-{path.name}")
    run_ok("convert", snapshot, work / "megatron", "--tp", 2)
    run_ok("convert", work / "megatron", work / "back")
    assert tree(work / "back") == tree(work / "plain")
    assert not any(p.is_symlink() for folder in ("megatron", "back") for p in (work / folder).rglob("*"))
    run_ok("verify", snapshot, work / "back")


def test_dry_run_writes_nothing(large, work):
    for kind in ("--dry-run", "--dry-run=plan", "--dry-run=read"):
        done = run_ok("convert", large.source["megatron"], work / "out", *large.options["megatron"], kind)
        assert done.stdout + done.stderr
        assert not list(work.iterdir())


@pytest.mark.parametrize("model", ["large", *FAMILIES], indirect=True)
@pytest.mark.parametrize("way", ["megatron", "back", "archive", "from_archive"])
def test_memory_stays_below_the_limit(way, model, work):
    """--max-memory bounds the buffers; the program itself and its tables get 48 MiB on top, chunks of archives 24."""
    peak = peak_kib("convert", model.source[way], work / "out", *model.options[way], "--quiet", "--max-memory", "16MiB", "--threads", "2")
    chunks = 24 if "archive" in way else 0
    assert peak < (16 + 48 + chunks) * 1024, f"{peak} KiB"
    assert tree(work / "out") == model.want[way]
