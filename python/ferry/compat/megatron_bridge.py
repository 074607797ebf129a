"""Megatron-Bridge's conversions, done by Ferry: without a model in memory, a GPU, or Megatron-Bridge itself.

    from ferry.compat.megatron_bridge import AutoBridge
    AutoBridge.import_ckpt("Qwen/Qwen3-8B", "megatron")
    AutoBridge.from_hf_pretrained("Qwen/Qwen3-8B").export_ckpt("megatron", "hf")
"""
import json
import os
import tempfile
from typing import Any, Dict, Iterator, Mapping, NamedTuple, Optional, Union

from .. import _checkpoint, _reports
from .._checkpoint import Checkpoint
from .._errors import Error
from .._arguments import Iteration, Path, require_folder
from .._reports import ConvertReport

# Fields of GPTModelProvider under the name that Megatron-LM's arguments have, too
_SAME = ("bf16", "fp16", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "seq_length",
         "position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved", "add_bias_linear", "add_qkv_bias",
         "normalization", "qk_layernorm", "attention_dropout", "hidden_dropout", "vocab_size", "make_vocab_size_divisible_by", "mtp_num_layers",
         "moe_layer_freq", "moe_ffn_hidden_size", "moe_grouped_gemm", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax",
         "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
         "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "tensor_model_parallel_size", "pipeline_model_parallel_size",
         "virtual_pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
         "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout")
