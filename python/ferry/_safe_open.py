"""The interface of safetensors, over checkpoints of every format."""
import operator
import os
import threading
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, Dict, Generic, Iterator, List, Literal, Optional, Tuple, TypeVar, Union, cast, overload

from ._arguments import Iteration, Path
from ._checkpoint import Checkpoint, TensorInfo, open_file, opened
from ._errors import Error
from ._reports import inspect
from ._tensor import Tensor, item_size

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor as TorchTensor

Given = TypeVar("Given")
"""A tensor of the framework."""
_Torch = Literal["pt", "torch", "pytorch"]
_NumPy = Literal["np", "numpy"]
_FRAMEWORKS = {"pt": "pt", "torch": "pt", "pytorch": "pt", "np": "np", "numpy": "np"}


def _box_of(index: Tuple[Any, ...], shape: Tuple[int, ...]) -> Tuple[List[Tuple[int, int]], Tuple[Any, ...]]:
    """-> (the box of the tensor that an index spans, the index into that box)"""
    def consumed(one: Any) -> int:
        """-> dimensions that it takes: a mask has as many as it is made of"""
        if one is None or one is Ellipsis or isinstance(one, bool):
            return 0
        return int(one.ndim) if str(getattr(one, "dtype", "")).endswith("bool") else 1

    missing = len(shape) - sum(map(consumed, index))
    if missing < 0:
        raise IndexError(f"too many indices for tensor of dimension {len(shape)}")
    if Ellipsis not in [one for one in index if one is None or one is Ellipsis]:
        index += (Ellipsis,)
    box: List[Tuple[int, int]] = []
    rest: List[Any] = []
    for one in index:
        if one is Ellipsis:
            box += [(0, size) for size in shape[len(box):len(box) + missing]]
            rest += [slice(None)] * missing
        elif not consumed(one):
            rest.append(one)
        elif isinstance(one, slice):
            begin, end, step = one.indices(shape[len(box)])
            if step < 1:
                raise ValueError("step must be greater than zero")
            box.append((begin, max(begin, end)))
            rest.append(slice(None, None, step))
        elif (at := _whole(one)) is not None:
            size = shape[len(box)]
            if not -size <= at < size:
                raise IndexError(f"index {at} is out of bounds for dimension {len(box)} with size {size}")
            box.append((at % size, at % size + 1))
            rest.append(0)
        else:
            box += [(0, size) for size in shape[len(box):len(box) + consumed(one)]]
            rest.append(one)
    return box, tuple(rest)


def _whole(index: Any) -> Optional[int]:
    """-> the integer that it is; None for an array or a list"""
    if getattr(index, "ndim", 0):  # one element of torch has __index__, whatever its shape
        return None
    try:
        return operator.index(index)
    except TypeError:
        return None


class _Window:
    """Whole tensors of a checkpoint that are asked for in about the order of the model: they come out of one stream. A read alone costs a plan of the model."""

    AHEAD = 1 << 29  # bytes that the stream may be ahead of what is asked for, and that may wait to be asked for

    def __init__(self, checkpoint: Checkpoint, infos: Dict[str, TensorInfo]):
        self._checkpoint, self._used = checkpoint, False
        self._order = {name: index for index, name in enumerate(infos)}
        self._bytes = [prod(info.shape) * item_size(info.dtype) for info in infos.values()]
        self._begins = [0, *accumulate(self._bytes)]
        self._begin()

    def _begin(self) -> None:
        self._lock, self._process = threading.Lock(), os.getpid()
        self._stream: Optional[Iterator[Tuple[str, Tensor]]] = None
        self._position = 0
        self._waiting: Dict[str, Tensor] = {}
        self._waiting_bytes = 0

    def take(self, name: str) -> Optional[Tensor]:
        """-> the tensor; None if it is better read alone"""
        if self._process != os.getpid():  # forked: the stream is the parent's, and a thread of it may hold the lock
            self._begin()
        with self._lock:
            index, first, self._used = self._order[name], not self._used, True
            if name in self._waiting:
                self._waiting_bytes -= self._bytes[index]
                return self._waiting.pop(name)
            if first or index < self._position or self._begins[index] - self._begins[self._position] > self.AHEAD:
                return None
            if self._stream is None:
                self._stream = self._checkpoint.tensors()
            for passed, tensor in self._stream:
                self._position += 1
                if passed == name:
                    return tensor
                self._waiting[passed] = tensor
                self._waiting_bytes += self._bytes[self._order[passed]]
                while self._waiting_bytes > self.AHEAD:
                    dropped = next(iter(self._waiting))
                    del self._waiting[dropped]
                    self._waiting_bytes -= self._bytes[self._order[dropped]]
            return None


