"""Changes of checkpoints: adapters merged and split out, deltas made and applied."""
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from ._arguments import Globs, Iteration, Path, Paths, Size, Source, paths
from ._progress import Progress
from ._reports import ConvertReport, convert_report, report


@dataclass(frozen=True)
class MergeReport:
    """An adapter that was merged.

    Attributes:
        converted: the conversion that it was merged in
        tensors, elements: that the adapter changes; after an interrupted run elements are those of the last one, of blocks of FP8 all
        changed, vanished: elements; vanished: a change other than zero was less than half a step of their dtype
        rescaled: blocks of FP8 that got another scale
    """

    converted: ConvertReport
    tensors: int
    elements: int
    changed: int
    vanished: int
    rescaled: int = 0


@dataclass(frozen=True)
class SplitTensor:
    """A weight that differs, or gate and up projections of an expert together.

    Attributes:
        change, error: Frobenius norms of what changed, and of the part of it that the factors leave over
    """

    name: str
    shape: Tuple[int, ...]
    change: float
    error: float


@dataclass(frozen=True)
class SplitReport:
    """An adapter that was split out of two checkpoints.

    Attributes:
        target: the folder that was published
        canonical: of Megatron-Bridge's form: its CanonicalLoRA, else its LoRA
        parameters: of the adapter
        equal: tensors that are equal in both
        change, error: as of SplitTensor, of all tensors
        proved: each factor, re-read from the published files, has the digest of what was written
    """

    target: str
    rank: int
    canonical: bool
    parameters: int
    equal: int
    change: float
    error: float
    proved: bool
    tensors: List[SplitTensor]


@dataclass(frozen=True)
class DeltaReport:
    """A delta that was made.

    Attributes:
        base, result, delta: folders
        base_model, result_model: digests of the models at both ends
        tensors, changed_tensors, elements, changed_elements: numbers
        model_bytes, delta_bytes: of one end, and of the delta's files
        files: that travel along, differ, and are in the delta
        notes: what looks wrong, or is not in it
    """

    base: str
    result: str
    delta: str
    base_model: str
    result_model: str
    tensors: int
    changed_tensors: int
    elements: int
    changed_elements: int
    model_bytes: int
    delta_bytes: int
    files: List[str]
    notes: List[str]
    seconds: float


@dataclass(frozen=True)
class DeltaVerifyReport:
    """Deltas that fit a base: where they do not, delta_verify() raises.

    Attributes:
        tensors, bytes: that were read and changed
        result_model: digest of the model that they give
    """

    fits: bool
    tensors: int
    bytes: int
    result_model: str


@dataclass(frozen=True)
class ChangedTensor:
    """elements: that changed; None in slime's form, which does not say it. bytes: of the delta."""

    tensor: str
    bytes: int
    elements: Optional[int] = None


@dataclass(frozen=True)
class DeltaSummary:
    """A delta that lies somewhere.

    Attributes:
        form: "ferry" or "slime"
        base_model, result_model, tensors, model_bytes, files: of Ferry's form, as of DeltaReport
        version, base_version, encoding: of slime's
        changed: the tensors that changed
    """

    delta: str
    form: str
    delta_bytes: int
    changed: List[ChangedTensor]
    base_model: Optional[str] = None
    result_model: Optional[str] = None
    tensors: Optional[int] = None
    model_bytes: Optional[int] = None
    files: Optional[List[str]] = None
    version: Optional[int] = None
    base_version: Optional[int] = None
    encoding: Optional[str] = None


def merge(base: Source, adapter: Path, target: Path, *, to: Optional[str] = None, lora_alpha: Optional[float] = None, iteration: Iteration = None,
          hf_config: Optional[Path] = None, keep_quantized: bool = False, allow_vanished: bool = False, tp: int = 1, pp: int = 1, ep: int = 1,
          etp: Optional[int] = None, vpp: Optional[int] = None,
          num_layers_in_first_pipeline_stage: Optional[int] = None, num_layers_in_last_pipeline_stage: Optional[int] = None,
          account_for_embedding_in_pipeline_split: bool = False, account_for_loss_in_pipeline_split: bool = False,
          pipeline_model_parallel_layout: str = "", make_vocab_size_divisible_by: int = 128, max_shard_size: Size = None, threads: int = 0,
          max_memory: Size = "192MiB", overwrite: bool = False, resume: bool = False, progress: Progress = None) -> MergeReport:
    """Converts a checkpoint with a LoRA adapter merged into its weights: `ferry merge`.

    Args:
        base: the checkpoint that the adapter was trained on, of any format
        adapter: a folder of PEFT, or a checkpoint of verl or Megatron-Bridge
        to: "hf", "megatron" or "h5". Default: as the base, or "hf"
        lora_alpha: of an adapter of Megatron-Bridge or of verl's ranks without run_config.yaml and lora_train_meta.json
        iteration: of a Megatron base
        hf_config: a folder with the config.json that a Megatron base lacks
        keep_quantized: weights in blocks of FP8 are changed in fp32 and quantised again, by the scales that they have; else they become bf16
        allow_vanished: with keep_quantized: take whatever FP8 leaves of the changes

    Raises:
        Error: as convert() does; "usage" where FP8 keeps fewer than half of the changes; "layout" for a tensor that the base lacks, and for a kind of adapter that is not merged
    """
    options = {name: value for name, value in locals().items() if name not in ("base", "progress")}
    found = report("merge", {**options, "source": base}, progress)
    return MergeReport(converted=convert_report(found), **found["adapter"])


