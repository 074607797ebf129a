"""A catalogue of bad input. Each must be refused with exit status 2 and an error that names the file or the tensor, must
leave nothing at the target, must not run what a pickle asks for, and must not make ferry take the memory that a lying
header promises.
"""
import json
import pickle
import shutil
import struct
import subprocess

import pytest

import torch_dist_raw as raw
from refusals import refuse
from support import (DATA, ferry, iteration_folder, llama_config, llama_shapes, parse_safetensors, random_tensors, safetensors_bytes,
                     weight_files, write_hf)

UP = "model.layers.2.mlp.up_proj.weight"
DOWN = "model.layers.2.mlp.down_proj.weight"


# ------------------------------------------------------------------------------------------- Hugging Face: the files


def rewritten(change=None, header=None, metadata={"format": "pt"}):
    """An edit of the only weight file: `change` alters its tensors, `header` what the header says about them."""
    def edit(hf):
        path = hf / "model.safetensors"
        tensors = parse_safetensors(path.read_bytes())[1]
        if change:
            tensors = change(tensors) or tensors
        path.write_bytes(safetensors_bytes(tensors, metadata, header))
    return edit


def entry(**changes):
    """A header entry that lies."""
    def header(entries):
        entries[UP].update(changes)
    return rewritten(header=header)


def bytes_of_weights(change):
    def edit(hf):
        path = hf / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))
    return edit


def with_header(text):
    return bytes_of_weights(lambda data: struct.pack("<Q", len(text)) + text)


def shifted(by):
    """UP's bytes are said to begin elsewhere: they overlap the tensor before, or leave a hole behind it."""
    def header(entries):
        begin, end = entries[UP]["data_offsets"]
        entries[UP]["data_offsets"] = [begin + by, end + by]
    return rewritten(header=header)


def twice_in_header(hf):
    path = hf / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    text = data[8:8 + size].replace(f'"{DOWN}"'.encode(), f'"{UP}"'.encode())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size:])


def nul_in_padding(hf):
    """A bit flip makes this of a blank. The safetensors library refuses it; some JSON readers take it for the end."""
    path = hf / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    path.write_bytes(struct.pack("<Q", size + 8) + data[8:8 + size] + b"\0" + b" " * 7 + data[8 + size:])


