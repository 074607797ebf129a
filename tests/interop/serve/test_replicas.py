"""`--dp 2`: two engines in one server answer as one does."""
import concurrent.futures
import json

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


def test_all_engines_pause_and_sleep(replicas):
    replicas.post("/pause?mode=keep")
    assert json.loads(replicas.get("/is_paused"))["is_paused"]
    replicas.post("/resume")
    replicas.post("/sleep?level=1")
    assert json.loads(replicas.get("/is_sleeping"))["is_sleeping"]
    replicas.post("/wake_up")
    assert replicas.complete("x", model=NAME, max_tokens=3)["choices"]