def split(base: Source, tuned: Source, target: Path, *, rank: int, to: str = "peft", base_iteration: Iteration = None, tuned_iteration: Iteration = None,
          hf_config: Optional[Path] = None, include: Globs = (), exclude: Globs = (), tp: int = 1, pp: int = 1, ep: int = 1, etp: Optional[int] = None,
          vpp: Optional[int] = None, num_layers_in_first_pipeline_stage: Optional[int] = None, num_layers_in_last_pipeline_stage: Optional[int] = None,
          account_for_embedding_in_pipeline_split: bool = False, account_for_loss_in_pipeline_split: bool = False,
          pipeline_model_parallel_layout: str = "", make_vocab_size_divisible_by: int = 128, threads: int = 0, max_memory: Size = "192MiB",
          progress: Progress = None) -> SplitReport:
    """Makes a LoRA adapter of what changed between two checkpoints, with the error that it leaves: `ferry split`.

    Args:
        base, tuned: checkpoints of one configuration, of any formats
        target: a folder; nothing may be there
        rank: of the factors of every weight; alpha is the same
        to: "peft", "megatron" (Megatron-Bridge's, in the layout of tp, pp, ...), "verl", "vllm" or "sglang"
        include, exclude: globs over Hugging Face names; other tensors are not looked at

    Raises:
        Error: then nothing was published; "layout" naming a tensor that differs and that no adapter changes, "usage" where nothing differs
    """
    found = report("split", {name: value for name, value in locals().items() if name != "progress"}, progress)
    tensors = [SplitTensor(**{**one, "shape": tuple(one["shape"])}) for one in found.pop("tensors")]
    return SplitReport(tensors=tensors, **found)


def delta_make(base: Source, new: Source, target: Path, *, to: str = "ferry", version: Optional[int] = None, base_iteration: Iteration = None,
               new_iteration: Iteration = None, hf_config: Optional[Path] = None, threads: int = 0, max_memory: Size = "192MiB",
               progress: Progress = None) -> DeltaReport:
    """Writes what changed from one checkpoint to another, of any formats and layouts: `ferry delta make`.

    Args:
        target: the folder to make; of "slime" the folder of versions, in which one is made
        to: "ferry", "slime" or "vllm"
        version: of "slime". Default: the one after the last that is there

    Raises:
        Error: then nothing was published; "layout" naming a tensor that only one end has, or that differs in shape or dtype
    """
    return DeltaReport(**report("delta_make", {name: value for name, value in locals().items() if name != "progress"}, progress))


def delta_apply(base: Source, deltas: Paths, target: Path, *, to: Optional[str] = None, iteration: Iteration = None, hf_config: Optional[Path] = None,
                tp: int = 1, pp: int = 1, ep: int = 1, etp: Optional[int] = None, vpp: Optional[int] = None,
                num_layers_in_first_pipeline_stage: Optional[int] = None, num_layers_in_last_pipeline_stage: Optional[int] = None,
                account_for_embedding_in_pipeline_split: bool = False, account_for_loss_in_pipeline_split: bool = False,
                pipeline_model_parallel_layout: str = "", make_vocab_size_divisible_by: int = 128, max_shard_size: Size = None, threads: int = 0,
                max_memory: Size = "192MiB", overwrite: bool = False, resume: bool = False, progress: Progress = None) -> ConvertReport:
    """Converts a checkpoint with deltas applied, in one pass, and proves the result: `ferry delta apply`.

    Args:
        base: the checkpoint that the first delta was made from, of any format
        deltas: one, or several in their order; of slime's also a folder of versions
        to: "hf", "megatron" or "h5". Default: as the base, or "hf"

    Raises:
        Error: as convert() does; "layout" for another base, "corrupt" for a damaged delta
    """
    options = {name: value for name, value in locals().items() if name not in ("base", "progress")}
    return convert_report(report("delta_apply", {**options, "source": base, "deltas": paths(deltas, "deltas")}, progress))


def delta_verify(base: Source, deltas: Paths, *, iteration: Iteration = None, hf_config: Optional[Path] = None, threads: int = 0,
                 max_memory: Size = "192MiB", progress: Progress = None) -> DeltaVerifyReport:
    """Applies deltas without writing: do they fit the base, and give what they say? `ferry delta verify`.

    Raises:
        Error: where they do not
    """
    options: Dict[str, Any] = {name: value for name, value in locals().items() if name != "progress"}
    return DeltaVerifyReport(**report("delta_verify", {**options, "deltas": paths(deltas, "deltas")}, progress))


def delta_inspect(delta: Path) -> List[DeltaSummary]:
    """Both ends of a delta, and what changed; of a folder of slime's versions one after the other: `ferry delta inspect`."""
    found: Any = report("delta_inspect", {"delta": delta})
    return [DeltaSummary(**{**one, "changed": [ChangedTensor(**tensor) for tensor in one["changed"]]}) for one in found]
