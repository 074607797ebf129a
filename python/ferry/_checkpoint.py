"""Opened checkpoints, and their tensors one by one."""
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union, cast

from . import _ferry
from ._arguments import Dtype, Globs, Opened, Path, Size, placed, plain, whole
from ._errors import Error
from ._progress import Progress, reporting
from ._reports import Manifest, digest
from ._tensor import Tensor, borrow

if TYPE_CHECKING:
    from typing_extensions import TypeVar
    Given = TypeVar("Given", default=Tensor)
    """The objects whose memory a caller gives. Default: tensors of Ferry"""
else:
    from typing import TypeVar
    Given = TypeVar("Given")

Into = Union[Mapping[str, Given], Callable[[str, str, Tuple[int, ...]], Given]]
"""Memory for tensors: a mapping by name, or a function of name, dtype and shape. Each is row-major on the host (pinned or not), speaks DLPack, and has
the tensor's shape and dtype; unsigned integers of the same width serve, too."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a model.

    Attributes:
        name: in Hugging Face terms
        dtype: "bf16", "fp32", ...
        shape: outermost first
    """

    name: str
    dtype: str
    shape: Tuple[int, ...]


class Checkpoint(Opened):
    """A checkpoint that lies somewhere, in any format and layout. Headers were read, tensors were not; they are read when they are asked for.

    It may be pickled: whoever unpickles it opens the same path and iteration anew. After fork both processes may read it, but an iterator over its tensors belongs to the
    process that began it.

    Attributes:
        path: the folder of its files
        format: "huggingface", "torch_dist", "archive", "torch_save", "megatron_legacy", "torch_dcp", "zarr", "fsdp"
        iteration: of a Megatron checkpoint: "4000" or "release"
        family: Hugging Face's model_type: "llama"
        config: the content of config.json; None for a Megatron checkpoint that has none
        args: the arguments of training in a Megatron checkpoint, those of numbers, words and lists of them; None where there are none
        files: that go along with the weights: config.json, generation_config.json, the tokenizer's
    """

    path: str
    format: str
    iteration: Optional[str]
    family: str
    config: Optional[Dict[str, Any]]
    args: Optional[Dict[str, Any]]
    files: List[str]

    def __init__(self, handle: Any, options: Dict[str, Any]):
        self._handle, self._options = handle, options
        found = json.loads(_ferry.describe(handle))
        self.path = os.fsdecode(bytes(found["path"]))
        self.format, self.iteration, self.family = found["format"], found["iteration"], found["family"]
        if found["is_chosen"]:  # by a tracker, perhaps, which may name another one later
            self._options = {**options, "iteration": self.iteration}
        self.config = None if found["config"] is None else json.loads(found["config"])
        self._metadata: Optional[Dict[str, str]] = found["metadata"]
        self._vocab_size: int = found["vocab_size"]
        self.args, self.files = found["args"], found["files"]
        self._bridge_layout: str = found["bridge_layout"]
        self._run_config_problem: Optional[str] = found["run_config_problem"]
        self._infos = [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in found["tensors"]]

    def __reduce__(self) -> Tuple[Callable[[Dict[str, Any]], "Checkpoint"], Tuple[Dict[str, Any]]]:
        return _open_again, (self._options,)

    def __repr__(self) -> str:
        return f"<ferry.Checkpoint {self.path} ({self.format}, {self.family}, {len(self._infos)} tensors)>"

    def infos(self) -> List[TensorInfo]:
        """The tensors of the model, in Hugging Face terms and order."""
        return list(self._infos)

    def read_file(self, name: str) -> bytes:
        """The content of one of `files`, wherever it lies: in the folder, in the sidecar of a Megatron checkpoint, in an archive.

        Raises:
            Error: "not_found" if it is none of them
        """
        return _ferry.carried_file(self._handle, name)

    def tensors(self, names: str = "hf", *, include: Globs = (), exclude: Globs = (), tp: int = 1, pp: int = 1, ep: int = 1,
                etp: Optional[int] = None, vpp: Optional[int] = None, pipeline_model_parallel_layout: str = "", make_vocab_size_divisible_by: int = 128,
                rank: int = 0, dtype: Dtype = None, into: Optional[Into[Given]] = None, read_ahead: Size = "256MiB", threads: int = 0,
                max_memory: Size = "192MiB", progress: Progress = False) -> Iterator[Tuple[str, Given]]:
        """Reads tensors, in parallel and ahead of the loop.

        Args:
            names: "hf": every tensor of the model, whole, as save_pretrained of transformers names it; each expert is a tensor of its own.
                "megatron": the parameters that `rank` holds, as Megatron-Core's modules do: linear_qkv [(q + k + v heads)/tp, hidden], linear_fc1
                [2 ffn/tp, hidden] gate over up, the vocabulary padded; each layer and each expert under a key of its own, numbered as in the whole
                model ("decoder.layers.3.mlp.linear_fc1.weight").
            include, exclude: globs over the names; `*` matches dots, too
            tp, pp, ep, etp, vpp, pipeline_model_parallel_layout: the mesh, for "megatron"
            make_vocab_size_divisible_by: the vocabulary is padded with zeros to a multiple of this times tp, for "megatron"
            rank: in that mesh, in Megatron-Core's order (tensor parallel fastest, pipeline slowest)
            dtype: "bf16", "fp16", "fp32", or a dtype of torch or NumPy: casts weights to nearest even. Default: each keeps its own
            into: memory for the tensors, whose objects are then yielded. Default: each gets memory of its own
            read_ahead: bytes of tensors that are read before they are asked for, unless one alone is larger
            threads: that read; 0: one per core
            max_memory: of the buffers through which a batch is read
            progress: see Progress. Default: none

        Yields:
            (name, Tensor [*shape]), or (name, what `into` has for it)

        Raises:
            Error: "usage" for arguments that do not fit the model, "corrupt" or "io" for files that are damaged or change meanwhile. Checksums that
                files state are checked by the end.
        """
        options = {name: value for name, value in locals().items() if name not in ("self", "into", "progress")}
        if into is not None and not callable(into) and not hasattr(into, "__getitem__"):
            raise Error("usage", f"into: a {type(into).__name__} is neither a mapping by name nor a function")
        if names == "hf":
            defaults = Checkpoint.tensors.__kwdefaults__ or {}
            for name in ("tp", "pp", "ep", "etp", "vpp", "pipeline_model_parallel_layout", "make_vocab_size_divisible_by", "rank"):
                if options[name] != defaults[name]:
                    raise Error("usage", f'{name}={options[name]}: has no effect on the whole tensors of names="hf"', [], 'take names="megatron"')
        return self._stream(_ferry.stream(self._handle, plain(options)), into, progress)

    def read(self, name: str, box: Optional[Sequence[Union[slice, Tuple[int, int]]]] = None, *, into: Optional[Given] = None,
             dtype: Dtype = None) -> Given:
        """Reads one tensor, or a box of it; of the files only what that takes.

        Args:
            name: in Hugging Face terms ("model.layers.0.self_attn.q_proj.weight"), or as a module of Megatron-Core has it
                ("decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.experts.experts.7.linear_fc1.weight")
            box: (begin, end) or a slice without step for each dimension. Default: all of it
            into: memory of the box's shape. Default: a new Tensor
            dtype: casts, as in tensors()

        Returns:
            Tensor [end - begin, ...], or `into`

        Raises:
            Error: "not_found" for a name that the model lacks, "usage" for a box that leaves the tensor
        """
        options: Dict[str, Any] = dict(name=name, dtype=dtype)
        if box is not None:
            if not isinstance(box, (tuple, list)):
                raise Error("usage", f"{name}: the box {box!r} is no sequence of (begin, end)")
            shape = None
            ranges = []
            for d, one in enumerate(box):
                if isinstance(one, slice):
                    if shape is None:
                        (described,) = json.loads(_ferry.stream_tensors(_ferry.stream(self._handle, plain(options))))
                        shape = described[2]
                    if d >= len(shape):
                        raise Error("usage", f"{name}: a box of {len(box)} dimensions does not fit into {shape}")
                    begin, end, step = one.indices(shape[d])
                    if step != 1:
                        raise Error("usage", f"{name}: a box has no steps")
                    one = (begin, max(begin, end))
                if not isinstance(one, (tuple, list)) or len(one) != 2:
                    raise Error("usage", f"{name}: {one!r} is neither (begin, end) nor a slice")
                ranges.append([whole(bound, f"{name}: box") for bound in one])
            options["box"] = ranges
        stream = self._stream(_ferry.stream(self._handle, plain(options)), None if into is None else (lambda *_: into), False)
        ((_, tensor),) = stream
        return cast(Given, tensor)

    def digest(self, *, files: bool = False, progress: Progress = None) -> Manifest:
        """Digests every tensor, whatever the format: equal models have equal digests.

        Args:
            files: also the checkpoint's files
            progress: see Progress
        """
        return digest(self, files=files, progress=progress)

    def _stream(self, stream: Any, into: Optional[Into[Any]], progress: Progress) -> Iterator[Tuple[str, Any]]:
        tensors = [(name, dtype, tuple(shape), bytes_) for name, dtype, shape, bytes_ in json.loads(_ferry.stream_tensors(stream))]
        given: Dict[int, Any] = {}  # by index: what is yielded, from when it is started on
        kept: Dict[int, Any] = {}   # ... and what keeps its memory alive while it is read

        def place(index: int) -> int:
            name, dtype, shape, bytes_ = tensors[index]
            if into is None:
                memory, address = _ferry.allocate(bytes_)
                given[index] = Tensor(memory, address, dtype, shape)
                return address
            if callable(into):
                target = into(name, dtype, shape)
            elif name in into:
                target = into[name]
            else:
                raise Error("usage", f"{name}: there is no memory for it")
            kept[index], address = borrow(name, target, dtype, shape)
            given[index] = target
            return address

        try:
            with reporting(progress) as callback:
                while True:
                    batch = _ferry.stream_next(stream)
                    while batch is not None:
                        _ferry.stream_start(stream, [place(index) for index in range(*batch)])
                        batch = _ferry.stream_next(stream)
                    done = _ferry.stream_wait(stream, callback)
                    if done is None:
                        return
                    for index in range(*done):
                        kept.pop(index, None)
                        yield tensors[index][0], given.pop(index)
                    _ferry.stream_release(stream, *done)
        finally:
            _ferry.stream_close(stream)


