"""A checkpoint engine for verl: weights go from trainer to rollout as a Hugging Face checkpoint in a folder or bucket that all machines see.

    actor_rollout_ref:
      rollout:
        checkpoint_engine:
          backend: ferry
          custom_backend_module: ferry.compat.verl_engine
          engine_kwargs: {ferry: {folder: /shared/weights, model: "${actor_rollout_ref.model.path}"}}

Trainer and rollout need no network of GPUs between them, and each update is a checkpoint that vLLM, transformers and Ferry open, too. Importing this
module registers the engine with verl (0.9.1), which has to be installed.
"""
import asyncio
import json
import os
import shutil
import tempfile
import time
import uuid
from typing import Any, AsyncIterator, Dict, List, Optional, Tuple

import torch
from safetensors.torch import save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from .. import _arguments, _checkpoint, _reports
from .._errors import Error


class _Writer:
    """Writes the files of a Hugging Face folder, one bucket while the next one is gathered."""

    def __init__(self, folder: str, bucket_size: int):
        self.folder, self.bucket_size = folder, bucket_size
        self.bucket: Dict[str, Any] = {}
        self.bytes, self.total, self.files = 0, 0, 0
        self.file_of: Dict[str, str] = {}
        self.writing: Optional["asyncio.Task[None]"] = None

    async def add(self, name: str, tensor: Any) -> None:
        if name in self.file_of or name in self.bucket:
            raise Error("layout", f"{name}: was sent twice")
        if self.bucket and self.bytes + tensor.nbytes > self.bucket_size:
            await self.flush()
        self.bucket[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())  # the sender uses its memory again
        self.bytes += tensor.nbytes

    async def flush(self) -> None:
        if self.writing is not None:
            await self.writing
        self.files += 1
        file, bucket = f"model-{self.files:05d}.safetensors", self.bucket
        self.file_of.update(dict.fromkeys(bucket, file))
        self.total += self.bytes
        self.bucket, self.bytes = {}, 0
        self.writing = asyncio.create_task(asyncio.to_thread(save_file, bucket, os.path.join(self.folder, file), metadata={"format": "pt"}))

    async def finish(self) -> int:
        """-> bytes of all tensors"""
        await self.flush()
        if self.writing is not None:
            await self.writing
        with open(os.path.join(self.folder, "model.safetensors.index.json"), "w", encoding="utf-8") as out:
            json.dump({"metadata": {"total_size": self.total}, "weight_map": self.file_of}, out)
        return self.total


def _give_modes(work: str, model: str) -> None:
    """Lets nobody read the folder `work` who could not read the model, which may be an address."""
    files, folders = 0o644, 0o755
    for folder, _, names in os.walk(model):
        folders &= os.stat(folder).st_mode
        for name in names:
            files &= os.stat(os.path.join(folder, name)).st_mode
    for entry in os.scandir(work):
        os.chmod(entry.path, files | 0o400)
    os.chmod(work, folders | 0o700)


