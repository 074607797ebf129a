"""Qwen3-VL trained as a language model: its vision tower goes along as it was."""
import pytest

import seeing_model
from ranks import TORCH_PROGRAM
from sft_run import STEPS, conversations, train, write_rows
from support import run_ok

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")


def test_a_trained_model_keeps_its_vision_tower(tmp_path):
    import torch
    import transformers
    (tmp_path / "model").mkdir()
    seeing_model.write_model(tmp_path / "model", "Qwen3VL")
    write_rows(tmp_path / "train.jsonl", conversations())
    found = train(tmp_path, tmp_path / "run", ranks=2, **{"engine.tensor_model_parallel_size": 2, "checkpoint.save_freq": STEPS - 3,
                                                          "checkpoint.save_hf": True})
    assert found[-1] < found[0]
    run_ok("verify", tmp_path / "run", tmp_path / "run/hf_model")
    before, after = ({name: p for name, p in transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder).state_dict().items()}
                     for folder in (tmp_path / "model", tmp_path / "run/hf_model"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    assert changed and not [name for name in changed if "visual" in name]
    run_ok("convert", tmp_path / "run", tmp_path / "relaid", "--to", "megatron", "--pp", 2)
    run_ok("verify", tmp_path / "run", tmp_path / "relaid")
