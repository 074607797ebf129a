"""Bad input that only models with experts, latent attention or prediction layers can be: experts that are missing, too many
or of unequal count, configurations that say otherwise. Each is refused as in test_bad_input.py.
"""
import shutil

import pytest

import torch_dist_raw as raw
from support import DATA, ferry, iteration_folder, random_tensors
from test_bad_input import Parts, edited, refuse, rewritten, with_config

# ------------------------------------------------------------------------------------------------------- Hugging Face


def lacking(*parts):
    """Without the tensors whose names hold one of these."""
    return rewritten(lambda tensors: {n: v for n, v in tensors.items() if not any(p in n for p in parts)})


def also(shapes):
    return rewritten(lambda tensors: {**tensors, **random_tensors(shapes)})


def of_shape(name, shape):
    return rewritten(lambda tensors: {**tensors, **random_tensors({name: shape})})


MIXTRAL, QWEN, V3, MOONLIGHT = "hf_mixtral", "hf_qwen2_moe", "hf_deepseek_v3", "hf_moonlight"
MOE = "model.layers.1.block_sparse_moe."
MLP = "model.layers.1.mlp."
MTP = "model.layers.3."
ATTENTION = "model.layers.1.self_attn."
FOLDER = "model.safetensors"

HUGGING_FACE = {
    "expert without one of its tensors": (MIXTRAL, lacking(MOE + "experts.2.w3"), [MOE + "experts.2.w3.weight is missing"]),
    "expert missing": (MIXTRAL, lacking(MOE + "experts.3."), [MOE + "experts.3.w1.weight is missing", "2 other tensors"]),
    "expert of every layer missing": (MIXTRAL, lacking("experts.3."), [".experts.3.w1.weight is missing", "config.json"]),
    "expert too many": (MIXTRAL, also({MOE + f"experts.4.w{i}.weight": (32, 48) if i == 2 else (48, 32) for i in (1, 2, 3)}),
                        [MOE + "experts.4.", FOLDER, "num_local_experts"]),
    "num_local_experts too small": (MIXTRAL, with_config(num_local_experts=2), ["experts.2.", FOLDER, "num_local_experts"]),
    "num_local_experts too large": (MIXTRAL, with_config(num_local_experts=6), ["gate.weight", "[4, 32]", "[6, 32]", "config.json"]),
    "num_local_experts left away": (MIXTRAL, with_config(num_local_experts=...), ["gate.weight", "[4, 32]", "[8, 32]", "config.json"]),
    "experts by the billion": (MIXTRAL, with_config(num_local_experts=10**9), ["config.json", "num_local_experts"]),
    "layers of experts by the billion": (MIXTRAL, with_config(num_local_experts=65536, num_hidden_layers=65536),
                                         ["config.json", "65536 layers of 65536 experts"]),
    "router with a row less": (MIXTRAL, of_shape(MOE + "gate.weight", (3, 32)), [MOE + "gate.weight", "[3, 32]", "[4, 32]"]),
    "router missing": (MIXTRAL, lacking(MOE + "gate."), [MOE + "gate.weight is missing"]),
    "one expert of another size": (QWEN, of_shape(MLP + "experts.2.up_proj.weight", (40, 32)),
                                   [MLP + "experts.2.up_proj.weight", "[40, 32]", "[24, 32]"]),
    "num_experts too small": (QWEN, with_config(num_experts=3, num_local_experts=3), ["experts.3.", FOLDER, "num_experts"]),
    "num_experts that is text": (QWEN, with_config(num_experts="4"), ["config.json", "num_experts"]),
    "dense layer where experts are stored": (QWEN, with_config(mlp_only_layers=[1]), [MLP, FOLDER]),
    "mlp_only_layers that is no list": (QWEN, with_config(mlp_only_layers=1), ["config.json", "mlp_only_layers"]),
    "shared expert missing": (QWEN, lacking(MLP + "shared_expert."), [MLP + "shared_expert.gate_proj.weight is missing"]),
    "gate of the shared expert missing": (QWEN, lacking(MLP + "shared_expert_gate"), [MLP + "shared_expert_gate.weight is missing"]),
    "shared experts fewer than the tensors hold": (V3, with_config(n_shared_experts=1), ["shared_experts.down_proj.weight", "[32, 48]", "[32, 24]"]),
    "no shared experts, but stored": (V3, with_config(n_shared_experts=...), ["shared_experts", FOLDER]),
    "bias of a router missing": (V3, lacking(MLP + "gate.e_score"), [MLP + "gate.e_score_correction_bias is missing"]),
    "n_routed_experts too small": (V3, with_config(n_routed_experts=4), ["config.json", "n_group", "4 experts"]),
    "experts in a layer that should be dense": (V3, with_config(first_k_dense_replace=2), [MLP, FOLDER]),
    "dense layer that should have experts": (V3, with_config(first_k_dense_replace=0), ["model.layers.0.mlp.", FOLDER]),
    "half a prediction layer": (V3, lacking(MTP + "eh_proj", MTP + "enorm"), [MTP + "enorm.weight is missing, and 1 other tensor\n"]),
    "prediction layer without its experts": (V3, lacking(MTP + "mlp.experts"), [MTP + "mlp.experts.0.gate_proj.weight is missing"]),
    "prediction layer too many": (V3, also({"model.layers.4.enorm.weight": (32,)}), ["model.layers.4.enorm.weight", FOLDER]),
    "prediction layers that config.json denies": (V3, with_config(num_nextn_predict_layers=0), [MTP, FOLDER, "num_nextn_predict_layers"]),
    "prediction layers by the billion": (V3, with_config(num_nextn_predict_layers=10**9), ["config.json", "num_nextn_predict_layers"]),
    "q_lora_rank left away": (V3, with_config(q_lora_rank=None), ["q_a_layernorm.weight", FOLDER, "q_lora_rank"]),
    "q_lora_rank of another size": (V3, with_config(q_lora_rank=8), ["self_attn.q_", "[16", "[8"]),
    "q_lora_rank where queries are projected at once": (MOONLIGHT, with_config(q_lora_rank=16), ["self_attn.q_proj.weight", FOLDER, "q_lora_rank"]),
    "kv_lora_rank of another size": (V3, with_config(kv_lora_rank=8), ["self_attn.kv_", "[16", "[8"]),
    "kv_lora_rank left away": (V3, with_config(kv_lora_rank=...), ["config.json", "kv_lora_rank"]),
    "rope dimensions of another size": (V3, with_config(qk_rope_head_dim=4), ["self_attn.", "[24, 32]", "[20, 32]"]),
    "low-rank norm missing": (V3, lacking(ATTENTION + "kv_a_layernorm"), [ATTENTION + "kv_a_layernorm.weight is missing"]),
}


