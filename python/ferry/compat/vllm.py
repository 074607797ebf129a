"""A loader of weights for vLLM, from a checkpoint of any format: load format "ferry".

    import ferry.compat.vllm
    ferry.compat.vllm.register()    # vLLM calls it itself where this package is installed: it is a plugin
    llm = vllm.LLM(model="hf", load_format="ferry", model_loader_extra_config={"checkpoint": "megatron"})

Configuration and tokenizer are those of `model`, a Hugging Face folder that needs no weights.
"""
from typing import Any, Iterator, Mapping, Tuple

from .._checkpoint import open
from .._errors import Error

_OPTIONS = {"checkpoint", "iteration", "hf_config", "keep_quantized", "read_ahead", "threads", "max_memory"}


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
    surplus = set(extra_config) - _OPTIONS
    if surplus:
        raise Error("usage", f"model_loader_extra_config: has {', '.join(sorted(surplus))}", [], f"known: {', '.join(sorted(_OPTIONS))}")
    options = dict(extra_config)
    path = options.pop("checkpoint", model)
    reading = {name: options.pop(name) for name in ("read_ahead", "threads", "max_memory") if name in options}
    options.setdefault("hf_config", None)
    checkpoint = open(path, **options)
    return ((name, tensor.torch()) for name, tensor in checkpoint.tensors(**reading))


def register(load_format: str = "ferry") -> None:
    """Registers the loader with vLLM, which has to be installed."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class FerryModelLoader(BaseModelLoader):  # type: ignore[misc]
        """vLLM's BaseModelLoader by Ferry: get_all_weights() yields what DefaultModelLoader's yields for the Hugging Face folder."""

        def download_model(self, model_config: Any) -> None:
            """Has nothing to do: addresses are read by ranges."""

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[Tuple[str, Any]]:
            return weights_iterator(model_config.model, self.load_config.model_loader_extra_config or {})

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights(self.get_all_weights(model_config, model))

    register_model_loader(load_format)(FerryModelLoader)
