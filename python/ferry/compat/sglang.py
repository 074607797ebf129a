"""Loaders of weights for SGLang, from a checkpoint of any format.

A running engine takes the weights of a checkpoint by its custom_weight_loader:

    engine = sglang.Engine(model_path="hf", custom_weight_loader=[ferry.compat.sglang.LOAD_FORMAT])
    engine.update_weights_from_tensor(ferry.compat.sglang.named("megatron"), load_format=ferry.compat.sglang.LOAD_FORMAT)

An engine starts with them by model_loader(), where a LoadConfig takes a class as its load_format.
"""
import json
import os
from typing import Any, Iterator, List, Sequence, Tuple

from .._arguments import Path
from .vllm import require_known, weights_iterator

LOAD_FORMAT = "ferry.compat.sglang.load_weights"
_NAME = "ferry.checkpoint"


def named(checkpoint: Path, **options: Any) -> List[Tuple[str, Any]]:
    """-> named_tensors for SGLang's update_weights_from_tensor: one tensor of bytes that names a checkpoint, which each rank reads itself

    Args:
        checkpoint: its folder or address, as every rank sees it
        options: of ferry.open() and Checkpoint.tensors(), as in ferry.compat.vllm.weights_iterator()

    Raises:
        Error: "usage" for another option
    """
    import torch
    require_known(options)
    if options.get("hf_config") is not None:
        options["hf_config"] = os.fsdecode(options["hf_config"])
    text = json.dumps({"checkpoint": os.fsdecode(checkpoint), **options}).encode()
    return [(_NAME, torch.tensor(list(text), dtype=torch.uint8))]


def load_weights(model: Any, named_tensors: Sequence[Tuple[str, Any]]) -> None:
    """SGLang's custom_weight_loader: gives a model the weights of the checkpoint that named() names, and every other tensor as it is.

    Args:
        model: of SGLang: load_weights(iterable of (name, tensor)) is called
        named_tensors: as SGLang's update_weights_from_tensor hands them on
    """
    def weights() -> Iterator[Tuple[str, Any]]:
        for name, tensor in named_tensors:
            if name == _NAME:
                yield from weights_iterator(None, json.loads(bytes(tensor.tolist())))
            else:
                yield name, tensor

    model.load_weights(weights())


def model_loader() -> type:
    """-> a class for LoadConfig(load_format=): SGLang's DefaultModelLoader, which reads the weights by Ferry from model_loader_extra_config["checkpoint"],
    or from the model's path. SGLang has to be installed."""
    from sglang.srt.model_loader.loader import BaseModelLoader, DefaultModelLoader

    class FerryModelLoader(DefaultModelLoader):  # type: ignore[misc]
        def __init__(self, load_config: Any):
            BaseModelLoader.__init__(self, load_config)

        def download_model(self, model_config: Any) -> None:
            """Has nothing to do: addresses are read by ranges."""

        def _get_all_weights(self, model_config: Any, model: Any) -> Iterator[Tuple[str, Any]]:
            return weights_iterator(model_config.model_path, self.load_config.model_loader_extra_config or {})

    return FerryModelLoader
