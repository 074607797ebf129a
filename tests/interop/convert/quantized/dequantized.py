"""The comparison that tests of dequantised checkpoints share."""
import torch
from safetensors.torch import load_file

BITS = {2: torch.int16, 4: torch.int32}


def assert_same(folder, want):
    """The Hugging Face folder has the tensors `want` {name: tensor} and no other, bit for bit. A NaN need only be one: torch itself gives it other
    bits with other instructions."""
    got = {}
    for file in sorted(folder.glob("*.safetensors")):
        got |= load_file(file)
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        nan, bits = tensor.isnan(), BITS[tensor.element_size()]
        assert torch.equal(got[name].isnan(), nan), name
        assert torch.equal(got[name].masked_fill(nan, 0).view(bits), tensor.masked_fill(nan, 0).view(bits)), name
