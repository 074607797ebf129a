"""Arguments of the module ferry that cannot be meant: each is an error that names it, and nothing is published."""
import multiprocessing
import os
import pickle
import shutil

import numpy as np
import pytest
import torch

from support import DATA

ferry = pytest.importorskip("ferry", reason="the Python module is not built")

HF = DATA / "hf_llama/hf"


@pytest.mark.parametrize("option", [dict(tp=2**32 + 2), dict(tp=2**31), dict(tp=2.5), dict(tp=True), dict(pp=0), dict(threads=-5), dict(threads=2**31),
                                    dict(max_memory=2**63), dict(max_memory=0), dict(max_shard_size=1.5), dict(max_memory="infGB"),
                                    dict(max_memory=b"64MiB")], ids=str)
def test_a_number_that_cannot_be_meant_is_an_error(option, work):
    with pytest.raises(ferry.Error) as failure:
        ferry.convert(HF, work / "out", to="megatron", **option)
    assert failure.value.kind == "usage" and next(iter(option)) in failure.value.message
    assert not (work / "out").exists()


@pytest.mark.parametrize("option", [dict(tp=2**32 + 1), dict(rank=2**32), dict(read_ahead=-3), dict(threads=-1)], ids=str)
def test_so_is_one_of_a_stream(option):
    with pytest.raises(ferry.Error, match=next(iter(option))):
        next(ferry.open(HF).tensors(names="megatron", **option))


@pytest.mark.parametrize("option", [dict(tp=2), dict(rank=1), dict(make_vocab_size_divisible_by=64)], ids=str)
def test_a_mesh_has_no_effect_on_whole_tensors(option):
    with pytest.raises(ferry.Error, match=next(iter(option))):
        next(ferry.open(HF).tensors(**option))


class Stop(Exception):
    pass


@pytest.mark.parametrize("raises", [False, True])
def test_a_conversion_that_its_callback_stops_publishes_nothing(raises, work):
    def stop(*_):
        if raises:
            raise Stop
        return False
    with pytest.raises(Stop if raises else ferry.Error) as failure:
        ferry.convert(HF, work / "out", to="hf", progress=stop)
    assert raises or failure.value.kind == "cancelled"
    assert not (work / "out").exists()


@pytest.mark.parametrize("option", [dict(tp=float("nan")), dict(threads=float("inf")), dict(tp=object()), dict(tp=1 + 2j)], ids=lambda one: next(iter(one)))
def test_a_value_that_no_text_holds_is_named(option, work):
    with pytest.raises(ferry.Error, match=next(iter(option))) as failure:
        ferry.convert(HF, work / "out", to="megatron", **option)
    assert failure.value.kind == "usage"


def test_numbers_of_numpy_are_numbers(work):
    assert ferry.convert(HF, work / "out", tp=np.int64(2), threads=np.int8(1), max_memory=np.int64(1 << 27), progress=False).proved


@pytest.mark.parametrize("target", [5, True, {}, None], ids=str)
def test_a_target_that_is_no_path_is_an_error(target):
    """... of every function; a delta's ended the process."""
    for act in (ferry.convert, ferry.delta_make):
        with pytest.raises(ferry.Error) as failure:
            act(HF, *([HF] if act is ferry.delta_make else []), target)
        assert failure.value.kind == "usage"


@pytest.mark.parametrize("options", [dict(include="\ud800"), dict(iteration="\ud800"), dict(dtype="\ud800")], ids=lambda one: next(iter(one)))
def test_a_lone_surrogate_is_named(options, work):
    with pytest.raises(ferry.Error, match=f"{next(iter(options))}: holds a lone surrogate") as failure:
        ferry.convert(HF, work / "out", **options)
    assert failure.value.kind == "usage"


def test_a_name_ends_at_no_zero_byte(work):
    with pytest.raises(ferry.Error, match="a name has no zero bytes"):
        ferry.convert(HF, f"{work}/out\0side", progress=False)
    assert os.listdir(work) == []


def test_a_tensor_without_a_name_is_not_saved(work):
    with pytest.raises(ferry.Error, match="5: is no name of a tensor"):
        ferry.save(work / "out", {5: torch.zeros(2)}, like=HF)


@pytest.mark.parametrize("box", [5, "ab", {0: 1}, [5], [(0, 1, 2), (0, 1)], [(0.5, 1), (0, 1)], [("a", "b"), (0, 1)], [(0, 10**30), (0, 1)], [(None, 1), (0, 1)]],
                         ids=repr)
def test_a_box_that_is_none_is_named(box):
    with pytest.raises(ferry.Error, match="model.norm.weight|lm_head.weight") as failure:
        ferry.open(HF).read("lm_head.weight", box)
    assert failure.value.kind == "usage"


def test_a_checkpoint_goes_to_another_process_by_its_path():
    checkpoint = ferry.open(HF)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (digest,) = pool.map(digest_of_norm, [checkpoint])
    assert digest == digest_of_norm(checkpoint) == digest_of_norm(pickle.loads(pickle.dumps(checkpoint)))


def digest_of_norm(checkpoint):
    return bytes(memoryview(checkpoint.read("model.norm.weight").bits().tobytes()))