class SafeSlice(Generic[Given]):
    """A tensor of a checkpoint that is not read yet. Made by safe_open.get_slice()."""

    def __init__(self, opened: "safe_open[Given]", info: TensorInfo):
        self._opened, self._info = opened, info

    def get_shape(self) -> List[int]:
        """The shape of the whole tensor, outermost first."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """The dtype in safetensors' words: "BF16", "F32", "F8_E4M3"."""
        return self._info.dtype.upper().replace("FP", "F")

    def __getitem__(self, index: Any) -> Given:
        """Reads a part: integers, slices, `...`, None, lists and arrays, as a tensor of the framework takes them. Of the files it reads the box that they span.

        Raises:
            IndexError: for an integer beyond the tensor, or more of them than it has dimensions
        """
        box, rest = _box_of(index if isinstance(index, tuple) else (index,), self._info.shape)
        part: Any = self._opened._read(self._info.name, box)
        return cast(Given, part if all(isinstance(one, slice) and one.step in (None, 1) for one in rest) else part[rest])


class safe_open(Generic[Given]):
    """safetensors.safe_open over a checkpoint of any format: the tensors of the model under Hugging Face names, whatever names and layout it is stored in.

        with ferry.safe_open("megatron", framework="pt") as f:
            rows = f.get_slice("model.embed_tokens.weight")[:128]

    A tensor that a checkpoint stores twice (the head of a prediction layer) is there once. Threads may share it. Tensors that are asked for in the order of
    keys(), or nearly so, are read ahead, up to 768 MiB of them; a part, or a tensor out of that order, costs a look at the whole model.

    Args:
        filename: a folder or address, as in open(), an opened Checkpoint, or a safetensors file, of which the tensors are there as they are stored
        framework: "pt" for tensors of torch, "np" for arrays of NumPy (bf16 by the package ml_dtypes)
        device: of torch, where tensors go
        backend: has no effect; safetensors has it
        iteration, hf_config, keep_quantized: as in open(); of an opened Checkpoint no others than it was opened with

    Raises:
        Error: as open() does; "usage" for another framework, or when it is used after it was left
    """

    @overload
    def __init__(self: "safe_open[TorchTensor]", filename: Union[Path, Checkpoint], framework: _Torch, device: Union[str, int] = ..., *, backend: str = ...,
                 iteration: Iteration = ..., hf_config: Optional[Path] = ..., keep_quantized: bool = ...): ...

    @overload
    def __init__(self: "safe_open[NDArray[Any]]", filename: Union[Path, Checkpoint], framework: _NumPy, device: Union[str, int] = ..., *, backend: str = ...,
                 iteration: Iteration = ..., hf_config: Optional[Path] = ..., keep_quantized: bool = ...): ...

    @overload
    def __init__(self: "safe_open[Any]", filename: Union[Path, Checkpoint], framework: str, device: Union[str, int] = ..., *, backend: str = ...,
                 iteration: Iteration = ..., hf_config: Optional[Path] = ..., keep_quantized: bool = ...): ...

    def __init__(self, filename: Union[Path, Checkpoint], framework: str, device: Union[str, int] = "cpu", *, backend: str = "mmap",
                 iteration: Iteration = None, hf_config: Optional[Path] = None, keep_quantized: bool = False):
        if framework not in _FRAMEWORKS:
            raise Error("usage", f"framework={framework}: is neither pt nor np")
        if _FRAMEWORKS[framework] == "np" and device != "cpu":
            raise Error("usage", f"device={device}: an array of NumPy is on the host")
        self._framework, self._device = _FRAMEWORKS[framework], device
        self._is_file = not isinstance(filename, Checkpoint) and os.fspath(filename).endswith(".safetensors") and not os.path.isdir(filename)
        if self._is_file and (iteration is not None or hf_config is not None):
            raise Error("usage", f"{os.fspath(cast(Path, filename))}: is a file, of which iteration and hf_config choose nothing")
        checkpoint = open_file(cast(Path, filename)) if self._is_file else opened(filename, iteration=iteration, hf_config=hf_config,
                                                                                  keep_quantized=keep_quantized)
        self._checkpoint: Optional[Checkpoint] = checkpoint
        self._infos = {info.name: info for info in checkpoint.infos()}
        self._window: Optional[_Window] = _Window(checkpoint, self._infos)

    def __enter__(self) -> "safe_open[Given]":
        return self

    def __exit__(self, *_: Any) -> None:
        self._checkpoint = self._window = None

    def keys(self) -> List[str]:
        """The names of the tensors, in the order of the model, in which reading is the quickest."""
        self._open()
        return list(self._infos)

    def offset_keys(self) -> List[str]:
        """The names in the order of the files where they are Hugging Face's, else in that of keys()."""
        checkpoint = self._open()
        if self._is_file or checkpoint.format != "huggingface":
            return list(self._infos)
        stored = inspect(checkpoint.path).tensors
        place = {tensor.name: (tensor.chunks[0].file, tensor.chunks[0].offset) for tensor in stored if tensor.chunks}
        return sorted(self._infos, key=lambda name: place.get(name, ("", 0)))

    def metadata(self) -> Optional[Dict[str, str]]:
        """The metadata of a file; of a checkpoint {"format": "pt"}, which transformers asks for."""
        checkpoint = self._open()
        return (checkpoint._metadata or None) if self._is_file else {"format": "pt"}

    def get_tensor(self, name: str) -> Given:
        """-> the tensor [*shape], of its own memory

        Raises:
            Error: "not_found" for a name that the model lacks
        """
        return self._read(self._info(name).name, None)

    def get_tensors(self) -> Dict[str, Given]:
        """-> {name: tensor} of all of them, read in parallel"""
        return {name: self._given(tensor) for name, tensor in self._open().tensors()}

    def get_slice(self, name: str) -> SafeSlice[Given]:
        """-> a SafeSlice, of which an index reads no more than it takes

        Raises:
            Error: "not_found" for a name that the model lacks
        """
        return SafeSlice(self, self._info(name))

    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            raise Error("usage", "the checkpoint is closed")
        return self._checkpoint

    def _info(self, name: str) -> TensorInfo:
        checkpoint = self._open()
        if name not in self._infos:
            raise Error("not_found", f"{checkpoint.path}: has no tensor {name}")
        return self._infos[name]

    def _read(self, name: str, box: Optional[List[Tuple[int, int]]]) -> Given:
        checkpoint, window = self._open(), self._window
        whole = box is None or all(one == (0, size) for one, size in zip(box, self._infos[name].shape))
        tensor = window.take(name) if window is not None and whole else None
        return self._given(checkpoint.read(name, box) if tensor is None else tensor)

    def _given(self, tensor: Tensor) -> Given:
        given: Any = tensor.numpy() if self._framework == "np" else tensor.torch()
        return cast(Given, given if self._device == "cpu" else given.to(self._device))


