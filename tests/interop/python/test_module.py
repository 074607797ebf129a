"""The module ferry beside safetensors, torch and NumPy: every tensor, every format, errors, memory."""
import gc
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import typing

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from servers import serve_files
from support import DATA, FERRY, ROOT, ferry_json, llama_config, llama_shapes, run_ok, tree, write_hf

ferry = pytest.importorskip("ferry", reason="the Python module is not built")


def of_safetensors(folder):
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def require_equal(found, expected):
    assert set(found) == set(expected)
    assert [name for name in expected if not same(found[name].contiguous(), expected[name].contiguous())] == []


CHECKPOINTS = [("hf_llama/hf", "hf_llama"), ("llama_tp2pp2", "hf_llama"), ("legacy/mixtral_legacy_ep2", "hf_mixtral"), ("zarr/llama_zarr_tp2pp2", "hf_llama"), ("mixtral_ep2", "hf_mixtral"),
               ("deepseek_v3_tp2pp2", "hf_deepseek_v3"), ("glm4_moe_tp2ep2", "hf_glm4_moe")]


@pytest.mark.parametrize("path, model", CHECKPOINTS)
def test_tensors_are_those_that_safetensors_reads(path, model):
    hf = DATA / model / "hf"
    checkpoint = ferry.open(DATA / path, hf_config=None if path.startswith("hf_") else hf)
    found = {name: tensor.torch() for name, tensor in checkpoint.tensors()}
    expected = of_safetensors(hf)
    second_copies = {f"model.layers.3.{name}.weight": of for name, of in [("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")]}
    for name in second_copies.keys() & expected.keys():  # of a prediction layer: stored twice, one tensor of the model
        assert same(expected.pop(name), expected[second_copies[name] + ".weight"])
    require_equal(found, expected)
    assert checkpoint.config["model_type"] == checkpoint.family


def test_an_archive_gives_the_same_tensors(work):
    report = ferry.convert(DATA / "hf_qwen2/hf", work / "archive", to="h5")
    assert report.proved and report.target.format == "archive"
    require_equal({name: tensor.torch() for name, tensor in ferry.open(work / "archive").tensors()}, of_safetensors(DATA / "hf_qwen2/hf"))


def test_an_address_gives_the_same_tensors():
    with serve_files(DATA / "hf_llama") as server:
        found = {name: tensor.torch() for name, tensor in ferry.open(f"{server.url}/hf").tensors()}
    require_equal(found, of_safetensors(DATA / "hf_llama/hf"))


def test_a_small_window_reads_the_same_in_the_same_order():
    checkpoint = ferry.open(DATA / "llama_tp2pp2", hf_config=DATA / "hf_llama/hf")
    names = [info.name for info in checkpoint.infos()]
    found = list(checkpoint.tensors(read_ahead=1, threads=2))
    assert [name for name, _ in found] == names
    require_equal({name: tensor.torch() for name, tensor in found}, of_safetensors(DATA / "hf_llama/hf"))


