"""Ferry: carries model weights between Hugging Face and Megatron-Core checkpoints, in any layout, and proves every bit.

    import ferry
    ferry.convert("Qwen2.5-1.5B", "megatron", tp=2, pp=2)
    for name, tensor in ferry.open("megatron").tensors():
        weight = tensor.torch()
"""
import atexit

from . import _ferry
from ._changes import (ChangedTensor, DeltaReport, DeltaSummary, DeltaVerifyReport, MergeReport, SplitReport, SplitTensor, delta_apply, delta_inspect,
                       delta_make, delta_verify, merge, split)
from ._checkpoint import Checkpoint, Into, TensorInfo, open
from ._errors import Error
from ._progress import Progress, ProgressCallback
from ._reports import (AdapterReport, CheckReport, Chunk, ConvertReport, Difference, DiffReport, File, InspectReport, LayerDiff, Manifest, ManifestFile,
                       ManifestTensor, Place, StoredTensor, TensorDiff, TensorDifference, VerifyReport, check, convert, convert_adapter, diff, digest,
                       inspect, verify)
from ._safe_open import SafeSlice, load_file, safe_open
from ._shards import LoadReport, SaveReport, load_into, save, save_from
from ._tensor import Tensor

atexit.register(_ferry.let_interpreter_end)  # daemon threads that are at work then stay where they are
__version__ = _ferry.version
__all__ = [
    "AdapterReport", "ChangedTensor", "CheckReport", "Checkpoint", "Chunk", "ConvertReport", "DeltaReport", "DeltaSummary", "DeltaVerifyReport", "DiffReport",
    "Difference", "Error", "File", "InspectReport", "Into", "LayerDiff", "LoadReport", "Manifest", "ManifestFile", "ManifestTensor", "MergeReport", "Place",
    "Progress", "ProgressCallback", "SafeSlice", "SaveReport", "SplitReport", "SplitTensor", "StoredTensor", "Tensor", "TensorDiff", "TensorDifference",
    "TensorInfo", "VerifyReport", "check", "convert", "convert_adapter", "delta_apply", "delta_inspect", "delta_make", "delta_verify", "diff", "digest",
    "inspect", "load_file", "load_into", "merge", "open", "safe_open", "save", "save_from", "split", "verify"
]
