"""Arguments of Ferry's functions, and the JSON that they become."""
import json
import math
import operator
import os
from typing import Any, Dict, List, Optional, Sequence, Union

from ._errors import Error

Path = Union[str, "os.PathLike[str]"]
Paths = Union[Path, Sequence[Path]]
Iteration = Union[int, str, None]
Size = Union[int, str, None]
Dtype = Any
"""A dtype of weights: "bf16", "fp16", "fp32", or a dtype of torch or NumPy, or its name."""
Globs = Union[str, Sequence[str]]

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


def size(value: Size, name: str) -> Optional[int]:
    """-> bytes of 1000, "64MiB", "5GB\""""
    if value is None:
        return None
    if not isinstance(value, str):
        return whole(value, name)
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", 1):
        units[letter + "B"], units[letter + "iB"] = 1000 ** power, 1024 ** power
    try:
        number = value.rstrip("BKMGTi")
        return int(float(number) * units[value[len(number):]])
    except (KeyError, OverflowError, ValueError):
        raise Error("usage", f"{name}={value}: is no size", [], "64MiB, 5GB, or a number of bytes") from None


def whole(value: Any, name: str) -> int:
    """-> the value of an integer of Python, NumPy or torch, of 64 bits"""
    try:
        number = operator.index(value)
    except TypeError:
        raise Error("usage", f"{name}: {value!r} is no whole number") from None
    if not -2**63 <= number < 2**63:
        raise Error("usage", f"{name}: {number} is out of range")
    return number


def _path(value: Any) -> Any:
    """-> text; JSON has no place for a name that is not UTF-8: its bytes"""
    text = os.fsdecode(value)
    if "\0" in text:  # where the system takes a name to end
        raise Error("usage", f"{text!r}: a name has no zero bytes")
    return list(os.fsencode(text)) if any("\ud800" <= letter <= "\udfff" for letter in text) else text


def paths(value: Paths, name: str) -> List[Any]:
    """-> one path or several as a list"""
    if isinstance(value, (str, bytes, os.PathLike)):
        return [_path(value)]
    try:
        return [_path(one) for one in value]
    except TypeError:
        raise Error("usage", f"{name}: {value!r} are no paths") from None


def plain(options: Dict[str, Any]) -> str:
    """-> JSON: paths and iterations as text, sizes in bytes, dtypes by their short names, one glob as a list"""
    for name in list(options):
        value = options[name]
        if name.endswith("iteration") and value is not None:
            options[name] = str(value)
        elif name in ("max_memory", "max_shard_size", "read_ahead"):
            options[name] = size(value, name)
        elif name == "dtype" and value is float:
            raise Error("usage", "dtype=float: Python's float has 64 bits", [], "bf16, fp16, fp32")
        elif name == "dtype" and value is not None:
            given = getattr(value, "__name__", str(value)).replace("torch.", "")
            options[name] = _DTYPES.get(given, given)
        elif name in ("include", "exclude") and isinstance(value, str):
            options[name] = [value]
        elif isinstance(value, (str, bytes, os.PathLike)):
            options[name] = _path(value)
        elif isinstance(value, tuple):
            options[name] = list(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise Error("usage", f"{name}: {value} is not a number that it can be")
        elif hasattr(value, "__index__") and not isinstance(value, int):
            options[name] = whole(value, name)
    return "{" + ",".join(f"{json.dumps(name)}:{_json(name, value)}" for name, value in options.items()) + "}"


def _json(name: str, value: Any) -> str:
    try:
        text = json.dumps(value, default=lambda one: repr(type(one)), ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        raise Error("usage", f"{name}: holds a lone surrogate, which no text of UTF-8 has") from None
    return text


def require_folder(path: Path, who: str) -> None:
    """Raises an Error for the address of a server."""
    if "://" in os.fsdecode(path):
        raise Error("usage", f"{os.fsdecode(path)}: {who} into a folder of this machine", [], "ferry.convert(folder, address) sends it to a bucket")