@pytest.mark.parametrize("case", HUGGING_FACE)
def test_bad_experts_in_a_hugging_face_folder(case, work):
    model, edit, words = HUGGING_FACE[case]
    shutil.copytree(DATA / model / "hf", work / "hf")
    edit(work / "hf")
    limit = refuse(work, work / "hf", [*words, str(work / "hf")])
    assert ferry("verify", DATA / model / "hf", work / "hf", **limit).returncode in (1, 2)
    ferry("inspect", work / "hf", **limit)


# ----------------------------------------------------------------------------------------------------------- Megatron

STACKED = "decoder.layers.mlp."
FC1, FC2, ROUTER = STACKED + "experts.experts.linear_fc1.weight", STACKED + "experts.experts.linear_fc2.weight", STACKED + "router.weight"


def whole(parts, key):
    """(dtype, shape, one chunk that is all of it)."""
    dtype, shape, chunks = parts.tensors[key]
    data = bytearray(shape_bytes(shape))
    for offsets, sizes, payload in chunks:
        raw.put(data, shape, offsets, sizes, payload, 2)
    return dtype, shape, bytes(data)


def shape_bytes(shape):
    count = 2
    for size in shape:
        count *= size
    return count


def of_size(key, dim, size):
    """The same tensor, `size` long in one dimension; what it holds then is of no matter."""
    def edit(parts):
        dtype, shape, _ = parts.tensors[key]
        shape = (*shape[:dim], size, *shape[dim + 1:])
        parts.tensors[key] = (dtype, shape, [((0,) * len(shape), shape, bytes(shape_bytes(shape)))])
    return edited(edit)


def experts_of_rank(key, ranks):
    """Chunks as ranks with so many experts each would write them: [begin, end) of the expert axis, the first of two."""
    def edit(parts):
        dtype, shape, data = whole(parts, key)
        chunks = []
        for begin, end in ranks:
            offsets, sizes = (0, begin, *[0] * (len(shape) - 2)), (shape[0], end - begin, *shape[2:])
            chunks.append((offsets, sizes, raw.get(data, shape, offsets, sizes, 2)))
        parts.tensors[key] = (dtype, shape, chunks)
    return edited(edit)


def without_chunk(key, index):
    def edit(parts):
        dtype, shape, chunks = parts.tensors[key]
        parts.tensors[key] = (dtype, shape, chunks[:index] + chunks[index + 1:])
    return edited(edit)


def without_keys(*fragments):
    def edit(parts):
        for key in [k for k in parts.tensors if any(f in k for f in fragments)]:
            del parts.tensors[key]
    return edited(edit)


def gate_without_up(parts):
    """The halves of fc1 as singleton_local_shards has them, and one of them lost."""
    del parts.tensors["decoder.layers.1.mlp.experts.experts.2.linear_fc1.weight_v"]


