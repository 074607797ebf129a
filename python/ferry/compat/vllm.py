"""A loader of weights for vLLM, from a checkpoint of any format: load format "ferry", and weight transfer backend "ferry".

    import ferry.compat.vllm
    ferry.compat.vllm.register()    # vLLM calls plugin(), which does it, where this package is installed
    llm = vllm.LLM(model="hf", load_format="ferry", model_loader_extra_config={"checkpoint": "megatron"})

Configuration and tokenizer are those of `model`, a Hugging Face folder that needs no weights. A running engine takes the weights of another checkpoint:

    llm = vllm.LLM(model="hf", weight_transfer_config=WeightTransferConfig(backend="ferry"))
    llm.init_weight_transfer_engine(WeightTransferInitRequest())
    llm.start_weight_update()
    llm.update_weights(WeightTransferUpdateRequest(update_info={"checkpoint": "megatron"}))
    llm.finish_weight_update()
"""
import logging
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, Mapping, Tuple

from .. import _shards
from .._checkpoint import open
from .._errors import Error

_OPTIONS = {"checkpoint", "iteration", "hf_config", "keep_quantized", "read_ahead", "threads", "max_memory"}


def require_known(options: Mapping[str, Any]) -> None:
    """Raises Error "usage" for an option that weights_iterator() does not take."""
    surplus = set(options) - _OPTIONS
    if surplus:
        raise Error("usage", f"model_loader_extra_config: has {', '.join(sorted(surplus))}", [], f"known: {', '.join(sorted(_OPTIONS))}")


def weights_iterator(model: Any, extra_config: Mapping[str, Any]) -> Iterator[Tuple[str, Any]]:
    """Reads the weights of a model, one by one, ahead of the loop.

    Args:
        model: a checkpoint, where extra_config names none
        extra_config: "checkpoint" and what ferry.open() and Checkpoint.tensors() take: "iteration", "hf_config", "keep_quantized"; "read_ahead", "threads",
            "max_memory"

    Yields:
        (Hugging Face name, torch.Tensor [*shape] on the host)

    Raises:
        Error: as ferry.open() does; "usage" for another option
    """
    require_known(extra_config)
    options = dict(extra_config)
    path = options.pop("checkpoint", model)
    reading = {name: options.pop(name) for name in ("read_ahead", "threads", "max_memory") if name in options}
    options.setdefault("hf_config", None)
    checkpoint = open(path, **options)
    return ((name, tensor.torch()) for name, tensor in checkpoint.tensors(**reading))


def _load_weights(model: Any, weights: Iterator[Tuple[str, Any]]) -> Any:
    """Gives a model of vLLM all weights.

    Returns:
        the names of its parameters that it loaded, or None where the model does not say them

    Raises:
        Error: "layout" naming the tensors that it did not read
    """
    loaded = model.load_weights(weights)
    left = [name for name, _ in weights]
    if left:
        raise Error("layout", f"{', '.join(left)}: the model did not read them")
    return loaded


def register(load_format: str = "ferry") -> None:
    """Registers the loader with vLLM, which has to be installed, and its weight transfer backend of that name, where vLLM has such (0.25)."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class FerryModelLoader(BaseModelLoader):  # type: ignore[misc]
        """vLLM's BaseModelLoader by Ferry: get_all_weights() yields what DefaultModelLoader's yields for the Hugging Face folder."""

        def download_model(self, model_config: Any) -> None:
            """Has nothing to do: addresses are read by ranges."""

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[Tuple[str, Any]]:
            return weights_iterator(model_config.model, self.load_config.model_loader_extra_config or {})

        def load_weights(self, model: Any, model_config: Any) -> None:
            loaded = _load_weights(model, self.get_all_weights(model_config, model))
            # vLLM's DefaultModelLoader: models of quantised weights do not keep track.
            if loaded is None or getattr(model_config, "quantization", None) is not None:
                return
            missing = sorted({name for name, _ in model.named_parameters()} - set(loaded))
            if missing:
                raise Error("layout", f"{', '.join(missing)}: the checkpoint has no weights for them")

    register_model_loader(load_format)(FerryModelLoader)
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
        engine = weight_transfer_engine()
    except ImportError:
        return
    if load_format not in getattr(WeightTransferEngineFactory, "_registry", ()):  # plugins are loaded more than once
        WeightTransferEngineFactory.register_engine(load_format, engine)


def plugin() -> None:
    """The entry point that vLLM calls in each of its processes: register(), but a vLLM that lacks what it needs starts without, and logs why."""
    try:
        register()
    except Exception as error:  # of a vLLM that is older or younger than those that this was written for
        logging.getLogger(__name__).warning("ferry: no load format \"ferry\" in this vLLM: %s: %s", type(error).__name__, error)


def weight_transfer_engine() -> type:
    """-> vLLM's WeightTransferEngine by Ferry, with the methods of vLLM 0.25: each worker reads the checkpoint that an update names, within a layerwise reload

    update_info is {"checkpoint": its folder or address, as every worker sees it, "options": as extra_config of weights_iterator()}. On the trainer's side
    trainer_send_weights(iterator of (Hugging Face name, tensor), {"checkpoint": a folder, "like": the model, and what ferry.save() takes}) saves such a
    checkpoint. vLLM has to be installed.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class FerryInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
        """Nothing: the checkpoint is all that both sides share."""

    @dataclass
    class FerryUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
        checkpoint: str
        options: Dict[str, Any] = field(default_factory=dict)

    class FerryWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls = FerryInitInfo
        update_info_cls = FerryUpdateInfo

        def init_transfer_engine(self, init_info: Any) -> None:
            """Has nothing to do."""

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Any) -> None:
            _load_weights(self.model, weights_iterator(None, {**update_info.options, "checkpoint": update_info.checkpoint}))

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """Has nothing to do."""

        @staticmethod
        def trainer_send_weights(iterator: Iterator[Tuple[str, Any]], trainer_args: Mapping[str, Any]) -> None:
            options = dict(trainer_args)
            _shards.save(options.pop("checkpoint"), iterator, **options)

    return FerryWeightTransferEngine
