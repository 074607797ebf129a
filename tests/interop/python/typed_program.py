"""A program of somebody who uses ferry, for mypy and for Python alike: both find the types that it states.

    python typed_program.py CHECKPOINT FOLDER

mypy finds the mistakes of wrong_programs(), too: where it overlooks one, the comment that excuses it is the error.
"""
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import assert_type

import ferry
from ferry.compat import megatron_bridge, transformers, vllm


def read(checkpoint: ferry.Checkpoint) -> None:
    assert_type(checkpoint.config, Optional[Dict[str, Any]])
    for name, tensor in checkpoint.tensors(include="*norm*"):
        assert_type(name, str)
        assert_type(tensor, ferry.Tensor)
        assert_type(tensor.shape, Tuple[int, ...])
        assert_type(tensor.torch(), torch.Tensor)
        assert_type(tensor.bits(), NDArray[Any])
        assert isinstance(tensor, ferry.Tensor) and isinstance(tensor.torch(), torch.Tensor) and isinstance(tensor.bits(), np.ndarray)


def make_array(name: str, dtype: str, shape: Tuple[int, ...]) -> NDArray[np.float32]:
    return np.empty(shape, dtype=np.float32)


def read_into_memory(checkpoint: ferry.Checkpoint) -> Dict[str, torch.Tensor]:
    memory = {info.name: torch.empty(info.shape, dtype=torch.float32) for info in checkpoint.infos()}
    for _, given in checkpoint.tensors(dtype="fp32", into=memory):
        assert_type(given, torch.Tensor)
        assert isinstance(given, torch.Tensor)
    for _, made in checkpoint.tensors(dtype=np.float32, into=make_array):
        assert_type(made, NDArray[np.float32])
        assert isinstance(made, np.ndarray)
    name, weight = next(iter(memory.items()))
    alone, part, into = checkpoint.read(name), checkpoint.read(name, [(0, 1), slice(None)]), checkpoint.read(name, dtype=torch.float32, into=weight)
    assert_type(alone, ferry.Tensor)
    assert_type(part, ferry.Tensor)
    assert_type(into, torch.Tensor)
    assert isinstance(alone, ferry.Tensor) and isinstance(part, ferry.Tensor) and into is weight
    return memory


def open_safely(path: Path, framework: str) -> None:
    with ferry.safe_open(path, "pt") as file, ferry.safe_open(path, framework="np") as arrays, ferry.safe_open(path, framework) as either:
        name = min(file.keys())
        tensor, part, array = file.get_tensor(name), file.get_slice(name)[:1], arrays.get_tensor(name)
        assert_type(tensor, torch.Tensor)
        assert_type(part, torch.Tensor)
        assert_type(array, NDArray[Any])
        assert_type(either.get_tensor(name), Any)
        assert_type(file.get_slice(name).get_shape(), List[int])
        assert isinstance(tensor, torch.Tensor) and isinstance(part, torch.Tensor) and isinstance(array, np.ndarray)
    assert_type(ferry.load_file(path), Dict[str, torch.Tensor])
    assert_type(ferry.load_file(path, framework="np"), Dict[str, NDArray[Any]])
    assert_type(ferry.load_file(path, framework=framework), Dict[str, Any])


def report(source: Path, folder: Path) -> None:
    def progress(stage: str, done: int, total: int, finished: bool) -> Optional[bool]:
        return None

    converted = ferry.convert(source, folder / "megatron", tp=2, max_memory="64MiB", dtype=torch.float32, progress=progress)
    assert_type(converted, ferry.ConvertReport)
    assert_type(converted.target.path, str)
    compared = ferry.diff(source, folder / "megatron")
    assert_type(compared.layers[0].difference.max_ulps, Optional[int])
    assert_type(ferry.verify(source, folder / "megatron").tensors, List[ferry.TensorDifference])
    assert_type(ferry.inspect(folder / "megatron").saved_with, Optional[Dict[str, int]])
    assert_type(ferry.digest(source).model, str)
    assert_type(ferry.delta_make(folder / "megatron", folder / "megatron", folder / "delta").changed_elements, int)
    assert_type(ferry.delta_apply(folder / "megatron", [folder / "delta"], folder / "applied"), ferry.ConvertReport)
    assert_type(ferry.delta_inspect(folder / "delta")[0].changed, List[ferry.ChangedTensor])
    assert_type(megatron_bridge.AutoBridge.from_hf_pretrained(source).export_ckpt(folder / "megatron", folder / "back", False), ferry.ConvertReport)
    for name, weight in vllm.weights_iterator(folder / "back", {"threads": 1}):
        assert_type(name, str)
    assert_type(transformers.from_pretrained(folder / "back"), Any)
    try:
        ferry.open(folder / "nothing")
    except ferry.Error as error:
        assert_type(error.context, List[str])
        assert (error.kind, type(error.message), type(error.hint)) == ("not_found", str, str)


def wrong_programs(checkpoint: ferry.Checkpoint) -> None:
    checkpoint.path = 3  # type: ignore[assignment]
    checkpoint.tensor("norm")  # type: ignore[attr-defined]
    checkpoint.read("norm", [0, 1])  # type: ignore[list-item]
    checkpoint.tensors(into={"norm": 1}, tp="2")  # type: ignore[arg-type]
    ferry.open(3)  # type: ignore[arg-type]
    ferry.convert("hf")  # type: ignore[call-arg]
    ferry.split("hf", "tuned", "adapter")  # type: ignore[call-arg]
    ferry.merge("hf", "adapter", "merged").converted = None  # type: ignore[misc, assignment]
    ferry.save("hf", {}, to="hf")  # type: ignore[call-arg]
    ferry.verify("left", "right").identical = True  # type: ignore[misc]
    for _, tensor in checkpoint.tensors():
        tensor.torch().shapes  # type: ignore[attr-defined]


if __name__ == "__main__":
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    opened = ferry.open(source)
    read(opened)
    ferry.save(target / "saved", read_into_memory(opened), like=opened)
    open_safely(target / "saved", "pt")
    report(source, target)