def test_globs_select_tensors():
    checkpoint = ferry.open(DATA / "hf_llama/hf")
    found = [name for name, _ in checkpoint.tensors(include=["*.mlp.*"], exclude=["model.layers.[123].*"])]
    assert found == [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    with pytest.raises(ferry.Error) as error:
        checkpoint.tensors(include=["nothing.*"])
    assert error.value.kind == "usage" and "nothing.*" in error.value.message


@pytest.mark.parametrize("dtype", [torch.float32, np.float32, np.dtype("float32"), "float32"], ids=str)
def test_dtypes_of_torch_and_numpy_and_one_glob_are_taken(dtype):
    checkpoint = ferry.open(DATA / "hf_llama/hf")
    ((_, tensor),) = checkpoint.tensors(dtype=dtype, include="*.norm.weight")
    array = np.asarray(tensor)
    assert array.dtype == np.float32 and array.nbytes == tensor.nbytes == 4 * 32 and np.asarray(tensor, np.float64).sum() == array.sum(dtype=np.float64)
    np.testing.assert_array_equal(array, np.asarray(checkpoint.read("model.norm.weight", dtype=dtype)))
    assert same(torch.as_tensor(tensor), of_safetensors(DATA / "hf_llama/hf")["model.norm.weight"].float())


def test_a_dtype_that_is_no_cast_is_refused():
    with pytest.raises(ferry.Error, match="dtype=int8: is none of bf16, fp16, fp32"):
        ferry.open(DATA / "hf_llama/hf").tensors(dtype=torch.int8)


def test_a_cast_rounds_as_torch_does():
    expected = of_safetensors(DATA / "hf_llama/hf")
    found = {name: tensor.torch() for name, tensor in ferry.open(DATA / "hf_llama/hf").tensors(dtype="fp16")}
    require_equal(found, {name: tensor.to(torch.float16) for name, tensor in expected.items()})


def test_tensors_come_into_memory_of_the_caller():
    expected = of_safetensors(DATA / "hf_llama/hf")
    into = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    for name, tensor in ferry.open(DATA / "llama_tp2pp2", hf_config=DATA / "hf_llama/hf").tensors(into=into):
        assert tensor is into[name]
    require_equal(into, expected)


def test_numpy_arrays_of_bits_serve_as_memory():
    checkpoint = ferry.open(DATA / "hf_llama/hf")
    arrays = {}

    def room(name, dtype, shape):
        assert dtype == "bf16"
        return arrays.setdefault(name, np.zeros(shape, np.uint16))

    assert all(array is arrays[name] for name, array in checkpoint.tensors(into=room))
    for name, expected in of_safetensors(DATA / "hf_llama/hf").items():
        np.testing.assert_array_equal(arrays[name], expected.view(torch.uint16).numpy())


@pytest.mark.parametrize("memory, words", [
    (torch.empty(3, dtype=torch.bfloat16), "has shape [3]"), (torch.empty((250, 32), dtype=torch.float32), "is of fp32, not bf16"),
    (torch.empty((32, 250), dtype=torch.bfloat16).T, "is not row-major"), ([1, 2], "is a list, which does not speak DLPack"),
    (torch.empty((250, 32), dtype=torch.bfloat16, device="meta"), "")
])
def test_memory_that_does_not_fit_is_refused(memory, words):
    with pytest.raises((ferry.Error, BufferError, RuntimeError, ValueError)) as error:
        ferry.open(DATA / "hf_llama/hf").read("model.embed_tokens.weight", into=memory)
    assert words in str(error.value)


def test_a_tensor_is_shared_with_torch_and_numpy_and_outlives_everything():
    ((name, tensor),) = ferry.open(DATA / "hf_llama/hf").tensors(include=["model.norm.weight"], dtype="fp32")
    array, shared, copy = np.from_dlpack(tensor), torch.from_dlpack(tensor), tensor.numpy()
    shared[0] = 42
    del tensor
    gc.collect()
    assert array[0] == 42 and copy[0] == 42 and array.shape == (32,) and name == "model.norm.weight"


def test_bf16_without_numpys_help_is_its_bits():
    tensor = ferry.open(DATA / "hf_llama/hf").read("model.norm.weight")
    np.testing.assert_array_equal(tensor.bits(), tensor.torch().view(torch.uint16).numpy())
    if "ml_dtypes" not in sys.modules:
        with pytest.raises(ferry.Error, match="NumPy has no bf16"):
            tensor.numpy()


def test_a_box_is_the_slice():
    expected = of_safetensors(DATA / "hf_llama/hf")["model.layers.2.mlp.gate_proj.weight"]
    checkpoint = ferry.open(DATA / "llama_tp2pp2", hf_config=DATA / "hf_llama/hf")
    name = "model.layers.2.mlp.gate_proj.weight"
    assert same(checkpoint.read(name, [(5, 40), (3, 17)]).torch(), expected[5:40, 3:17].contiguous())
    assert same(checkpoint.read(name, [slice(-2, None), slice(4)]).torch(), expected[-2:, :4].contiguous())
    both = torch.cat([expected, of_safetensors(DATA / "hf_llama/hf")["model.layers.2.mlp.up_proj.weight"]])
    assert same(checkpoint.read("decoder.layers.2.mlp.linear_fc1.weight").torch(), both)
    with pytest.raises(ferry.Error, match=r"\[0:49, 0:1\] is no box of its shape \[48, 32\]"):
        checkpoint.read(name, [(0, 49), (0, 1)])
    with pytest.raises(ferry.Error, match=r"a box of 3 dimensions does not fit into \[48, 32\]"):
        checkpoint.read(name, [slice(1)] * 3)
    with pytest.raises(ferry.Error) as error:
        checkpoint.read("model.layers.9.mlp.gate_proj.weight")
    assert error.value.kind == "not_found"


def test_ranks_together_hold_the_model():
    """Megatron's names: the boxes of tp 2, ep 2 put together are the whole tensors."""
    checkpoint = ferry.open(DATA / "hf_mixtral/hf")
    ranks = [dict(checkpoint.tensors("megatron", tp=2, ep=2, etp=1, rank=rank)) for rank in range(2)]
    weights = of_safetensors(DATA / "hf_mixtral/hf")
    down = [rank["decoder.layers.0.self_attention.linear_proj.weight"].torch() for rank in ranks]
    assert same(torch.cat(down, 1).contiguous(), weights["model.layers.0.self_attn.o_proj.weight"])
    experts = sorted(name for rank in ranks for name in rank if ".experts." in name and name.startswith("decoder.layers.0."))
    assert len(experts) == 2 * checkpoint.config["num_local_experts"] and len(set(experts)) == len(experts)
    embedding = torch.cat([rank["embedding.word_embeddings.weight"].torch() for rank in ranks])
    vocabulary = checkpoint.config["vocab_size"]
    assert embedding.shape[0] == -(-vocabulary // 256) * 256 and not embedding[vocabulary:].any()
    assert same(embedding[:vocabulary].contiguous(), weights["model.embed_tokens.weight"])


def test_convert_verify_diff_digest_inspect_are_those_of_the_program(work):
    hf = DATA / "hf_llama/hf"
    report = ferry.convert(hf, work / "megatron", tp=2, pp=2)
    assert report.proved and report.num_tensors == 39 and len(report.files) == 4
    run_ok("convert", hf, work / "other", "--tp", "2", "--pp", "2")
    assert tree(work / "megatron") == tree(work / "other")
    assert ferry.verify(hf, work / "megatron").num_compared == 39 and ferry.verify(hf, work / "megatron")
    difference = ferry.diff(hf, work / "megatron")
    assert difference and difference.total.changed == 0 and len(difference.layers) == 4
    said = ferry_json("digest", hf, "--tensors-only")
    assert ferry.digest(work / "megatron").model == ferry.open(hf).digest().model == report.model_digest == said["model"]
    assert {tensor.name: tensor.digest for tensor in ferry.open(hf).digest().tensors} == {n: t["digest"] for n, t in said["tensors"].items()}
    found = ferry.inspect(work / "megatron", filter="*.linear_fc2.weight")
    assert [tensor.name for tensor in found.tensors] == ["decoder.layers.mlp.linear_fc2.weight"] and found.family == "llama"
    assert found.saved_with["tensor_model_parallel_size"] == 2


def test_differences_are_reported(work):
    write_hf(work / "a", seed=1)
    write_hf(work / "b", seed=1)
    weights = load_file(work / "b/model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, work / "b/model.safetensors", {"format": "pt"})
    report = ferry.verify(work / "a", work / "b")
    assert not report and [(one.name, one.kind, one.first_element) for one in report.tensors] == [("model.norm.weight", "values", (3,))]
    difference = ferry.diff(work / "a", work / "b")
    assert not difference and difference.num_changed == 1 and difference.total.changed == 1


def test_errors_have_kind_message_and_hint(work):
    with pytest.raises(ferry.Error) as error:
        ferry.convert(DATA / "hf_llama/hf", work / "out", tp=3)
    assert error.value.kind == "usage" and "4 attention heads cannot be split so" in error.value.message
    assert error.value.hint == "possible: tp 1, 2, 4" and not (work / "out").exists()
    with pytest.raises(ferry.Error) as error:
        ferry.open(work / "nowhere")
    assert error.value.kind == "not_found"
    with pytest.raises(ferry.Error, match="max_memory=1 banana: is no size"):
        ferry.convert(DATA / "hf_llama/hf", work / "out", max_memory="1 banana")


def test_damage_is_found_while_reading(work):
    ferry.convert(DATA / "hf_llama/hf", work / "archive", to="h5")
    file = next((work / "archive").glob("*.h5"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ferry.Error) as error:
        dict(ferry.open(work / "archive").tensors())
    assert error.value.kind == "corrupt"


def large_checkpoint(folder, layers):
    """16 MB a layer, of zeros: sparse"""
    config = llama_config(hidden_size=512, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4)
    shapes = llama_shapes(config)
    write_hf(folder, config, {name: ("BF16", shape, bytes(2 * int(np.prod(shape)))) for name, shape in shapes.items()}, companions={})


def test_memory_stays_bounded(work):
    large_checkpoint(work / "hf", 40)  # 590 MB
    program = """
import re, sys, ferry
total = 0
for name, tensor in ferry.open(sys.argv[1]).tensors(read_ahead="32MiB", threads=2, max_memory="16MiB"):
    total += tensor.bits().nbytes
    del tensor
print(total, re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""
    done = subprocess.run([sys.executable, "-c", program, work / "hf"], stdout=subprocess.PIPE, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT / "build/python")})
    total, peak = map(int, done.stdout.split())
    assert total > 500e6 and peak < 190 * 1024, (total, peak)  # KiB; Python and NumPy take 30 MB of it


def test_other_threads_run_meanwhile(work):
    large_checkpoint(work / "hf", 10)
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    started = time.monotonic()
    ferry.convert(work / "hf", work / "out", tp=2, threads=1)
    seconds = time.monotonic() - started
    stop.set()
    thread.join()
    assert max(b - a for a, b in zip(ticks, ticks[1:])) < seconds / 2


def test_progress_is_told_and_may_stop(work):
    large_checkpoint(work / "hf", 10)
    told = []
    ferry.convert(work / "hf", work / "one", progress=lambda *now: told.append(now))
    assert {stage for stage, *_ in told} == {"copying", "proving"} and told[-1][1] == told[-1][2] and told[-1][3] is True
    with pytest.raises(ValueError, match="of the callback"):
        ferry.convert(work / "hf", work / "two", progress=lambda *now: raise_error("of the callback"), threads=1)


def raise_error(words):
    raise ValueError(words)


def test_an_interrupt_stops_a_conversion(work):
    large_checkpoint(work / "hf", 40)
    program = f"""
import os, signal, sys, threading, ferry
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
def progress(stage, done, total, finished):
    os.kill(os.getpid(), signal.SIGINT)
try:
    ferry.convert("{work}/hf", "{work}/out", threads=1, progress=progress)
except KeyboardInterrupt:
    print("interrupted")
print(ferry.convert("{work}/hf", "{work}/out", resume=True, progress=False).proved)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT / "build/python")})
    assert done.stdout.split() == ["interrupted", "True"], done.stderr


def test_a_stream_that_is_left_ends(work):
    large_checkpoint(work / "hf", 10)
    stream = ferry.open(work / "hf").tensors(threads=2)
    next(stream)
    stream.close()
    before = threading.active_count()
    assert before == threading.active_count() and list(stream) == []


def test_python_m_ferry_runs_the_program():
    done = subprocess.run([sys.executable, "-m", "ferry", "--version"], stdout=subprocess.PIPE, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT / "build/python"), "PATH": f"{FERRY.parent}:{os.environ['PATH']}"})
    assert done.stdout.strip() == f"ferry {ferry.__version__}"


