"""ferry serve with OpenAI's own client, beside transformers, and alone beside busy."""
import asyncio
import concurrent.futures
import json
import time

import openai
import pytest
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from generate_beside_transformers import chosen, forward_log_probs, load
from served import NAME, serve
from support import FERRY, run_ok

PROMPT = "The weights of"


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def tokenizer(talker):
    return transformers.AutoTokenizer.from_pretrained(talker)


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == (NAME, "model", "ferry", 4096)
    assert client.models.retrieve(NAME) == model
    with pytest.raises(openai.NotFoundError, match="another/one"):
        client.models.retrieve("another/one")


def test_a_token_s_bytes_are_its_own_where_it_is_part_of_a_character(client, tokenizer):
    answer = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}], max_completion_tokens=200, seed=3, temperature=9,
                                            logprobs=True, top_logprobs=1, extra_body={"return_token_ids": True, "ignore_eos": True}).choices[0]
    alphabet = bytes_to_unicode()
    byte_of = {character: byte for byte, character in alphabet.items()}
    pieces = [one for one in zip(answer.token_ids, answer.logprobs.content) if "\ufffd" in one[1].token and byte_of[tokenizer.convert_ids_to_tokens(one[0])[0]] != 255]
    assert len(pieces) > 10
    for token_id, one in pieces:
        assert one.bytes == [byte_of[character] for character in tokenizer.convert_ids_to_tokens(token_id)]


def test_a_completion_is_that_of_ferry_generate(client, talker, tokenizer):
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=40, seed=1, logprobs=3, extra_body={"ignore_eos": True, "return_token_ids": True})
    lines = run_ok("generate", talker, PROMPT, "--max-tokens", 40, "--seed", 1, "--ignore-eos", "--json", "--quiet").stdout
    (expected,) = json.loads(lines)["outputs"]
    (choice,) = answer.choices
    assert (choice.text, choice.token_ids, choice.finish_reason) == (expected["text"], expected["token_ids"], "length")
    assert choice.logprobs.token_logprobs == expected["model_logprobs"]
    assert choice.prompt_token_ids == tokenizer(PROMPT)["input_ids"]
    assert "".join(choice.logprobs.tokens).startswith(choice.text[:20])
    assert (answer.object, answer.usage.prompt_tokens, answer.usage.completion_tokens) == ("text_completion", len(choice.prompt_token_ids), 40)


def test_greedy_tokens_and_their_log_probs_are_transformers(client, talker):
    model = load(talker)
    prompt = list(range(20, 60))
    answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=24, temperature=0, logprobs=0, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    with torch.no_grad():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt):].tolist()
    assert choice.token_ids == expected
    log_probs = chosen(forward_log_probs(model, prompt, choice.token_ids), choice.token_ids)
    assert torch.equal(log_probs, torch.tensor(choice.logprobs.token_logprobs))


