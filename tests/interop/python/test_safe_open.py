"""ferry.safe_open beside safetensors' own, over every format."""
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from support import DATA, llama_config, random_tensors, llama_shapes, write_hf

ferry = pytest.importorskip("ferry", reason="the Python module is not built")
HF = DATA / "hf_llama/hf"
FILE = HF / "model.safetensors"
PLACES = {"huggingface": (HF, None), "torch_dist": (DATA / "llama_tp2pp2", HF), "legacy": (DATA / "legacy/llama_legacy_tp2pp2", HF),
          "zarr": (DATA / "zarr/llama_zarr_tp2pp2", HF)}


@pytest.fixture(params=PLACES)
def pair(request):
    """safetensors' file and Ferry's checkpoint, opened"""
    path, hf_config = PLACES[request.param]
    with safe_open(FILE, "pt") as theirs, ferry.safe_open(path, framework="pt", hf_config=hf_config) as ours:
        yield theirs, ours


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def test_keys_tensors_and_metadata_are_those_of_safetensors(pair):
    theirs, ours = pair
    assert sorted(ours.keys()) == sorted(theirs.keys()) == sorted(ours.offset_keys()) and ours.metadata() == theirs.metadata()
    assert [name for name in theirs.keys() if not same(ours.get_tensor(name), theirs.get_tensor(name))] == []
    of_both = ours.get_tensors(), theirs.get_tensors()
    assert set(of_both[0]) == set(of_both[1]) and all(same(tensor, of_both[1][name]) for name, tensor in of_both[0].items())


INDICES = [0, -1, ..., slice(0, 2), slice(-3, None), slice(5, 1000), slice(4, 2), slice(0, 9, 4), (slice(0, 2), 3), (..., 2), (slice(None), slice(1, 7, 2)),
           (1, 2), (), None, (None, 3), (slice(2, 5), None, slice(1, 2)), [1, 2], (slice(None), [1, 2]), (slice(0, 0), 1), (3, ..., 4),
           np.int64(3), torch.tensor(3), np.array([2, 1]), torch.tensor([4, 4, 0]), (slice(1, 9), torch.tensor([3, 1])), torch.arange(250) % 3 == 0,
           torch.arange(8000).reshape(250, 32) % 7 == 0]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_gives_the_part_that_safetensors_gives(pair, index):
    theirs, ours = (opened.get_slice("model.embed_tokens.weight") for opened in pair)
    assert (ours.get_shape(), ours.get_dtype()) == (theirs.get_shape(), theirs.get_dtype())
    assert same(ours[index], theirs[index])


@pytest.mark.parametrize("index", [slice(None, None, -1), (0, slice(9, 2, -1))], ids=str)
def test_a_step_back_raises_as_in_safetensors(pair, index):
    messages = []
    for opened in pair:
        with pytest.raises(ValueError) as error:
            opened.get_slice("model.embed_tokens.weight")[index]
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("index", [250, -251, (0, 0, 0), (slice(None), 32)], ids=str)
def test_an_index_beyond_the_tensor_raises_as_in_safetensors(pair, index):
    messages = []
    for opened in pair:
        with pytest.raises(IndexError) as error:
            opened.get_slice("model.embed_tokens.weight")[index]
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_a_file_is_what_safetensors_reads_of_it(work):
    """One of several, whose keys are no model; one of no model at all, in dtypes that no weight has."""
    from transformers import AutoModelForCausalLM
    AutoModelForCausalLM.from_pretrained(HF).save_pretrained(work / "many", max_shard_size="40KB")
    other = {"z": torch.arange(6).reshape(2, 3), "a.b": torch.tensor([True, False]), "half": torch.ones(3, dtype=torch.float16)}
    save_file(other, work / "other.safetensors", metadata={"of": "mine"})
    files = [*sorted((work / "many").glob("model-*.safetensors")), work / "other.safetensors"]
    assert len(files) > 2
    for file in files:
        with safe_open(file, "pt") as theirs, ferry.safe_open(file, "pt") as ours:
            assert sorted(ours.keys()) == sorted(theirs.keys()) and ours.offset_keys() == theirs.offset_keys() and ours.metadata() == theirs.metadata()
            assert all(same(ours.get_tensor(name), theirs.get_tensor(name)) for name in theirs.keys())
            name = ours.keys()[0]
            assert same(ours.get_slice(name)[:1], theirs.get_slice(name)[:1])
        found, want = ferry.load_file(str(file)), load_file(file)
        assert found.keys() == want.keys() and all(same(found[name], want[name]) for name in want)
    with pytest.raises(ferry.Error, match="hf_config"):
        ferry.safe_open(files[0], "pt", hf_config=HF)
    with pytest.raises(ferry.Error, match="not_there"):
        ferry.safe_open(work / "not_there.safetensors", "pt")


