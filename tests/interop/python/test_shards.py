"""megatron-core's own modules, filled and saved by the module ferry; models in memory, saved in any format."""
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support import DATA, load_with_megatron, run_ok, tree

ferry = pytest.importorskip("ferry", reason="the Python module is not built")

# Loaded from: (checkpoint, model, options of the mesh)
LOADED = {
    "hf_llama_tp2pp2": ("hf_llama/hf", "hf_llama", dict(tp=2, pp=2)),
    "llama_tp2pp2_tp4": ("llama_tp2pp2", "hf_llama", dict(tp=4)),
    "legacy_to_local": ("legacy/llama_legacy_tp2pp2", "hf_llama", dict(tp=2, spec="local")),
    "tied_pp2": ("hf_qwen2_tied/hf", "hf_qwen2_tied", dict(pp=2)),
    "mixtral_tp2ep2": ("hf_mixtral/hf", "hf_mixtral", dict(tp=2, ep=2)),
    "qwen3_moe_ep4": ("qwen3moe_ep2", "hf_qwen3_moe", dict(ep=4)),
    "llama_pp2_vpp2": ("hf_llama/hf", "hf_llama", dict(pp=2, vpp=2)),
    "llama_tp2_pp2_vpp2": ("llama_tp2pp2", "hf_llama", dict(tp=2, pp=2, vpp=2)),
    "tied_pp2_vpp2": ("hf_qwen2_tied/hf", "hf_qwen2_tied", dict(pp=2, vpp=2)),
    "deepseek_v3_tp2ep2": ("deepseek_v3_tp2pp2", "hf_deepseek_v3", dict(tp=2, ep=2)),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """{case: where its model was saved}; every element of every model is that of the Hugging Face checkpoint."""
    work = tmp_path_factory.mktemp("loaded")
    jobs = [{"ckpt": str(DATA / path), "hf": str(DATA / model / "hf"), "expect_hf": True, "by_ferry": True, "vpad": 256,
             "saved_by_ferry": str(work / case), **mesh} for case, (path, model, mesh) in LOADED.items()]
    load_with_megatron("mc0192", jobs, list(LOADED), work)
    return {case: work / case for case in LOADED}


@pytest.mark.parametrize("case", LOADED)
def test_a_model_of_megatron_is_filled_and_saved(case, loaded):
    _, model, mesh = LOADED[case]
    report = ferry.verify(DATA / model / "hf", loaded[case])
    assert ferry.open(loaded[case]).args["virtual_pipeline_model_parallel_size"] == mesh.get("vpp")
    if mesh.get("spec") == "local":  # its norms are fp32, whatever the model is
        assert {(one.kind, one.detail) for one in report.tensors} == {("dtype", "bf16, fp32")}
    else:
        assert report.identical


def test_megatron_loads_what_was_saved(loaded, work):
    """... on another mesh."""
    cases = ["hf_llama_tp2pp2", "mixtral_tp2ep2", "tied_pp2", "llama_pp2_vpp2"]
    meshes = [dict(tp=1, pp=2), dict(tp=2), dict(pp=2, vpp=2), dict(tp=2)]
    jobs = [{"ckpt": str(loaded[case]), "hf": str(DATA / LOADED[case][1] / "hf"), "expect_hf": True, "vpad": 256, **mesh}
            for case, mesh in zip(cases, meshes)]
    load_with_megatron("mc0192", jobs, cases, work)


def weights(model):
    return {name: tensor for path in sorted((DATA / model / "hf").glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("options", [dict(to="hf"), dict(to="megatron", tp=2, pp=2), dict(to="h5")], ids=lambda options: options["to"])
def test_a_model_in_memory_is_saved_as_a_conversion_is(options, work):
    hf = DATA / "hf_mixtral/hf"
    report = ferry.save(work / "saved", weights("hf_mixtral"), like=hf, **options)
    ferry.convert(hf, work / "converted", **options)
    assert report.proved and tree(work / "saved") == tree(work / "converted")


def test_pairs_and_arrays_are_saved_in_another_dtype(work):
    checkpoint = ferry.open(DATA / "hf_llama/hf")
    arrays = {name: tensor.numpy() for name, tensor in checkpoint.tensors(dtype="fp32")}
    assert all(array.dtype == np.float32 for array in arrays.values())
    ferry.save(work / "fp32", arrays.items(), like=checkpoint)
    ferry.convert(DATA / "hf_llama/hf", work / "converted", to="hf", dtype="fp32")
    assert ferry.verify(work / "fp32", work / "converted")
    run_ok("verify", work / "fp32", work / "converted")


def test_views_are_saved_as_they_read(work):
    """Transposed, with gaps, and negated when they are read: the bits behind the last are others."""
    tensors = weights("hf_llama")
    for i, (name, tensor) in enumerate(tensors.items()):
        if tensor.ndim == 2:
            tensors[name] = (tensor.t().contiguous().t(), torch.stack([tensor, tensor], 2)[..., 0], torch._neg_view(-tensor))[i % 3]
    assert ferry.save(work / "saved", tensors, like=DATA / "hf_llama/hf").proved
    assert ferry.verify(work / "saved", DATA / "hf_llama/hf")


def test_a_model_that_lacks_a_tensor_is_refused(work):
    tensors = weights("hf_llama")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(ferry.Error, match="^the tensors to save: model.layers.2.mlp.up_proj.weight is missing") as error:
        ferry.save(work / "out", tensors, like=DATA / "hf_llama/hf")
    assert error.value.kind == "layout" and not error.value.hint and not (work / "out").exists()


@pytest.mark.parametrize("model", ["hf_qwen3_vl", "hf_gemma3", "hf_mistral3"])
def test_a_model_that_also_sees_has_megatrons_tensors(model):
    """The language model's, whose norm is in every layout; a tower is carried beside it."""
    checkpoint = ferry.open(DATA / model / "hf")
    tensors = {name: tensor.torch() for name, tensor in checkpoint.tensors("megatron")}
    (norm,) = [name for name in weights(model) if name.endswith("norm.weight") and "layers" not in name and "vis" not in name and "proj" not in name]
    assert torch.equal(tensors["decoder.final_layernorm.weight"], weights(model)[norm])
    assert torch.equal(checkpoint.read("decoder.final_layernorm.weight").torch(), weights(model)[norm])


def test_a_pattern_may_match_tensors_of_other_ranks_alone():
    checkpoint = ferry.open(DATA / "hf_llama/hf")
    of_ranks = [[name for name, _ in checkpoint.tensors("megatron", pp=2, rank=rank, include="output_layer.*")] for rank in (0, 1)]
    assert of_ranks == [[], ["output_layer.weight"]]
    for rank in (0, 1):
        with pytest.raises(ferry.Error, match="'no.such.*': matches no parameter of the model"):
            checkpoint.tensors("megatron", pp=2, rank=rank, include="no.such.*")


class Shard:
    """A megatron.core.dist_checkpointing.ShardedTensor of one rank."""

    def __init__(self, key, data):
        self.key, self.data, self.local_shape, self.global_shape = key, data, tuple(data.shape), tuple(data.shape)
        self.global_offset, self.prepend_axis_num, self.replica_id, self.flattened_range = (0,) * data.dim(), 0, 0, None


def test_shards_that_are_not_the_model_are_refused():
    state = {"one": Shard("decoder.final_layernorm.weight", torch.zeros(32, dtype=torch.bfloat16))}
    with pytest.raises(ferry.Error) as error:
        ferry.load_into(DATA / "hf_llama/hf", state)
    assert error.value.kind == "layout"


@pytest.mark.parametrize("state", [{"decoder.final_layernorm.weight": torch.zeros(32)}, torch.nn.Linear(2, 2)], ids=["state_dict", "model"])
def test_a_model_or_its_state_dict_holds_no_shards(state):
    with pytest.raises(ferry.Error, match="holds no ShardedTensor") as error:
        ferry.load_into(DATA / "hf_llama/hf", state)
    assert error.value.kind == "usage" and "sharded_state_dict()" in error.value.hint


def test_a_model_whose_type_is_not_known_is_saved_from_no_modules(work):
    shutil.copytree(DATA / "hf_llama/hf", work / "unknown")
    config = work / "unknown/config.json"
    config.write_text(config.read_text().replace('"llama"', '"llamb"'))
    for state in ({}, {"one": Shard("decoder.final_layernorm.weight", torch.zeros(32, dtype=torch.bfloat16))}):
        with pytest.raises(ferry.Error, match='the model_type "llamb" is not known') as error:
            ferry.save_from(work / "saved", state, like=work / "unknown")
        assert error.value.kind == "layout" and not (work / "saved").exists()


def test_shards_of_one_rank_need_no_process_group(work):
    checkpoint = ferry.open(DATA / "hf_llama/hf")
    expected = {name: tensor.torch() for name, tensor in checkpoint.tensors("megatron")}
    state = {name: [Shard(name, torch.full_like(tensor, float("nan")))] for name, tensor in expected.items()}
    report = ferry.load_into(checkpoint, state)
    assert report.bytes > 0 and all(torch.equal(state[name][0].data, tensor) for name, tensor in expected.items())
    saved = ferry.save_from(work / "saved", state, like=checkpoint, iteration=7)
    assert saved.folder.endswith("iter_0000007") and saved.model_digest == checkpoint.digest().model


@pytest.mark.parametrize("like", ["hf", "megatron"])
@pytest.mark.parametrize("to", ["hf", "megatron", "h5"])
def test_experts_that_lie_the_other_way_round_are_saved_as_they_lie(to, like, work):
    """The shapes decide: save_pretrained of transformers writes [E,2F,H], the hub has [E,H,2F]."""
    hf = DATA / "hf_qwen3_vl_moe/hf"
    if like == "megatron":
        ferry.convert(hf, work / "like")
    given = {name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor for name, tensor in weights("hf_qwen3_vl_moe").items()}
    assert ferry.save(work / "saved", given, like=hf if like == "hf" else work / "like", to=to).proved
    ferry.convert(work / "saved", work / "back", to="hf")
    saved = {name: tensor for path in sorted((work / "back").glob("*.safetensors")) for name, tensor in load_file(path).items()}
    assert set(saved) == set(given) and all(torch.equal(saved[name], tensor) for name, tensor in given.items())
    expected = {name: tensor.torch() for name, tensor in ferry.open(hf).tensors("megatron")}
    assert all(torch.equal(tensor.torch(), expected[name]) for name, tensor in ferry.open(work / "saved").tensors("megatron"))


def whole_shards(checkpoint, **padding):
    return {name: Shard(name, tensor.torch()) for name, tensor in checkpoint.tensors("megatron", **padding)}


@pytest.mark.parametrize("like", ["hf", "megatron"])
def test_a_saved_model_has_the_names_of_the_one_that_it_is_like(like, work):
    """The experts of a layer are one tensor in these files, where the family has names for each, too."""
    hf = DATA / "hf_qwen3_5_moe/hf"
    ferry.convert(hf, work / "megatron")
    ferry.save_from(work / "saved", whole_shards(ferry.open(hf)), like=hf if like == "hf" else work / "megatron")
    assert ferry.verify(work / "saved", hf) and ferry.open(work / "saved").infos() == ferry.open(hf).infos()


@pytest.mark.parametrize("divisor", [1, 7, 128])
@pytest.mark.parametrize("like", ["hf_llama/hf", "hf_qwen2_5_vl/hf", "llama_tp2pp2"])
def test_the_padding_of_the_vocabulary_is_that_of_the_shards(like, divisor, work):
    checkpoint = ferry.open(DATA / like)
    assert ferry.save_from(work / "saved", whole_shards(checkpoint, make_vocab_size_divisible_by=divisor), like=checkpoint).proved
    assert ferry.verify(work / "saved", DATA / like, weights_only=True)