def prompt_of(length, seed):
    return torch.randint(20, 120, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_prompt_logprobs(model, ids, entries, most):
    """Bit for bit, with ranks and the likeliest tokens beside them."""
    assert entries[0] is None and len(entries) == len(ids)
    rows = forward_log_probs(model, ids[:1], ids[1:])
    for row, token, entry in zip(rows, ids[1:], entries[1:], strict=True):
        (first, mine), *_ = entry.items()
        assert int(first) == token
        assert torch.tensor(mine["logprob"]) == row[token] and mine["rank"] == (row >= row[token]).sum()
        likeliest = sorted((one for one in entry.values() if one["rank"] <= most), key=lambda one: one["rank"])
        assert torch.equal(torch.tensor([one["logprob"] for one in likeliest]), row.topk(most).values[:len(likeliest)])
        assert len(entry) == most + (mine["rank"] > most)


def test_log_probs_of_a_prompt_are_transformers(client, talker, tokenizer):
    """Also of a prompt that the cache has, one that takes several steps, and in company."""
    model = load(talker)
    prompts = [prompt_of(length, seed) for length, seed in ((40, 1), (700, 2), (1, 3), (41, 4))]
    fields = {"model": NAME, "prompt": prompts, "max_tokens": 3, "n": 2, "seed": 1, "extra_body": {"prompt_logprobs": 2}}
    once = client.completions.create(**fields)
    for number, choice in enumerate(once.choices):
        check_prompt_logprobs(model, prompts[number // 2], choice.prompt_logprobs, 2)
        entry = (choice.prompt_logprobs[1:] or [{}])[0]
        assert all(one["decoded_token"] == tokenizer.decode([int(token)]) for token, one in entry.items())
    again = client.completions.create(**fields)
    assert [choice.prompt_logprobs for choice in again.choices] == [choice.prompt_logprobs for choice in once.choices]
    assert [choice.text for choice in again.choices] == [choice.text for choice in client.completions.create(**fields | {"extra_body": {}}).choices]


def test_a_chat_has_log_probs_of_its_prompt(client, talker):
    answer = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "How likely is this?"}], max_completion_tokens=2,
                                            extra_body={"prompt_logprobs": 0, "return_token_ids": True})
    assert all(len(entry) == 1 for entry in answer.prompt_logprobs[1:])
    check_prompt_logprobs(load(talker), answer.prompt_token_ids, answer.prompt_logprobs, 0)


@pytest.mark.parametrize("drawn", [0, 5])
def test_an_echo_has_log_probs_of_the_prompt_and_the_answer(client, talker, tokenizer, drawn):
    ids = tokenizer(PROMPT)["input_ids"]
    choice = client.completions.create(model=NAME, prompt=PROMPT, echo=True, max_tokens=drawn, temperature=0, logprobs=1,
                                       extra_body={"return_token_ids": True, "ignore_eos": True}).choices[0]
    assert len(choice.token_ids) == drawn and choice.finish_reason == "length" and not hasattr(choice, "prompt_logprobs")
    assert choice.text.startswith(PROMPT) and (drawn > 0 or choice.text == PROMPT)
    scored = choice.logprobs
    assert scored.tokens == [tokenizer.decode([token]) for token in ids + choice.token_ids]
    assert scored.token_logprobs[0] is None and scored.top_logprobs[0] is None
    rows = forward_log_probs(load(talker), ids[:1], ids[1:] + choice.token_ids)
    assert torch.equal(torch.tensor(scored.token_logprobs[1:]), chosen(rows, ids[1:] + choice.token_ids))
    assert [max(one.values()) for one in scored.top_logprobs[1:]] == rows.max(1).values.tolist()
    assert scored.text_offset[0] == 0 and scored.text_offset == sorted(scored.text_offset)


def test_offsets_of_tokens_are_characters(client):
    """vLLM counts them in Python's strings."""
    scored = client.completions.create(model=NAME, prompt="größer → ☃", echo=True, max_tokens=12, logprobs=1, seed=3, temperature=5).choices[0].logprobs
    lengths = list(map(len, scored.tokens))
    assert scored.text_offset == [sum(lengths[:i]) for i in range(len(lengths))]
    assert any(len(token.encode()) > len(token) for token in scored.tokens)


def test_a_prompt_that_fills_the_model_is_scored(client, talker):
    """4096 tokens, the last of the model's positions among them, also in company and where the cache has some of them."""
    model, prompts = load(talker), [prompt_of(4096, 7), prompt_of(9, 8)]
    expected = [chosen(forward_log_probs(model, ids[:1], ids[1:]), ids[1:]) for ids in prompts]
    for prompt in (prompts[0], prompts):
        choices = client.completions.create(model=NAME, prompt=prompt, echo=True, max_tokens=0, logprobs=0, extra_body={"return_token_ids": True}).choices
        for ids, log_probs, choice in zip(prompts, expected, choices):
            assert (choice.token_ids, choice.finish_reason, len(choice.logprobs.token_logprobs)) == ([], "length", len(ids))
            assert torch.equal(torch.tensor(choice.logprobs.token_logprobs[1:]), log_probs)
    for fields in ({"prompt": [7] * 4097, "echo": True, "max_tokens": 0}, {"prompt": prompts[0], "echo": True, "max_tokens": 1}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=NAME, **fields)
        assert caught.value.code == "context_length_exceeded"


