"""verl's core_algos, rollout_corr_helper, losses and metrics, loaded from the wheel that setup_peers unpacks, without what they import but do
not compute with: ray, tensordict, omegaconf, hydra and the configuration classes are stand-ins here."""
import importlib.util
import sys
import types
from enum import Enum

import torch

from support import PEERS

ROOT = PEERS / "verl091"


class Config(dict):
    """The part of ActorConfig, AlgoConfig and DictConfig that verl's functions read."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Batch(dict):
    """A TensorDict, or a DataProto: tensors under names."""

    @classmethod
    def from_dict(cls, tensors):
        return types.SimpleNamespace(batch=cls(tensors))

    def select(self, *names):
        return self

    def to_padded_tensor(self):
        return self


class AggregationType(Enum):
    SUM, MEAN = range(2)


class Metric:
    def __init__(self, value, aggregation):
        self.value = value.detach().item() if torch.is_tensor(value) else value

    @staticmethod
    def from_dict(metrics, aggregation):
        return {name: Metric(value, aggregation) for name, value in metrics.items()}


def _stand_in(name, **members):
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(members)
    sys.modules[name] = module
    return module


def _load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / (name.replace(".", "/") + ".py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load_all():
    _stand_in("omegaconf", DictConfig=Config, OmegaConf=None)
    _stand_in("tensordict", TensorDict=Batch)
    for package in ("verl.trainer", "verl.trainer.ppo", "verl.workers.utils", "verl.utils.dataset", "verl.utils.debug"):
        _stand_in(package)
    _stand_in("verl.utils.device", get_device_name=lambda: "cpu", get_torch_device=lambda: torch.cpu)
    _stand_in("verl.utils.fs", copy_to_local=None)
    _stand_in("verl.utils.model", update_model_config=None)
    _stand_in("verl.utils.import_utils", deprecated=lambda *_: lambda function: function)
    _stand_in("verl.utils.metric", AggregationType=AggregationType, Metric=Metric)
    _stand_in("verl.utils.tensordict_utils")
    _stand_in("verl.utils.dataset.dataset_utils", DatasetPadMode=Enum)
    _stand_in("verl.workers.utils.padding", no_padding_2_padding=lambda values, data: values)
    _stand_in("verl.protocol", DataProto=Batch)
    _stand_in("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {}))
    _stand_in("verl.trainer.config.algorithm", RolloutCorrectionConfig=Config)
    _stand_in("verl.workers.config", ActorConfig=Config, CriticConfig=Config)
    _stand_in("verl.workers.config.actor", PolicyLossConfig=Config)
    utils = _stand_in("verl.utils")
    _stand_in("verl", DataProto=Batch)
    utils.torch_functional = _load("verl.utils.torch_functional")
    groupwise = _load("verl.utils.groupwise")
    utils.as_torch_index, utils.group_mean_std = groupwise.as_torch_index, groupwise.group_mean_std
    utils.tensordict_utils = sys.modules["verl.utils.tensordict_utils"]
    return (utils.torch_functional, _load("verl.trainer.ppo.core_algos"), _load("verl.trainer.ppo.rollout_corr_helper"),
            _load("verl.workers.utils.losses"), _load("verl.trainer.ppo.metric_utils"), _load("verl.utils.debug.metrics"))


torch_functional, core_algos, rollout_corr_helper, losses, metric_utils, debug_metrics = _load_all()
