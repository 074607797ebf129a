"""Control of a server: weights that change, sleep, pauses, metrics under vLLM's names."""
import json
import threading
import time

import pytest
import safetensors
import torch
import transformers

from servers import serve_faults, serve_files
from served import NAME, make_talker, save_weights, serve
from support import run_ok

ASK = {"prompt": "The weights of", "max_tokens": 20, "seed": 3, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The talker's shape with other weights."""
    folder = make_talker(tmp_path_factory.mktemp("other"))
    save_weights(folder, transformers.AutoConfig.from_pretrained(folder), 4)
    return folder


@pytest.fixture(scope="module")
def expected(talker, other):
    """The choice of each checkpoint, by ferry generate."""
    def of(checkpoint):
        lines = run_ok("generate", checkpoint, ASK["prompt"], "--max-tokens", 20, "--seed", 3, "--ignore-eos", "--json", "--quiet").stdout
        (output,) = json.loads(lines)["outputs"]
        return output["token_ids"], output["model_logprobs"]
    return {"talker": of(talker), "other": of(other)}


def answer(server):
    (choice,) = server.complete(**ASK)["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def in_background(call):
    result = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    return lambda: (thread.join(30), result[0])[1]


def running(server):
    while server.metric("vllm:num_requests_running") == 0:
        time.sleep(0.01)


def test_weights_are_those_of_the_last_update(server, talker, other, expected, work):
    assert answer(server) == expected["talker"]
    server.post("/update_weights", checkpoint=str(other))
    assert answer(server) == expected["other"]
    run_ok("convert", talker, work / "megatron", "--tp", 2)
    server.post("/update_weights", checkpoint=str(work / "megatron"), mode="keep")
    assert answer(server) == expected["talker"]


def make_delta(base, new, folder, form):
    if form == "ferry":
        run_ok("delta", "make", base, new, folder)
        return folder
    run_ok("delta", "make", base, new, folder.parent / "versions", "--to", "slime")
    return max((folder.parent / "versions").glob("weight_v*"))


@pytest.mark.parametrize("engines, form", [((), "ferry"), ((), "slime"), (("--tp", 2), "ferry"), (("--dp", 2), "ferry"), (("--tp", 2), "slime")])
def test_deltas_follow_each_other(engines, form, talker, other, expected, work):
    third = make_talker(work)
    save_weights(third, transformers.AutoConfig.from_pretrained(third), 7)
    first = make_delta(talker, other, work / "first", form)
    second = make_delta(other, third, work / "second", form)
    lines = run_ok("generate", third, ASK["prompt"], "--max-tokens", 20, "--seed", 3, "--ignore-eos", "--json", "--quiet").stdout
    with serve(talker, *engines, ranks=2 if engines else 1) as server:
        assert answer(server) == expected["talker"]
        server.post("/update_weights", checkpoint=str(talker), delta=str(first))
        assert answer(server) == expected["other"]
        server.post("/update_weights", delta=str(second), mode="keep")
        before = answer(server)
        assert before[0] == json.loads(lines)["outputs"][0]["token_ids"]
        error = server.post("/update_weights", 500, checkpoint=str(talker), delta=str(second))["error"]
        assert error["message"].endswith("; the weights are those of before"), error
        assert ("was made from" if form == "ferry" else ": became ") in error["message"], error
        assert answer(server) == before


def test_an_answer_under_way_goes_on_with_new_weights_or_is_awaited(server, talker, other):
    long = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "seed": 1, "return_token_ids": True}
    alone = server.complete(**long)["choices"][0]["token_ids"]
    for mode, is_same in (("wait", True), ("keep", False)):
        pending = in_background(lambda: server.complete(**long)["choices"][0]["token_ids"])
        running(server)
        server.post("/update_weights", checkpoint=str(other), mode=mode)
        tokens = pending()
        assert (tokens == alone) == is_same and len(tokens) == 2000
        assert tokens[0] == alone[0]
        server.post("/update_weights", checkpoint=str(talker))


def test_an_update_that_does_not_fit_changes_nothing(server, expected, work):
    for path in (str(work / "absent"), "/" + "x" * 300, "x/" * 5000, "a\0b"):
        assert server.post("/update_weights", 400, checkpoint=path)["error"]["type"] == "invalid_request_error"
    small = make_talker(work)
    config = transformers.AutoConfig.from_pretrained(small)
    config.num_hidden_layers = 3
    save_weights(small, config, 1)
    assert "is another model" in server.post("/update_weights", 400, checkpoint=str(small))["error"]["message"]
    config.num_hidden_layers, config.intermediate_size = 2, 64
    save_weights(small, config, 1)
    assert "gate_proj.weight has shape [64, 32], expected [48, 32]" in server.post("/update_weights", 400, checkpoint=str(small))["error"]["message"]
    assert answer(server) == expected["talker"]


def test_an_update_that_is_refused_pauses_nobody(server, work):
    long = {"prompt": "x", "max_tokens": 800, "ignore_eos": True, "seed": 1}
    pending = in_background(lambda: server.complete(**long)["choices"][0]["finish_reason"])
    running(server)
    for mode in ("wait", "abort", "keep"):
        message = server.post("/update_weights", 400, checkpoint=str(work / "absent"), mode=mode)["error"]["message"]
        assert message.endswith("; the weights are those of before")
        assert server.metric("vllm:num_requests_running") == 1
    assert pending() == "length"


@pytest.mark.parametrize("engines", [("--tp", 2), ("--dp", 2)])
def test_an_update_that_breaks_off_leaves_all_ranks_the_weights_of_before(engines, talker, other, expected, work):
    """One rank of two meets bytes that are damaged; the other has loaded its own."""
    run_ok("convert", other, work / "broken", "--tp", 2)
    file = max((work / "broken").rglob("*.distcp"))
    whole = bytearray(file.read_bytes())
    whole[len(whole) * 9 // 10] ^= 1  # of the second rank's half of the output layer
    file.write_bytes(whole)
    with serve(talker, *engines) as served:
        message = served.post("/update_weights", 500, checkpoint=str(work / "broken"))["error"]["message"]
        assert "output_layer.weight" in message and message.endswith("; the weights are those of before"), message
        assert answer(served) == expected["talker"]
        served.post("/update_weights", checkpoint=str(other))
        assert answer(served) == expected["other"]


def test_damage_where_no_rank_reads_a_tensor_whole_is_found(talker, other, expected, work):
    """Each of two ranks takes half of a tensor, whose checksum is of the whole; one byte of it is flipped."""
    run_ok("convert", other, work / "whole")
    file = max((work / "whole").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    good = file.read_bytes()
    with serve(talker, "--tp", 2) as served, safetensors.safe_open(other / "model.safetensors", "pt") as tensors:
        for name, place in (("lm_head.weight", 0.1), ("model.layers.1.self_attn.o_proj.weight", 0.7), ("model.layers.0.mlp.down_proj.weight", 0.2)):
            stored = tensors.get_tensor(name).view(torch.uint8).numpy().tobytes()
            assert good.count(stored) == 1
            flipped = bytearray(good)
            flipped[good.index(stored) + int(len(stored) * place)] ^= 1
            file.write_bytes(flipped)
            message = served.post("/update_weights", 500, checkpoint=str(work / "whole"))["error"]["message"]
            assert "CRC-32" in message and message.endswith("; the weights are those of before"), message
            assert answer(served) == expected["talker"]
        file.write_bytes(good)
        served.post("/update_weights", checkpoint=str(work / "whole"))
        assert answer(served) == expected["other"]


@pytest.mark.parametrize("engines", [(), ("--tp", 2), ("--dp", 2)])
def test_answers_go_on_while_weights_are_opened_over_a_slow_network(engines, talker, other, expected):
    asked, answers = threading.Event(), threading.Event()

    def wait(number, request, reply):
        asked.set()
        answers.wait(60)

    with serve_files(other.parent) as files, serve_faults(files.url, wait) as slow, serve(talker, *engines) as served:
        updated = in_background(lambda: served.post("/update_weights", checkpoint=f"{slow.url}/{other.name}"))
        assert asked.wait(60)
        assert [answer(served) for _ in range(5)] == [expected["talker"]] * 5
        answers.set()
        updated()
        assert answer(served) == expected["other"]


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_sleeps_and_answers_as_before(server, talker, expected, level):
    server.post(f"/sleep?level={level}")
    assert json.loads(server.get("/is_sleeping")) == {"is_sleeping": True}
    pending = in_background(lambda: answer(server))
    server.post("/wake_up")
    if level == 2:
        server.post("/update_weights", checkpoint=str(talker))
    assert pending() == expected["talker"]


def test_a_server_that_sleeps_can_sleep_deeper(server, talker, expected):
    for level in (1, 2, 1):
        server.post(f"/sleep?level={level}")
    server.post("/wake_up")
    server.post("/update_weights", checkpoint=str(talker))
    assert answer(server) == expected["talker"]


def test_a_pause_holds_requests_and_aborts_or_keeps_those_under_way(server, expected):
    long = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "seed": 1}
    kept = in_background(lambda: server.complete(**long)["choices"][0]["finish_reason"])
    running(server)
    server.post("/pause?mode=keep")
    held = in_background(lambda: answer(server))
    while server.metric("vllm:num_requests_waiting") == 0:
        time.sleep(0.01)
    server.post("/resume")
    assert (held(), kept()) == (expected["talker"], "length")
    aborted = in_background(lambda: server.complete(**long)["choices"][0]["finish_reason"])
    running(server)
    server.post("/pause")
    assert aborted() == "abort"
    server.post("/resume")


def test_metrics_have_vllms_names(server):
    before = {name: server.metric(f"vllm:{name}") for name in ("prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_count")}
    server.complete([1, 2, 3], n=2, max_tokens=5, ignore_eos=True, seed=1)
    assert server.metric("vllm:prompt_tokens_total") == before["prompt_tokens_total"] + 3
    assert server.metric("vllm:generation_tokens_total") == before["generation_tokens_total"] + 10
    assert server.metric("vllm:e2e_request_latency_seconds_count") == before["e2e_request_latency_seconds_count"] + 2
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total",
                 "num_preemptions_total", "request_success_total", "time_to_first_token_seconds_sum", "inter_token_latency_seconds_sum",
                 "request_queue_time_seconds_count", "request_prefill_time_seconds_count", "request_decode_time_seconds_count"):
        server.metric(f"vllm:{name}")
    assert server.metric("vllm:request_prefill_time_seconds_sum") > 1e-4
    assert f'model_name="{NAME}"' in server.get("/metrics").decode()


def test_usage_counts_the_tokens_that_the_prefix_cache_had(server):
    usage = [server.complete([5 + i % 7 for i in range(200)], max_tokens=1)["usage"] for _ in range(2)]
    assert [one["prompt_tokens"] for one in usage] == [200, 200]
    assert usage[0]["prompt_tokens_details"]["cached_tokens"] < 64 <= usage[1]["prompt_tokens_details"]["cached_tokens"] < 200
