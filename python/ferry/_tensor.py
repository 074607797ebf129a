"""A tensor in the memory of the host, handed over by DLPack."""
from typing import TYPE_CHECKING, Any, Optional, Tuple

from . import _ferry
from ._errors import Error

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor as TorchTensor

_TYPES = {"bool": "|b1", "u8": "|u1", "i8": "|i1", "i16": "<i2", "i32": "<i4", "i64": "<i8", "fp16": "<f2", "fp32": "<f4", "fp64": "<f8"}
_BITS = {"bf16": "<u2", "f8e4m3": "|u1", "f8e5m2": "|u1"}
_ML_DTYPES = {"bf16": "bfloat16", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}


class _Bytes:
    """Makes NumPy share the memory of a tensor, and keep it alive."""

    def __init__(self, tensor: "Tensor", typestr: str):
        self.tensor = tensor
        self.__array_interface__ = {"version": 3, "shape": tensor.shape, "typestr": typestr, "data": (tensor.address, False)}


class Tensor:
    """A dense, row-major tensor on the host.

    torch.from_dlpack(tensor), numpy.from_dlpack(tensor) and whatever else reads DLPack share its memory, which lives as long as one of them.

    Attributes:
        dtype: "bf16", "fp16", "fp32", "fp64", "f8e4m3", "f8e5m2", "i64", ...
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
        if copy:
            raise BufferError("the tensor is shared, not copied")
        return _ferry.export_dlpack(self._memory, self.dtype, self.shape, max_version is not None and max_version[0] >= 1)

    def __dlpack_device__(self) -> Tuple[int, int]:
        return 1, 0

    def torch(self) -> "TorchTensor":
        """-> torch.Tensor [*shape] that shares the memory"""
        import torch
        from torch.utils.dlpack import from_dlpack
        if self.dtype.startswith("f8"):
            return torch.from_numpy(self.bits()).view(getattr(torch, _ML_DTYPES[self.dtype]))
        return from_dlpack(self)

    def bits(self) -> "NDArray[Any]":
        """-> numpy.ndarray [*shape] that shares the memory. Numbers that NumPy lacks (bf16, fp8) are unsigned integers of their bits."""
        import numpy
        return numpy.asarray(_Bytes(self, {**_TYPES, **_BITS}[self.dtype]))

    @property
    def nbytes(self) -> int:
        size = int({**_TYPES, **_BITS}[self.dtype][2:])
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


_CODES = {0: "i", 1: "u", 2: "fp", 4: "bf", 6: "bool"}


def borrow(name: str, target: Any, dtype: str, shape: Tuple[int, ...]) -> Tuple[Any, int]:
    """-> (what keeps the memory of `target` alive, its address). `target` speaks DLPack, and has the shape and the dtype, or unsigned integers of its width."""
    def refuse(what: str) -> Error:
        return Error("usage", f"{name}: the memory that was given {what}")
    if not hasattr(target, "__dlpack__"):
        raise refuse(f"is a {type(target).__name__}, which does not speak DLPack")
    if getattr(target, "requires_grad", False):
        target = target.detach()
    try:
        capsule = target.__dlpack__()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # of a meta tensor, a read-only array, a sparse tensor
        raise refuse(f"cannot be shared by DLPack: {error}") from error
    address, device, code, bits, sizes, strides, read_only = _ferry.import_dlpack(capsule)
    width = 8 if dtype in ("bool", "u8", "i8") or dtype.startswith("f8") else int(dtype.lstrip("bfpi"))
    found = "bool" if code == 6 else f"f8 of code {code}" if code > 6 else _CODES.get(code, "?") + str(bits)
    if device not in (1, 3):  # host, pinned host
        raise refuse(f"is on a device of DLPack's type {device}, not on the host")
    if tuple(sizes) != shape:
        raise refuse(f"has shape {sizes}, not {list(shape)}")
    if bits != width or (found != dtype and code != 1 and not (dtype.startswith("f8") and code > 6)):
        raise refuse(f"is of {found}, not {dtype}")
    if read_only:
        raise refuse("is read-only")
    if strides is not None:
        step = 1
        for size, stride in zip(reversed(sizes), reversed(strides)):
            if size != 1 and stride != step:
                raise refuse(f"has strides {strides}: it is not row-major without gaps")
            step *= size
    return (target, capsule), address