_LATENT = ("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type",
           "rotary_scaling_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "original_max_position_embeddings")
_RENAMED = {"norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma", "num_experts": "num_moe_experts",
            "use_rope_scaling": "rope_scaling", "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
            "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
            "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage"}
_DECODER_BLOCK = {"_target_": "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec", "_partial_": True, "_args_": [],
                  "use_transformer_engine": True}
# Families that Megatron-Bridge has: the layers, where they are not the plain ones
_LAYER_SPECS: Dict[str, Any] = {
    "llama": None, "mistral": None, "qwen2": None, "qwen3": None, "qwen3_moe": None, "deepseek_v2": _DECODER_BLOCK, "deepseek_v3": _DECODER_BLOCK,
    "kimi_k2": _DECODER_BLOCK, "glm4_moe": _DECODER_BLOCK, "glm4_moe_lite": _DECODER_BLOCK,
    "olmoe": {"_target_": "megatron.bridge.models.olmoe.olmoe_provider.olmoe_layer_spec", "_call_": False},
    "minimax_m2": {"_target_": "megatron.bridge.models.minimax_m2.minimax_m2_provider.minimax_m2_layer_spec", "_call_": False},
}


def model_config(args: Mapping[str, Any], family: str, hf_model_id: Optional[str] = None) -> Dict[str, Any]:
    """The model of a run_config.yaml: a GPTModelProvider of Megatron-Bridge, or its MLAModelProvider.

    Args:
        args: Megatron-LM's arguments in a checkpoint: ferry.Checkpoint.args
        family: Hugging Face's model_type
        hf_model_id: the Hugging Face model that it was imported from

    Raises:
        Error: "usage" for a family that this has no provider for
    """
    if family not in _LAYER_SPECS:
        raise Error("usage", f"{family}: Megatron-Bridge's model of this family is not known", [], f"known: {', '.join(_LAYER_SPECS)}")
    latent = bool(args.get("multi_latent_attention"))
    if latent and args.get("q_lora_rank") is None:
        raise Error("usage", f"{family}: has no q_lora_rank: Megatron-Bridge's model then has a norm before q that this one lacks")
    provider = "mla_provider.MLAModelProvider" if latent else "gpt_provider.GPTModelProvider"
    dtype = "bfloat16" if args.get("bf16") else "float16" if args.get("fp16") else "float32"
    model: Dict[str, Any] = {"_target_": f"megatron.bridge.models.{provider}"}
    model.update({name: args[name] for name in _SAME + (_LATENT if latent else ()) if name in args})
    model.update({name: args[old] for old, name in _RENAMED.items() if old in args})
    model["share_embeddings_and_output_weights"] = not args.get("untie_embeddings_and_output_weights", False)
    model["params_dtype"] = {"_target_": f"torch.{dtype}", "_call_": False}
    if args.get("use_rope_scaling"):
        model["rope_scaling_factor"] = args["rope_scaling_factor"]
    if args.get("swiglu"):
        model["gated_linear_unit"] = True
        model["activation_func"] = {"_target_": "torch.nn.functional.silu", "_call_": False}
    if model.get("num_moe_experts"):
        model["moe_token_dispatcher_type"] = "alltoall"
    if _LAYER_SPECS[family] is not None:
        model["transformer_layer_spec"] = _LAYER_SPECS[family]
    if hf_model_id is not None:
        model["hf_model_id"] = hf_model_id
    return model


def _yaml(value: Any) -> str:
    """-> YAML of one line"""
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")  # YAML takes 1e-05 for a word
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {_yaml(one)}" for name, one in value.items()) + "}"
    return json.dumps(value)


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
    checkpoint = _checkpoint.open(path, iteration=iteration, hf_config=hf_config)
    if checkpoint.format != "torch_dist" or checkpoint.args is None:
        raise Error("usage", f"{checkpoint.path}: is no torch_dist checkpoint with arguments of Megatron")
    lines = [f"  {name}: {_yaml(value)}\n" for name, value in model_config(checkpoint.args, checkpoint.family, hf_model_id).items()]
    target = os.path.join(checkpoint.path, "run_config.yaml")
    descriptor, new = tempfile.mkstemp(dir=checkpoint.path, prefix=".run_config.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write("model:\n" + "".join(lines))
        os.chmod(new, os.stat(os.path.join(checkpoint.path, "metadata.json")).st_mode & 0o666)
        os.replace(new, target)
    except BaseException:
        os.unlink(new)
        raise
    return target


class HFWeightTuple(NamedTuple):
    """A weight under its Hugging Face name: torch.Tensor [*shape]."""

    param_name: str
    weight: Any


# Options of transformers' from_pretrained that say how a model in memory is made: there is none
_OF_MODELS = {"trust_remote_code", "device_map", "attn_implementation", "low_cpu_mem_usage", "use_safetensors", "local_files_only"}


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
            kwargs: revision; options of models in memory (device_map, trust_remote_code, ...) have no effect

        Raises:
            TypeError: for another keyword
        """
        revision = kwargs.pop("revision", None)
        surplus = set(kwargs) - _OF_MODELS
        if surplus:
            raise TypeError(f"from_hf_pretrained() got unexpected keyword arguments: {', '.join(sorted(surplus))}")
        name = os.fspath(path)
        if not os.path.exists(name) and "://" not in name:
            name = f"hf://{name}" + (f"@{revision}" if revision else "")
        return cls(name)

    @classmethod
    def import_ckpt(cls, hf_model_id: Path, megatron_path: Path, **kwargs: Any) -> ConvertReport:
        """Converts a Hugging Face model to a Megatron checkpoint, and writes a run_config.yaml, so that Megatron-Bridge trains and exports it.

        Args:
            hf_model_id: as in from_hf_pretrained()
            megatron_path: the root; the checkpoint is its iteration 0, as Megatron-Bridge's are
            kwargs: of ferry.convert (tp, pp, ep, dtype, overwrite, progress, ...), torch_dtype, and those of from_hf_pretrained(). The vocabulary is
                padded where make_vocab_size_divisible_by says so.

        Returns:
            the report of the conversion; Megatron-Bridge returns None

        Raises:
            Error: as ferry.convert() does, and "usage" for a family that has no provider; then nothing was written
        """
        source, options = cls.from_hf_pretrained(hf_model_id, **{name: kwargs.pop(name) for name in _OF_MODELS | {"revision"} if name in kwargs}), kwargs
        require_folder(megatron_path, "Megatron-Bridge's checkpoints, with a run_config.yaml, are written")
        if "torch_dtype" in options:
            options["dtype"] = options.pop("torch_dtype")
        checkpoint = _checkpoint.open(source.hf_pretrained)
        config = checkpoint.config or {}
        model_config({"multi_latent_attention": "kv_lora_rank" in config, "q_lora_rank": config.get("q_lora_rank")}, checkpoint.family)
        options.setdefault("make_vocab_size_divisible_by", 1)
        report = _reports.convert(source.hf_pretrained, megatron_path, to="megatron", iteration=0, **options)
        write_run_config(report.target.path, hf_model_id=os.fspath(hf_model_id))
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