@overload
def load_file(filename: Union[Path, Checkpoint], device: Union[str, int] = ..., *, framework: _Torch = ..., iteration: Iteration = ...,
              hf_config: Optional[Path] = ..., keep_quantized: bool = ...) -> "Dict[str, TorchTensor]": ...


@overload
def load_file(filename: Union[Path, Checkpoint], device: Union[str, int] = ..., *, framework: _NumPy, iteration: Iteration = ...,
              hf_config: Optional[Path] = ..., keep_quantized: bool = ...) -> "Dict[str, NDArray[Any]]": ...


@overload
def load_file(filename: Union[Path, Checkpoint], device: Union[str, int] = ..., *, framework: str, iteration: Iteration = ...,
              hf_config: Optional[Path] = ..., keep_quantized: bool = ...) -> Dict[str, Any]: ...


def load_file(filename: Union[Path, Checkpoint], device: Union[str, int] = "cpu", *, framework: str = "pt", iteration: Iteration = None,
              hf_config: Optional[Path] = None, keep_quantized: bool = False) -> Dict[str, Any]:
    """safetensors.torch.load_file over a checkpoint of any format.

    Args: as those of safe_open

    Returns:
        {Hugging Face name: tensor [*shape]} of the whole model, or of the file
    """
    with safe_open(filename, framework, device, iteration=iteration, hf_config=hf_config, keep_quantized=keep_quantized) as opened_file:
        return opened_file.get_tensors()
