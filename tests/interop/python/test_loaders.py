"""The loaders of ferry.compat for vLLM and SGLang, and verl's merger.

vLLM and SGLang do not run without a GPU. Their side is played by the classes below: signatures, and the order of calls, as in vLLM's
vllm/model_executor/model_loader (base_loader.py of commit 01f62d3, __init__.py), vllm/distributed/weight_transfer (base.py of commit 02f250b, factory.py
of commit 047c993) and SGLang's python/sglang/srt/model_loader/loader.py (commit
005cbe0) and model_executor/model_runner.py.
"""
import os
import shutil
import subprocess
import sys
import types
from abc import ABC, abstractmethod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sharded_runs import sharded_runs
from support import DATA, ROOT, described, hf_tensors, llama_config, tree, verls_merger, write_hf

ferry = pytest.importorskip("ferry", reason="the Python module is not built")
import ferry.compat.sglang  # noqa: E402
import ferry.compat.verl  # noqa: E402
import ferry.compat.vllm  # noqa: E402

HF, MEGATRON = DATA / "hf_llama/hf", DATA / "llama_tp2pp2"


class Model(torch.nn.Module):
    """A model of vLLM or SGLang: takes weights one by one, and keeps none alive while it waits for the next."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def load_weights(self, weights):
        assert iter(weights) is weights, "a generator, not all weights at once"
        self.found.update((name, tensor.clone()) for name, tensor in weights)
        return set(self.found)


def require_weights(found, expected=HF / "model.safetensors"):
    expected = load_file(expected)
    assert set(found) == set(expected)
    assert [name for name, tensor in expected.items() if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor)] == []


class BaseModelLoader(ABC):
    def __init__(self, load_config):
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config):
        """vLLM and SGLang"""


class VllmLoader(BaseModelLoader):
    @abstractmethod
    def load_weights(self, model, model_config):
        """vLLM"""

    def load_model(self, vllm_config, model_config, prefix=""):
        model = Model()
        self.load_weights(model, model_config)
        return model.eval()


class SglangDefaultLoader(BaseModelLoader):
    def __init__(self, load_config):
        raise AssertionError("refuses options that it does not know")

    def download_model(self, model_config):
        raise AssertionError("looks for files")

    def load_model(self, *, model_config, device_config):
        model = Model()
        model.load_weights(self._get_all_weights(model_config, model))
        return model.eval()


def module(monkeypatch, name, **content):
    for end in range(name.count(".") + 1):
        parent = ".".join(name.split(".")[:end + 1])
        monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or types.ModuleType(parent))
    vars(sys.modules[name]).update(content)


@pytest.fixture
def vllm(monkeypatch):
    """-> the registry of model loaders"""
    registry = {}

    def register_model_loader(load_format):
        def register(loader):
            assert issubclass(loader, VllmLoader)
            registry[load_format] = loader
            return loader
        return register

    module(monkeypatch, "vllm.model_executor.model_loader.base_loader", BaseModelLoader=VllmLoader)
    module(monkeypatch, "vllm.model_executor.model_loader", register_model_loader=register_model_loader)
    return registry


def config(**options):
    return types.SimpleNamespace(**options)


def test_vllm_loads_a_checkpoint_of_megatron(vllm):
    ferry.compat.vllm.register()
    loader = vllm["ferry"](config(load_format="ferry", model_loader_extra_config={"checkpoint": str(MEGATRON), "hf_config": str(HF), "threads": 2}))
    loader.download_model(config(model=str(HF)))
    require_weights(loader.load_model(config(), config(model=str(HF), revision=None)).found)


def test_vllm_loads_the_model_itself_where_no_checkpoint_is_named(vllm):
    ferry.compat.vllm.register("by_ferry")
    loader = vllm["by_ferry"](config(model_loader_extra_config={}))
    require_weights(dict(loader.get_all_weights(config(model=str(HF)), Model())))


class LazyModel(Model):
    def load_weights(self, weights):
        return {next(weights)[0]}


def test_a_model_of_vllm_reads_all_weights_and_has_all_its_parameters(vllm, transfer):
    """vLLM's own loader raises an error for parameters that were not initialized."""
    ferry.compat.vllm.register()
    loader = vllm["ferry"](config(model_loader_extra_config={}))
    with pytest.raises(ferry.Error, match="the model did not read them"):
        loader.load_weights(LazyModel(), config(model=str(HF)))
    engine = transfer[0](config(), config(model_config=None), None, LazyModel())
    with pytest.raises(ferry.Error, match="the model did not read them"):
        engine.update_weights({"checkpoint": str(HF)})
    more = Model()
    more.other = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ferry.Error, match="^other: the checkpoint has no weights for them"):
        loader.load_weights(more, config(model=str(HF)))
    loader.load_weights(more, config(model=str(HF), quantization="fp8"))


def test_an_option_that_is_not_known_is_refused():
    with pytest.raises(ferry.Error, match="model_loader_extra_config: has num_threads"):
        ferry.compat.vllm.weights_iterator(HF, {"num_threads": 8})


