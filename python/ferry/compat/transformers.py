"""transformers' from_pretrained, from a checkpoint of any format.

    from ferry.compat.transformers import from_pretrained, load_tokenizer
    model, tokenizer = from_pretrained("megatron"), load_tokenizer("megatron")
"""
import contextlib
import tempfile
from pathlib import Path as Folder
from typing import Any, Dict, Iterator, Optional, Union

from .. import _checkpoint
from .._checkpoint import Checkpoint
from .._errors import Error
from .._arguments import Iteration, Path
from .._safe_open import safe_open


@contextlib.contextmanager
def carried_files(checkpoint: Checkpoint) -> Iterator[str]:
    """A folder with what goes along with a checkpoint's weights (config.json, the tokenizer's files), while the context lasts.

    Raises:
        Error: "usage" if the checkpoint has no config.json
    """
    if checkpoint.config is None:
        raise Error("usage", f"{checkpoint.path}: has no config.json", [], "hf_config= names a folder that has it")
    with tempfile.TemporaryDirectory() as folder:
        for name in checkpoint.files:
            (Folder(folder) / name).write_bytes(checkpoint.read_file(name))
        yield folder


def _refuse_places(options: Dict[str, Any]) -> None:
    """Refuses arguments that say where a model lies on the hub: they are part of its address here."""
    for name in ("revision", "subfolder"):
        if options.get(name) not in (None, "", "main"):
            raise Error("usage", f"{name}={options[name]!r}: is part of the address", [], "hf://ORG/REPO@REVISION/FOLDER")
        options.pop(name, None)


def _configured(folder: str, options: Dict[str, Any]) -> Any:
    """-> the configuration of a folder with what the options say of it, which are taken out, as transformers' Auto classes do (auto_factory.py)"""
    import transformers
    of_model: Dict[str, Any] = {name: options.pop(name) for name in ("trust_remote_code", "quantization_config") if name in options}
    for name in ("dtype", "torch_dtype"):
        if name in options:  # the configuration says it, and the model's own class asks for it again
            of_model[name] = options[name]
            if options[name] == "auto":
                del options[name]
    config, unused = transformers.AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **options)
    options.clear()
    options.update(unused, **of_model)
    return config


def from_pretrained(path: Union[Path, Checkpoint], *model_args: Any, auto_class: Any = None, config: Any = None, iteration: Iteration = None,
                    hf_config: Optional[Path] = None, keep_quantized: bool = False, **kwargs: Any) -> Any:
    """Loads a checkpoint of any format into a model of transformers, as AutoModelForCausalLM.from_pretrained loads a Hugging Face folder.

    Tensors are read one by one as transformers asks for them, and become the parameters without a copy where dtype and device are theirs.

    Args:
        path: a folder or address, as in ferry.open(), or an opened Checkpoint
        model_args, kwargs: of transformers' from_pretrained: dtype, device_map, attn_implementation, num_labels and other fields of the configuration, ...;
            revision and subfolder are part of the address
        auto_class: an Auto class or model class of transformers. Default: AutoModelForCausalLM
        config: a PreTrainedConfig. Default: of the checkpoint's config.json
        iteration, hf_config, keep_quantized: as in ferry.open()

    Returns:
        PreTrainedModel in evaluation mode, with the checkpoint's generation_config.json

    Raises:
        Error: as ferry.open() does; "usage" if the checkpoint has no config.json
    """
    import torch
    import transformers
    _refuse_places(kwargs)
    checkpoint = _checkpoint.opened(path, iteration=iteration, hf_config=hf_config, keep_quantized=keep_quantized)
    with carried_files(checkpoint) as folder:
        if config is None:
            config = _configured(folder, kwargs)
        if "generation_config" not in kwargs and "generation_config.json" in checkpoint.files:
            kwargs["generation_config"] = transformers.GenerationConfig.from_pretrained(folder)
    if kwargs.get("dtype", "auto") == "auto" and kwargs.get("torch_dtype", "auto") == "auto" and getattr(config, "dtype", None) is None:
        floating = [info for info in checkpoint.infos() if info.dtype in ("bf16", "fp16", "fp32")]
        kwargs["dtype"] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[floating[0].dtype]
    opened = safe_open(checkpoint, "pt")
    state_dict = {info.name: opened.get_slice(info.name) for info in checkpoint.infos()}
    model_class: Any = auto_class or transformers.AutoModelForCausalLM
    if hasattr(model_class, "from_config"):  # an Auto class wants a folder, the class that it chooses does not
        with torch.device("meta"):
            model = model_class.from_config(config)
        model_class, config = type(model), model.config
    model = model_class.from_pretrained(None, *model_args, config=config, state_dict=state_dict, **kwargs)
    (model[0] if isinstance(model, tuple) else model).config.name_or_path = checkpoint.path
    return model


def load_tokenizer(path: Union[Path, Checkpoint], *, iteration: Iteration = None, hf_config: Optional[Path] = None, **kwargs: Any) -> Any:
    """-> the tokenizer of a checkpoint of any format, as AutoTokenizer.from_pretrained(**kwargs) makes it"""
    import transformers
    _refuse_places(kwargs)
    checkpoint = _checkpoint.opened(path, iteration=iteration, hf_config=hf_config)
    with carried_files(checkpoint) as folder:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **kwargs)
    tokenizer.name_or_path = checkpoint.path  # where its files are when it has been loaded
    return tokenizer