def test_a_name_that_is_not_utf8_is_read_as_any_other(work):
    text = os.path.join(work, os.fsdecode(b"nu\xff"))
    shutil.copytree(HF, text)
    for path in (text, os.fsencode(text)):
        checkpoint = ferry.open(path)
        assert len(list(checkpoint.tensors())) == len(list(ferry.open(HF).tensors())) and os.fsencode(checkpoint.path) == os.fsencode(text)
        assert ferry.safe_open(checkpoint, "pt").offset_keys() == ferry.safe_open(HF, "pt").offset_keys()
    manifest = os.path.join(work, os.fsdecode(b"manifest\xff"))
    with open(manifest, "w", encoding="utf-8") as out:
        out.write(ferry.digest(HF).text)
    assert ferry.check(text, manifest)


@pytest.mark.parametrize("memory", [torch.empty(5, 3, device="meta"), torch.eye(3).to_sparse()], ids=["meta", "sparse"])
def test_memory_that_cannot_be_shared_is_an_error(memory, work):
    with pytest.raises(ferry.Error, match="cannot be shared by DLPack"):
        ferry.open(HF).read("model.norm.weight", into=memory)
    with pytest.raises(ferry.Error, match="has no dense memory"):
        ferry.save(work / "out", {"model.norm.weight": memory}, like=HF)


def test_memory_for_tensors_is_a_mapping_or_a_function():
    with pytest.raises(ferry.Error, match="into: a int is neither a mapping by name nor a function"):
        ferry.open(HF).tensors(into=5)


def test_memory_that_is_read_only_is_an_error():
    checkpoint = ferry.open(HF)
    memory = np.empty(checkpoint.read("model.norm.weight").shape, np.uint16)
    memory.flags.writeable = False
    with pytest.raises(ferry.Error, match="cannot be shared by DLPack|is read-only"):
        checkpoint.read("model.norm.weight", into=memory)


def test_numpy_takes_a_tensor_as_it_is():
    tensor = ferry.open(HF).read("model.norm.weight", dtype="fp32")
    found = np.asarray(tensor)
    assert found.dtype == np.float32 and found.shape == tensor.shape and found.tolist() == tensor.torch().tolist()


@pytest.mark.parametrize("take", [lambda *args, **options: ferry.safe_open(*args, "pt", **options), ferry.load_file, ferry.load_into],
                         ids=["safe_open", "load_file", "load_into"])
def test_an_open_checkpoint_takes_no_options_of_open(take):
    checkpoint = ferry.open(DATA / "llama_tp2pp2", hf_config=DATA / "hf_llama/hf")
    given = [dict(hf_config=DATA / "hf_mixtral/hf")]
    if take is not ferry.load_into:
        given += [dict(keep_quantized=True), dict(iteration=7)]
        take(checkpoint, hf_config=DATA / "hf_llama/hf")  # says what is so already
    for options in given:
        with pytest.raises(ferry.Error, match="has no effect on a checkpoint that is open already") as error:
            take(checkpoint, **({"sharded_state_dict": {}} if take is ferry.load_into else {}), **options)
        assert error.value.kind == "usage"


def test_an_opened_checkpoint_stands_for_its_path(work):
    opened = ferry.open(DATA / "llama_tp2pp2", hf_config=HF)
    ferry.convert(opened, work / "out", to="hf")
    assert ferry.verify(opened, work / "out") and ferry.verify(ferry.open(work / "out"), opened)
    assert ferry.digest(opened).model == opened.digest().model == ferry.digest(work / "out").model
    assert ferry.inspect(opened).path == ferry.inspect(DATA / "llama_tp2pp2").path
    with pytest.raises(ferry.Error, match="hf_config"):
        ferry.verify(opened, HF, hf_config=work)
    packed = ferry.open(HF, keep_quantized=True)
    with pytest.raises(ferry.Error, match="keep_quantized"):
        ferry.verify(packed, HF)


def test_nothing_is_written_to_an_object_that_is_no_path(work, monkeypatch):
    monkeypatch.chdir(work)
    opened = ferry.open(HF)
    calls = [lambda: ferry.convert(HF, opened, to="hf"), lambda: ferry.convert(HF, object(), to="hf"), lambda: ferry.check(HF, opened),
             lambda: ferry.delta_make(HF, HF, opened)]
    for call in calls:
        with pytest.raises(ferry.Error, match="target|manifest") as failure:
            call()
        assert failure.value.kind == "usage" and "is not what it takes" in failure.value.message
    assert not list(work.iterdir())


def test_a_dtype_has_one_spelling_in_all_that_is_returned(work):
    checkpoint = ferry.open(HF)
    ferry.convert(HF, work / "bf16", to="hf", dtype="bf16")
    of_all = [checkpoint.infos(), ferry.inspect(HF).tensors, ferry.diff(HF, work / "bf16").tensors, checkpoint.digest().tensors]
    assert [{tensor.dtype for tensor in tensors} for tensors in of_all] == [{"bf16"}] * 4
    assert '"BF16"' in checkpoint.digest().text  # the manifest's format


@pytest.mark.parametrize("dtype", ["float32", "F32", "torch.float32", "float", torch.float32, np.float32], ids=str)
def test_a_dtype_may_have_the_names_of_others(dtype):
    assert {tensor.dtype for _, tensor in ferry.open(HF).tensors(dtype=dtype, include="model.norm.weight")} == {"fp32"}


def test_errors_name_keywords_and_leave_paths_alone(work):
    with pytest.raises(ferry.Error) as failure:
        ferry.convert(HF, work / "out", to="hf", keep_quantized=True)
    assert failure.value.message.startswith("keep_quantized (keep_fp8): has no effect")
    with pytest.raises(ferry.Error, match="models--org--name: is not there"):
        ferry.open("models--org--name")