def test_a_stream_has_the_parts_of_the_whole(client):
    fields = {"model": NAME, "prompt": PROMPT, "max_tokens": 60, "seed": 2, "n": 2, "logprobs": 1, "extra_body": {"return_token_ids": True}}
    whole = client.completions.create(**fields)
    parts = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert parts[-1].usage == whole.usage and parts[-1].choices == []
    for choice in whole.choices:
        mine = [one for part in parts for one in part.choices if one.index == choice.index]
        assert "".join(one.text for one in mine) == choice.text
        assert [one.finish_reason for one in mine if one.finish_reason] == [choice.finish_reason]
        assert sum((one.token_ids for one in mine), []) == choice.token_ids
        assert mine[0].prompt_token_ids == choice.prompt_token_ids
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert sum((getattr(one.logprobs, name) for one in mine if one.logprobs), []) == getattr(choice.logprobs, name)


def test_an_asynchronous_client_has_the_answers_of_others(server, client):
    fields = [{"model": NAME, "messages": [{"role": "user", "content": f"Question {i}"}], "max_tokens": 30, "seed": i} for i in range(8)]
    expected = [client.chat.completions.create(**one).choices[0].message.content for one in fields]

    async def ask(other, number):
        if number % 2:
            return (await other.chat.completions.create(**fields[number])).choices[0].message.content
        async with other.chat.completions.stream(**fields[number]) as stream:
            return "".join([event.delta async for event in stream if event.type == "content.delta"])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as other:
            return await asyncio.gather(*(ask(other, number) for number in range(len(fields))))

    assert asyncio.run(ask_all()) == expected


def test_a_chat_is_a_completion_of_its_template(client, tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    ids = tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
    answer = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=30, seed=5, logprobs=True, top_logprobs=2,
                                            extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    assert answer.prompt_token_ids == ids and (choice.message.role, answer.object) == ("assistant", "chat.completion")
    same = client.completions.create(model=NAME, prompt=ids, max_tokens=30, seed=5, logprobs=2, extra_body={"return_token_ids": True}).choices[0]
    assert (choice.message.content, choice.token_ids, choice.finish_reason) == (same.text, same.token_ids, same.finish_reason)
    content = choice.logprobs.content
    assert [one.logprob for one in content] == same.logprobs.token_logprobs and all(len(one.top_logprobs) == 2 for one in content)
    assert bytes(content[0].bytes).decode() == content[0].token
    parts = list(client.chat.completions.create(model=NAME, messages=messages, max_tokens=30, seed=5, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == choice.message.content
    assert parts[-1].choices[0].finish_reason == choice.finish_reason


def test_tokens_in_and_out_are_not_tokenised_again(client, server, tokenizer):
    """The ids of a turn are the prompt of the next; as text they would be others."""
    first = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=20, seed=3, extra_body={"return_token_ids": True}).choices[0]
    ids = first.prompt_token_ids + first.token_ids
    answer = server.post("/v1/chat/completions", model=NAME, prompt_token_ids=ids, max_tokens=5, seed=3, return_token_ids=True)
    assert answer["prompt_token_ids"] == ids and len(answer["choices"][0]["token_ids"]) == 5
    assert server.post("/tokenize", prompt=PROMPT)["tokens"] == tokenizer(PROMPT)["input_ids"] == first.prompt_token_ids
    assert server.post("/detokenize", tokens=ids)["prompt"] == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "x"}], return_token_strs=True)
    expected = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True)["input_ids"]
    assert chat["tokens"] == expected and chat["token_strs"] == tokenizer.convert_ids_to_tokens(expected) and chat["count"] == len(expected)


