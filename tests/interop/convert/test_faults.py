"""More than a thousand single faults, at random but the same in every run, in a Hugging Face folder, in a torch_dist
folder written by ferry and in two written by megatron-core, one of them of a model with experts. An independent oracle says whether a reader still gets the
same checkpoint.

- `ferry digest --check` must notice every byte that changed, in whatever file.
- `ferry verify` must notice every fault after which a reader gets something else, or nothing at all.
- Nothing ends by a signal, or is still running after a minute.
"""
import collections
import concurrent.futures
import random
import shutil
import struct
import threading
import zipfile
import zlib

import pytest

import oracle
import torch_dist_raw as raw
from sharded_runs import sharded_runs
from support import DATA, ferry, iteration_folder, llama_config, parse_safetensors, run_ok, safetensors_bytes, write_hf

SEED = 20250101
CONFIG = llama_config(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=40)


# ------------------------------------------------------------------------------------------------------- the faults


class Fault:
    """One change of one file, or of two: {relative path: its new bytes}."""
    def __init__(self, kind, changes, what):
        self.kind, self.changes, self.what = kind, changes, what


def any_byte(rng, files):
    """Half of the time every file is as likely, half of the time every byte: small files get their share."""
    names = [n for n, d in files.items() if d]
    name = rng.choice(names) if rng.random() < 0.5 else rng.choices(names, [len(files[n]) for n in names])[0]
    return name, rng.randrange(len(files[name]))


def bit_flip(rng, files):
    name, at = any_byte(rng, files)
    bit = rng.randrange(8)
    data = bytearray(files[name])
    data[at] ^= 1 << bit
    return Fault("bit flip", {name: bytes(data)}, f"{name} byte {at} bit {bit}")


def lost_block(rng, files):
    """A block that was never written reads as zeros."""
    name, at = any_byte(rng, files)
    length = rng.choice([4, 64, 512])
    data = bytearray(files[name])
    data[at:at + length] = bytes(len(data[at:at + length]))
    return Fault("lost block", {name: bytes(data)}, f"{name} bytes {at} to {at + length}")


def truncation(rng, files):
    name, at = any_byte(rng, files)
    return Fault("truncation", {name: files[name][:at]}, f"{name} after {at} bytes")


def appended(rng, files):
    name, _ = any_byte(rng, files)
    return Fault("appended bytes", {name: files[name] + rng.randbytes(rng.choice([1, 8, 100]))}, name)


ANYWHERE = [(bit_flip, 12), (lost_block, 2), (truncation, 2), (appended, 1)]


def swap_payloads(kind, pairs):
    """Faults that a well-meaning program makes: valid files, the weights of two tensors exchanged."""
    def make(rng, files):
        where = {}  # tensor -> (file, parsed file)
        for name in files:
            if name.endswith(".safetensors"):
                metadata, tensors = parse_safetensors(files[name])
                where.update({t: (name, metadata, tensors) for t in tensors})
        a, b = rng.choice(pairs)
        changes = {}
        first, second = where[a][2][a], where[b][2][b]
        for target, source in ((a, second), (b, first)):
            name, metadata, tensors = where[target]
            if name in changes:
                metadata, tensors = parse_safetensors(changes[name])
            changes[name] = safetensors_bytes({**tensors, target: (source[0], tensors[target][1], source[2])}, metadata)
        return Fault(kind, changes, f"{a} and {b}")
    return make


def relabelled(rng, files):
    """A header that calls the same bytes another dtype: still a valid file."""
    name = rng.choice([n for n in files if n.endswith(".safetensors")])
    metadata, tensors = parse_safetensors(files[name])
    tensor = rng.choice(sorted(tensors))
    tensors[tensor] = ("F16", *tensors[tensor][1:])
    return Fault("dtype relabelled", {name: safetensors_bytes(tensors, metadata)}, tensor)


def layer_names(i, j):
    rest = ("self_attn.o_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight", "self_attn.v_proj.weight")
    return [(f"model.layers.{i}.{r}", f"model.layers.{j}.{r}") for r in rest]


IN_HF = [(swap_payloads("q and k swapped", [(f"model.layers.{i}.self_attn.q_proj.weight", f"model.layers.{i}.self_attn.k_proj.weight") for i in (0, 1)]), 1),
         (swap_payloads("gate and up swapped", [(f"model.layers.{i}.mlp.gate_proj.weight", f"model.layers.{i}.mlp.up_proj.weight") for i in (0, 1)]), 1),
         (swap_payloads("layers swapped", layer_names(0, 1)), 1),
         (relabelled, 1)]


