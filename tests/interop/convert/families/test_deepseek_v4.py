"""DeepSeek-V4, which has no Megatron form here: its tensors go from Hugging Face to Hugging Face and into archives as they are, under the names that
transformers writes and under those of the hub, FP8 and packed FP4 with their scales included."""
import json
import shutil

import pytest

from support import refuse, run_ok

LAYERS = ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A tiny model, as transformers saves it."""
    import torch
    import transformers as T
    T.logging.set_verbosity_error()
    folder = tmp_path_factory.mktemp("deepseek_v4") / "hf"
    config = T.DeepseekV4Config(
        vocab_size=90, hidden_size=24, moe_intermediate_size=20, num_hidden_layers=4, num_attention_heads=4, head_dim=16, q_lora_rank=12,
        num_experts_per_tok=2, n_routed_experts=4, max_position_embeddings=64, layer_types=LAYERS, num_nextn_predict_layers=0, hc_mult=2,
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}, mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        sliding_window=8, o_groups=2, o_lora_rank=6, index_n_heads=2, index_head_dim=10, index_topk=4)
    torch.manual_seed(4)
    model = T.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape) + (1 if parameter.ndim == 1 and "norm" in name else 0))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def native(written, tmp_path_factory):
    """The same as on the hub: names without a prefix, weights in FP8 with E8M0 scales of blocks, experts in packed FP4, a table of int32."""
    import torch
    from safetensors.torch import load_file, save_file
    folder = tmp_path_factory.mktemp("deepseek_v4_native") / "hf"
    shutil.copytree(written, folder)
    tensors = {}
    for name, tensor in load_file(written / "model.safetensors").items():
        name = name.removeprefix("model.")
        if name.endswith("tid2eid"):
            tensors[name] = tensor.to(torch.int32)
        elif ".ffn.experts." in name:
            tensors[name] = torch.randint(-128, 128, (tensor.shape[0], 8), dtype=torch.int8)
            tensors[name.replace(".weight", ".scale")] = torch.full((tensor.shape[0], 1), 0.5).to(torch.float8_e8m0fnu)
        elif ".attn.w" in name:
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", ".scale")] = torch.ones(1, 1).to(torch.float8_e8m0fnu)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


@pytest.fixture(params=["written", "native"])
def hf(request):
    return request.getfixturevalue(request.param)


def test_other_files_and_archives_hold_the_same_bytes(hf, work):
    from safetensors import safe_open
    run_ok("convert", hf, work / "cut", "--to", "hf", "--max-shard-size", "30KB")
    assert len(list((work / "cut").glob("*.safetensors"))) > 1
    run_ok("convert", work / "cut", work / "archive", "--to", "h5")
    run_ok("convert", work / "archive", work / "back", "--to", "hf")
    for folder in ("cut", "archive", "back"):
        run_ok("verify", hf, work / folder)
        run_ok("diff", hf, work / folder)
    assert run_ok("digest", hf).stdout.split()[0] == run_ok("digest", work / "back").stdout.split()[0]
    with safe_open(hf / "model.safetensors", "pt") as before:
        names = set(before.keys())
    found = set()
    for path in (work / "back").glob("*.safetensors"):
        with safe_open(path, "pt") as after:
            found |= set(after.keys())
    assert found == names
    assert json.loads((work / "back/config.json").read_text()) == json.loads((hf / "config.json").read_text())


def test_transformers_loads_what_was_cut_into_files(written, work):
    import torch
    import transformers as T
    run_ok("convert", written, work / "cut", "--to", "hf", "--max-shard-size", "30KB")
    before, after = (T.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict() for folder in (written, work / "cut"))
    assert before.keys() == after.keys()
    assert not [name for name in before if not torch.equal(before[name], after[name])]


def test_another_dtype(written, work):
    run_ok("convert", written, work / "fp32", "--to", "hf", "--dtype", "fp32")
    run_ok("convert", work / "fp32", work / "back", "--to", "hf", "--dtype", "bf16")
    run_ok("verify", written, work / "back")


def test_a_changed_weight_is_found(written, work):
    from safetensors.torch import load_file, save_file
    shutil.copytree(written, work / "other")
    tensors = load_file(written / "model.safetensors")
    tensors["model.layers.1.attn.compressor.ape"][0, 0] += 1
    save_file(tensors, work / "other/model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.attn.compressor.ape" in run_ok("verify", written, work / "other", code=1).stdout


def test_what_is_not_known_is_refused_by_name(hf, work):
    refuse("convert", hf, work / "megatron", words=["deepseek_v4", "no Megatron form", "--to hf"])
    assert not (work / "megatron").exists()
    refuse("convert", hf, work / "fp8", "--to", "hf", "--quantize", "fp8-block", words=["--quantize", "deepseek_v4", "as they are"])


def test_inspect_says_the_sizes_that_are_known(written):
    text = run_ok("inspect", written).stdout
    assert "deepseek_v4: 4 layers, hidden 24, 4 heads of 16, 1 query group, 4 experts of 20 in 4 layers, shared ones of 20, vocabulary 90, untied" in text
    assert "parameters" not in text
    report = json.loads(run_ok("inspect", written, "--json").stdout)
    assert report["config"]["num_experts"] == 4
    assert report["parameters"] is None
    assert not [key for key, value in report["config"].items() if value == 0]
