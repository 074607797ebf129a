"""The interface of safetensors, over checkpoints of every format."""
from typing import Any, Dict, List, Optional, Tuple, Union

from ._checkpoint import Checkpoint, TensorInfo, open
from ._errors import Error
from ._reports import Iteration, Path, inspect
from ._tensor import Tensor

_FRAMEWORKS = {"pt": "pt", "torch": "pt", "pytorch": "pt", "np": "np", "numpy": "np"}
_DTYPES = {"fp16": "F16", "fp32": "F32", "fp64": "F64", "f8e4m3": "F8_E4M3", "f8e5m2": "F8_E5M2"}  # others: in capitals


def _box_of(index: Tuple[Any, ...], shape: Tuple[int, ...]) -> Tuple[List[Tuple[int, int]], Tuple[Any, ...]]:
    """-> (the box of the tensor that an index spans, the index into that box)"""
    def consumes(one: Any) -> bool:
        return one is not None and one is not Ellipsis and not isinstance(one, bool)

    missing = len(shape) - sum(map(consumes, index))
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
        elif not consumes(one):
            rest.append(one)
        elif isinstance(one, slice):
            begin, end, step = one.indices(shape[len(box)])
            if step < 1:
                raise ValueError("slice step must be positive")
            box.append((begin, max(begin, end)))
            rest.append(slice(None, None, step))
        elif hasattr(one, "__index__"):
            at, size = one.__index__(), shape[len(box)]
            if not -size <= at < size:
                raise IndexError(f"index {at} is out of bounds for dimension {len(box)} with size {size}")
            box.append((at % size, at % size + 1))
            rest.append(0)
        else:
            box.append((0, shape[len(box)]))
            rest.append(one)
    return box, tuple(rest)


class SafeSlice:
    """A tensor of a checkpoint that is not read yet. Made by safe_open.get_slice()."""

    def __init__(self, opened: "safe_open", info: TensorInfo):
        self._opened, self._info = opened, info

    def get_shape(self) -> List[int]:
        """The shape of the whole tensor, outermost first."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """The dtype in safetensors' words: "BF16", "F32", "F8_E4M3"."""
        return _DTYPES.get(self._info.dtype, self._info.dtype.upper())

    def __getitem__(self, index: Any) -> Any:
        """Reads a part: integers, slices, `...`, None and lists, as a tensor of the framework takes them. Of the files it reads the box that they span.

        Raises:
            IndexError: for an integer beyond the tensor, or more of them than it has dimensions
        """
        box, rest = _box_of(index if isinstance(index, tuple) else (index,), self._info.shape)
        part = self._opened._read(self._info.name, box)
        return part if all(isinstance(one, slice) and one.step in (None, 1) for one in rest) else part[rest]


class safe_open:
    """safetensors.safe_open over a checkpoint of any format: the tensors of the model under Hugging Face names, whatever names and layout it is stored in.

        with ferry.safe_open("megatron", framework="pt") as f:
            rows = f.get_slice("model.embed_tokens.weight")[:128]

    A tensor that a checkpoint stores twice (the head of a prediction layer) is there once. Threads may share it.

    Args:
        filename: a folder or address, as in open(), or an opened Checkpoint
        framework: "pt" for tensors of torch, "np" for arrays of NumPy (bf16 by the package ml_dtypes)
        device: of torch, where tensors go
        backend: has no effect; safetensors has it
        iteration, hf_config, keep_fp8: as in open()

    Raises:
        Error: as open() does; "usage" for another framework, or when it is used after it was left
    """

    def __init__(self, filename: Union[Path, Checkpoint], framework: str, device: Union[str, int] = "cpu", *, backend: str = "mmap",
                 iteration: Iteration = None, hf_config: Optional[Path] = None, keep_fp8: bool = False):
        if framework not in _FRAMEWORKS:
            raise Error("usage", f"framework={framework}: is neither pt nor np")
        if _FRAMEWORKS[framework] == "np" and device != "cpu":
            raise Error("usage", f"device={device}: an array of NumPy is on the host")
        self._framework, self._device = _FRAMEWORKS[framework], device
        opened = filename if isinstance(filename, Checkpoint) else open(filename, iteration=iteration, hf_config=hf_config, keep_fp8=keep_fp8)
        self._checkpoint: Optional[Checkpoint] = opened
        self._infos = {info.name: info for info in opened.infos()}

    def __enter__(self) -> "safe_open":
        return self

    def __exit__(self, *_: Any) -> None:
        self._checkpoint = None

    def keys(self) -> List[str]:
        """The names of the tensors, sorted."""
        self._open()
        return sorted(self._infos)

    def offset_keys(self) -> List[str]:
        """The names in the order of the files where they are Hugging Face's, else in the order of the model: reading is the quickest so."""
        checkpoint = self._open()
        if checkpoint.format != "huggingface":
            return list(self._infos)
        stored = inspect(checkpoint.path).tensors
        place = {tensor.name: (tensor.chunks[0].file, tensor.chunks[0].offset) for tensor in stored if tensor.chunks}
        return sorted(self._infos, key=lambda name: place.get(name, ("", 0)))

    def metadata(self) -> Optional[Dict[str, str]]:
        """{"format": "pt"}, which transformers asks a file for."""
        self._open()
        return {"format": "pt"}

    def get_tensor(self, name: str) -> Any:
        """-> the tensor [*shape], of its own memory

        Raises:
            Error: "not_found" for a name that the model lacks
        """
        return self._read(self._info(name).name, None)

    def get_tensors(self) -> Dict[str, Any]:
        """-> {name: tensor} of all of them, read in parallel"""
        return {name: self._given(tensor) for name, tensor in self._open().tensors()}

    def get_slice(self, name: str) -> SafeSlice:
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

    def _read(self, name: str, box: Optional[List[Tuple[int, int]]]) -> Any:
        return self._given(self._open().read(name, box))

    def _given(self, tensor: Tensor) -> Any:
        if self._framework == "np":
            return tensor.numpy()
        return tensor.torch() if self._device == "cpu" else tensor.torch().to(self._device)


def load_file(filename: Union[Path, Checkpoint], device: Union[str, int] = "cpu", *, framework: str = "pt", iteration: Iteration = None,
              hf_config: Optional[Path] = None, keep_fp8: bool = False) -> Dict[str, Any]:
    """safetensors.torch.load_file over a checkpoint of any format.

    Args: as those of safe_open

    Returns:
        {Hugging Face name: tensor [*shape]} of the whole model
    """
    with safe_open(filename, framework, device, iteration=iteration, hf_config=hf_config, keep_fp8=keep_fp8) as opened:
        return opened.get_tensors()