class TorchDist:
    """The file and place of each chunk's payload."""
    def __init__(self, files, folder):
        checkpoint = raw.Checkpoint("", files[f"{folder}.metadata"])
        self.chunks = []  # (key, offsets, sizes, file, begin of the item, its end, begin of the payload, its end)
        for key, (_, _, chunks) in checkpoint.tensors.items():
            for offsets, sizes in chunks:
                path, begin, length, _ = checkpoint.store[(key, offsets)]
                at, size = raw.zip_entries(files[folder + path][begin:begin + length])["data/0"]
                self.chunks.append((key, offsets, sizes, folder + path, begin, begin + length, begin + at, begin + at + size))

    def of(self, key, *offsets):
        return next(c for c in self.chunks if c[0].endswith(key) and c[1][:len(offsets)] == offsets)


def replace_payload(data, chunk, payload):
    """New weights in a chunk, and its checksums made right again: nothing but the weights gives it away."""
    _, _, _, _, begin, end, at, stop = chunk
    old, new = (zlib.crc32(p).to_bytes(4, "little") for p in (data[at:stop], payload))
    return data[:begin] + data[begin:at].replace(old, new) + payload + data[stop:end].replace(old, new) + data[end:]


def exchange(kind, files, a, b, both=True):
    first, second = files[a[3]][a[6]:a[7]], files[b[3]][b[6]:b[7]]
    changes = {a[3]: replace_payload(files[a[3]], a, second)}
    if both:
        changes[b[3]] = replace_payload(changes.get(b[3], files[b[3]]), b, first)
    return Fault(kind, changes, f"{a[0]} {a[1]} and {b[1]}")


def other_rank(rng, files, at):
    """A rank wrote its piece where that of another belongs."""
    while True:
        a, b = rng.sample(at.chunks, 2)
        if a[0] == b[0] and a[2] == b[2]:
            return exchange("chunk of another rank", files, a, b, both=False)


def layers_swapped(rng, files, at):
    a = rng.choice([c for c in at.chunks if c[0].startswith("decoder.layers.") and c[1][0] == 0])
    return exchange("layers swapped", files, a, at.of(a[0], 1, *a[1][1:]))