def test_vllm_finds_the_loader_as_a_plugin(vllm):
    assert 'entry-points."vllm.general_plugins"]\nferry = "ferry.compat.vllm:plugin"' in (ROOT / "pyproject.toml").read_text()
    ferry.compat.vllm.plugin()
    assert "ferry" in vllm


def test_a_vllm_that_lacks_the_registry_starts_without_the_plugin(vllm, caplog):
    """vLLM 0.9 calls what its plugins load outside of its try."""
    del sys.modules["vllm.model_executor.model_loader"].register_model_loader
    with pytest.raises(ImportError):
        ferry.compat.vllm.register()
    ferry.compat.vllm.plugin()
    assert not vllm and "cannot import name 'register_model_loader'" in caplog.text


class TransferEngine(ABC):
    """vLLM's WeightTransferEngine, and the worker that calls it."""

    def __init__(self, config, vllm_config, device, model):
        self.config, self.vllm_config, self.model_config, self.device, self.model = config, vllm_config, vllm_config.model_config, device, model

    def update_weights(self, update_info):
        try:
            parsed = self.update_info_cls(**update_info)
        except TypeError as error:
            raise ValueError(f"Invalid update_info: {error}") from error
        self.receive_weights(parsed)

    @abstractmethod
    def init_transfer_engine(self, init_info):
        """vLLM"""

    @abstractmethod
    def start_weight_update(self):
        """vLLM"""

    @abstractmethod
    def finish_weight_update(self):
        """vLLM"""

    @abstractmethod
    def receive_weights(self, update_info):
        """vLLM"""

    @abstractmethod
    def shutdown(self):
        """vLLM"""

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator, trainer_args):
        """vLLM"""


class TransferFactory:
    _registry = {}

    @classmethod
    def register_engine(cls, name, engine):
        if name in cls._registry:
            raise ValueError(f"'{name}' is already registered.")
        cls._registry[name] = engine


@pytest.fixture
def transfer(vllm, monkeypatch):
    """-> the class that is registered as the backend "ferry", and a record of layerwise reloads"""
    record = []
    monkeypatch.setattr(TransferFactory, "_registry", {})
    module(monkeypatch, "vllm.distributed.weight_transfer.base", WeightTransferEngine=TransferEngine, WeightTransferInitInfo=type("Init", (), {}),
           WeightTransferUpdateInfo=type("Update", (), {}))
    module(monkeypatch, "vllm.distributed.weight_transfer.factory", WeightTransferEngineFactory=TransferFactory)
    module(monkeypatch, "vllm.model_executor.model_loader.reload", initialize_layerwise_reload=lambda model: record.append(("start", model)),
           finalize_layerwise_reload=lambda model, model_config: record.append(("finish", model, model_config)))
    ferry.compat.vllm.register()
    ferry.compat.vllm.register()  # as a plugin in a process that has it
    return TransferFactory._registry["ferry"], record


def test_a_worker_of_vllm_takes_the_checkpoint_that_an_update_names(transfer):
    kind, record = transfer
    model, of_model = Model(), config(model=str(HF))
    engine = kind(config(backend="ferry"), config(model_config=of_model), torch.device("cpu"), model)
    engine.init_transfer_engine(engine.init_info_cls())
    engine.start_weight_update()
    engine.update_weights({"checkpoint": str(MEGATRON), "options": {"hf_config": str(HF), "threads": 2}})
    engine.finish_weight_update()
    engine.shutdown()
    require_weights(model.found)
    assert record == [("start", model), ("finish", model, of_model)]
    with pytest.raises(ValueError, match="chekpoint"):
        engine.update_weights({"chekpoint": str(MEGATRON)})
    with pytest.raises(ferry.Error, match="num_threads"):
        engine.update_weights({"checkpoint": str(MEGATRON), "options": {"num_threads": 2}})


def test_a_trainer_sends_its_weights_to_vllm_by_a_checkpoint(transfer, work):
    kind, _ = transfer
    changed = {name: tensor * 2 for name, tensor in load_file(HF / "model.safetensors").items()}
    kind.trainer_send_weights(iter(changed.items()), {"checkpoint": work / "step_1", "like": HF})
    model = Model()
    kind(config(), config(model_config=None), None, model).update_weights({"checkpoint": str(work / "step_1")})
    assert model.found.keys() == changed.keys() and all(torch.equal(model.found[name], tensor) for name, tensor in changed.items())


def test_sglang_starts_with_a_checkpoint_of_megatron(monkeypatch):
    module(monkeypatch, "sglang.srt.model_loader.loader", BaseModelLoader=BaseModelLoader, DefaultModelLoader=SglangDefaultLoader)
    loader = ferry.compat.sglang.model_loader()(config(model_loader_extra_config={"checkpoint": str(MEGATRON), "hf_config": str(HF)}))
    loader.download_model(config(model_path=str(HF)))
    require_weights(loader.load_model(model_config=config(model_path=str(HF)), device_config=config()).found)