def with_config(**changes):
    def edit(hf):
        config = json.loads((hf / "config.json").read_text())
        config.update(changes)
        (hf / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return edit


def text(name, content):
    def edit(hf):
        (hf / name).write_text(content)
    return edit


def replaced(name, old, new):
    def edit(hf):
        content = (hf / name).read_text()
        assert old in content
        (hf / name).write_text(content.replace(old, new, 1))
    return edit


def without(name):
    return lambda hf: (hf / name).unlink()


def surplus(name):
    return rewritten(lambda tensors: {**tensors, name: ("BF16", (2, 2), b"12345678")})


def reshaped(tensors):
    dtype, shape, data = tensors[UP]
    tensors[UP] = (dtype, shape[::-1], data)


def integers(tensors):
    dtype, shape, data = tensors[UP]
    tensors[UP] = ("I64", shape, data * 4)


def one_row_less(tensors):
    dtype, (rows, columns), data = tensors[UP]
    tensors[UP] = (dtype, (rows - 1, columns), data[:-len(data) // rows])


ONE_FILE = {
    "no bytes at all": (bytes_of_weights(lambda d: b""), ["model.safetensors"]),
    "less than a header's length": (bytes_of_weights(lambda d: d[:5]), ["model.safetensors"]),
    "truncated header": (bytes_of_weights(lambda d: d[:100]), ["model.safetensors"]),
    "header that promises terabytes": (bytes_of_weights(lambda d: struct.pack("<Q", 1 << 43) + d[8:]), ["model.safetensors"]),
    "header length of all ones": (bytes_of_weights(lambda d: b"\xff" * 8 + d[8:]), ["model.safetensors"]),
    "header that is no JSON": (with_header(b"{not json      "), ["model.safetensors"]),
    "header that is a list": (with_header(b"[]      "), ["model.safetensors"]),
    "header that is no UTF-8": (with_header(b'{"\xff\xfe":{}}'), ["model.safetensors"]),
    "header with a NUL in its padding": (nul_in_padding, ["model.safetensors"]),
    "header that nests without end": (with_header(b"[" * 200000), ["model.safetensors"]),
    "header with an entry that is a number": (with_header(b'{"%s":17}' % UP.encode()), ["model.safetensors"]),
    "truncated data": (bytes_of_weights(lambda d: d[:-1]), ["model.safetensors"]),
    "data behind the last tensor": (bytes_of_weights(lambda d: d + b"more"), ["model.safetensors"]),
    "offsets past the end": (entry(data_offsets=[1 << 40, (1 << 40) + 3072]), [UP]),
    "offsets past all numbers": (entry(data_offsets=[2**64 - 3072, 2**64]), ["model.safetensors"]),
    "offsets that run backwards": (entry(data_offsets=[3072, 0]), [UP]),
    "negative offsets": (entry(data_offsets=[-3072, 0]), ["model.safetensors"]),
    "offsets that are text": (entry(data_offsets=["0", "3072"]), ["model.safetensors"]),
    "overlapping tensors": (shifted(-64), [UP]),
    "a hole between tensors": (shifted(64), [UP]),
    "a size unlike the shape": (entry(shape=[48, 33]), [UP]),
    "a shape whose product wraps around": (entry(shape=[1 << 33, 1 << 33]), [UP]),
    "a negative shape": (entry(shape=[-48, -32]), ["model.safetensors"]),
    "an unknown dtype": (entry(dtype="F12"), [UP]),
    "duplicate key in a header": (twice_in_header, ["model.safetensors", UP]),
    "missing tensor": (rewritten(lambda t: {n: v for n, v in t.items() if n != UP}), [UP]),
    "missing layer": (rewritten(lambda t: {n: v for n, v in t.items() if ".layers.3." not in n}), ["model.layers.3."]),
    "surplus tensor": (surplus("model.layers.2.mlp.extra.weight"), ["model.layers.2.mlp.extra.weight"]),
    "surplus layer": (surplus("model.layers.4.mlp.up_proj.weight"), ["model.layers.4.mlp.up_proj.weight"]),
    "bias that the model does not have": (surplus("model.layers.0.self_attn.q_proj.bias"), ["model.layers.0.self_attn.q_proj.bias"]),
    "transposed tensor": (rewritten(reshaped), [UP]),
    "tensor with a row less": (rewritten(one_row_less), [UP]),
    "tensor of integers": (rewritten(integers), [UP]),
    "no config.json": (without("config.json"), ["config.json"]),
    "config.json that is no JSON": (text("config.json", "{"), ["config.json"]),
    "config.json that is a list": (text("config.json", "[1]"), ["config.json"]),
    "config.json with more behind a NUL": (lambda hf: (hf / "config.json").write_bytes((hf / "config.json").read_bytes() + b"\0more"), ["config.json"]),
    "config.json that nests without end": (text("config.json", '{"a":' * 100000), ["config.json"]),
    "duplicate key in config.json": (replaced("config.json", "{", '{"hidden_size": 64,'), ["config.json", "hidden_size"]),
    "unknown model_type": (with_config(model_type="mamba9"), ["config.json", "mamba9"]),
    "no model_type": (with_config(model_type=...), ["config.json", "model_type"]),
    "config.json without hidden_size": (with_config(hidden_size=...), ["config.json", "hidden_size"]),
    "hidden_size that is text": (with_config(hidden_size="32"), ["config.json", "hidden_size"]),
    "no attention heads": (with_config(num_attention_heads=0), ["config.json", "num_attention_heads"]),
    "layers by the billion": (with_config(num_hidden_layers=10**12), ["config.json", "num_hidden_layers"]),
    "negative vocabulary": (with_config(vocab_size=-100), ["config.json", "vocab_size"]),
    "heads that the groups do not divide": (with_config(num_key_value_heads=3), ["num_key_value_heads"]),
    "more layers than the files hold": (with_config(num_hidden_layers=5), ["model.layers.4."]),
    "no weights": (without("model.safetensors"), ["model.safetensors"]),
    "weights that are a folder": (lambda hf: [(hf / "model.safetensors").unlink(), (hf / "model.safetensors").mkdir()], ["model.safetensors"]),
    "weights that are a dangling link": (lambda hf: [(hf / "model.safetensors").unlink(), (hf / "model.safetensors").symlink_to("blob")],
                                         ["model.safetensors"]),
}


@pytest.mark.parametrize("case", ONE_FILE)
def test_bad_hugging_face_folder(case, work):
    edit, words = ONE_FILE[case]
    write_hf(work / "hf")
    shutil.copytree(work / "hf", work / "good")
    edit(work / "hf")
    limit = refuse(work, work / "hf", words, "--tp", 2)
    assert ferry("verify", work / "good", work / "hf", **limit).returncode in (1, 2)
    ferry("inspect", work / "hf", **limit)
    ferry("digest", work / "hf", **limit)


# -------------------------------------------------------------------------------------------- Hugging Face: the index


def with_index(change):
    def edit(hf):
        path = hf / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))
    return edit


def outside(where):
    def edit(hf):
        """The file exists, but not in the folder."""
        shutil.move(hf / "model-00002-of-00002.safetensors", hf.parent / "stray.safetensors")
        target = {"relative": "../stray.safetensors", "absolute": str(hf.parent / "stray.safetensors")}[where]
        with_index(lambda m: m.update({n: target for n, f in m.items() if "00002" in f}))(hf)
    return edit


def stored_twice(hf):
    first, second = weight_files(hf)
    one, two = (parse_safetensors(p.read_bytes())[1] for p in (first, second))
    name = sorted(one)[0]
    second.write_bytes(safetensors_bytes({name: one[name], **two}))


INDEXED = {
    "index naming a missing file": (without("model-00002-of-00002.safetensors"), ["model-00002-of-00002.safetensors"]),
    "index with a path that leaves the folder": (outside("relative"), ["model.safetensors.index.json", "../stray.safetensors"]),
    "index with an absolute path": (outside("absolute"), ["model.safetensors.index.json", "stray.safetensors"]),
    "index that names the wrong file": (with_index(lambda m: m.update({"model.embed_tokens.weight": "model-00002-of-00002.safetensors"})),
                                        ["model.embed_tokens.weight"]),
    "index without a tensor that a file holds": (with_index(lambda m: m.pop(UP)), [UP]),
    "index with a tensor that no file holds": (with_index(lambda m: m.update({"model.layers.0.ghost": "model-00001-of-00002.safetensors"})),
                                               ["model.layers.0.ghost"]),
    "index with a number for a file": (with_index(lambda m: m.update({UP: 7})), ["model.safetensors.index.json"]),
    "index that is no JSON": (text("model.safetensors.index.json", "{]"), ["model.safetensors.index.json"]),
    "index without a map": (text("model.safetensors.index.json", "{}"), ["model.safetensors.index.json"]),
    "duplicate key in the index": (replaced("model.safetensors.index.json", '"weight_map": {', '"weight_map": {"%s": "a.safetensors",' % UP), [UP]),
    "tensor in two files": (stored_twice, ["lm_head.weight", ".safetensors"]),
}


@pytest.mark.parametrize("case", INDEXED)
def test_bad_index(case, work):
    edit, words = INDEXED[case]
    write_hf(work / "hf", tensors=dict(sorted(random_tensors(llama_shapes(llama_config())).items())), shards=2)
    shutil.copytree(work / "hf", work / "good")
    edit(work / "hf")
    limit = refuse(work, work / "hf", words)
    assert ferry("verify", work / "good", work / "hf", **limit).returncode in (1, 2)
    ferry("inspect", work / "hf", **limit)


# ----------------------------------------------------------------------------------------------------------- Megatron


def evil(marker):
    """A pickle that runs a command when Python loads it."""
    command = f"touch {marker}".encode()
    return b"\x80\x02cposix\nsystem\nX" + struct.pack("<I", len(command)) + command + b"\x85R."


def archive(pickle, name="archive"):
    return raw.torch_save(pickle, [("0", b"")], archive=name)


def in_metadata(make):
    def edit(folder, marker):
        (folder / ".metadata").write_bytes(make(marker))
    return edit


def in_common(make):
    def edit(folder, marker):
        (folder / "common.pt").write_bytes(archive(make(marker), "common"))
    return edit


def in_item(select):
    """The pickle of an item becomes an evil one; the item keeps its place, its length and a valid archive."""
    def edit(folder, marker):
        checkpoint = raw.Checkpoint(str(folder))
        key = next(k for k in checkpoint.store if select in k[0])
        path, begin, length, _ = checkpoint.store[key]
        file = folder / path
        data = file.read_bytes()
        item = archive(evil(marker))
        assert len(item) <= length
        # An archive is found from its end: what stands in front of it would shift its offsets, so pad behind, as a comment.
        comment = length - len(item)
        item = item[:-2] + struct.pack("<H", comment) + b" " * comment
        file.write_bytes(data[:begin] + item + data[begin + length:])
    return edit


LONG_NEST = lambda marker: b"\x80\x02" + b"(" * 1000000 + b"N" + b"t" * 1000000 + b"."
BAD_PICKLES = {
    "nothing": lambda marker: b"",
    "noise": lambda marker: bytes(range(256)) * 4,
    "one that runs a command": evil,
    "one with a string of exabytes": lambda marker: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"text.",
    "one that recalls what was never stored": lambda marker: b"\x80\x02h\x07.",
    "one that pops an empty stack": lambda marker: b"\x80\x02ttt.",
    "one that nests without end": LONG_NEST,
    "one that holds itself": lambda marker: b"\x80\x02]q\x00h\x00a.",
    "one with a dictionary for a key": lambda marker: b"\x80\x02}}Ns.",
    "one without an end": lambda marker: b"\x80\x02}",
}


class Parts:
    """A torch_dist checkpoint taken apart, to be written again with something wrong in it."""
    def __init__(self, folder):
        checkpoint = raw.Checkpoint(str(folder))
        self.tensors = {}
        for key in checkpoint.tensors:
            dtype, shape, data = checkpoint.tensor(key)
            size = raw.DTYPES[dtype][1]
            self.tensors[key] = (dtype, shape, [(o, s, raw.get(data, shape, o, s, size)) for o, s in raw.rechunk(shape, 2)])
        self.objects = {k: bytes(checkpoint.blob(k)) for k in checkpoint.objects if not k.startswith("common_state")}
        self.common = raw.plain(checkpoint.common())

    def write(self, folder):
        shutil.rmtree(folder)
        raw.write_checkpoint(str(folder), self.tensors, self.objects, self.common)


def edited(change):
    def edit(folder, marker):
        parts = Parts(folder)
        change(parts)
        parts.write(folder)
    return edit


FC1, FC2, QKV = (f"decoder.layers.{n}.weight" for n in ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_qkv"))


def chunk(key, index, change):
    """Changes (offsets, sizes, bytes) of one chunk; None takes it away."""
    def edit(parts):
        dtype, shape, chunks = parts.tensors[key]
        new = change(*chunks[index])
        parts.tensors[key] = (dtype, shape, [c for c in (chunks[:index] + [new] + chunks[index + 1:]) if c])
    return edited(edit)


def renamed(old, new):
    def edit(parts):
        parts.tensors[new] = parts.tensors.pop(old)
    return edited(edit)


def metadata_bytes(old, new):
    """Same length, so that the pickle stays sound."""
    def edit(folder, marker):
        data = (folder / ".metadata").read_bytes()
        assert old in data and len(old) == len(new)
        (folder / ".metadata").write_bytes(data.replace(old, new))
    return edit


def dictionary_for_a_key(folder, marker):
    """One bit of .metadata: the name of an attribute becomes a dictionary out of the memo, which Python cannot hash."""
    data = bytearray((folder / ".metadata").read_bytes())
    assert data[6781:6784] == b"jH\x02"  # LONG_BINGET
    data[6782] ^= 1 << 5
    with pytest.raises(TypeError):
        pickle.loads(bytes(data))
    (folder / ".metadata").write_bytes(data)


def dropped(name):
    return lambda folder, marker: (folder / name).unlink()


def content(name, data):
    return lambda folder, marker: (folder / name).write_bytes(data)


def shortened(name):
    return lambda folder, marker: (folder / name).write_bytes((folder / name).read_bytes()[:-2000])


def tracker(data):
    return lambda folder, marker: (folder.parent / "latest_checkpointed_iteration.txt").write_bytes(data)


def wrong_dtype(parts):
    _, shape, chunks = parts.tensors[FC2]
    parts.tensors[FC2] = ("int64", shape, [(o, s, d * 4) for o, s, d in chunks])


def another_shape(parts):
    dtype, (layers, hidden, ffn), chunks = parts.tensors[FC2]
    parts.tensors[FC2] = (dtype, (layers, ffn, hidden), [((o[0], o[2], o[1]), (s[0], s[2], s[1]), d) for o, s, d in chunks])


def a_layer_less(parts):
    dtype, (layers, *rest), chunks = parts.tensors[FC2]
    parts.tensors[FC2] = (dtype, (layers - 1, *rest), [c for c in chunks if c[0][0] != layers - 1])


def fewer_vocabulary_rows(parts):
    key = "embedding.word_embeddings.weight"
    dtype, (rows, hidden), _ = parts.tensors[key]
    parts.tensors[key] = (dtype, (240, hidden), [((0, 0), (240, hidden), bytes(240 * hidden * 2))])


MEGATRON = {
    **{f".metadata is {kind}": (in_metadata(make), [".metadata"]) for kind, make in BAD_PICKLES.items()},
    **{f"common.pt is {kind}": (in_common(make), ["common.pt"]) for kind, make in BAD_PICKLES.items()},
    "a tensor's pickle runs a command": (in_item("linear_fc2.weight"), ["linear_fc2.weight"]),
    "an object's pickle runs a command": (in_item("_extra_state"), ["_extra_state"]),
    "no .metadata": (dropped(".metadata"), [".metadata"]),
    "a dictionary for a key in .metadata": (dictionary_for_a_key, [".metadata"]),
    "truncated .metadata": (shortened(".metadata"), [".metadata"]),
    "truncated data file": (shortened("__0_0.distcp"), ["__0_0.distcp"]),
    "missing data file": (dropped("__0_0.distcp"), ["__0_0.distcp"]),
    "empty common.pt": (content("common.pt", b""), ["common.pt"]),
    "data file outside the folder": (metadata_bytes(b"__0_0.distcp", b"../../stray1"), ["../../stray1"]),
    "data file with an absolute path": (metadata_bytes(b"__0_0.distcp", b"/etc/passwd1"), ["/etc/passwd1"]),
    "no metadata.json": (dropped("metadata.json"), ["metadata.json"]),
    "metadata.json of another backend": (content("metadata.json", b'{"sharded_backend": "zarr", "sharded_backend_version": 1}'), ["metadata.json", "zarr"]),
    "metadata.json that is no JSON": (content("metadata.json", b"{"), ["metadata.json"]),
    "missing tensor": (edited(lambda p: p.tensors.pop(FC2)), [FC2]),
    "surplus tensor": (edited(lambda p: p.tensors.update({"decoder.layers.mlp.gate.weight": p.tensors[FC2]})), ["decoder.layers.mlp.gate.weight"]),
    "tensor under another name": (renamed(FC2, "decoder.layers.mlp.linear_fc3.weight"), ["linear_fc"]),
    "tensor of another shape": (edited(another_shape), [FC2]),
    "tensor of integers": (edited(wrong_dtype), [FC2]),
    "tensor of a layer less": (edited(a_layer_less), [FC2]),
    "vocabulary smaller than the model's": (edited(fewer_vocabulary_rows), ["embedding.word_embeddings.weight"]),
    "missing chunk": (chunk(FC1, 3, lambda o, s, d: None), [FC1]),
    "overlapping chunks": (chunk(FC1, 1, lambda o, s, d: ((o[0], o[1] - 1, o[2]), s, d)), [FC1]),
    "chunk outside its tensor": (chunk(FC1, 7, lambda o, s, d: ((o[0], o[1] + 1, o[2]), s, d)), [FC1]),
    "chunk whose bytes are too few": (chunk(FC1, 2, lambda o, s, d: (o, s, d[:-2])), [FC1]),
    "tracker that names no folder": (tracker(b"77"), ["iter_0000077"]),
    "tracker that leaves the folder": (tracker(b"../iter_0000010"), ["latest_checkpointed_iteration.txt"]),
    "empty tracker": (tracker(b""), ["latest_checkpointed_iteration.txt"]),
}


@pytest.mark.parametrize("case", MEGATRON)
def test_bad_megatron_checkpoint(case, work):
    edit, words = MEGATRON[case]
    shutil.copytree(DATA / "llama_tp2pp2_mc0161", work / "megatron")
    (work / "stray1").write_bytes(b"")
    marker = work / "marker"
    edit(iteration_folder(work / "megatron"), marker)
    limit = refuse(work, work / "megatron", words, "--hf-config", DATA / "hf_llama/hf")
    assert ferry("verify", DATA / "llama_tp2pp2_mc0161", work / "megatron", "--hf-config", DATA / "hf_llama/hf", **limit).returncode in (1, 2)
    ferry("inspect", work / "megatron", **limit)
    ferry("digest", work / "megatron", **limit)
    assert not marker.exists(), "the pickle's command was run"


def test_evil_pickles_are_evil(work):
    """The marker of the tests above does appear when Python itself loads such a pickle."""
    (work / "pickle").write_bytes(evil(work / "marker"))
    subprocess.run(["python3", "-c", f"import pickle; pickle.load(open({str(work / 'pickle')!r}, 'rb'))"], check=True)
    assert (work / "marker").exists()


def test_a_foreign_checkpoint_needs_a_configuration(work):
    refuse(work, DATA / "llama_tp2pp2", ["--hf-config"])


def test_the_configuration_of_another_model_does_not_fit(work):
    refuse(work, DATA / "llama_tp2pp2", ["kv_channels"], "--hf-config", DATA / "hf_qwen3/hf")
