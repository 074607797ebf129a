"""Tensors in memory: the shards of a megatron-core model, filled from any checkpoint and saved, and whole tensors saved."""
import json
import os
import sys
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from . import _ferry
from ._arguments import Dtype, Iteration, Path, Size, plain, require_folder
from ._checkpoint import Checkpoint, opened
from ._errors import Error
from ._progress import Progress, reporting
from ._reports import ConvertReport, convert_report
from ._tensor import Tensor, torch_name


@dataclass(frozen=True)
class LoadReport:
    """The part of a checkpoint that this rank took in.

    Attributes:
        bytes: in the dtypes of the model
        left_behind: tensors of the checkpoint that the model lacks
        nonzero_padding: rows of the checkpoint's padding that were not zero, and were dropped
    """

    bytes: int
    seconds: float
    threads: int
    left_behind: List[str]
    nonzero_padding: List[str]


@dataclass(frozen=True)
class SaveReport:
    """The part of a model that this rank wrote.

    Attributes:
        folder: of the iteration
        bytes: that this rank wrote
        proved: each rank read back what it would load and compared it with its memory
        model_digest: 32 hexadecimal digits; on rank 0
    """

    folder: str
    bytes: int
    seconds: float
    proved: bool
    proof_seconds: float
    model_digest: str


class _Shards:
    """The ShardedTensors of a state dict, as megatron.core.dist_checkpointing describes them."""

    def __init__(self, state: Any):
        self.shards: List[Dict[str, Any]] = []
        self.kept: List[Any] = []  # tensors whose memory is named by address
        self.copies: List[Tuple[Any, Any]] = []  # (tensor on a device, its copy on the host)
        self.factories: List[Tuple[Any, Any]] = []  # (factory, what it built)
        self.add(state)
        is_other = not isinstance(state, (Mapping, list, tuple)) or any(hasattr(leaf, "data_ptr") for leaf in _leaves(state))
        if is_other and not self.shards:  # a model, or its state_dict()
            raise Error("usage", f"sharded_state_dict: a {type(state).__name__} holds no ShardedTensor", [], "give model.sharded_state_dict()")

    def add(self, state: Any) -> None:
        if isinstance(state, Mapping):
            for value in state.values():
                self.add(value)
        elif isinstance(state, (list, tuple)):
            for value in state:
                self.add(value)
        elif hasattr(state, "build_fn"):  # ShardedTensorFactory
            built = state.build()
            self.factories.append((state, built))
            self.add(built)
        elif hasattr(state, "local_shape") and hasattr(state, "global_offset"):  # ShardedTensor
            self.add_tensor(state)

    def add_tensor(self, shard: Any) -> None:
        if getattr(shard, "flattened_range", None) is not None:
            raise Error("usage", f"{shard.key}: is a flattened range of an optimizer")
        if shard.data is None:
            raise Error("usage", f"{shard.key}: has no data")
        address = _address(shard.key, shard.data)
        tensor = shard.data.detach()
        if tensor.device.type != "cpu":
            import torch
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            self.copies.append((tensor, host))
            tensor, address = host, host.data_ptr()
        self.kept.append(tensor)
        replica = shard.replica_id
        self.shards.append({
            "key": shard.key, "dtype": str(tensor.dtype).replace("torch.", ""), "local_shape": list(tensor.shape),
            "global_shape": list(shard.global_shape), "global_offset": list(shard.global_offset), "prepend_axis_num": shard.prepend_axis_num,
            "replica_id": [replica] if isinstance(replica, int) else list(replica), "address": address, "strides": list(tensor.stride())
        })

    def from_devices(self) -> None:
        for device, host in self.copies:
            host.copy_(device)

    def to_devices(self) -> None:
        for device, host in self.copies:
            device.copy_(host)
        for factory, built in self.factories:
            merged = factory.merge_fn(_data_of(built))
            if merged.data_ptr() != factory.data.data_ptr() and not _shares_memory(built, factory.data):
                factory.data.detach().copy_(merged)


def _address(name: str, tensor: Any) -> int:
    """-> of the memory of a dense tensor of torch, on any device. A view that is negated when it is read has other bits."""
    if not hasattr(tensor, "data_ptr"):
        raise Error("usage", f"{name}: a {type(tensor).__name__} is no tensor of torch")
    try:
        address, empty = int(tensor.data_ptr()), tensor.numel() == 0
    except (RuntimeError, NotImplementedError) as error:  # of a sparse or a nested tensor
        raise Error("usage", f"{name}: has no dense memory: {error}") from error
    if tensor.is_neg():
        raise Error("usage", f"{name}: is a view that is negated when it is read", [], "give resolve_neg() of it")
    if not address and not empty:  # of a meta tensor, a fake one, a DTensor
        hint = "give full_tensor() of it" if hasattr(tensor, "full_tensor") else ""
        raise Error("usage", f"{name}: has no dense memory: it is a {type(tensor).__name__} on {tensor.device}", [], hint)
    return address