def test_python_m_ferry_finds_what_was_built_with_it_or_says_that_there_is_none(work):
    def run(folder):
        return subprocess.run([sys.executable, "-m", "ferry", "--version"], capture_output=True, text=True, env={"PYTHONPATH": str(folder), "PATH": "/none"})
    assert run(ROOT / "build/python").stdout.strip() == f"ferry {ferry.__version__}"
    shutil.copytree(ROOT / "build/python/ferry", work / "alone/python/ferry", ignore=shutil.ignore_patterns("*.p"))
    done = run(work / "alone/python")
    assert done.returncode == 2 and done.stderr.startswith("error: the program ferry is neither") and "hint: pip install" in done.stderr


def test_a_checkpoint_stays_that_of_its_iteration(work):
    """... when a newer one appears, to which the tracker leads from then on."""
    ferry.convert(DATA / "hf_llama/hf", work / "root", to="megatron", iteration=10)
    checkpoint = ferry.open(work / "root")
    before = checkpoint.digest().model
    ferry.convert(DATA / "hf_llama/hf", work / "fp32", to="hf", dtype="fp32")
    ferry.convert(work / "fp32", work / "root", to="megatron", iteration=20)
    assert ferry.open(work / "root").iteration == "20" and ferry.digest(work / "root").model != before
    again = pickle.loads(pickle.dumps(checkpoint))
    assert again.iteration == checkpoint.iteration == "10" and again.path == checkpoint.path
    assert checkpoint.digest().model == again.digest().model == before
    single = ferry.open(checkpoint.path)  # of one iteration, which takes none
    assert pickle.loads(pickle.dumps(single)).digest().model == before


def test_relative_paths_are_those_of_the_place_where_it_was_opened(work, monkeypatch):
    monkeypatch.chdir(DATA)
    checkpoint = ferry.open("llama_tp2pp2", hf_config="hf_llama/hf")
    monkeypatch.chdir(work)
    assert pickle.loads(pickle.dumps(checkpoint)).config == checkpoint.config
    assert checkpoint.digest().model == ferry.digest(DATA / "hf_llama/hf").model


def test_a_difference_to_zeros_is_relative_to_nothing(work):
    tensors = {name: tensor.torch() for name, tensor in ferry.open(DATA / "hf_llama/hf").tensors()}
    ferry.save(work / "zeros", {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, like=DATA / "hf_llama/hf")
    assert ferry.diff(work / "zeros", DATA / "hf_llama/hf").total.relative_difference is None
    assert typing.get_type_hints(ferry.Difference)["relative_difference"] == typing.Optional[float]