def test_offset_keys_of_a_file_are_its_order():
    with safe_open(FILE, "pt") as theirs, ferry.safe_open(HF, "pt") as ours:
        assert ours.offset_keys() == theirs.offset_keys()


@pytest.mark.parametrize("dtype, word", [("BF16", "BF16"), ("F16", "F16"), ("F32", "F32")])
def test_dtypes_and_arrays_of_numpy(dtype, word, work):
    config = llama_config(num_hidden_layers=1, dtype={"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype])
    write_hf(work / "hf", config, random_tensors(llama_shapes(config), dtype=dtype), companions={})
    ours = ferry.safe_open(work / "hf", framework="np")
    assert ours.get_slice("model.norm.weight").get_dtype() == word
    if dtype != "BF16":  # which NumPy lacks
        with safe_open(work / "hf/model.safetensors", framework="np") as theirs:
            np.testing.assert_array_equal(ours.get_slice("lm_head.weight")[3:9, ::2], theirs.get_slice("lm_head.weight")[3:9, ::2])
            assert ours.get_tensor("model.norm.weight").dtype == theirs.get_tensor("model.norm.weight").dtype


ORDERS = {"of_the_model": lambda names: names, "sorted": sorted, "backwards": lambda names: names[::-1],
          "every_third": lambda names: names[::3] + names[1::3] + names[2::3],
          "twice": lambda names: [name for name in names for _ in range(2)]}


@pytest.mark.parametrize("ahead", [0, 5000, 1 << 29])
@pytest.mark.parametrize("order", ORDERS)
def test_tensors_are_the_same_in_any_order_and_by_any_number_of_threads(order, ahead, monkeypatch):
    monkeypatch.setattr("ferry._safe_open._Window.AHEAD", ahead)
    expected = load_file(FILE)
    with ferry.safe_open(HF, "pt") as opened:
        names = ORDERS[order](opened.keys())
        assert [name for name in names if not same(opened.get_tensor(name), expected[name])] == []
        with ThreadPoolExecutor(4) as pool:
            assert all(same(tensor, expected[name]) for name, tensor in zip(names, pool.map(opened.get_tensor, names)))


def test_thousands_of_tensors_are_read_by_few_plans(monkeypatch):
    """A read alone plans the whole model."""
    alone = []
    read = ferry.Checkpoint.read
    monkeypatch.setattr(ferry.Checkpoint, "read", lambda self, name, *rest: alone.append(name) or read(self, name, *rest))
    opened = ferry.safe_open(DATA / "mixtral_ep2", "pt", hf_config=DATA / "hf_mixtral/hf")
    for name in opened.keys():
        opened.get_tensor(name)
    assert len(alone) == 1


def test_a_forked_process_reads_what_the_other_has_not(tmp_path):
    """... whatever a thread of the other does, as the workers of a DataLoader do."""
    opened = ferry.safe_open(HF, "pt")
    names, theirs = list(opened.keys()), load_file(FILE)
    for name in names[:3]:
        opened.get_tensor(name)
    with opened._window._lock:  # a thread of the parent that reads
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            os._exit(0 if all(same(opened.get_tensor(name), theirs[name]) for name in names[3:]) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert all(same(opened.get_tensor(name), theirs[name]) for name in names[3:])


def test_load_file_is_that_of_safetensors():
    ours, theirs = ferry.load_file(DATA / "llama_tp2pp2", hf_config=HF), load_file(FILE)
    assert set(ours) == set(theirs) and all(same(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_device_of_torch_is_where_tensors_go():
    assert ferry.safe_open(HF, "pt", device="meta").get_tensor("model.norm.weight").device.type == "meta"


def test_a_name_that_is_not_there_a_closed_one_and_another_framework_are_errors():
    with ferry.safe_open(HF, "pt") as opened:
        for act in (opened.get_tensor, opened.get_slice):
            with pytest.raises(ferry.Error, match="has no tensor model.nothing") as error:
                act("model.nothing")
            assert error.value.kind == "not_found"
        part = opened.get_slice("model.norm.weight")
    for act in (opened.keys, lambda: part[:]):
        with pytest.raises(ferry.Error, match="is closed"):
            act()
    with pytest.raises(ferry.Error, match="framework=tf: is neither pt nor np"):
        ferry.safe_open(HF, "tf")
