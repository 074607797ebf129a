"""`--dp 2`: two engines in one server answer as one does."""
import concurrent.futures
import json
import re
import time

import pytest
import transformers

from served import NAME, save_weights, serve


def ask_all(server):
    def one(number):
        fields = {"n": 2, "seed": number, "max_tokens": 40, "logprobs": 2, "return_token_ids": True}
        if number % 3 == 0:
            fields["guided_regex"] = "[a-z ]{5,30}"
        answer = server.complete(f"Request {number % 4} of many, and now", **fields)
        return [{key: choice[key] for key in ("text", "token_ids", "logprobs", "finish_reason")} for choice in answer["choices"]]

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        return list(pool.map(one, range(24)))


@pytest.fixture(scope="module")
def replicas(talker):
    with serve(talker, "--dp", 2) as served:
        yield served


def test_answers_are_those_of_one_engine(server, replicas):
    assert ask_all(replicas) == ask_all(server)
    assert replicas.metric("vllm:num_requests_running") == 0


def test_weights_of_all_engines_are_updated(replicas, talker, tmp_path):
    before = ask_all(replicas)
    config = transformers.AutoConfig.from_pretrained(talker)
    save_weights(tmp_path / "other", config, 9)
    replicas.post("/update_weights", checkpoint=str(tmp_path / "other"), mode="keep")
    other = ask_all(replicas)
    assert all(one != two for one, two in zip(before, other, strict=True))
    replicas.post("/update_weights", checkpoint=str(talker))
    assert ask_all(replicas) == before
    assert replicas.post("/update_weights", 400, checkpoint="/nowhere")["error"]
    assert ask_all(replicas) == before


def test_metrics_are_told_apart_by_engine(replicas):
    ask_all(replicas)
    text = replicas.get("/metrics").decode()
    for name in ("vllm:num_requests_running", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"):
        values = dict(re.findall(rf'^{name}{{engine="(\d)",model_name="{NAME}"}} (\d+)$', text, re.M))
        assert set(values) == {"0", "1"}, name
        assert name.endswith("running") or min(map(int, values.values())) > 0


def test_all_engines_pause_and_sleep(replicas):
    replicas.post("/pause?mode=keep")
    assert json.loads(replicas.get("/is_paused"))["is_paused"]
    replicas.post("/resume")
    replicas.post("/sleep?level=1")
    assert json.loads(replicas.get("/is_sleeping"))["is_sleeping"]
    replicas.post("/wake_up")
    assert replicas.complete("x", model=NAME, max_tokens=3)["choices"]


@pytest.mark.parametrize("when", ["under way", "at rest"])
def test_others_go_on_where_a_rank_dies(when, talker, tmp_path):
    """They answer what it began, and it is left out of all that follows: updates, sleep, the end."""
    config = transformers.AutoConfig.from_pretrained(talker)
    save_weights(tmp_path / "other", config, 9)
    long = {"max_tokens": 800, "ignore_eos": True, "return_token_ids": True}

    def draw(server, number):
        return server.complete(f"Long request {number}", seed=number, **long)["choices"][0]["token_ids"]

    with serve(talker, "--dp", 3, ranks=3) as served, concurrent.futures.ThreadPoolExecutor(6) as pool:
        before = ask_all(served)
        if when == "under way":
            expected = list(pool.map(lambda number: draw(served, number), range(6)))
            drawn = [pool.submit(draw, served, number) for number in range(6)]
            while served.metric("vllm:num_requests_running") < 6 and not all(one.done() for one in drawn):
                time.sleep(0.01)
            time.sleep(0.1)
            served.others[0].kill()
            assert [one.result() for one in drawn] == expected
        else:
            served.others[0].kill()
        served.post("/sleep?level=1")
        served.post("/wake_up")
        served.post("/update_weights", checkpoint=str(tmp_path / "other"))
        assert all(one != two for one, two in zip(before, ask_all(served), strict=True))
        served.post("/sleep?level=2")
        served.post("/wake_up")
        assert served.post("/update_weights", 400, checkpoint="/nowhere")["error"]
        served.post("/update_weights", checkpoint=str(talker))
        assert ask_all(served) == before
        assert 'engine="1"' not in re.search("vllm:num_requests_running.*?# HELP", served.get("/metrics").decode(), re.S)[0]
