"""Weights of a trainer go to two replicas of a rollout by verl's own manager of checkpoint engines (verl/checkpoint_engine/base.py of 0.9.1) and the
engine "ferry".

    update_through_verl.py FOLDER MODEL BUCKET_SIZE FAULT     FOLDER: s3://BUCKET/KEY, too

The manager, its workers of the rollout and the registry are verl's. ray, what it starts, and what the adapters of engines do are stand-ins here: the
trainer's workers are threads, those of the rollout threads of another process. Updates are those of steps 1 to 3, the weights of MODEL times the step.
FAULT: "", or the name of a tensor that step 2 lacks.
"""
import asyncio
import functools
import importlib.util
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.managers import BaseManager
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support import PEERS

FOLDER, MODEL, BUCKET_SIZE, FAULT = sys.argv[1:]
TRAINERS, ROLLOUTS = 2, 4


def stand_in(name, **members):
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(members)
    sys.modules[name] = module


class WorkerGroup:
    """ray's actors: a call of the group is one of each worker, lists give each its own argument."""

    def __init__(self, worker_handles, ray_cls_with_init=None):
        self.workers, self.world_size = worker_handles, len(worker_handles)

    def execute_checkpoint_engine(self, method, **kwargs):
        return [THREADS.submit(worker.execute_checkpoint_engine, method[i], **{name: values[i] for name, values in kwargs.items()})
                for i, worker in enumerate(self.workers)]

    def update_weights(self, **kwargs):
        return [THREADS.submit(worker.update, kwargs) for worker in self.workers]


@functools.cache
def load_verl():
    async def ensure_async_iterator(iterable):
        if hasattr(iterable, "__aiter__"):
            async for item in iterable:
                yield item
        else:
            for item in iterable:
                yield item

    stand_in("ray", remote=lambda cls: cls, get=lambda futures: [future.result() for future in futures])
    for package in ("verl", "verl.utils", "verl.single_controller", "verl.workers", "verl.checkpoint_engine"):
        stand_in(package)
    stand_in("verl.single_controller.base", Worker=object)
    stand_in("verl.single_controller.base.decorator", Dispatch=types.SimpleNamespace(ONE_TO_ALL=0, DP_COMPUTE=1),
             register=lambda **_: lambda method: method)
    stand_in("verl.single_controller.ray", RayClassWithInitArgs=lambda **_: None, RayWorkerGroup=WorkerGroup)
    stand_in("verl.utils.distributed", initialize_global_process_group_ray=lambda **_: None)
    stand_in("verl.utils.import_utils", import_external_libs=lambda name: name and importlib.import_module(name))
    stand_in("verl.utils.ray_utils", auto_await=lambda function: function)
    stand_in("verl.workers.config", CheckpointEngineConfig=object, HFModelConfig=object, RolloutConfig=object)
    stand_in("verl.workers.rollout", BaseRollout=object, RolloutReplica=object, get_rollout_class=None)
    stand_in("verl.workers.rollout.utils", ensure_async_iterator=ensure_async_iterator)
    spec = importlib.util.spec_from_file_location("verl.checkpoint_engine.base", PEERS / "verl091/verl/checkpoint_engine/base.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def config():
    return types.SimpleNamespace(backend="ferry", custom_backend_module="ferry.compat.verl_engine", update_weights_bucket_megabytes=0,
                                 engine_kwargs={"ferry": {"folder": FOLDER, "model": MODEL, "timeout": 60, "threads": 1}})


class Trainer:
    """verl's ActorRolloutRefWorker, as far as it deals with the engine."""

    def __init__(self, base, rank):
        base.import_external_libs(config().custom_backend_module)
        self.checkpoint_engine = base.CheckpointEngineRegistry.new("ferry", is_master=rank == 0, bucket_size=BUCKET, **config().engine_kwargs["ferry"])
        self.gathered = 0

    def execute_checkpoint_engine(self, method, **kwargs):
        return getattr(self.checkpoint_engine, method)(**kwargs)

    def weights(self, step):
        memory = torch.empty(1 << 20, dtype=torch.bfloat16)  # used again for each tensor, as a gathered parameter's is
        for name, weight in WEIGHTS.items():
            if step == 2 and name == FAULT:
                continue
            self.gathered += 1
            yield name, memory[:weight.numel()].view(weight.shape).copy_(weight * step)

    def update(self, arguments):
        step = arguments["global_steps"]
        return asyncio.run(self.checkpoint_engine.send_weights(self.weights(step), global_steps=step))


class Adapter:
    """... of an engine that generates"""

    def __init__(self):
        self.found = {}

    async def update_weights(self, weights, global_steps, wire_format):
        assert wire_format == "named_tensors"
        self.found = {name: weight.clone() async for name, weight in weights}


class RolloutWorker:
    """verl's worker, in another process"""

    def __init__(self):
        rollout = types.SimpleNamespace(checkpoint_engine=config(), name="vllm")
        self.worker = load_verl().CheckpointEngineWorker(rollout, None, Adapter())

    def execute_checkpoint_engine(self, method, **kwargs):
        return self.worker.execute_checkpoint_engine(method, **kwargs)

    def update(self, arguments):
        asyncio.run(self.worker.update_weights(**arguments))

    def holds(self, step):
        found = self.worker.server_adapter.found
        return set(found) == set(WEIGHTS) and all(torch.equal(found[name], weight * step) for name, weight in WEIGHTS.items())


class Processes(BaseManager):
    """A process with a thread for each worker that asks it."""


class Replica:
    def __init__(self, workers):
        self.workers, self.calls = workers, []

    def __getattr__(self, name):
        async def call(**_):
            self.calls.append(name)
        return call


async def main(processes):
    base = load_verl()
    trainers = [Trainer(base, rank) for rank in range(TRAINERS)]
    workers = [processes.RolloutWorker() for _ in range(ROLLOUTS)]
    manager = base.CheckpointEngineManager(config(), WorkerGroup(trainers), [Replica(workers[:2]), Replica(workers[2:])])
    for step in (1, 2, 3):
        metrics = await manager.update_weights(global_steps=step)
        assert metrics["checkpoint_engine/send_seconds"] > 0
        assert {trainer.gathered for trainer in trainers} == {step * len(WEIGHTS)}
        assert all(worker.holds(step) for worker in workers), step
    published = trainers[0].checkpoint_engine.published if "://" in FOLDER else Path(FOLDER).iterdir()
    print("updated", *sorted(Path(path).name.split("_")[1] for path in published))


WEIGHTS = load_file(f"{MODEL}/model.safetensors")
BUCKET = int(BUCKET_SIZE)
Processes.register("RolloutWorker", RolloutWorker, exposed=("execute_checkpoint_engine", "update", "holds"))
with Processes() as started:
    THREADS = ThreadPoolExecutor(16)
    asyncio.run(main(started))
