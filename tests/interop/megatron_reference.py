#!/usr/bin/env python3
"""Writes the logits of megatron-core's own GPTModel for a Hugging Face folder, prediction layers included: a reference of
`ferry verify --logits`, in fp32, by one rank on the CPU. tools/setup_peers installs the peers.

    source build/peers/env.sh
    build/peers/bin/python tests/interop/megatron_reference.py --mcore build/peers/mc0192 tests/data/hf_deepseek_v3/hf reference.safetensors
"""
import argparse
import contextlib
import json
import os
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("file")
    parser.add_argument("--mcore", required=True, help="folder that contains megatron/core")
    parser.add_argument("--lengths", default="24,40")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def build(arch, folder):
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron_model import build_model, fill_from_full
    from tiny_models import load_hf_sd
    from weight_mapping import hf_to_megatron, stack_full
    parallel_state.initialize_model_parallel()
    random.initialize_rng_tracker()
    random.get_cuda_rng_tracker().fork = lambda *a, **k: contextlib.nullcontext()
    weights = stack_full(hf_to_megatron(arch, load_hf_sd(folder), arch["vocab"]), arch)
    model = build_model(arch, 1, 1, 1, 1, torch.float32, True, arch["vocab"])
    missing = set(weights) - fill_from_full(model, weights)
    assert not missing, f"never loaded: {missing}"
    return model


def logits(model, tokens):
    """-> logits of the model and of each prediction layer: [tokens, vocab] each"""
    import torch
    states = []
    hook = model.mtp.register_forward_hook(lambda module, inputs, output: states.append(output))
    length = len(tokens)
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    with torch.no_grad():
        # Some releases insist on labels where there are prediction layers; the loss is of no interest.
        model(tokens[None], torch.arange(length)[None], mask, labels=tokens[None])
        hook.remove()
        # The block gives the hidden states of the model and of each layer one behind another: [tokens, 1, hidden] each.
        return [model.output_layer(part)[0][:, 0] for part in torch.chunk(states[0], 1 + model.config.mtp_num_layers, dim=0)]


def main():
    options = parse()
    sys.path.insert(0, os.path.abspath(options.mcore))
    from cpu_stand_ins import install_cpu_patches, install_te_stub
    from megatron_model import init_dist
    from weight_mapping import arch_of
    install_cpu_patches()
    install_te_stub()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(os.path.join(options.checkpoint, "config.json")) as file:
        arch = arch_of(json.load(file))
    with tempfile.TemporaryDirectory() as folder:
        init_dist(0, 1, folder + "/store")
        import torch
        import megatron.core
        from safetensors.torch import save_file
        model = build(arch, options.checkpoint)
        generator = torch.Generator().manual_seed(options.seed)
        tensors = {}
        for i, length in enumerate(map(int, options.lengths.split(","))):
            tokens = torch.randint(arch["vocab"], (length,), generator=generator)
            ours, *predicted = logits(model, tokens)
            tensors |= {f"tokens.{i}": tokens, f"logits.{i}": ours.contiguous()}
            tensors |= {f"predicted.{i}.mtp.layers.{k}": layer.contiguous() for k, layer in enumerate(predicted)}
        regime = {"megatron_core": megatron.core.__version__.split("+")[0], "torch": torch.__version__, "dtype": "float32", "device": "cpu"}
        save_file(tensors, options.file, metadata={"ferry_reference": "1", "regime": json.dumps(regime)})
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