def test_stop_strings_and_stop_tokens_end_an_answer(client):
    def ask(**fields):
        return client.completions.create(model=NAME, prompt=PROMPT, max_tokens=40, seed=1, **fields).choices[0]

    whole = ask(extra_body={"ignore_eos": True, "return_token_ids": True})
    stop = whole.text[5:8]
    by_text = ask(stop=["never said", stop], extra_body={"ignore_eos": True})
    assert (by_text.text, by_text.finish_reason, by_text.stop_reason) == (whole.text[:whole.text.index(stop)], "stop", stop)
    by_token = ask(extra_body={"ignore_eos": True, "stop_token_ids": [whole.token_ids[9]], "return_token_ids": True})
    assert by_token.token_ids == whole.token_ids[:whole.token_ids.index(whole.token_ids[9]) + 1]
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", whole.token_ids[9])


def test_a_request_says_which_tokens_may_be_drawn(client, tokenizer):
    """vLLM documents logit_bias, allowed_token_ids and bad_words so."""
    def ask(**fields):
        return client.completions.create(model=NAME, prompt=PROMPT, max_tokens=40, seed=1, extra_body={"ignore_eos": True, "return_token_ids": True} | fields).choices[0]

    free = ask()
    assert ask(logit_bias={}).token_ids == free.token_ids
    assert set(ask(logit_bias={"77": 100}).token_ids) == {77}
    never = ask(logit_bias={str(free.token_ids[3]): -100}).token_ids
    assert never[:3] == free.token_ids[:3] and free.token_ids[3] not in never
    assert set(ask(allowed_token_ids=[5, 6, 7]).token_ids) <= {5, 6, 7}
    pairs = [free.token_ids[i:i + 2] for i in range(39)]
    pair = next(pair for pair in pairs if tokenizer.encode(tokenizer.decode(pair).lstrip()) == pair)
    other = ask(bad_words=[tokenizer.decode(pair)]).token_ids
    assert pair not in [other[i:i + 2] for i in range(39)]