def test_sglang_takes_the_weights_of_a_checkpoint_while_it_runs():
    """model_runner.update_weights_from_tensor imports the load format, and calls it with model and tensors."""
    name, _, function = ferry.compat.sglang.LOAD_FORMAT.rpartition(".")
    model = Model()
    getattr(sys.modules[name], function)(model, ferry.compat.sglang.named(MEGATRON, hf_config=str(HF)) + [("model.other", torch.ones(2))])
    assert torch.equal(model.found.pop("model.other"), torch.ones(2))
    require_weights(model.found)


def test_sglangs_paths_may_be_of_any_kind_and_options_are_known():
    names = [ferry.compat.sglang.named(MEGATRON, hf_config=kind(HF)) for kind in (str, Path, os.fsencode)]
    assert all(torch.equal(names[0][0][1], one[0][1]) for one in names)
    with pytest.raises(ferry.Error, match="has revision"):
        ferry.compat.sglang.named(MEGATRON, revision="v2")


# ------------------------------------------------------------------------------------------------------------- verl


def actor(work, backend):
    """The actor's folder of a step, as verl 0.9.1 lays it out."""
    folder = work / "run/global_step_5/actor"
    inner = folder / "model" if backend == "megatron" else folder
    shutil.copytree(HF, inner / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    if backend == "megatron":
        shutil.copytree(DATA / "llama_tp2pp2_local", inner / "dist_ckpt", ignore=shutil.ignore_patterns("sha256.json"))
    else:
        shutil.copytree(sharded_runs() / "fsdp2_llama", inner, dirs_exist_ok=True)
    return folder


def merger(*arguments, code=0):
    """-> what python -m ferry.compat.verl says; without torch"""
    program = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('ferry.compat.verl', run_name='__main__', alter_sys=True)"
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={"PYTHONPATH": str(ROOT / "build/python")})
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_merge_and_test_have_verls_arguments(backend, work):
    """`test` of verl compares with a folder of transformers; the one that the run began with is equal to the bit."""
    common = ["--backend", backend, "--local_dir", actor(work, backend)]
    for _ in range(2):  # the second replaces the first
        assert "39 tensors" in merger("merge", *common, "--target_dir", work / "merged")
    require_weights(load_file(work / "merged/model.safetensors"))
    assert ferry.open(work / "merged").config == ferry.open(HF).config
    assert merger("test", *common, "--test_hf_dir", HF) == "equal\n"
    write_hf(work / "other", llama_config(**{name: value for name, value in ferry.open(HF).config.items() if name != "head_dim"}), companions={})
    assert "model.norm.weight: values" in merger("test", *common, "--test_hf_dir", work / "other", code=1)


def test_verls_own_merger_writes_the_same_weights_and_takes_ours(work):
    """The merger of FSDP: the one of Megatron wants tensordict and a GPU."""
    folder = actor(work, "fsdp")
    (folder / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 4}')
    common = ["--backend", "fsdp", "--local_dir", folder]
    merger("merge", *common, "--target_dir", work / "ferry")
    write_hf(work / "other", llama_config(**{name: value for name, value in ferry.open(HF).config.items() if name != "head_dim"}), companions={})
    merged, tested, refused = verls_merger(["merge", *common, "--target_dir", work / "verl"], ["test", *common, "--test_hf_dir", work / "ferry"],
                                           ["test", *common, "--test_hf_dir", work / "other"])
    assert merged[0] == 0, merged
    assert described(hf_tensors(work / "ferry")) == described(hf_tensors(work / "verl"))
    assert merger("test", *common, "--test_hf_dir", work / "verl") == "equal\n"
    assert tested[0] == 0, tested
    assert refused[0] != 0


def test_the_other_backend_a_tied_head_and_an_upload_are_refused(work):
    folder = actor(work, "megatron")
    before = tree(work)
    assert "--backend fsdp: the checkpoint is torch_dist" in merger("merge", "--backend", "fsdp", "--local_dir", folder, "--target_dir", work / "m", code=2)
    common = ["merge", "--backend", "megatron", "--local_dir", folder, "--target_dir", work / "m"]
    assert "config.json does not say tie_word_embeddings" in merger(*common, "--tie-word-embedding", code=2)
    assert "Ferry does not upload" in merger(*common, "--hf_upload_path", "org/model", code=2)
    assert tree(work) == before


def test_weights_of_fsdp_in_fp32_are_merged_in_bf16(work):
    folder = actor(work, "fsdp")
    for path in folder.glob("*.pt"):
        path.unlink()
    torch.save({name: tensor.float() for name, tensor in load_file(HF / "model.safetensors").items()}, folder / "model_world_size_1_rank_0.pt")
    ferry.compat.verl.merge(str(folder), str(work / "merged"), "fsdp")
    require_weights(load_file(work / "merged/model.safetensors"))