def _data_of(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _data_of(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_data_of(value) for value in state]
    return getattr(state, "data", state)


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for value in state:
            yield from _leaves(value)
    else:
        yield state


def _shares_memory(built: Any, data: Any) -> bool:
    """-> whether what a factory built are views of its tensor, as those of torch.chunk are"""
    storage = data.untyped_storage().data_ptr()
    return all(leaf.data is None or leaf.data.untyped_storage().data_ptr() == storage for leaf in _leaves(built) if hasattr(leaf, "data"))


def _ranks(group: Any) -> Tuple[Dict[str, int], Any]:
    """-> rank and size, and a function that gathers bytes from all ranks"""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return {"rank": 0, "size": 1}, None
    size = distributed.get_world_size(group)

    def gather(mine: bytes) -> List[bytes]:
        all_of_them: List[Any] = [None] * size
        distributed.all_gather_object(all_of_them, mine, group=group)
        return all_of_them

    return {"rank": distributed.get_rank(group), "size": size}, gather


def load_into(checkpoint: Union[Checkpoint, Path], sharded_state_dict: Mapping[str, Any], *, hf_config: Optional[Path] = None, round: bool = False,
              group: Any = None, threads: int = 0, max_memory: Size = "192MiB", progress: Progress = None) -> LoadReport:
    """Fills the shards of a megatron-core model, on any mesh, from a checkpoint of any format. Each rank reads its own boxes straight from the files.

    All ranks of torch.distributed call it; without torch.distributed the model is that of one rank.

    Args:
        checkpoint: opened, or its folder
        sharded_state_dict: model.sharded_state_dict() of a GPTModel: ShardedTensors and their factories are filled where they lie; objects (extra
            states) are left alone. Of a rank with several chunks (virtual pipeline stages) all of them: {"model0": ..., "model1": ...}. Tensors of a
            GPU go through host memory of their size.
        hf_config: a folder with the config.json that a Megatron checkpoint lacks
        round: rounds to nearest where the model has a narrower dtype. Default: a value that would be rounded is an Error
        group: of ranks. Default: all
        progress: see Progress

    Raises:
        Error: "layout" naming a tensor that is missing, surplus, of another shape, or held by the wrong ranks. Shards may be filled in part then.
    """
    shards = _Shards(sharded_state_dict)
    place, gather = _ranks(group)
    options = plain(dict(shards=shards.shards, round=round, threads=threads, max_memory=max_memory, **place))
    with reporting(progress) as callback:
        report = LoadReport(**json.loads(_ferry.load_shards(opened(checkpoint, hf_config=hf_config)._handle, options, gather, callback)))
    shards.to_devices()
    return report


def _mesh(given: Dict[str, Optional[int]]) -> Dict[str, Optional[int]]:
    """-> parallel sizes: as given, else those of megatron.core.parallel_state, else 1; no virtual one for a chunk a stage"""
    state = sys.modules.get("megatron.core.parallel_state")
    found = {}
    if state is not None and state.model_parallel_is_initialized():
        found = {"tp": state.get_tensor_model_parallel_world_size(), "pp": state.get_pipeline_model_parallel_world_size(),
                 "ep": state.get_expert_model_parallel_world_size(), "etp": state.get_expert_tensor_parallel_world_size()}
        found["vpp"] = state.get_virtual_pipeline_model_parallel_world_size()
    mesh = {name: value if value is not None else found.get(name, 1) for name, value in given.items()}
    if mesh.get("vpp") == 1:  # megatron-core takes a size for an interleaved schedule
        mesh["vpp"] = None
    return mesh


def save_from(path: Path, sharded_state_dict: Mapping[str, Any], *, like: Union[Checkpoint, Path], iteration: Iteration = None, tp: Optional[int] = None,
              pp: Optional[int] = None, ep: Optional[int] = None, etp: Optional[int] = None, vpp: Optional[int] = None,
              make_vocab_size_divisible_by: Optional[int] = None, overwrite: bool = False, group: Any = None, threads: int = 0,
              max_memory: Size = "192MiB", progress: Progress = None) -> SaveReport:
    """Saves the shards of a megatron-core model as a Megatron-Core checkpoint (torch_dist). It appears when all ranks have written and proved theirs, or not
    at all.

    All ranks of torch.distributed call it; they see one file system.

    Args:
        path: the root of iterations, a folder
        sharded_state_dict: as in load_into()
        like: the checkpoint that the model was made from: its configuration, and config.json and tokenizer, which go along
        iteration: a number. Default: "release"
        tp, pp, ep, etp, vpp: what the saved arguments say. Default: the sizes of megatron.core.parallel_state, else 1
        make_vocab_size_divisible_by: likewise. Default: 128 if that gives the model's rows, else what gives them
        overwrite: replaces this iteration, atomically
        progress: see Progress
    """
    require_folder(path, "the ranks of a model save")
    shards = _Shards(sharded_state_dict)
    shards.from_devices()
    place, gather = _ranks(group)
    origin = opened(like)
    mesh = _mesh(dict(tp=tp, pp=pp, ep=ep, etp=etp, vpp=vpp))
    tensor_ranks = mesh["tp"] or 1
    if make_vocab_size_divisible_by is None:
        make_vocab_size_divisible_by = 128
        vocabulary = origin._vocab_size
        rows = [shard["global_shape"][-2] for shard in shards.shards
                if shard["key"].endswith(("word_embeddings.weight", "output_layer.weight")) and len(shard["global_shape"]) > 1]
        step = 128 * tensor_ranks
        if vocabulary and rows and -(-vocabulary // step) * step != rows[0]:
            make_vocab_size_divisible_by = rows[0] // tensor_ranks
    options = plain(dict(shards=shards.shards, target=os.fspath(path), iteration=iteration, overwrite=overwrite, threads=threads, max_memory=max_memory,
                         make_vocab_size_divisible_by=make_vocab_size_divisible_by, **mesh, **place))
    with reporting(progress) as callback:
        return SaveReport(**json.loads(_ferry.save_shards(origin._handle, options, gather, callback)))


def _named(name: str, tensor: Any) -> Tuple[Any, Dict[str, Any]]:
    """-> (what keeps the memory alive, its description). A tensor of torch, a ferry.Tensor, or an array of NumPy."""
    if not isinstance(name, str):
        raise Error("usage", f"{name!r}: is no name of a tensor")
    if isinstance(tensor, Tensor):
        return tensor, {"name": name, "dtype": torch_name(tensor.dtype), "shape": list(tensor.shape), "address": tensor.address}
    if hasattr(tensor, "data_ptr"):
        try:
            tensor = tensor.detach().cpu().resolve_neg().contiguous()
            shape = list(tensor.shape)
        except (RuntimeError, NotImplementedError) as error:  # of a sparse, a nested or a meta tensor
            raise Error("usage", f"{name}: has no dense memory: {error}") from error
        return tensor, {"name": name, "dtype": str(tensor.dtype).replace("torch.", ""), "shape": shape, "address": _address(name, tensor)}
    if hasattr(tensor, "__array_interface__"):
        import numpy
        tensor = numpy.ascontiguousarray(tensor)
        return tensor, {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape), "address": tensor.__array_interface__["data"][0]}
    raise Error("usage", f"{name}: a {type(tensor).__name__} is neither a tensor of torch nor an array of NumPy")


def _memory(tensor: Any) -> Any:
    """-> what a second name of the same tensor has, too"""
    try:
        return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    except (AttributeError, NotImplementedError, RuntimeError):  # no tensor of torch, or one without dense memory
        return id(tensor)


_OF_MODULES = ("state_dict() of transformers 5 names modules, and keeps experts together; "
               "transformers.core_model_loading.revert_weight_conversion(model, model.state_dict()) gives what files hold")


def save(path: Path, tensors: Union[Mapping[str, Any], Iterable[Tuple[str, Any]]], *, like: Union[Checkpoint, Path], to: str = "hf",
         iteration: Iteration = None, tp: int = 1, pp: int = 1, ep: int = 1, etp: Optional[int] = None, vpp: Optional[int] = None,
         pipeline_model_parallel_layout: str = "", make_vocab_size_divisible_by: int = 128, dtype: Dtype = None,
         max_shard_size: Size = None, overwrite: bool = False, threads: int = 0, max_memory: Size = "192MiB",
         progress: Progress = None) -> ConvertReport:
    """Saves a model that is in memory, under Hugging Face names, in any format and layout; proved and published as a conversion is.

    Args:
        path: a folder: of Hugging Face files, a Megatron root, an archive's
        tensors: a mapping or pairs of name and tensor, of torch, NumPy or Ferry, under the names that files have or model.state_dict() of transformers 5; a
            further name of the same memory (a tied head) is left out. All of them are in memory until it returns.
        like: the checkpoint of the same model that gives config.json and tokenizer
        to: "hf", "megatron" or "h5"
        iteration, tp, pp, ep, etp, vpp, pipeline_model_parallel_layout, make_vocab_size_divisible_by: of a Megatron target, as in convert()
        dtype, max_shard_size, overwrite, threads, max_memory, progress: as in convert()

    Raises:
        Error: "layout" naming a tensor that is missing, surplus or of another shape; then nothing was published
    """
    options = {name: value for name, value in locals().items() if name not in ("path", "tensors", "like", "progress")}
    origin = opened(like)
    known = {info.name for info in origin.infos()}
    pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    given = {_memory(tensor) for name, tensor in pairs if name in known}
    named = [_named(name, tensor) for name, tensor in pairs if name in known or _memory(tensor) not in given]
    names = [description["name"] for _, description in named]
    options.update(source=origin.path, target=os.fspath(path), tensors=[description for _, description in named])
    try:
        with reporting(progress) as callback:
            return convert_report(json.loads(_ferry.save_tensors(origin._handle, plain(options), callback)))
    except Error as error:
        if error.kind != "layout":
            raise
        message, hint, subject = error.message, error.hint, f"{origin.path}: "  # the checkpoint whose form the tensors take
        if message.startswith(subject):
            message, hint = f"the tensors to save: {message[len(subject):]}", ""
        raise Error(error.kind, message, error.context, hint or ("" if known.issuperset(names) else _OF_MODULES)) from None
