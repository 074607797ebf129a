"""Helpers of the interop tests: running ferry, reading and writing safetensors byte by byte, tiny checkpoints."""
import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DATA = HERE.parent / "data"
PEERS = Path(os.environ.get("PEERS", ROOT / "build/peers"))
FERRY = Path(os.environ.get("FERRY", ROOT / "build/cli/ferry"))

# ---------------------------------------------------------------------------------------------------- running ferry


def ferry(*arguments, timeout=120, **kwargs):
    """Runs ferry. A signal or an exit status that the manual does not know is a failure of whichever test runs it."""
    command = [str(FERRY), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                          timeout=timeout, stdin=subprocess.DEVNULL, **kwargs)
    assert done.returncode in (0, 1, 2), f"exit {done.returncode}: {' '.join(command)}\n{done.stderr[-2000:]}"
    return done


def run_ok(*arguments, code=0, **kwargs):
    done = ferry(*arguments, **kwargs)
    assert done.returncode == code, \
        f"exit {done.returncode}, expected {code}: ferry {' '.join(map(str, arguments))}\n{done.stderr[-2000:]}{done.stdout[-500:]}"
    return done


def peak_kib(*arguments):
    """-> the most memory that `ferry ARGUMENTS` held, in KiB"""
    # Through a small process: the peak of a child includes that of the image it was started from.
    script = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
              "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
    done = subprocess.run([sys.executable, "-S", "-c", script, FERRY, *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


def save_from_ranks(source, to, *sizes):
    """Loads a checkpoint into the memory of ranks ("tp=2", "pp=2", ...) and saves it from there."""
    done = subprocess.run([FERRY.parent.parent / "tests/save_ranks", source, to, *sizes], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]


def load_with_megatron(release, jobs, cases, work):
    """-> the report of load_with_mcore.py on each job; `cases` are their names"""
    (work / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([sys.executable, HERE / "load_with_mcore.py", "--mcore", PEERS / release, "--jobs", work / "jobs.json",
                           "--report", work / "report.json"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    report = json.loads((work / "report.json").read_text()) if (work / "report.json").exists() else []
    assert len(report) == len(jobs), f"{cases[len(report)]}: {done.stdout[-3000:]}"
    assert {case: r["bad"] for case, r in zip(cases, report) if r["bad"]} == {}
    return report


def verls_merger(*commands):
    """-> [(exit status, what it said)] of `python -m verl.model_merger`, of verl 0.9.1's own source, with the arguments of each command"""
    done = subprocess.run([sys.executable, HERE / "python/merge_with_verl.py"], stdout=subprocess.PIPE, text=True, env=dict(os.environ, PEERS=str(PEERS)),
                          input=json.dumps([[str(argument) for argument in command] for command in commands]), check=True)
    return json.loads(done.stdout)


def ferry_json(*arguments, code=0, **kwargs):
    return json.loads(run_ok(*arguments, "--json", code=code, **kwargs).stdout)


def skip_where_transformers_differs(checkpoint, dtype):
    """Asks the certificate, which has to pass, whether transformers has Ferry's bits in fp32 on this machine, where MKL decides; skips if not."""
    import pytest  # scripts that read this file do without
    numerics = ferry_json("verify", "--numerics", checkpoint, "--dtype", dtype)
    assert numerics["passed"], numerics["checks"]
    if other := [check["subject"] for check in numerics["transformers"] if not check["passed"]]:
        pytest.skip(f"`ferry verify --numerics` says that transformers' {dtype} has other bits on this machine: {', '.join(other)}")


def digest_of(path, *options):
    """-> the digest of a checkpoint's model, and those of its tensors"""
    report = ferry_json("digest", path, "--tensors-only", *options)
    return report["model"], report["tensors"]


def refuse(*arguments, words=(), **kwargs):
    """Ferry fails with a message that has the words. -> what it said"""
    done = run_ok(*arguments, code=2, **kwargs)
    assert "error:" in done.stderr
    missing = [w for w in words if w not in done.stderr]
    assert not missing, f"stderr does not say {missing}:\n{done.stderr}"
    return done.stderr


def refuse_to_convert(work, source, *words, options=()):
    """... and leaves nothing behind."""
    said = refuse("convert", source, work / "out", *options, words=words)
    assert not (work / "out").exists()
    return said


# ------------------------------------------------------------------------------------------------------------ files


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def tree(folder):
    """{relative path: sha256} of every file below the folder."""
    folder = Path(folder)
    return {str(p.relative_to(folder)): sha256(p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


def iteration_folder(root):
    """The folder that the tracker file points at; the folder itself where there is no tracker."""
    tracker = Path(root) / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return Path(root)
    text = tracker.read_text().strip()
    return Path(root) / (text if text == "release" else f"iter_{int(text):07d}")


# ------------------------------------------------------------------------------------------------------ safetensors

ITEM_SIZE = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "BOOL": 1}
TORCH_NAME = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64", "I32": "int32",
              "U8": "uint8", "I8": "int8", "BOOL": "bool"}


def parse_safetensors(data):
    """-> (metadata, {name: (dtype, shape, bytes)}), in the order of the header."""
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:8 + size]), data[8 + size:]
    metadata = header.pop("__metadata__", None)
    return metadata, {n: (t["dtype"], tuple(t["shape"]), body[slice(*t["data_offsets"])]) for n, t in header.items()}


def read_safetensors(path):
    return parse_safetensors(Path(path).read_bytes())


def safetensors_bytes(tensors, metadata={"format": "pt"}, header=None):
    """The file, its tensors in the given order. `header` changes the header before it is written down."""
    entries, offset = {}, 0
    if metadata is not None:
        entries["__metadata__"] = metadata
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    if header:
        entries = header(entries) or entries
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values())


def weight_files(folder):
    return sorted(Path(folder).glob("*.safetensors"))


def hf_tensors(folder):
    """{name: (dtype, shape, bytes)} of all weight files of a Hugging Face folder."""
    tensors = {}
    for path in weight_files(folder):
        for name, tensor in read_safetensors(path)[1].items():
            assert name not in tensors, name
            tensors[name] = tensor
    return tensors


def described(tensors):
    """-> the entries of sha256.json: torch's dtype name, shape, sha256"""
    return {n: {"dtype": TORCH_NAME[d], "shape": list(s), "sha256": sha256(b)} for n, (d, s, b) in tensors.items()}


# ------------------------------------------------------------------------------------------------- tiny checkpoints

LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, attention_dropout=0.0,
             bos_token_id=1, eos_token_id=2, dtype="bfloat16", head_dim=8, hidden_act="silu", hidden_size=32,
             initializer_range=0.02, intermediate_size=48, max_position_embeddings=64, mlp_bias=False,
             num_attention_heads=4, num_hidden_layers=4, num_key_value_heads=4, rms_norm_eps=1e-05,
             rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}, tie_word_embeddings=False,
             transformers_version="5.17.0", use_cache=True, vocab_size=100)


