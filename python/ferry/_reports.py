"""The acts of Ferry that end in a report."""
import json
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from . import _ferry
from ._arguments import Dtype, Globs, Iteration, Path, Size, Source, plain
from ._progress import Progress, reporting
from ._tensor import short_name


@dataclass(frozen=True)
class Place:
    """A checkpoint: its folder, and its format ("huggingface", "torch_dist", "archive", ...)."""

    path: str
    format: str


@dataclass(frozen=True)
class File:
    """A file that holds tensors: its name in the folder of the checkpoint, and its size."""

    name: str
    bytes: int


@dataclass(frozen=True)
class ConvertReport:
    """A conversion that was done, or planned.

    Attributes:
        source, target: the folders; the target's is the one that was published
        family: Hugging Face's model_type
        num_tensors, num_parameters, bytes: of the model, in Hugging Face terms
        num_copies: rectangular copies of the plan
        files: that hold tensors
        threads, staging_bytes: that were used
        dry_run: nothing was written
        resumed_bytes: were there from an interrupted run
        copy_seconds, proof_seconds: the second is of reading the target again
        proved: each tensor, re-read from the published files, has the digest of what was copied; proof_from_disk: past the page cache
        model_digest: 32 hexadecimal digits, "" for a plan
        nonzero_padding: rows of the source's padding that were not zero, and were dropped
        run_config_problem: why a Megatron target has no run_config.yaml for Megatron-Bridge; "" where it has one
        training_notes: what of a training run did not go along, and why
        adapter_left_out: factors of a LoRA adapter beside the model (verl's): convert_adapter() takes them
    """

    source: Place
    target: Place
    family: str
    num_tensors: int
    num_parameters: int
    bytes: int
    num_copies: int
    files: List[File]
    threads: int
    staging_bytes: int
    dry_run: bool
    resumed_bytes: int
    copy_seconds: float
    proof_seconds: float
    proved: bool
    proof_from_disk: bool
    model_digest: str
    nonzero_padding: List[str]
    run_config_problem: str
    training_notes: List[str]
    adapter_left_out: int


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same on both sides.

    Attributes:
        kind: "values", "dtype", "shape", "only_left" or "only_right"
        detail: of dtype and shape: both of them
        first_element, left_value, right_value: of values: the first element that differs, in row-major order
        num_different, num_elements: of values
        max_difference, max_ulps: of values: the largest, of finite elements
    """

    name: str
    kind: str
    detail: str = ""
    first_element: Tuple[int, ...] = ()
    left_value: Optional[float] = None
    right_value: Optional[float] = None
    num_different: Optional[int] = None
    num_elements: Optional[int] = None
    max_difference: Optional[float] = None
    max_ulps: Optional[int] = None


@dataclass(frozen=True)
class VerifyReport:
    """The answer whether two checkpoints are equal, bit for bit. True in a condition if they are.

    Attributes:
        identical: every tensor of both, or of those that include and exclude select, was compared and is equal; so are configuration and files, as
            far as both have them
        left, right: folders
        num_compared, bytes: that were compared
        tensors: that differ
        configuration, files: their differences, a line each
        notes: what was not compared, and why
    """

    identical: bool
    left: str
    right: str
    num_compared: int
    bytes: int
    tensors: List[TensorDifference]
    configuration: List[str]
    files: List[str]
    notes: List[str]
    seconds: float

    def __bool__(self) -> bool:
        return self.identical


@dataclass(frozen=True)
class Difference:
    """The difference of elements. Norms are those of the Frobenius kind.

    Attributes:
        elements, changed: their numbers
        relative_difference: difference_norm / left_norm; None where that is no finite number
        max_difference, max_ulps: of finite elements; None if there are none
        ulps: number of elements by distance: {"0": 12, "3-4": 1}
        nans, infinities: of left and right
    """

    elements: int
    changed: int
    changed_share: float
    left_norm: float
    right_norm: float
    difference_norm: float
    relative_difference: Optional[float]
    max_difference: Optional[float]
    max_ulps: Optional[int]
    ulps: Dict[str, int]
    nans: Tuple[int, int]
    infinities: Tuple[int, int]


@dataclass(frozen=True)
class TensorDiff:
    """The difference of a tensor that both checkpoints hold, under its Hugging Face name. dtype: "bf16", "fp32", ... shape: outermost first."""

    name: str
    dtype: str
    shape: Tuple[int, ...]
    difference: Difference


@dataclass(frozen=True)
class LayerDiff:
    """layer: None for what lies outside of layers."""

    layer: Optional[int]
    num_tensors: int
    num_changed: int
    difference: Difference


@dataclass(frozen=True)
class DiffReport:
    """The difference of the weights of two checkpoints. True in a condition if they do not.

    Attributes:
        tensors: that both hold, also equal ones; unpaired: that cannot be compared
        num_changed: tensors
    """

    identical: bool
    left: Place
    right: Place
    family: str
    num_changed: int
    bytes: int
    total: Difference
    outside_layers: LayerDiff
    layers: List[LayerDiff]
    tensors: List[TensorDiff]
    unpaired: List[TensorDifference]
    notes: List[str]
    seconds: float

    def __bool__(self) -> bool:
        return self.identical


@dataclass(frozen=True)
class ManifestTensor:
    """A tensor and the digest of its elements (32 hexadecimal digits). dtype: "bf16", "fp32", ... shape: outermost first."""

    name: str
    dtype: str
    shape: Tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class ManifestFile:
    """A file that goes along with the weights: path in the checkpoint's folder, size in bytes, digest of its bytes (32 hexadecimal digits)."""

    path: str
    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Digests of 32 hexadecimal digits, independent of format and layout. `text` is what `ferry digest --check` reads."""

    format: str
    model: str
    tensors: List[ManifestTensor]
    files: List[ManifestFile]
    text: str


@dataclass(frozen=True)
class CheckReport:
    """The answer whether a checkpoint is as a manifest says. True in a condition if it is.

    Attributes:
        model: the model's digest, as it was found
        files_compared: False where the manifest is of another format, or of a part of a model
        differences: a line each
    """

    matches: bool
    model: str
    files_compared: bool
    differences: List[str]

    def __bool__(self) -> bool:
        return self.matches


@dataclass(frozen=True)
class AdapterReport:
    """A LoRA adapter that was converted.

    Attributes:
        source, target: folders; the target's is the one that was published
        source_form: "PEFT", "verl" or "Megatron-Bridge"
        target_form: one of these, or "vLLM, SGLang"
        canonical: of Megatron-Bridge's form: its CanonicalLoRA, else its LoRA
        factors: tensors, in PEFT's terms
        proved: each factor, re-read from the published files, has the digest of what was copied
    """

    source: str
    source_form: str
    target: str
    target_form: str
    canonical: bool
    factors: int
    parameters: int
    bytes: int
    proved: bool


@dataclass(frozen=True)
class Chunk:
    """A box of a stored tensor: it begins at `offsets`, and its bytes at `offset` of the file."""

    file: str
    offset: int
    length: int
    offsets: Tuple[int, ...]
    sizes: Tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """name: as it is stored. dtype: "bf16", "fp32", ... shape: outermost first."""

    name: str
    dtype: str
    shape: Tuple[int, ...]
    chunks: List[Chunk]


@dataclass(frozen=True)
class InspectReport:
    """The content of a checkpoint, from its headers.

    Attributes:
        family, config: of the model, in Megatron-Core's terms; None, and config_problem says why, if the checkpoint does not say it
        saved_with: the parallel sizes of a Megatron checkpoint's arguments
        parameters: of the model, if its sizes are known
        stored_elements: with padding and second copies
        training_state: entries of optimizer and RNG
        adapter: factors of a LoRA adapter: beside the model, and then not among the tensors, or alone
    """

    path: str
    format: str
    iteration: Optional[str]
    family: Optional[str]
    config: Optional[Dict[str, Any]]
    config_problem: str
    saved_with: Optional[Dict[str, int]]
    sidecar: bool
    parameters: Optional[int]
    stored_elements: int
    bytes: int
    elements_by_dtype: Dict[str, int]
    chunks_by_file: Dict[str, int]
    objects: List[str]
    training_state: int
    adapter: int
    tensors: List[StoredTensor]


def report(act: str, options: Dict[str, Any], progress: Progress = False) -> Dict[str, Any]:
    with reporting(progress) as callback:
        found: Dict[str, Any] = json.loads(_ferry.report(act, plain(options), callback))
    return found


def convert_report(found: Dict[str, Any]) -> ConvertReport:
    return ConvertReport(source=Place(**found["source"]), target=Place(**found["target"]), family=found["family"], num_tensors=found["tensors"],
                         num_parameters=found["parameters"], num_copies=found["copies"], files=[File(**file) for file in found["files"]],
                         **{name: found[name] for name in ("bytes", "threads", "staging_bytes", "dry_run", "resumed_bytes", "copy_seconds",
                                                           "proof_seconds", "proved", "proof_from_disk", "model_digest", "nonzero_padding",
                                                           "run_config_problem", "training_notes", "adapter_left_out")})


def convert(source: Source, target: Path, *, to: Optional[str] = None, iteration: Iteration = None, hf_config: Optional[Path] = None,
            include: Globs = (), exclude: Globs = (), tp: int = 1, pp: int = 1, ep: int = 1, etp: Optional[int] = None,
            vpp: Optional[int] = None, num_layers_in_first_pipeline_stage: Optional[int] = None,
            num_layers_in_last_pipeline_stage: Optional[int] = None, account_for_embedding_in_pipeline_split: bool = False,
            account_for_loss_in_pipeline_split: bool = False, pipeline_model_parallel_layout: str = "", make_vocab_size_divisible_by: int = 128,
            megatron_layout: Optional[str] = None, dtype: Dtype = None, mtp: str = "keep", keep_quantized: bool = False, quantize: Optional[str] = None,
            no_save_optim: bool = False, max_shard_size: Size = None, threads: int = 0, max_memory: Size = "192MiB", dry_run: Optional[str] = None,
            overwrite: bool = False, resume: bool = False,
            follow_symlinks: bool = False, ranks: bool = False, progress: Progress = None) -> ConvertReport:
    """Converts a checkpoint, and proves it: `ferry convert` (docs/cli.md has every option).

    Args:
        source: a checkpoint of any format
        target: a folder: of Hugging Face files, a Megatron root, an archive's
        to: "hf", "megatron" or "h5". Default: the other format
        megatron_layout: where a Megatron target keeps a model that also sees ("language-model", "megatron-bridge", "mbridge") or its gated delta
            nets ("slime"). Default: as the source
        mtp: prediction layers: "keep" those that are there, "drop" them, or "error" if config.json names some that are missing
        quantize: "fp8-block", "fp8-block-lossless" or "mxfp4"
        dry_run: "plan" plans and writes nothing; "read" also reads and digests
        ranks: shares the work with the other processes that torchrun, srun or mpirun started; all of them call this, and the first one's report counts
        progress: see Progress

    Raises:
        Error: then nothing was published, and nothing that was there is lost. KeyboardInterrupt likewise: resume=True goes on.
    """
    options = {name: value for name, value in locals().items() if name != "progress"}
    return convert_report(report("convert", options, progress))


def convert_adapter(source: Path, target: Path, *, base: Source, to: str, lora_alpha: Optional[float] = None, hf_config: Optional[Path] = None,
                    tp: int = 1, pp: int = 1, ep: int = 1, etp: Optional[int] = None, vpp: Optional[int] = None,
                    num_layers_in_first_pipeline_stage: Optional[int] = None, num_layers_in_last_pipeline_stage: Optional[int] = None,
                    account_for_embedding_in_pipeline_split: bool = False, account_for_loss_in_pipeline_split: bool = False,
                    pipeline_model_parallel_layout: str = "", make_vocab_size_divisible_by: int = 128, dtype: Dtype = None, threads: int = 0,
                    max_memory: Size = "192MiB", progress: Progress = None) -> AdapterReport:
    """Converts a LoRA adapter between PEFT, verl and Megatron-Bridge: `ferry convert --base`.

    Args:
        source: an adapter of any of the three forms
        target: a folder; nothing may be there
        base: the checkpoint that the adapter changes
        to: "peft", "megatron" (Megatron-Bridge's, in the layout of tp, pp, ...), "verl", or "vllm" and "sglang": the factors of each expert
            under names of its own
        lora_alpha: of an adapter of Megatron-Bridge or of verl's ranks without run_config.yaml and lora_train_meta.json
        hf_config: a folder with the config.json that a Megatron base lacks
        dtype: of the target's factors. Default: no element changes

    Raises:
        Error: then nothing was published; "layout" for settings that the target's form does not have
    """
    options = {name: value for name, value in locals().items() if name != "progress"}
    return AdapterReport(**report("convert_adapter", options, progress))


def _differences(found: List[Dict[str, Any]]) -> List[TensorDifference]:
    return [TensorDifference(**{**one, "first_element": tuple(one.get("first_element", ()))}) for one in found]


def verify(left: Source, right: Source, *, left_iteration: Iteration = None, right_iteration: Iteration = None, hf_config: Optional[Path] = None,
           weights_only: bool = False, include: Globs = (), exclude: Globs = (), threads: int = 0, max_memory: Size = "192MiB",
           progress: Progress = None) -> VerifyReport:
    """Compares two checkpoints bit for bit, in any formats and layouts: `ferry verify`.

    Args:
        hf_config: a folder with the config.json that a Megatron checkpoint lacks
        weights_only: leaves config.json and the other files alone
        include, exclude: globs over Hugging Face names
    """
    options = {name: value for name, value in locals().items() if name != "progress"}
    found = report("verify", options, progress)
    found["num_compared"] = found.pop("compared")
    found["tensors"] = _differences(found["tensors"])
    return VerifyReport(**found)


def _difference(found: Dict[str, Any]) -> Difference:
    fields: Dict[str, Any] = {name: found[name] for name in Difference.__dataclass_fields__}
    return Difference(**{**fields, "nans": tuple(found["nans"]), "infinities": tuple(found["infinities"])})


def _layer(found: Dict[str, Any]) -> LayerDiff:
    return LayerDiff(layer=found["layer"], num_tensors=found["tensors"], num_changed=found["changed_tensors"], difference=_difference(found))


def diff(left: Source, right: Source, *, left_iteration: Iteration = None, right_iteration: Iteration = None, hf_config: Optional[Path] = None,
         include: Globs = (), exclude: Globs = (), threads: int = 0, max_memory: Size = "192MiB",
         progress: Progress = None) -> DiffReport:
    """Tells how the weights of two checkpoints differ, per tensor and per layer: `ferry diff`. Arguments as in verify()."""
    options = {name: value for name, value in locals().items() if name != "progress"}
    found = report("diff", options, progress)
    return DiffReport(identical=found["identical"], left=Place(**found["left"]), right=Place(**found["right"]), family=found["family"],
                      num_changed=found["changed_tensors"], bytes=found["bytes"], total=_difference(found["total"]),
                      outside_layers=_layer(found["outside_layers"]), layers=[_layer(layer) for layer in found["layers"]],
                      tensors=[TensorDiff(one["name"], short_name(one["dtype"]), tuple(one["shape"]), _difference(one)) for one in found["tensors"]],
                      unpaired=_differences(found["unpaired"]), notes=found["notes"], seconds=found["seconds"])


def digest(path: Source, *, iteration: Iteration = None, hf_config: Optional[Path] = None, keep_quantized: bool = False, files: bool = True, threads: int = 0,
           max_memory: Size = "192MiB", progress: Progress = None) -> Manifest:
    """Digests every tensor in Hugging Face terms, whatever format and layout, and every file: `ferry digest`.

    Args:
        files: also the checkpoint's files
    """
    options = {name: value for name, value in locals().items() if name != "progress"}
    with reporting(progress) as callback:
        text = _ferry.report("digest", plain(options), callback)
    found = json.loads(text)
    tensors = [ManifestTensor(name, short_name(one["dtype"]), tuple(one["shape"]), one["digest"]) for name, one in found["tensors"].items()]
    return Manifest(format=found["checkpoint"], model=found["model"], tensors=tensors, text=text,
                    files=[ManifestFile(path, one["size"], one["digest"]) for path, one in found["files"].items()])


def check(path: Source, manifest: Path, *, iteration: Iteration = None, hf_config: Optional[Path] = None, keep_quantized: bool = False, files: bool = True,
          threads: int = 0, max_memory: Size = "192MiB", progress: Progress = None) -> CheckReport:
    """Digests a checkpoint and compares it with a manifest: `ferry digest --check`.

    Args:
        manifest: a file that holds the text of a Manifest
        files: also the checkpoint's files, where the manifest is of the same format

    Raises:
        Error: "corrupt" if the file is no manifest
    """
    options = {name: value for name, value in locals().items() if name != "progress"}
    return CheckReport(**report("check", options, progress))


def inspect(path: Source, *, iteration: Iteration = None, hf_config: Optional[Path] = None, filter: str = "*") -> InspectReport:
    """Describes what a checkpoint holds, from its headers: `ferry inspect`. Also one whose model is not known.

    Args:
        filter: a glob over the names as they are stored
    """
    found = report("inspect", dict(locals()))
    found["tensors"] = [
        StoredTensor(one["name"], short_name(one["dtype"]), tuple(one["shape"]), [
            Chunk(chunk["file"], chunk["offset"], chunk["length"], tuple(chunk["offsets"]), tuple(chunk["sizes"])) for chunk in one["chunks"]
        ]) for one in found["tensors"]
    ]
    absent: Dict[str, Any] = {"config": None, "config_problem": "", "saved_with": None}
    known: Dict[str, Any] = {name: found.get(name, absent.get(name)) for name in InspectReport.__dataclass_fields__}
    return InspectReport(**known)
