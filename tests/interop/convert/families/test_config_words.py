"""config.json with NaN, Infinity and -Infinity, which Python's json writes and reads: read, carried and written as Python does."""
import json
import shutil

import pytest

from support import DATA, refuse, run_ok, tree

HF = DATA / "hf_nemotron_h/hf"
WORDS = {"time_step_limit": [0.0, float("inf")], "of_ours": {"a": [float("-inf"), {"Infinity": float("nan")}], "b": '"NaN, -Infinity'}}


@pytest.fixture
def hf(work):
    shutil.copytree(HF, work / "hf")
    config = {**json.loads((HF / "config.json").read_text()), **WORDS}
    (work / "hf/config.json").write_text(json.dumps(config, indent=2) + "\n")
    assert "Infinity\n" in (work / "hf/config.json").read_text()
    return work / "hf"


def test_comes_back_byte_for_byte(hf, work):
    run_ok("convert", hf, work / "megatron", "--tp", 2)
    run_ok("convert", work / "megatron", work / "archive", "--to", "h5")
    run_ok("convert", work / "archive", work / "back", "--to", "hf")
    assert tree(work / "back") == tree(hf)
    run_ok("verify", hf, work / "megatron")


def test_is_written_as_python_writes_it(hf, work):
    """A cast changes config.json: nothing in it but the dtype."""
    import transformers
    run_ok("convert", hf, work / "cast", "--to", "hf", "--dtype", "fp16", "--mtp", "drop")
    text = (work / "cast/config.json").read_text()
    config = json.loads(text)
    wanted = {**json.loads((hf / "config.json").read_text()), **{key: config[key] for key in ("dtype", "torch_dtype", "num_nextn_predict_layers")}}
    assert json.dumps(config) == json.dumps(wanted)
    assert text == json.dumps(wanted, indent=2) + "\n"
    limits = [transformers.AutoConfig.from_pretrained(folder).time_step_limit for folder in (hf, work / "cast")]
    assert list(limits[0]) == list(limits[1]) == [0.0, float("inf")]


def test_a_difference_is_named(hf, work):
    shutil.copytree(hf, work / "other")
    (work / "other/config.json").write_text((hf / "config.json").read_text().replace("Infinity\n", "1.0\n", 1))
    assert "time_step_limit: [0.0,Infinity], [0.0,1.0]" in run_ok("verify", hf, work / "other", code=1).stdout


def test_where_a_size_is_expected_they_are_refused(hf, work):
    config = {**json.loads((hf / "config.json").read_text()), "hidden_size": float("inf")}
    (hf / "config.json").write_text(json.dumps(config))
    refuse("convert", hf, work / "out", words=["hidden_size is Infinity, an integer is expected"])


def test_other_files_stay_strict(hf, work):
    (hf / "model.safetensors.index.json").write_text('{"metadata": {"total_size": Infinity}, "weight_map": {}}')
    refuse("convert", hf, work / "out", words=["model.safetensors.index.json", "not valid JSON"])