def test_an_answer_may_have_its_prompt_and_its_stop_string(client, tokenizer):
    def ask(prompt=PROMPT, **fields):
        return client.completions.create(model=NAME, prompt=prompt, max_tokens=40, seed=1, **fields)

    alone = ask().choices[0].text
    stop = alone[5:8]
    assert ask(echo=True).choices[0].text == PROMPT + alone
    assert "".join(part.choices[0].text for part in ask(echo=True, stream=True)) == PROMPT + alone
    ids = tokenizer.encode(PROMPT)
    assert [choice.text for choice in ask([ids, ids], echo=True).choices] == [PROMPT + alone] * 2
    assert [choice.text for choice in ask(["A", PROMPT], echo=True, n=2).choices][2] == PROMPT + ask(n=2).choices[0].text
    ended = ask(stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert (ended.text, ended.stop_reason) == (alone[:alone.index(stop) + len(stop)], stop)
    last = ask("A b c " + PROMPT, extra_body={"truncate_prompt_tokens": len(ids), "return_token_ids": True}).choices[0]
    assert last.prompt_token_ids == tokenizer.encode("A b c " + PROMPT)[-len(ids):]


def test_a_large_body_holds_up_nobody(server):
    """16 MB of a prompt that is refused for its length, while others ask and are answered."""
    large = {"model": NAME, "prompt": "word " * 3_200_000}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        refused = [pool.submit(server.ask, "POST", path, large) for path in ("/v1/completions", "/tokenize")]
        waited = []
        while not all(one.done() for one in refused):
            begin = time.monotonic()
            assert server.ask("GET", "/health")[0] == 200
            waited.append(time.monotonic() - begin)
            time.sleep(0.01)
    assert [one.result()[0] for one in refused] == [400, 200]
    assert max(waited) < 0.5, max(waited)


def test_several_prompts_are_several_choices(client):
    both = client.completions.create(model=NAME, prompt=["One", "Another"], n=2, max_tokens=8, seed=4)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    for i, prompt in enumerate(["One", "Another"]):
        alone = client.completions.create(model=NAME, prompt=prompt, n=2, max_tokens=8, seed=4)
        assert [choice.text for choice in alone.choices] == [choice.text for choice in both.choices[2 * i:2 * i + 2]]


def test_an_answer_alone_has_the_bytes_of_one_among_32_others(server):
    def ask(i):
        body = {"model": NAME, "prompt": f"Prompt {i} of " + "some " * (i % 5), "max_tokens": 30 + i, "seed": i, "temperature": 0.5 + i % 3,
                "top_p": 1 - 0.1 * (i % 2), "logprobs": 2, "return_token_ids": True, "stream": i % 2 == 1}
        if i % 4 == 3:
            body["repetition_penalty"] = 1.2
        status, _, answer = server.ask("POST", "/v1/completions", body)
        assert status == 200
        return answer if body["stream"] else json.loads(answer)["choices"]

    def without_names(answer):
        if not isinstance(answer, bytes):
            return answer
        events = [json.loads(line[6:]) for line in answer.decode().split("\n\n") if line.startswith("data: {")]
        return [event["choices"] for event in events]

    alone = {i: without_names(ask(i)) for i in (0, 3, 17, 32)}
    with concurrent.futures.ThreadPoolExecutor(33) as pool:
        together = list(pool.map(ask, range(33)))
    assert {i: without_names(together[i]) for i in alone} == alone


def test_ranks_that_share_layers_give_the_same_answers(server, talker):
    ask = {"prompt": "Both of", "max_tokens": 30, "seed": 4, "n": 2, "logprobs": 2, "return_token_ids": True, "stop": ["e t"]}
    alone = server.complete(**ask)["choices"]
    with serve(talker, "--tp", 2) as both:
        assert both.complete(**ask)["choices"] == alone
        both.post("/sleep")
        both.post("/wake_up")
        both.post("/update_weights", checkpoint=str(talker))
        both.post("/update_weights", 400, checkpoint="absent")
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert all(choices == alone for choices in pool.map(lambda _: both.complete(**ask)["choices"], range(8)))


@pytest.mark.parametrize("fields, status, param", [
    ({"model": "another"}, 404, "model"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"max_tokens": 5000}, 400, "max_tokens"),
    ({"prompt": [4, 5000]}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"n": 2, "temperature": 0}, 400, "n"),
    ({"logit_bias": {"99999": 3}}, 400, "logit_bias"),
    ({"allowed_token_ids": []}, 400, "allowed_token_ids"),
    ({"bad_words": [" "]}, 400, "bad_words"),
    ({"echo": True, "logprobs": 1, "stream": True}, 400, "echo"),
    ({"prompt_logprobs": 21}, 400, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"logprobs": 99}, 400, "logprobs"),
    ({"stop": [3]}, 400, "stop"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
])
def test_a_bad_field_is_named_in_openais_form(client, fields, status, param):
    fields = {"model": NAME, "prompt": "x"} | fields
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=fields.pop("model"), prompt=fields.pop("prompt"), extra_body=fields)
    error = caught.value
    assert (error.status_code, error.param) == (status, param)
    assert error.type == ("not_found_error" if status == 404 else "invalid_request_error")
    assert isinstance(error, openai.NotFoundError if status == 404 else openai.BadRequestError)


def test_a_request_that_is_too_long_says_so(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt=[7] * 4096, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


def test_the_server_says_how_it_is_used():
    assert "--max-queued-requests" in run_ok("serve", "--help").stdout and FERRY.exists()