def gate_up_swapped(rng, files, at):
    layer = rng.randrange(2)
    pieces = sorted(c for c in at.chunks if c[0].endswith("linear_fc1.weight") and c[1][0] == layer)
    return exchange("gate and up swapped", files, pieces[0], pieces[len(pieces) // 2])


def q_k_swapped(rng, files, at):
    """In the fused matrix the first query head of a group changes place with the group's key head."""
    chunk = rng.choice([c for c in at.chunks if c[0].endswith("linear_qkv.weight")])
    payload = bytearray(files[chunk[3]][chunk[6]:chunk[7]])
    head = CONFIG["head_dim"] * CONFIG["hidden_size"] * 2
    queries = CONFIG["num_attention_heads"] // CONFIG["num_key_value_heads"]
    k = queries * head
    payload[:head], payload[k:k + head] = payload[k:k + head], payload[:head]
    return Fault("q and k swapped", {chunk[3]: replace_payload(files[chunk[3]], chunk, bytes(payload))}, f"{chunk[0]} {chunk[1]}")


IN_MEGATRON = [(other_rank, 2), (layers_swapped, 1), (gate_up_swapped, 1), (q_k_swapped, 1)]


# ---------------------------------------------------------------------------------------------------- the campaign


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Campaign:
    def __init__(self, original, read_state, work, verify_options=()):
        self.original, self.read_state, self.work, self.verify_options = original, read_state, work, verify_options
        self.files = files_of(original)
        self.state = read_state(original)
        self.manifest = work / "manifest"
        run_ok("digest", original, "--output", self.manifest)
        run_ok("digest", original, "--check", self.manifest)
        run_ok("verify", original, original, *verify_options)
        self.counts, self.wrong = collections.Counter(), []
        self.lock, self.local, self.copies = threading.Lock(), threading.local(), 0

    def copy(self):
        """A copy of the checkpoint for each thread, mended after each fault."""
        if not hasattr(self.local, "folder"):
            with self.lock:
                self.copies += 1
                self.local.folder = self.work / f"copy{self.copies}"
            shutil.copytree(self.original, self.local.folder)
        return self.local.folder

    def judge(self, fault):
        folder = self.copy()
        try:
            for name, data in fault.changes.items():
                (folder / name).write_bytes(data)
            state = oracle.state_or_error(self.read_state, folder)
            digest = ferry("digest", folder, "--check", self.manifest, timeout=60)
            verify = ferry("verify", self.original, folder, *self.verify_options, timeout=60)
        finally:
            for name in fault.changes:
                (folder / name).write_bytes(self.files[name])
        matters = state != self.state
        unreadable = isinstance(state, BaseException)
        with self.lock:
            for column, yes in (("faults", True), ("by digest", digest.returncode), ("read as another", matters),
                                ("of these unreadable", unreadable), ("by verify", verify.returncode)):
                self.counts[fault.kind, column] += bool(yes)
            if not digest.returncode:
                self.wrong.append(f"digest --check passed: {fault.kind}, {fault.what}")
            if matters and not verify.returncode:
                why = state if unreadable else [k for k in state if state[k] != self.state[k]]
                self.wrong.append(f"verify passed: {fault.kind}, {fault.what}; a reader finds {why!r}")
            for done in (digest, verify):
                if done.returncode == 2 and not done.stderr.strip():
                    self.wrong.append(f"exit 2 without a word: {fault.kind}, {fault.what}")

    def run(self, faults):
        faults = [f for f in faults if any(self.files[n] != d for n, d in f.changes.items())]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for result in [pool.submit(self.judge, f) for f in faults]:
                result.result()
        columns = ["faults", "by digest", "read as another", "of these unreadable", "by verify"]
        print(f"\n{self.original.name}: {'':24}" + "".join(f"{c:>21}" for c in columns))
        for kind in sorted({k for k, _ in self.counts}):
            print(f"  {kind:34}" + "".join(f"{self.counts[kind, c]:21}" for c in columns))
        assert not self.wrong, f"{len(self.wrong)} faults went unnoticed:\n" + "\n".join(self.wrong[:20])
        return len(faults)


def choose(rng, makers, count, *context):
    makers, weights = zip(*makers)
    return [maker(rng, *context) for maker in rng.choices(makers, weights, k=count)]


def hugging_face(work):
    write_hf(work / "huggingface", CONFIG, shards=2)
    campaign = Campaign(work / "huggingface", oracle.hf_state, work)
    rng = random.Random(SEED)
    return campaign.run(choose(rng, ANYWHERE, 400, campaign.files) + choose(rng, IN_HF, 40, campaign.files))


def megatron_by_ferry(work):
    write_hf(work / "hf", CONFIG)
    run_ok("convert", work / "hf", work / "ferry", "--tp", 2, "--pp", 2)
    campaign = Campaign(work / "ferry", oracle.megatron_state, work)
    rng = random.Random(SEED + 1)
    return campaign.run(choose(rng, ANYWHERE, 400, campaign.files)
                        + choose(rng, IN_MEGATRON, 50, campaign.files, TorchDist(campaign.files, "release/")))


def megatron_by_itself(work):
    fixture = work / "megatron-core"
    shutil.copytree(DATA / "llama_tp2pp2_mc0161", fixture, ignore=shutil.ignore_patterns("sha256.json"))
    campaign = Campaign(fixture, oracle.megatron_state, work, ("--hf-config", DATA / "hf_llama/hf"))
    rng = random.Random(SEED + 2)
    in_megatron = [m for m in IN_MEGATRON if m[0] is not q_k_swapped]  # another architecture than CONFIG
    at = TorchDist(campaign.files, iteration_folder(fixture).name + "/")
    return campaign.run(choose(rng, ANYWHERE, 220, campaign.files) + choose(rng, in_megatron, 30, campaign.files, at))


def experts_exchanged(rng, files, at):
    """Two experts of one layer, written where the other belongs."""
    a = rng.choice([c for c in at.chunks if ".experts.experts." in c[0]])
    b = rng.choice([c for c in at.chunks if c[0] == a[0] and c[2] == a[2] and c[1][0] == a[1][0] and c[1][2:] == a[1][2:] and c is not a])
    return exchange("experts exchanged", files, a, b)


def megatron_experts(work):
    fixture = work / "experts"
    shutil.copytree(DATA / "mixtral_ep2", fixture, ignore=shutil.ignore_patterns("sha256.json"))
    campaign = Campaign(fixture, oracle.megatron_state, work, ("--hf-config", DATA / "hf_mixtral/hf"))
    rng = random.Random(SEED + 3)
    at = TorchDist(campaign.files, iteration_folder(fixture).name + "/")
    return campaign.run(choose(rng, ANYWHERE, 120, campaign.files)
                        + choose(rng, [(other_rank, 1), (experts_exchanged, 2)], 30, campaign.files, at))


CAMPAIGNS = {f.__name__: f for f in (hugging_face, megatron_by_ferry, megatron_by_itself, megatron_experts)}
DONE = {}


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_no_fault_goes_unnoticed(campaign, work, capsys):
    with capsys.disabled():
        DONE[campaign] = CAMPAIGNS[campaign](work)


def test_padding_that_is_not_zero_is_reported(work):
    """Rows of padding are no weights. Where both sides hold them they are compared and carried over all the same."""
    write_hf(work / "hf", CONFIG)
    run_ok("convert", work / "hf", work / "right", "--tp", 2)
    shutil.copytree(work / "right", work / "wrong")
    files = files_of(work / "wrong")
    at = TorchDist(files, "release/")
    key = "embedding.word_embeddings.weight"
    fault = exchange("padding overwritten", files, at.of(key, 128, 0), at.of(key, 0, 0), both=False)
    for name, data in fault.changes.items():
        (work / "wrong" / name).write_bytes(data)
    assert oracle.megatron_state(work / "wrong") != oracle.megatron_state(work / "right")
    assert "model.embed_tokens.weight [40:256, 0:16] (padding)" in run_ok("verify", work / "right", work / "wrong", code=1).stdout
    done = run_ok("verify", work / "hf", work / "wrong")
    assert key in done.stdout and "padding that is not zero" in done.stdout
    run_ok("convert", work / "wrong", work / "moved", "--to", "megatron", "--pp", 2, "--tp", 2)
    run_ok("verify", work / "wrong", work / "moved")
    assert "padding that was not zero was dropped" in run_ok("convert", work / "wrong", work / "back").stdout
    run_ok("verify", work / "hf", work / "back")


def test_there_were_a_thousand_faults():
    if set(DONE) != set(CAMPAIGNS):
        pytest.skip("counts the faults of the tests above, which did not all run to their end")
    assert sum(DONE.values()) >= 1000


# ---------------------------------------------------------------------------------------------------- damaged metadata

DESCRIBED = {"torch_dist": ("llama_optim_dp", "*/.metadata"), "zarr": ("zarr/llama_zarr_tp2pp2", "*/*/.zarray"), "dcp": (None, ".metadata"),
             "fsdp": ("sharded/fsdp2_llama", "model_*_rank_*.pt")}


def with_another_byte(path, rng):
    """-> the bytes of a file in which one byte is another; in a zip, one of data.pkl, whose checksum is right again"""
    bad, begin, size = bytearray(path.read_bytes()), 0, path.stat().st_size
    if zipfile.is_zipfile(path):
        (entry,) = [entry for entry in zipfile.ZipFile(path).infolist() if entry.filename.endswith("data.pkl")]
        begin = entry.header_offset + 30 + len(entry.filename) + int.from_bytes(bad[entry.header_offset + 28:entry.header_offset + 30], "little")
        size = entry.file_size
    bad[begin + rng.randrange(size)] = rng.choice(b"0123456789xyz")
    if begin:
        bad = bad.replace(struct.pack("<I", entry.CRC), struct.pack("<I", zlib.crc32(bad[begin:begin + size])))
    return bad


@pytest.mark.parametrize("form", DESCRIBED)
def test_a_refusal_of_damaged_metadata_names_its_file(form, work):
    """One byte of a file that describes tensors is another: whatever does not fit then, the error leads to that file."""
    name, pattern = DESCRIBED[form]
    shutil.copytree(DATA / name if name else sharded_runs() / "dcp_model", work / "bad")
    rng, files, refused = random.Random(form), sorted((work / "bad").glob(pattern)), 0
    for _ in range(60):
        path = rng.choice(files)
        good = path.read_bytes()
        path.write_bytes(with_another_byte(path, rng))
        done = ferry("digest", work / "bad", "--tensors-only", "--hf-config", DATA / "hf_llama/hf")
        path.write_bytes(good)
        if done.returncode == 2:
            refused += 1
            assert path.name in done.stderr, done.stderr
    assert refused > 30
