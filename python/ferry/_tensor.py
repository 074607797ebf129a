"""A tensor in the memory of the host, handed over by DLPack."""
import ctypes
import re
from typing import TYPE_CHECKING, Any, Callable, Optional, Tuple

from . import _ferry
from ._errors import Error

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor as TorchTensor

_TYPES = {"bool": "|b1", "u8": "|u1", "i8": "|i1", "i16": "<i2", "i32": "<i4", "i64": "<i8", "fp16": "<f2", "fp32": "<f4", "fp64": "<f8"}
_BITS = {"bf16": "<u2", "fp8_e4m3": "|u1", "fp8_e5m2": "|u1", "fp8_e8m0": "|u1"}
_ML_DTYPES = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "fp8_e8m0": "float8_e8m0fnu"}
_TORCH = {"bool": "bool", "u8": "uint8", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "fp16": "float16", "fp32": "float32",
          "fp64": "float64", **_ML_DTYPES}


def item_size(dtype: str) -> int:
    """-> bytes of an element"""
    return int({**_TYPES, **_BITS}[dtype][2:])


def torch_name(dtype: str) -> str:
    """-> "bfloat16" of "bf16\""""
    return _TORCH[dtype]


def short_name(dtype: str) -> str:
    """-> "bf16" of "bfloat16" (torch's) and of "BF16" (safetensors')"""
    names = {long: short for short, long in _TORCH.items()}
    return names.get(dtype) or re.sub(r"^f(?=\d)", "fp", dtype.lower())


class _Bytes:
    """Makes NumPy share the memory of a tensor, and keep it alive."""

    def __init__(self, tensor: "Tensor", typestr: str):
        self.tensor = tensor
        self.__array_interface__ = {"version": 3, "shape": tensor.shape, "typestr": typestr, "data": (tensor.address, False)}


class Tensor:
    """A dense, row-major tensor on the host.

    torch.from_dlpack(tensor), numpy.from_dlpack(tensor) and whatever else reads DLPack share its memory, which lives as long as one of them. It may be pickled:
    its bytes go along.

    Attributes:
        dtype: "bf16", "fp16", "fp32", "fp64", "fp8_e4m3", "fp8_e5m2", "fp8_e8m0", "i64", ...
        shape: outermost first
        address: of the first byte
    """

    __slots__ = ("dtype", "shape", "address", "_memory", "__weakref__")

    def __init__(self, memory: Any, address: int, dtype: str, shape: Tuple[int, ...]):
        self._memory, self.address, self.dtype, self.shape = memory, address, dtype, shape

    def __repr__(self) -> str:
        return f"ferry.Tensor({self.dtype}, {list(self.shape)})"

    def __dlpack__(self, *, stream: Any = None, max_version: Optional[Tuple[int, int]] = None, dl_device: Optional[Tuple[int, int]] = None,
                   copy: Optional[bool] = None) -> Any:
        if dl_device not in (None, (1, 0)):
            raise BufferError(f"the tensor is on the host, not on device {dl_device}")
        memory = _copy(self.dtype, self.shape, self._bytes())._memory if copy else self._memory
        return _ferry.export_dlpack(memory, self.dtype, self.shape, max_version is not None and max_version[0] >= 1, bool(copy))

    def __dlpack_device__(self) -> Tuple[int, int]:
        return 1, 0

    def __reduce__(self) -> Tuple[Callable[[str, Tuple[int, ...], bytes], "Tensor"], Tuple[str, Tuple[int, ...], bytes]]:
        return _copy, (self.dtype, self.shape, self._bytes())

    def _bytes(self) -> bytes:
        return bytes(memoryview((ctypes.c_char * self.nbytes).from_address(self.address)))  # string_at() takes sizes of 31 bits

    def torch(self) -> "TorchTensor":
        """-> torch.Tensor [*shape] that shares the memory"""
        import torch
        from torch.utils.dlpack import from_dlpack
        if self.dtype.startswith("fp8"):
            return from_dlpack(Tensor(self._memory, self.address, "u8", self.shape)).view(getattr(torch, torch_name(self.dtype)))
        return from_dlpack(self)

    def bits(self) -> "NDArray[Any]":
        """-> numpy.ndarray [*shape] that shares the memory. Numbers that NumPy lacks (bf16, fp8) are unsigned integers of their bits."""
        import numpy
        return numpy.asarray(_Bytes(self, {**_TYPES, **_BITS}[self.dtype]))

    @property
    def nbytes(self) -> int:
        size = item_size(self.dtype)
        for extent in self.shape:
            size *= extent
        return size

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> "NDArray[Any]":
        """numpy.asarray(tensor) is numpy() of it."""
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(f"{dtype} takes a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def numpy(self) -> "NDArray[Any]":
        """-> numpy.ndarray [*shape] that shares the memory; bf16 and fp8 by the package ml_dtypes.

        Raises:
            Error: "usage", if that is not installed
        """
        if self.dtype not in _BITS:
            return self.bits()
        try:
            import ml_dtypes
        except ImportError:
            raise Error("usage", f"NumPy has no {self.dtype}", [],
                        "install ml_dtypes, take torch(), or bits() for the bits as integers") from None
        return self.bits().view(getattr(ml_dtypes, _ML_DTYPES[self.dtype]))


def _copy(dtype: str, shape: Tuple[int, ...], content: bytes) -> Tensor:
    memory, address = _ferry.allocate(len(content))
    ctypes.memmove(address, content, len(content))
    return Tensor(memory, address, dtype, shape)


_CODES = {0: "i", 1: "u", 2: "fp", 4: "bf"}  # and the number of bits
_WHOLE_CODES = {6: "bool", 10: "fp8_e4m3", 12: "fp8_e5m2", 14: "fp8_e8m0"}


def borrow(name: str, target: Any, dtype: str, shape: Tuple[int, ...]) -> Tuple[Any, int]:
    """-> (what keeps the memory of `target` alive, its address). `target` speaks DLPack, and has the shape and the dtype, or unsigned integers of its width."""
    def refuse(what: str) -> Error:
        return Error("usage", f"{name}: the memory that was given {what}")
    if not hasattr(target, "__dlpack__"):
        raise refuse(f"is a {type(target).__name__}, which does not speak DLPack")
    if getattr(target, "requires_grad", False):
        target = target.detach()
    if hasattr(target, "is_neg") and target.is_neg():
        raise refuse("is a view that is negated when it is read")
    try:
        capsule = target.__dlpack__()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # of a meta tensor, a read-only array, a sparse tensor
        raise refuse(f"cannot be shared by DLPack: {error}") from error
    try:
        address, device, code, bits, sizes, strides, read_only = _ferry.import_dlpack(capsule)
    except ValueError as error:
        raise refuse(f"is no capsule of DLPack: {error}") from error
    found = _WHOLE_CODES.get(code, _CODES.get(code, f"code {code} of ") + str(bits))
    if device not in (1, 3):  # host, pinned host
        raise refuse(f"is on a device of DLPack's type {device}, not on the host")
    if tuple(sizes) != shape:
        raise refuse(f"has shape {sizes}, not {list(shape)}")
    if bits != 8 * item_size(dtype) or (found != dtype and code != 1):
        raise refuse(f"is of {found}, not {dtype}")
    if not address and 0 not in sizes:
        raise refuse(f"is a {type(target).__name__} without memory of its own")
    if read_only:
        raise refuse("is read-only")
    if strides is not None:
        step = 1
        for size, stride in zip(reversed(sizes), reversed(strides)):
            if size != 1 and stride != step:
                raise refuse(f"has strides {strides}: it is not row-major without gaps")
            step *= size
    return (target, capsule), address
