"""Arguments of Ferry's functions, and the JSON that they become."""
import json
import math
import operator
import os
from typing import Any, Dict, List, Optional, Sequence, Union

from ._errors import Error

Path = Union[str, "os.PathLike[str]"]
Source = Union[Path, "Opened"]
"""A checkpoint: its path, or what open() gave: then it is read again, at its iteration."""
Paths = Union[Path, Sequence[Path]]
Iteration = Union[int, str, None]
Size = Union[int, str, None]
Dtype = Any
"""A dtype of weights: "bf16", "fp16", "fp32", or a dtype of torch or NumPy, or its name ("bfloat16", "half", ...)."""
Globs = Union[str, Sequence[str]]

_SOURCES = ("source", "base", "left", "right", "tuned", "new", "path")  # options that take a checkpoint


class Opened:
    """A checkpoint that open() opened; Checkpoint is all of it."""

    path: str
    _options: Dict[str, Any]


def size(value: Size, name: str) -> Optional[int]:
    """-> bytes of 1000, "64MiB", "5GB", "5 gb", "5G\""""
    if value is None:
        return None
    if not isinstance(value, str):
        return whole(value, name)
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", 1):
        units[letter] = units[letter + "b"] = 1000 ** power
        units[letter + "ib"] = 1024 ** power
    try:
        number = value.lower().rstrip("bkmgti")
        return int(float(number) * units[value[len(number):].lower()])
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


def placed(path: Path) -> Any:
    """-> the path, absolute if it is one of this machine: it is read again later, wherever the process is then"""
    folder = os.fspath(path)
    return os.path.abspath(folder) if os.path.exists(folder) else folder


def _take_opened(options: Dict[str, Any], name: str, checkpoint: Opened) -> None:
    """Puts its path in the place of an opened checkpoint, and what it was opened with beside it."""
    iteration = next((one for one in (name + "_iteration", "iteration") if one in options), "")
    opened = checkpoint._options
    options[name] = opened["path"] if iteration or opened["iteration"] is None else checkpoint.path
    for option, value in ((iteration, opened["iteration"]), ("hf_config", opened["hf_config"]), ("keep_quantized", opened["keep_quantized"])):
        if not value or not option:
            continue
        if option not in options:
            raise Error("usage", f"{name}: was opened with {option}, which has no effect here", [], "give its path")
        given = options[option]
        if given and value not in (given, str(given), placed(given) if option == "hf_config" else None):
            raise Error("usage", f"{option}={given}: has no effect on a checkpoint that is open already", [], "ferry.open() takes it")
        options[option] = value


def plain(options: Dict[str, Any]) -> str:
    """-> JSON: paths and iterations as text, sizes in bytes, dtypes by their short names, one glob as a list"""
    for name in _SOURCES:
        if isinstance(options.get(name), Opened):
            _take_opened(options, name, options[name])
    for name in list(options):
        value = options[name]
        if name.endswith("iteration") and value is not None:
            options[name] = str(value)
        elif name in ("max_memory", "max_shard_size", "read_ahead"):
            options[name] = size(value, name)
        elif name == "dtype" and value is float:
            raise Error("usage", "dtype=float: Python's float has 64 bits", [], "bf16, fp16, fp32")
        elif name == "dtype" and value is not None:
            options[name] = getattr(value, "__name__", str(value)).replace("torch.", "")
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
    def refuse(one: Any) -> None:
        raise Error("usage", f"{name}: a {type(one).__name__} is not what it takes")

    try:
        text = json.dumps(value, default=refuse, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        raise Error("usage", f"{name}: holds a lone surrogate, which no text of UTF-8 has") from None
    return text


def require_folder(path: Path, who: str) -> None:
    """Raises an Error for the address of a server."""
    if "://" in os.fsdecode(path):
        raise Error("usage", f"{os.fsdecode(path)}: {who} into a folder of this machine", [], "ferry.convert(folder, address) sends it to a bucket")
