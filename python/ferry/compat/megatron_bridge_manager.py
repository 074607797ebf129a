"""A checkpoint manager for Megatron-Bridge's training: a run begins with the weights of a checkpoint of any format, which every rank reads for itself.

    from ferry.compat.megatron_bridge_manager import begin_from
    begin_from(config.checkpoint, "hf://Qwen/Qwen3-8B")     # of a ConfigContainer, before megatron.bridge.training.pretrain.pretrain(config, ...)
"""
import os
from typing import Any, Dict, Optional, Tuple

from .._arguments import Path
from .._errors import Error
from .._shards import load_into


def begin_from(checkpoint_config: Any, source: Path, hf_config: Optional[Path] = None) -> None:
    """Has a run of Megatron-Bridge begin with these weights, unless it resumes.

    Args:
        checkpoint_config: of megatron.bridge.training.config: its custom_manager_class becomes CheckpointManager, which Megatron-Bridge is told to allow
        source: a checkpoint of any format and layout, or its address (hf://..., s3://...). Only begin_from() takes addresses: Megatron-Bridge looks for the
            folder that `pretrained_checkpoint` names.
        hf_config: a folder with the config.json that a Megatron checkpoint lacks
    """
    from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
    register_allowed_target_prefix("ferry.compat.megatron_bridge_manager.")
    checkpoint_config.custom_manager_class = f"{__name__}.CheckpointManager"
    checkpoint_config.ferry_source = os.fspath(source)
    checkpoint_config.ferry_hf_config = hf_config


class _SomethingToLoad:
    """In the place of a manager of local checkpoints, which setup() asks whether there are any."""

    def find_latest(self) -> int:
        return 0


class CheckpointManager:
    """Megatron-Bridge's CheckpointManager (checkpoint.custom_manager_class) whose load() fills the model by ferry.load_into().

    A run that resumes (`checkpoint.load` holds a checkpoint of its own) and every save are Megatron-Bridge's own: optimizer, schedules and states of random
    numbers go along there.
    """

    def __init__(self, checkpoint_config: Any):
        from megatron.bridge.training.checkpointing import DefaultCheckpointManager
        self.checkpoint_config = checkpoint_config
        self._own = DefaultCheckpointManager(checkpoint_config)

    @property
    def _source(self) -> Optional[str]:
        source: Optional[str] = getattr(self.checkpoint_config, "ferry_source", None) or self.checkpoint_config.pretrained_checkpoint
        return source

    @property
    def checkpointing_context(self) -> Dict[str, Any]:
        context: Dict[str, Any] = self._own.checkpointing_context
        return context if self._source is None else {**context, "local_checkpoint_manager": _SomethingToLoad()}

    def _resumes(self) -> bool:
        from megatron.bridge.training import checkpointing
        config = self.checkpoint_config
        local = self._own.checkpointing_context.get("local_checkpoint_manager")
        return bool(checkpointing.checkpoint_exists(config.load) or checkpointing._has_global_non_persistent_checkpoint(config.load, config)
                    or (local is not None and local.find_latest() != -1))

    def load(self, ctx: Any) -> Tuple[int, int]:
        """Loads what the run resumes from, else the weights that it begins with: of wider dtypes they are rounded to those of the model.

        Args:
            ctx: Megatron-Bridge's CheckpointLoadContext

        Returns:
            iteration and operations so far: (0, 0) at the beginning

        Raises:
            Error: as ferry.load_into() does; "usage" for models that Megatron-Core does not describe by ShardedTensors of whole rows
        """
        if self._source is None or self._resumes():
            iteration, operations = self._own.load(ctx)
            return iteration, operations
        from megatron.core.utils import unwrap_model
        config = ctx.state.cfg
        interleaved = getattr(config.model, "moe_mlp_glu_interleave_size", None)
        if ctx.skip_load_to_model_and_opt or getattr(config.ddp, "use_megatron_fsdp", False) or interleaved:
            raise Error("usage", f"{self._source}: models of FSDP, and with gate and up of experts interleaved, are filled by Megatron-Bridge alone")
        chunks = unwrap_model(ctx.model)
        states = {"model" if len(chunks) == 1 else f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
        load_into(self._source, states, hf_config=getattr(self.checkpoint_config, "ferry_hf_config", None), round=True, progress=False)
        ctx.state.train_state.step = 0
        config.checkpoint.finetune = True  # neither an optimizer nor random numbers come along
        if ctx.optimizer is not None and (config.model.fp16 or config.model.bf16):
            ctx.optimizer.reload_model_params()
        return 0, 0

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        self._own.save(ctx, callback_manager)

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        self._own.finalize_async_saves(state, blocking, terminate)