@CheckpointEngineRegistry.register("ferry")
class FerryCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """The engine "ferry". The first rank of the trainer writes each update, every rank of the rollout reads it.

    Args:
        bucket_size: bytes that the trainer gathers before it writes; it holds two such buckets. A tensor is never cut.
        folder: where updates are published, each in a folder of its own; s3://BUCKET/KEY, too
        model: the Hugging Face checkpoint that the run began with: config.json and tokenizer go along with each update
        is_master: the first rank of the trainer; verl says it
        dtype: "bfloat16", ...: of the weights that the rollout gets. Default: that of those sent
        keep: updates that stay in a folder; older ones are removed when all ranks have the new one. Objects of a bucket stay.
        timeout: seconds until a rank of the rollout gives up waiting for an update
        device: where the rollout gets its tensors. Default: the current GPU, else the host
        read_ahead, threads, max_memory: as in Checkpoint.tensors()
    """

    def __init__(self, bucket_size: int, folder: str, model: str, is_master: bool = False, dtype: _arguments.Dtype = None, keep: int = 1, timeout: float = 1800,
                 device: Optional[str] = None, read_ahead: _arguments.Size = "256MiB", threads: int = 0, max_memory: _arguments.Size = "192MiB"):
        if keep < 1:
            raise Error("usage", f"keep={keep}: the last update stays")
        self.bucket_size, self.folder, self.model, self.is_master, self.keep, self.timeout = bucket_size, folder.rstrip("/"), model, is_master, keep, timeout
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.reading = dict(dtype=dtype, read_ahead=read_ahead, threads=threads, max_memory=max_memory)
        self.update = ""
        self.published: List[str] = []
        self.remote = "://" in folder
        if is_master and not self.remote:
            os.makedirs(folder, exist_ok=True)

    def prepare(self) -> Dict[str, Any]:
        """-> of the master, a name for the next update"""
        return {"update": uuid.uuid4().hex[:12]} if self.is_master else {}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: List[Dict[str, Any]]) -> Tuple[Dict[str, Any], Dict[str, Any]]:
        """-> the update's name, for every rank"""
        (update,) = [one["update"] for one in metadata if one]
        return {"update": [update] * actor_wg_world_size}, {"update": [update] * rollout_world_size}

    def init_process_group(self, update: str) -> None:
        """Takes in the name of the next update."""
        self.update = update

    def finalize(self) -> None:
        """Removes old updates."""
        while len(self.published) > self.keep:
            path = self.published.pop(0)
            if not self.remote:
                shutil.rmtree(path, ignore_errors=True)

    def _path(self, global_steps: Optional[int]) -> str:
        return f"{self.folder}/{'weights' if global_steps is None else f'step_{global_steps}'}_{self.update}"

    @torch.no_grad()
    async def send_weights(self, weights: Any, global_steps: Optional[int] = None) -> Dict[str, float]:
        """Publishes the weights that a generator yields: (Hugging Face name, torch.Tensor [*shape]).

        Returns:
            metrics for verl's log, of the master

        Raises:
            Error: "layout" naming a tensor that the model lacks or that is missing; then the rollout's ranks raise it, too, where they see a folder
        """
        if not self.is_master:
            async for _ in ensure_async_iterator(weights):  # each is gathered by all ranks of the trainer
                pass
            return {}
        start = time.monotonic()
        path = self._path(global_steps)
        work = tempfile.mkdtemp(prefix=".writing_", dir=None if self.remote else self.folder)
        try:
            writer = _Writer(work, self.bucket_size)
            async for name, tensor in ensure_async_iterator(weights):
                await writer.add(name, tensor)
            size = await writer.finish()
            await asyncio.to_thread(self._publish, work, path)
        except BaseException as error:
            if not self.remote:
                with open(work + ".failed", "w", encoding="utf-8") as out:
                    out.write(str(error))
                os.replace(work + ".failed", path + ".failed")
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self.published.append(path)
        seconds = time.monotonic() - start
        return {"checkpoint_engine/send_seconds": seconds, "checkpoint_engine/send_gb_per_second": size / 1e9 / seconds}

    def _publish(self, work: str, path: str) -> None:
        begun_with = _checkpoint.open(self.model)
        for name in begun_with.files:
            with open(os.path.join(work, name), "wb") as out:
                out.write(begun_with.read_file(name))
        _checkpoint.open(work)  # exactly the tensors of the model, or an Error
        if self.remote:
            _reports.convert(work, path, to="hf", progress=False)
        else:
            _give_modes(work, self.model)
            os.rename(work, path)

    async def _published(self, path: str) -> _checkpoint.Checkpoint:
        end = time.monotonic() + self.timeout
        while True:
            try:
                return await asyncio.to_thread(_checkpoint.open, path)
            except Error as error:
                if error.kind != "not_found":
                    raise
            if os.path.exists(path + ".failed"):
                with open(path + ".failed", encoding="utf-8") as file:
                    raise Error("io", f"{path}: the trainer did not publish it: {file.read()}")
            if time.monotonic() > end:
                raise Error("io", f"{path}: was not published in {self.timeout} s", [], "see what the trainer's first rank says; timeout= waits longer")
            await asyncio.sleep(0.5 if self.remote else 0.02)

    async def receive_weights(self, global_steps: Optional[int] = None) -> AsyncIterator[Tuple[str, Any]]:
        """Waits for the update and reads it, ahead of the loop.

        Yields:
            (Hugging Face name, torch.Tensor [*shape] on the device)
        """
        checkpoint = await self._published(self._path(global_steps))
        tensors = checkpoint.tensors(**self.reading)
        while True:
            item = await asyncio.to_thread(next, tensors, None)
            if item is None:
                return
            yield item[0], item[1].torch().to(self.device)
