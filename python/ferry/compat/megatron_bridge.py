"""Megatron-Bridge's conversions, done by Ferry: without a model in memory, a GPU, or Megatron-Bridge itself.

    from ferry.compat.megatron_bridge import AutoBridge
    AutoBridge.import_ckpt("Qwen/Qwen3-8B", "megatron")
    AutoBridge.from_hf_pretrained("Qwen/Qwen3-8B").export_ckpt("megatron", "hf")
"""
import os
import re
from typing import Any, Iterator, NamedTuple, Optional, Union
from urllib.parse import quote

from .. import _checkpoint, _ferry, _reports
from .._checkpoint import Checkpoint
from .._errors import Error
from .._arguments import Iteration, Path, require_folder
from .._reports import AdapterReport, ConvertReport


def write_run_config(path: Path, *, iteration: Iteration = None, hf_config: Optional[Path] = None, hf_model_id: Optional[str] = None) -> str:
    """Writes the run_config.yaml by which Megatron-Bridge opens a Megatron checkpoint (torch_dist).

    Args:
        path, iteration, hf_config: as in ferry.open()
        hf_model_id: of the Hugging Face model that it was imported from, which the file names

    Returns:
        the path of the file, in the folder of the iteration; another one is replaced

    Raises:
        Error: as ferry.open() does; "usage" for a checkpoint of another format or family, or without arguments
    """
    require_folder(path, "a run_config.yaml is written")
    return _ferry.write_run_config(_checkpoint.open(path, iteration=iteration, hf_config=hf_config)._handle, hf_model_id or "")


class HFWeightTuple(NamedTuple):
    """A weight under its Hugging Face name: torch.Tensor [*shape]."""

    param_name: str
    weight: Any


# Options of transformers' from_pretrained that say how a model in memory is made: there is none
_OF_MODELS = {"trust_remote_code", "device_map", "attn_implementation", "low_cpu_mem_usage", "use_safetensors", "local_files_only"}
_OF_ENVIRONMENT = {"token": "HF_TOKEN", "cache_dir": "HF_HUB_CACHE"}
_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
_DTYPES = {"dtype", "torch_dtype"}  # of such a model, too; an imported checkpoint is cast