def open(path: Path, *, iteration: Union[int, str, None] = None, hf_config: Optional[Path] = None, keep_quantized: bool = False) -> Checkpoint:
    """Opens a checkpoint: a Hugging Face folder, a Megatron root or iteration, an archive, verl's and FSDP's folders. Reads headers only.

    Args:
        path: its folder, or an address ("hf://org/repo", "s3://bucket/key", "https://...")
        iteration: of a Megatron root: a number or "release". Default: the tracker's
        hf_config: a folder with the config.json that a Megatron checkpoint lacks
        keep_quantized: leaves quantised weights and their scales as they are. Default: they are dequantised to bf16

    Raises:
        Error: for everything that is not exactly what the configuration says: tensors that are missing, surplus or of another shape are named
    """
    return _open_again(dict(path=placed(path), iteration=None if iteration is None else str(iteration), keep_quantized=keep_quantized,
                            hf_config=None if hf_config is None else placed(hf_config), is_file=False))


def open_file(path: Path) -> Checkpoint:
    """Opens one safetensors file: its tensors as they are stored, whatever else is beside it."""
    return _open_again(dict(path=placed(path), iteration=None, keep_quantized=False, hf_config=None, is_file=True))


def opened(checkpoint: Union[Checkpoint, Path], *, iteration: Union[int, str, None] = None, hf_config: Optional[Path] = None,
           keep_quantized: bool = False) -> Checkpoint:
    """-> the checkpoint, opened if it is not

    Raises:
        Error: "usage" for an option of open() that an opened one was not opened with, and as open() does
    """
    if not isinstance(checkpoint, Checkpoint):
        return open(checkpoint, iteration=iteration, hf_config=hf_config, keep_quantized=keep_quantized)
    given: Dict[str, Any] = {"iteration": None if iteration is None else str(iteration), "hf_config": None if hf_config is None else placed(hf_config),
                             "keep_quantized": keep_quantized}
    for name, value in given.items():
        if value and value not in (checkpoint._options[name], checkpoint.iteration if name == "iteration" else None):
            raise Error("usage", f"{name}={value}: has no effect on a checkpoint that is open already", [], "ferry.open() takes it")
    return checkpoint


def _open_again(options: Dict[str, Any]) -> Checkpoint:
    return Checkpoint(_ferry.open_checkpoint(plain(dict(options))), options)
