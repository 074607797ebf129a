"""Tensors of the module ferry in the hands of others: numbers of eight bits, copies, memory that nobody has."""
import copy
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support import DATA
from test_shards import Shard

ferry = pytest.importorskip("ferry", reason="the Python module is not built")

HF = DATA / "hf_llama/hf"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """{name: tensor} as safetensors reads them, and Ferry's checkpoint with its fp8 left as it is"""
    folder = tmp_path_factory.mktemp("quantized") / "hf"
    ferry.convert(HF, folder, to="hf", quantize="fp8-block", progress=False)
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}, ferry.open(folder, keep_quantized=True)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def test_fp8_is_that_of_safetensors_in_torch_and_as_bits(quantized):
    theirs, checkpoint = quantized
    found = dict(checkpoint.tensors())
    assert {tensor.dtype for tensor in found.values()} == {"bf16", "fp8_e4m3", "fp32"}
    for name, tensor in found.items():
        assert tensor.torch().dtype == theirs[name].dtype and torch.equal(bits(tensor.torch()), bits(theirs[name]))
        assert tensor.nbytes == theirs[name].nbytes and np.array_equal(tensor.bits().view(np.uint8), bits(theirs[name]).numpy())


def test_fp8_comes_into_memory_of_the_caller_and_by_safe_open(quantized):
    theirs, checkpoint = quantized
    name = "model.layers.0.mlp.up_proj.weight"
    for memory in (torch.empty_like(theirs[name]), torch.empty(theirs[name].shape, dtype=torch.uint8)):
        assert torch.equal(bits(checkpoint.read(name, into=memory)), bits(theirs[name]))
    with pytest.raises(ferry.Error, match="is of fp8_e5m2, not fp8_e4m3"):
        checkpoint.read(name, into=torch.empty(theirs[name].shape, dtype=torch.float8_e5m2))
    with ferry.safe_open(checkpoint, "pt") as opened:
        assert opened.get_slice(name).get_dtype() == "F8_E4M3"
        assert torch.equal(bits(opened.get_slice(name)[3:7]), bits(theirs[name][3:7]))


def test_a_tensor_is_pickled_with_its_bytes():
    tensor = ferry.open(HF).read("model.embed_tokens.weight", [(3, 9), (0, 5)])
    for other in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor)):
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape) and other.address != tensor.address
        assert torch.equal(other.torch(), tensor.torch())


def test_dlpack_copies_if_asked():
    tensor = ferry.open(HF).read(NORM, dtype="fp32")
    for taken in (torch.from_dlpack(tensor, copy=True), np.from_dlpack(tensor, copy=True)):
        assert taken.tolist() == tensor.torch().tolist()
        taken[0] = 42
    assert tensor.torch()[0] != 42


def test_a_copy_of_no_elements_is_empty():
    tensor = pickle.loads(pickle.dumps(ferry.open(HF).read("model.embed_tokens.weight", [(3, 3), (0, 5)])))
    assert tensor.torch().shape == (0, 5) and np.from_dlpack(ferry.open(HF).read(NORM, [(1, 1)], dtype="fp32")).shape == (0,)


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode
    return FakeTensorMode().from_tensor(torch.zeros(32, dtype=torch.bfloat16))


def spread():
    from torch.distributed.tensor import Shard as Sharded, distribute_tensor, init_device_mesh
    return distribute_tensor(torch.zeros(32, dtype=torch.bfloat16), init_device_mesh("cpu", (1,)), [Sharded(0)])


@pytest.fixture
def one_rank(monkeypatch, work):
    torch.distributed.init_process_group("gloo", init_method=f"file://{work}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("make, words", [(fake, "FakeTensor"), (spread, "DTensor.*\n.*full_tensor")], ids=["fake", "spread"])
def test_a_tensor_without_memory_of_its_own_is_not_saved(make, words, one_rank, work):
    tensors = {name: tensor.torch() for name, tensor in ferry.open(HF).tensors()}
    with pytest.raises(ferry.Error, match=f"{NORM}: has no dense memory.*{words}"):
        ferry.save(work / "out", {**tensors, NORM: make()}, like=HF)
    with pytest.raises(ferry.Error, match="without memory of its own|cannot be shared"):
        ferry.open(HF).read(NORM, into=make())


@pytest.mark.parametrize("change, words", [
    (lambda tensor: tensor.to("meta"), "has no dense memory: it is a Tensor on meta"), (torch._neg_view, "is a view that is negated when it is read"),
    (lambda tensor: tensor.numpy(), "a ndarray is no tensor of torch"), (lambda tensor: tensor.to_sparse(), "has no dense memory")
], ids=["meta", "negated", "numpy", "sparse"])
def test_shards_that_hold_no_plain_memory_are_named(change, words, work):
    """... before anything is loaded: a model on meta would look as if it were."""
    checkpoint = ferry.open(HF)
    state = {name: Shard(name, tensor.torch().float()) for name, tensor in checkpoint.tensors("megatron")}
    key = "decoder.final_layernorm.weight"
    state[key].data = change(state[key].data)
    with pytest.raises(ferry.Error, match=f"{key}: {words}"):
        ferry.load_into(checkpoint, state)
    with pytest.raises(ferry.Error, match=f"{key}: {words}"):
        ferry.save_from(work / "out", state, like=checkpoint)


def test_a_negated_view_is_no_memory_to_read_into():
    with pytest.raises(ferry.Error, match="is a view that is negated"):
        ferry.open(HF).read(NORM, into=torch._neg_view(torch.empty(32, dtype=torch.bfloat16)))


class Capsule:
    """Hands over the same capsule each time, as no exporter may."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_):
        return self.capsule


def test_a_capsule_that_is_used_up_or_none_is_an_error():
    used = torch.empty(32, dtype=torch.bfloat16).__dlpack__()
    torch.utils.dlpack.from_dlpack(used)
    for capsule in (used, 5):
        with pytest.raises(ferry.Error, match="is no capsule of DLPack"):
            ferry.open(HF).read(NORM, into=Capsule(capsule))


def test_a_part_of_a_model_names_the_parameter_that_it_lacks(tmp_path):
    ferry.convert(HF, tmp_path / "part", to="hf", include="*.mlp.*", progress=False)
    with pytest.raises(ferry.Error, match="embedding.word_embeddings.weight: .* holds a part of a model") as error:
        ferry.open(tmp_path / "part").tensors("megatron")
    assert error.value.kind == "layout" and 'names="hf"' in error.value.hint


def test_blocks_that_are_left_as_they_are_have_no_place_in_megatrons_modules(tmp_path):
    ferry.convert(DATA / "hf_gpt_oss/hf", tmp_path / "mxfp4", to="hf", quantize="mxfp4", progress=False)
    with pytest.raises(ferry.Error, match="linear_fc1.weight: keep_quantized leaves its blocks") as error:
        ferry.open(tmp_path / "mxfp4", keep_quantized=True).tensors("megatron")
    assert error.value.kind == "usage"