MIX, SINGLE, V3_EP2 = "mixtral_ep2", "mixtral_singleton", "deepseek_v3_ep2"
MEGATRON = {
    "chunk of an expert missing": (MIX, without_chunk(FC1, 3), [FC1, "stored 0 times"]),
    "ranks whose experts overlap": (MIX, experts_of_rank(FC2, [(0, 3), (2, 4)]), [FC2, "stored 2 times"]),
    "a rank without its experts": (MIX, experts_of_rank(FC2, [(0, 2)]), [FC2, "stored 0 times"]),
    "an expert less in fc1": (MIX, of_size(FC1, 1, 3), [FC1, "[2, 3,", "[2, 4,"]),
    "an expert more in fc2": (MIX, of_size(FC2, 1, 5), [FC2, "[2, 5,", "[2, 4,"]),
    "a layer less of experts": (MIX, of_size(FC2, 0, 1), [FC2, "[1, 4,", "[2, 4,"]),
    "fc1 with an odd number of rows": (MIX, of_size(FC1, 2, 95), [FC1, "95", "96"]),
    "fc1 without up": (MIX, of_size(FC1, 2, 48), [FC1, "48", "96"]),
    "router of fewer experts": (MIX, of_size(ROUTER, 1, 3), [ROUTER, "[2, 3, 32]", "[2, 4, 32]"]),
    "no router": (MIX, without_keys(ROUTER), [ROUTER, "missing"]),
    "no fc2 of experts": (MIX, without_keys(FC2), [FC2, "missing"]),
    "gate without up of one expert": (SINGLE, edited(gate_without_up), ["decoder.layers.1.mlp.experts.experts.", "linear_fc1.weight", "expert 2", "missing"]),
    "one expert's fc2 missing": (SINGLE, without_keys("decoder.layers.1.mlp.experts.experts.3.linear_fc2"), ["expert 3", "linear_fc2.weight", "missing"]),
    "expert too many": (SINGLE, edited(lambda p: p.tensors.update({"decoder.layers.1.mlp.experts.experts.4.linear_fc2.weight":
                        p.tensors["decoder.layers.1.mlp.experts.experts.3.linear_fc2.weight"]})), ["experts.4.linear_fc2.weight", "no rule"]),
    "experts of one layer missing": (V3_EP2, without_keys("decoder.layers.2.mlp.experts."), ["decoder.layers.2.mlp.experts.", "missing"]),
    "an expert less in one layer": (V3_EP2, of_size("decoder.layers.2.mlp.experts.experts.linear_fc2.weight", 0, 7),
                                    ["decoder.layers.2.mlp.experts.experts.linear_fc2.weight", "[7, 32, 24]", "[8, 32, 24]"]),
    "no shared experts": (V3_EP2, without_keys("layers.2.mlp.shared_experts"), ["decoder.layers.2.mlp.shared_experts.linear_fc1.weight", "missing"]),
    "no bias of a router": (V3_EP2, without_keys("layers.2.mlp.router.expert_bias"), ["decoder.layers.2.mlp.router.expert_bias", "missing"]),
    "half a prediction layer": (V3_EP2, without_keys("mtp.layers.0.eh_proj"), ["mtp.layers.0.eh_proj.weight", "missing"]),
    "low-rank projection missing": (V3_EP2, without_keys("layers.1.self_attention.linear_q_down_proj"),
                                    ["decoder.layers.1.self_attention.linear_q_down_proj.weight", "missing"]),
    "low-rank projection of another size": (V3_EP2, of_size("decoder.layers.1.self_attention.linear_kv_down_proj.weight", 0, 16),
                                            ["decoder.layers.1.self_attention.linear_kv_down_proj.weight", "[16, 32]", "[24, 32]"]),
}
OF = {MIX: MIXTRAL, SINGLE: MIXTRAL, V3_EP2: V3}


@pytest.mark.parametrize("case", MEGATRON)
def test_bad_experts_in_a_megatron_checkpoint(case, work):
    name, edit, words = MEGATRON[case]
    shutil.copytree(DATA / name, work / "megatron")
    edit(iteration_folder(work / "megatron"), None)
    config = ["--hf-config", DATA / OF[name] / "hf"]
    limit = refuse(work, work / "megatron", [*words, str(work / "megatron")], *config)
    assert ferry("verify", DATA / name, work / "megatron", *config, **limit).returncode in (1, 2)
    ferry("inspect", work / "megatron", **limit)


def test_ranks_of_unequal_count_that_hold_every_expert_are_no_bad_input(work):
    """Ranks may have written any number of experts as long as each is there once."""
    shutil.copytree(DATA / MIX, work / "megatron")
    experts_of_rank(FC2, [(0, 1), (1, 4)])(iteration_folder(work / "megatron"), None)
    config = ["--hf-config", DATA / "hf_mixtral/hf"]
    done = ferry("verify", DATA / MIX, work / "megatron", *config)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("model, word", [(QWEN, "add_qkv_bias"), (V3, "num_layers"), (MOONLIGHT, "num_query_groups"), ("hf_llama", "num_layers")])
def test_the_configuration_of_another_family_does_not_fit(model, word, work):
    refuse(work, DATA / MIX, [f"{word} is", "config.json says"], "--hf-config", DATA / model / "hf")


@pytest.mark.parametrize("options, words", [
    (["--ep", 3], ["--ep 3", "8 experts"]),
    (["--ep", 16], ["--ep 16", "8 experts"]),
    (["--etp", 5], ["--etp 5"]),
    (["--pp", 2, "--num-layers-in-last-pipeline-stage", 9], ["9"]),
])
def test_a_layout_that_does_not_divide_the_experts(options, words, work):
    refuse(work, DATA / V3 / "hf", words, *options)
