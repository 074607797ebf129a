"""ferry bench rollout: what it replays is what was asked for, and its numbers hang together."""
import json

import pytest

from support import DATA, ferry_json, run_ok

LLAMA = DATA / "hf_llama/hf"


def bench(*arguments):
    return ferry_json("bench", "rollout", LLAMA, "--num-warmups", 0, *arguments)


def test_the_load_is_replayed(work):
    report = bench("--num-prompts", 12, "--input-len", "3:20", "--output-len", "2:9", "--seed", 3)
    assert report["answers"] == 12 and 12 * 3 <= report["prompt_tokens"] <= 12 * 20 and 12 * 2 <= report["output_tokens"] <= 12 * 9
    assert report["output_tokens_per_second"] == pytest.approx(report["output_tokens"] / report["seconds"])
    first, between, whole = (report[name] for name in ("time_to_first_token_ms", "inter_token_latency_ms", "answer_ms"))
    for times in (first, between, whole):
        assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"]
    assert first["max"] <= whole["max"] <= 1e3 * report["seconds"]
    roofline = report["roofline"]
    assert 0 < roofline["share"] < 1 and roofline["busy_seconds"] <= report["seconds"]
    assert roofline["share"] == pytest.approx(roofline["bound_seconds"] / roofline["busy_seconds"])
    lengths = [{"input_len": 5 + i, "output_len": 4, "arrival": 0.05 * i} for i in range(4)]
    (work / "lengths.jsonl").write_text("\n".join(map(json.dumps, lengths)))
    for arguments in ([], ["--tp", 2], ["--dp", 2]):
        report = bench("--lengths", work / "lengths.jsonl", *arguments)
        assert (report["answers"], report["prompt_tokens"], report["output_tokens"]) == (4, 26, 16)
        assert report["seconds"] > 0.15


def test_lengths_may_be_log_normal(work):
    report = bench("--num-prompts", 400, "--input-len", 1, "--output-len", "lognormal:6:0.8:16", "--max-num-seqs", 400)
    assert 5 * 400 <= report["output_tokens"] <= 6.5 * 400  # cut at 16, and rounded down
    assert report["steps"] == 16


def test_dummy_weights_need_a_configuration_alone(work):
    (work / "config.json").write_bytes((DATA / "hf_mixtral/hf/config.json").read_bytes())
    for arguments in ([], ["--ep", 2], ["--tp", 2]):
        report = ferry_json("bench", "rollout", work, "--load-format", "dummy", "--num-prompts", 4, "--input-len", 6, "--output-len", 5, *arguments)
        assert report["output_tokens"] == 20 and report["family"] == "mixtral"


@pytest.mark.parametrize("arguments, message", [
    (["--input-len", "x"], "--input-len x: is neither a length nor a range"), (["--output-len", "9:3"], "--output-len 9:3"),
    (["--input-len", "lognormal:0:1:9"], "lognormal:0:1:9: is not mean, sigma and the most"),
    (["--num-prompts", "0"], "--num-prompts 0"), (["--input-len", "64"], "longer than max_model_len, 64"), (["--lengths", "/nowhere.jsonl"], "/nowhere.jsonl")])
def test_loads_that_make_no_sense(arguments, message):
    assert message in run_ok("bench", "rollout", LLAMA, *arguments, code=2).stderr