def llama_config(**changes):
    config = {**LLAMA, **changes}
    config["head_dim"] = changes.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return config


def llama_shapes(config):
    """{name: shape} in the order in which transformers registers the parameters."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {layer + "self_attn.q_proj.weight": (q, hidden), layer + "self_attn.k_proj.weight": (kv, hidden),
                   layer + "self_attn.v_proj.weight": (kv, hidden), layer + "self_attn.o_proj.weight": (hidden, q),
                   layer + "mlp.gate_proj.weight": (ffn, hidden), layer + "mlp.up_proj.weight": (ffn, hidden),
                   layer + "mlp.down_proj.weight": (hidden, ffn), layer + "input_layernorm.weight": (hidden,),
                   layer + "post_attention_layernorm.weight": (hidden,)}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_tensors(shapes, seed=0, dtype="BF16"):
    """{name: (dtype, shape, bytes)}: normal numbers, every tensor and every run another."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = generator.standard_normal(shape, dtype=np.float32) * np.float32(0.2)
        if dtype == "BF16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        elif dtype == "F16":
            data = values.astype(np.float16).tobytes()
        else:
            data = values.tobytes()
        tensors[name] = (dtype, shape, data)
    return tensors


def canonical(tensors):
    """The order in which safetensors itself writes a dictionary of one dtype."""
    return dict(sorted(tensors.items()))


# Files that a checkpoint carries beside its weights; not all of them text, and none of them empty of traps.
COMPANIONS = {
    "generation_config.json": b'{\n  "_from_model_config": true,\n  "eos_token_id": 2,\n  "transformers_version": "5.17.0"\n}\n',
    "tokenizer.json": '{"version":"1.0","model":{"type":"BPE","vocab":{"a":0,"\u00e9":1,"\u6f22":2},"merges":[]}}'.encode(),
    "tokenizer_config.json": b'{"chat_template":"{% for m in messages %}{{ m[\'content\'] }}{% endfor %}\\n"}',
    "tokenizer.model": bytes(range(256)),
}


def write_hf(folder, config=None, tensors=None, shards=1, companions=COMPANIONS, seed=0):
    """A Hugging Face folder, `shards` weight files with an index where they are more than one. Returns its tensors."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    config = config or llama_config()
    tensors = tensors or random_tensors(llama_shapes(config), seed)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name, data in companions.items():
        (folder / name).write_bytes(data)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(canonical(tensors)))
        return tensors
    names, weight_map = list(tensors), {}
    for i in range(shards):
        part = names[len(names) * i // shards:len(names) * (i + 1) // shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        (folder / file).write_bytes(safetensors_bytes(canonical({n: tensors[n] for n in part})))
        weight_map |= {n: file for n in part}
    total = sum(len(t[2]) for t in tensors.values())
    index = {"metadata": {"total_parameters": total // 2, "total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return tensors


class Mounted:
    """A small file system of its own at `folder`, where this process may mount one."""
    def __init__(self, folder, options):
        import pytest  # scripts that read this file do without
        folder.mkdir()
        self.folder = folder
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"needs to mount a tmpfs: {done.stderr.strip()}")

    def __enter__(self):
        return self.folder

    def __exit__(self, *error):
        subprocess.run(["umount", self.folder], check=True)
