"""verl's model merger, done by Ferry: without a model in memory, a GPU, megatron-core or torch.

    python -m ferry.compat.verl merge --backend megatron --local_dir run/global_step_5/actor --target_dir hf
    python -m ferry.compat.verl test --backend fsdp --local_dir run/global_step_5/actor --test_hf_dir hf

Arguments are those of `python -m verl.model_merger` (verl 0.9.1), and what is written is what that writes: the weights of FSDP in bf16, those of Megatron in
their own dtype, with config.json and tokenizer of the checkpoint's `huggingface` folder; where ranks of FSDP saved a LoRA adapter beside the model, it
is written to `lora_adapter/`, in bf16, too. `test` compares bits, where verl compares within a tolerance.
"""
import argparse
import os
import sys
import tempfile
from dataclasses import replace
from typing import List, Optional

from .. import _reports
from .._errors import Error

ADAPTER = "lora_adapter"

def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ferry.compat.verl", description="verl's model merger, done by Ferry")
    base = argparse.ArgumentParser(add_help=False)
    base.add_argument("--backend", required=True, choices=["fsdp", "megatron"], help="what wrote the checkpoint")
    base.add_argument("--local_dir", required=True, help="the actor's folder of a step, or any folder that Ferry finds it from")
    base.add_argument("--tie-word-embedding", action="store_true", help="the head is the embedding; config.json has to say so, too")
    base.add_argument("--is-value-model", action="store_true", help="no effect: the checkpoint says it")
    base.add_argument("--trust-remote-code", action="store_true", help="no effect: no code is run")
    base.add_argument("--use_cpu_initialization", action="store_true", help="no effect: no model is made")
    commands = parser.add_subparsers(dest="operation", required=True)
    merge = commands.add_parser("merge", parents=[base], help="write a Hugging Face folder")
    merge.add_argument("--target_dir", default="tmp", help="where; a Hugging Face folder that is there is replaced")
    merge.add_argument("--lora-alpha", type=float, help="of a LoRA adapter without a lora_train_meta.json; verl then writes 0")
    merge.add_argument("--hf_upload_path", help="refused: upload the folder with `hf upload`")
    merge.add_argument("--private", action="store_true", help="refused likewise")
    test = commands.add_parser("test", parents=[base], help="compare with a Hugging Face folder, bit for bit")
    test.add_argument("--test_hf_dir", required=True, help="that folder")
    return parser


def _checked(local_dir: str, backend: str, tie_word_embedding: bool) -> _reports.InspectReport:
    checkpoint = _reports.inspect(local_dir)
    if (checkpoint.format == "fsdp") != (backend == "fsdp"):
        raise Error("usage", f"{local_dir}: --backend {backend}: the checkpoint is {checkpoint.format}")
    if tie_word_embedding and (checkpoint.config or {}).get("untie_embeddings_and_output_weights", True):
        raise Error("usage", f"{local_dir}: --tie-word-embedding: config.json does not say tie_word_embeddings")
    return checkpoint


def _merge_model(local_dir: str, target_dir: str, backend: str) -> _reports.ConvertReport:
    return _reports.convert(local_dir, target_dir, to="hf", dtype="bf16" if backend == "fsdp" else None, overwrite=os.path.isdir(target_dir))


def merge(local_dir: str, target_dir: str, backend: str, tie_word_embedding: bool = False, lora_alpha: Optional[float] = None) -> _reports.ConvertReport:
    """Merges the ranks' files of a checkpoint of verl into a Hugging Face folder.

    Args:
        local_dir: the actor's folder of a step ("run/global_step_5/actor"), old layout or new, or a folder above or below it
        target_dir: where; a Hugging Face folder that is there is replaced
        backend: "fsdp": weights are written in bf16, as verl does; "megatron": in their own dtype
        tie_word_embedding: insists that config.json ties the head to the embedding
        lora_alpha: of a LoRA adapter beside the model, without a lora_train_meta.json

    Raises:
        Error: as ferry.convert() and ferry.convert_adapter() do; "usage" for a checkpoint of the other backend, or of an adapter alone
    """
    found = _checked(local_dir, backend, tie_word_embedding)
    adapter = os.path.join(target_dir, ADAPTER)
    replaces = os.path.isdir(adapter) and set(os.listdir(adapter)) == {"adapter_config.json", "adapter_model.safetensors"}
    if not found.adapter and not replaces:
        return _merge_model(local_dir, target_dir, backend)
    if "://" in target_dir:
        raise Error("usage", f"{target_dir}: a model with its adapter is written to a folder")
    above = os.path.dirname(os.path.abspath(target_dir))
    os.makedirs(above, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=above) as aside:
        new, old = os.path.join(aside, "new"), os.path.join(aside, "old")
        if found.adapter:
            _reports.convert_adapter(local_dir, new, base=local_dir, to="peft", dtype="bf16", lora_alpha=lora_alpha)
        if replaces:
            os.rename(adapter, old)
        try:
            report = _merge_model(local_dir, target_dir, backend)
        except BaseException:
            if replaces:
                os.rename(old, adapter)
            raise
        if found.adapter:
            os.rename(new, adapter)
    return replace(report, adapter_left_out=0)


def test(local_dir: str, test_hf_dir: str, backend: str, tie_word_embedding: bool = False) -> _reports.VerifyReport:
    """Compares a checkpoint of verl, merged, with a Hugging Face folder: bits, dtypes, and which tensors there are, without an adapter's. Arguments as in
    merge()."""
    _checked(local_dir, backend, tie_word_embedding)
    with tempfile.TemporaryDirectory() as folder:
        _merge_model(local_dir, os.path.join(folder, "merged"), backend)
        return _reports.verify(os.path.join(folder, "merged"), test_hf_dir, weights_only=True)


def main(arguments: Optional[List[str]] = None) -> int:
    """-> exit status: 0 done or equal, 1 different, 2 trouble"""
    options = _parser().parse_args(arguments)
    try:
        if options.operation == "merge":
            if options.hf_upload_path or options.private:
                raise Error("usage", "--hf_upload_path: Ferry does not upload", [], f"hf upload REPOSITORY {options.target_dir}")
            report = merge(options.local_dir, options.target_dir, options.backend, options.tie_word_embedding, options.lora_alpha)
            print(f"{report.target.path}: {report.num_tensors} tensors, {report.bytes} bytes, proved, digest {report.model_digest}")
            if os.path.isdir(os.path.join(options.target_dir, ADAPTER)):
                print(f"{os.path.join(options.target_dir, ADAPTER)}: the LoRA adapter, proved")
            return 0
        found = test(options.local_dir, options.test_hf_dir, options.backend, options.tie_word_embedding)
    except Error as error:
        print(f"error: {error}".replace("lora_alpha", "--lora-alpha"), file=sys.stderr)  # the name that it has here
        return 2
    for one in found.tensors:
        print(f"{one.name}: {one.kind} {one.detail}".rstrip())
    print("equal" if found else "different")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