class AutoBridge:
    """Megatron-Bridge's AutoBridge for checkpoints that lie on disks: no model is made, in memory are buffers of some MiB.

    Attributes:
        hf_pretrained: the Hugging Face folder, or its address
    """

    hf_pretrained: str

    def __init__(self, hf_pretrained: str):
        self.hf_pretrained = hf_pretrained

    @classmethod
    def from_hf_pretrained(cls, path: Path, **kwargs: Any) -> "AutoBridge":
        """Names a Hugging Face model; nothing is loaded.

        Args:
            path: a folder, an address, or a model of huggingface.co ("Qwen/Qwen3-8B")
            kwargs: revision; options of models in memory (torch_dtype, device_map, trust_remote_code, ...) have no effect

        Raises:
            TypeError: for another keyword
            Error: "not_found" for a path that is not there; "usage" for token and cache_dir, which HF_TOKEN and HF_HUB_CACHE say
        """
        revision = kwargs.pop("revision", None)
        for option, variable in _OF_ENVIRONMENT.items():
            if kwargs.pop(option, None) is not None:
                raise Error("usage", f"{option}: is read from the environment alone", [], f"set {variable}")
        surplus = set(kwargs) - _OF_MODELS - _DTYPES
        if surplus:
            raise TypeError(f"from_hf_pretrained() got unexpected keyword arguments: {', '.join(sorted(surplus))}")
        name = os.fspath(path)
        if not os.path.exists(name) and "://" not in name:
            if not _HUB_NAME.fullmatch(name):
                raise Error("not_found", f"{name}: is not there", [], "a model of huggingface.co is ORG/REPO")
            name = f"hf://{name}" + (f"@{quote(revision, safe='')}" if revision else "")
        return cls(name)

    @classmethod
    def from_auto_config(cls, megatron_path: Path, hf_model_id: Path, trust_remote_code: bool = False) -> "AutoBridge":
        """Names the Hugging Face model whose configuration and tokenizer a Megatron checkpoint is exported with.

        Args:
            megatron_path: the checkpoint. Its arguments have to be those of hf_model_id: a configuration of a smaller model is not made up.
            hf_model_id: as in from_hf_pretrained(); its weights are not read
            trust_remote_code: has no effect

        Raises:
            Error: as ferry.open() does
        """
        bridge = cls.from_hf_pretrained(hf_model_id)
        _checkpoint.open(megatron_path, hf_config=bridge._config_for(megatron_path, None))
        return bridge

    @classmethod
    def can_handle(cls, path: Path, trust_remote_code: bool = False) -> bool:
        """Tells whether import_ckpt() takes a Hugging Face model: `path` as in from_hf_pretrained(). trust_remote_code has no effect."""
        try:
            return _checkpoint.open(cls.from_hf_pretrained(path).hf_pretrained)._run_config_problem is None
        except Error:
            return False

    @classmethod
    def import_ckpt(cls, hf_model_id: Path, megatron_path: Path, **kwargs: Any) -> ConvertReport:
        """Converts a Hugging Face model to a Megatron checkpoint, and writes a run_config.yaml, so that Megatron-Bridge trains and exports it.

        Args:
            hf_model_id: as in from_hf_pretrained()
            megatron_path: the root; the checkpoint is its iteration 0, as Megatron-Bridge's are
            kwargs: of ferry.convert (tp, pp, ep, overwrite, progress, ...) and of from_hf_pretrained(). torch_dtype or dtype casts; None and "auto"
                keep what each tensor has. The vocabulary is padded where make_vocab_size_divisible_by says so. Models that also see are kept whole, in Megatron-Bridge's layout.

        Returns:
            the report of the conversion; Megatron-Bridge returns None

        Raises:
            Error: as ferry.convert() does, and "usage" for a family that has no provider; then nothing was written
        """
        source, options = cls.from_hf_pretrained(hf_model_id, **{name: kwargs.pop(name) for name in _OF_MODELS | set(_OF_ENVIRONMENT) | {"revision"} if name in kwargs}), kwargs
        require_folder(megatron_path, "Megatron-Bridge's checkpoints, with a run_config.yaml, are written")
        dtypes = [options.pop(name) for name in sorted(_DTYPES) if name in options]
        if len(dtypes) == 2:
            raise Error("usage", "dtype and torch_dtype are one option")
        if dtypes and dtypes[0] != "auto":
            options["dtype"] = dtypes[0]
        checkpoint = _checkpoint.open(source.hf_pretrained)
        if checkpoint._run_config_problem is not None:
            raise Error("usage", f"no run_config.yaml: {checkpoint._run_config_problem}")
        options.setdefault("make_vocab_size_divisible_by", 1)
        if checkpoint._bridge_layout != "language-model":
            options.setdefault("megatron_layout", checkpoint._bridge_layout)
        report = _reports.convert(source.hf_pretrained, megatron_path, to="megatron", iteration=0, **options)
        if not options.get("dry_run"):
            write_run_config(os.path.join(os.fsdecode(megatron_path), os.path.basename(report.target.path)), hf_model_id=os.fspath(hf_model_id))
        return report

    def export_ckpt(self, megatron_path: Path, hf_path: Path, show_progress: bool = True, strict: bool = False, source_path: Optional[Path] = None, *,
                    overwrite: bool = False) -> ConvertReport:
        """Converts a Megatron checkpoint to a Hugging Face folder, with the configuration and tokenizer that the checkpoint carries, else this model's.

        Args:
            megatron_path: a root or an iteration, of any format
            hf_path: a folder that is not there yet, unless `overwrite` is set
            show_progress: draws a bar where stderr is a terminal
            strict: has no effect: every tensor has to be there
            source_path: a folder whose configuration and tokenizer are taken in place of this model's

        Returns:
            the report of the conversion; Megatron-Bridge returns None
        """
        return _reports.convert(megatron_path, hf_path, to="hf", hf_config=self._config_for(megatron_path, source_path), overwrite=overwrite,
                                progress=None if show_progress else False)

    def export_adapter_ckpt(self, peft_checkpoint: Path, output_path: Path, show_progress: bool = True,
                            exclude_adapter_base_prefixes: None = None) -> AdapterReport:
        """Converts a LoRA adapter of Megatron-Bridge, trained on this model, to a folder of PEFT.

        Args:
            peft_checkpoint: the root or an iteration
            output_path: a folder; nothing may be there
            show_progress: draws a bar where stderr is a terminal
            exclude_adapter_base_prefixes: is refused: an adapter is converted whole

        Returns:
            the report of the conversion; Megatron-Bridge returns None

        Raises:
            Error: as ferry.convert_adapter() does
        """
        if exclude_adapter_base_prefixes is not None:
            raise Error("usage", "exclude_adapter_base_prefixes: an adapter is converted whole")
        return _reports.convert_adapter(peft_checkpoint, output_path, base=self.hf_pretrained, to="peft", progress=None if show_progress else False)

    def export_hf_weights(self, model: Union[Path, Checkpoint], cpu: bool = False, show_progress: bool = True, conversion_tasks: None = None,
                          merge_adapter_weights: bool = True, weight_dtype: Any = None) -> Iterator[HFWeightTuple]:
        """Reads a Megatron checkpoint as Hugging Face tensors, one by one, ahead of the loop.

        Args:
            model: a Megatron checkpoint of any format, or an opened one. Models in memory are Megatron-Bridge's to export.
            cpu: leaves tensors on the host. Default: they go to the current GPU, if there is one
            show_progress: draws a bar where stderr is a terminal
            conversion_tasks, merge_adapter_weights: have no effect
            weight_dtype: torch.bfloat16, torch.float16 or torch.float32: casts weights. Default: each keeps its own

        Yields:
            HFWeightTuple(param_name, weight [*shape])
        """
        import torch
        if isinstance(model, (list, tuple)) or hasattr(model, "parameters"):
            raise Error("usage", "export_hf_weights: a model in memory is given where a checkpoint is expected")
        checkpoint = model if isinstance(model, Checkpoint) else _checkpoint.open(model, hf_config=self._config_for(model, None))
        to_gpu = not cpu and torch.cuda.is_available()
        for name, tensor in checkpoint.tensors(dtype=weight_dtype, progress=None if show_progress else False):
            weight = tensor.torch()
            yield HFWeightTuple(name, weight.cuda() if to_gpu else weight)

    def _config_for(self, megatron_path: Path, source_path: Optional[Path]) -> Optional[Path]:
        """-> hf_config for a Megatron checkpoint; None if it carries one"""
        return None if _reports.inspect(megatron_path).sidecar else source_path or self.hf_pretrained
