"""ferry serve under requests that nobody sends in good faith, at every endpoint: each has an answer that names its fault, or its connection
closes, and no other request notices."""
import json
import random
import shutil
import socket
import threading
import time

import pytest

from served import NAME, serve
from test_load import choices, mutated, nothing_leaks, raw  # noqa: F401: the fixture is around each test

CHAT = {"model": NAME, "messages": [{"role": "system", "content": "y"}, {"role": "user", "content": [{"type": "text", "text": "x"}]},
                                    {"role": "assistant", "content": None, "tool_calls": [
                                        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
                                    {"role": "tool", "tool_call_id": "a", "content": "z"}],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {
            "type": "object", "properties": {"a": {"type": "integer", "minimum": 1}, "b": {"$ref": "#/$defs/c"}}, "$defs": {"c": {"enum": [1, "x"]}}}}}],
        "tool_choice": "auto", "parallel_tool_calls": False, "max_tokens": 1, "temperature": 0.7, "top_p": 0.9, "seed": 3, "n": 1, "logprobs": True,
        "top_logprobs": 1, "stop": ["a", "b"], "stream": False, "chat_template_kwargs": {"k": 1}, "documents": [{"t": "x"}],
        "response_format": {"type": "text"}, "return_token_ids": True}
COMPLETION = {"model": NAME, "prompt": ["x", "yy"], "max_tokens": 1, "n": 2, "stop": "a", "stop_token_ids": [1], "min_tokens": 0, "ignore_eos": False,
              "logprobs": 1, "echo": False, "stream": False, "stream_options": None, "temperature": 1, "top_k": 4, "top_p": 1, "min_p": 0, "seed": 1,
              "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "prompt_logprobs": None}
STRUCTURED = {"model": NAME, "prompt": "x", "max_tokens": 2, "structured_outputs": {"regex": "(a|b{2,3}){1,4}[^c-e]?"}}
SCHEMA = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "response_format": {"type": "json_schema", "json_schema": {
    "name": "s", "schema": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
                                                             "b": {"type": "string", "pattern": "^[a-z]+$"}}, "required": ["a"]}}}}
BODIES = {"/v1/completions": [COMPLETION, STRUCTURED], "/v1/chat/completions": [CHAT, SCHEMA],
          "/tokenize": [{"model": NAME, "prompt": "x", "add_special_tokens": True, "return_token_strs": True}, {"messages": CHAT["messages"]}],
          "/detokenize": [{"model": NAME, "tokens": [1, 2, 3]}],
          "/update_weights": [{"checkpoint": "/nowhere", "mode": "wait", "iteration": 1}, {"delta": "/nowhere"}]}
HOSTILE = [None, True, 0, -1, 2**31, 2**63, 2**64 - 1, -2**63, 10**400, 0.5, 1e308, -1e308, "", "\0", "x" * 200, "\ud83d\ude00", "/dev/zero", "..", [], {},
           [[]], [None], [2**63], [-1], [10**9], ["x"] * 2000, {"a": {"b": []}}, {"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": "#"}}},
           "(((a{1,1000}){1,1000}){1,1000}){1,1000}", "[", "(?=a)", "\\", {"type": ["string", "x"]}, {"enum": []}, {"const": 1e308}, {"minimum": "x"}]


@pytest.fixture(scope="module")
def server(talker):
    with serve(talker, "--max-model-len", 512, "--kv-cache-memory-bytes", "64MiB") as served:
        yield served


def places(value, path=()):
    yield path
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(one, (*path, key))


def with_hostile(body, path, hostile, chance):
    """The body with another value there, or without it, or with it in a place of its own."""
    body = json.loads(json.dumps(body))
    if not path:
        return hostile
    *outer, last = path
    inside = body
    for key in outer:
        inside = inside[key]
    kind = chance.random()
    if kind < .1:
        del inside[last]
    elif kind < .2 and isinstance(inside, dict):
        inside[chance.choice(["x", "prompt_token_ids", "guided_json", "min_tokens", "continue_final_message", "best_of", "suffix", "user"])] = hostile
    else:
        inside[last] = hostile
    return body


def receive(reader):
    """The status and the body of the next answer."""
    status, length = int(reader.readline().split()[1]), 0
    while (line := reader.readline()) != b"\r\n":
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
        assert not line.lower().startswith(b"transfer-encoding")
    return status, reader.read(length)


@pytest.mark.parametrize("path", BODIES)
def test_hostile_values_are_refused_by_name(server, path):
    """Any value of a request becomes another one. Each has an answer: 200, or an error in OpenAI's form that is the client's."""
    chance = random.Random(path)
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    reader, counts = client.makefile("rb"), {}
    for i in range(1500):
        body = chance.choice(BODIES[path])
        for _ in range(chance.choice([1, 1, 2])):
            if isinstance(body, dict):
                body = with_hostile(body, chance.choice(list(places(body))), chance.choice(HOSTILE), chance)
        if isinstance(body, dict) and body.get("stream") is True:
            body["stream"] = 7
        data = json.dumps(body).encode()
        if i % 5 == 0:
            data = mutated(data[:4000].ljust(20), chance)
        client.sendall(raw(data, path))
        begun = time.monotonic()
        status, answer = receive(reader)
        counts[status] = counts.get(status, 0) + 1
        assert status in (200, 400, 404, 413, 422), (data[:2000], answer)
        assert status == 200 or set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
        assert time.monotonic() - begun < 5, data[:2000]
    client.close()
    assert counts[400] > 500


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
# All that a connection says, the status of its answer, and words of it.
BROKEN = {
    "a chunk that is cut off": (CHUNKED + b"ff\r\nabc", None, b""),
    "a chunk of no size": (CHUNKED + b"zz\r\n", 400, b"the size of a chunk is no number"),
    "a chunk of a negative size": (CHUNKED + b"-5\r\nabcde\r\n0\r\n\r\n", 400, b"the size of a chunk is no number"),
    "a huge chunk": (CHUNKED + b"7fffffffffffffff\r\nabc", 413, b"longer than the server takes"),
    "a chunk longer than its size": (CHUNKED + b"3\r\nabcX\r\n0\r\n\r\n", 400, b"a chunk is longer than its size"),
    "a flood of trailers": (CHUNKED + b"0\r\n" + b"a: b\r\n" * 100_000, 431, b"longer than the server takes"),
    "a flood of headers": (HEAD + b"".join(b"h%d: v\r\n" % i for i in range(100_000)), 431, b"longer than the server takes"),
    "a header without end": (HEAD + b"x: " + b"y" * (10 << 20), 431, b"longer than the server takes"),
    "a line without end": (b"GET /" + b"a" * (10 << 20), 431, b"longer than the server takes"),
    "NUL": (HEAD + b"x: a\0b\r\n\r\n", 400, b"control character"),
    "two lengths": (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, b"not together"),
    "a negative length": (HEAD + b"Content-Length: -5\r\n\r\n", 400, b"Content-Length is no number"),
    "a huge length": (HEAD + b"Content-Length: 1073741824\r\n\r\n", 413, b"longer than the server takes"),
    "TLS": (b"\x16\x03\x01\x00\xf4" + b"\x01\n" * 122, 400, b"CR LF"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, b"not a path"),
    "a path outside": (b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 404, b"there is no /../../etc/passwd"),
    "a name with NUL": (b"GET /v1/models/%00x HTTP/1.1\r\nHost: x\r\n\r\n", 404, rb"the model \\0x does not exist"),
    "a body for HEAD": (b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 200, b"\r\n\r\n"),
}


def test_broken_requests_are_named_and_close_their_connection(server):
    for name, (data, status, words) in BROKEN.items():
        client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        except ConnectionError:  # it has been answered before its end
            pass
        answer = b""
        while part := client.recv(1 << 16):
            answer += part
        client.close()
        assert (answer == b"") if status is None else answer.startswith(b"HTTP/1.1 %d " % status), (name, answer)
        assert words in answer, (name, answer)
    assert answer.endswith(b"\r\n\r\n")  # that to HEAD has no body, which would be taken for the next answer


def test_requests_that_do_not_wait_for_answers_have_theirs_in_order(server):
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    reader = client.makefile("rb")
    writer = threading.Thread(target=lambda: [client.sendall(raw({"model": NAME, "prompt": [1 + i], "max_tokens": 1, "return_token_ids": True}))
                                              for i in range(200)])
    writer.start()
    for i in range(200):
        status, answer = receive(reader)
        assert status == 200 and json.loads(answer)["choices"][0]["prompt_token_ids"] == [1 + i]
    writer.join()
    client.close()


def test_drips_and_idle_connections_delay_nobody(server):
    """300 requests come byte by byte, and 700 connections say nothing."""
    request, before = raw({"model": NAME, "prompt": "x", "max_tokens": 1}), choices(server)
    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(1000)]
    for byte in request[:20]:
        for client in clients[:300]:
            client.sendall(bytes([byte]))
        begun = time.monotonic()
        assert choices(server) == before and time.monotonic() - begun < 5
    for client in clients:
        client.close()


def test_the_members_of_a_body_are_read_in_the_time_of_their_number(server):
    """nlohmann looks at all members of an ordered object for each, which takes a minute and more for so many."""
    body = json.dumps({"model": NAME, "max_tokens": 1} | {f"member{i}": 1 for i in range(200_000)}).encode()
    begun = time.monotonic()
    status, _, answer = server.ask("POST", "/v1/completions", body)
    assert status == 400 and b"prompt: is missing" in answer and time.monotonic() - begun < 10


def fan(kind):
    """A schema of a few lines that stands for 8^12 values."""
    defs = {f"d{i}": kind([{"$ref": f"#/$defs/d{i + 1}"}] * 8) for i in range(12)}
    return {"$defs": defs | {"d12": {"type": "null"}}, "$ref": "#/$defs/d0"}


def chat_of(schema):
    return {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


EXPLODING = {
    "objects of objects": (200, chat_of(fan(lambda all: {"type": "object", "properties": {f"p{j}": one for j, one in enumerate(all)}, "required": ["p0", "p7"]}))),
    "alternatives of alternatives": (200, chat_of(fan(lambda all: {"anyOf": [{"type": "array", "items": one} for one in all]}))),
    "a million strings": (200, chat_of({"type": "array", "minItems": 900, "maxItems": 1000, "items": {
        "type": "array", "minItems": 900, "maxItems": 1000, "items": {"type": "string", "maxLength": 1000}}})),
    "a hundred thousand constants": (400, chat_of({"enum": [f"v{i}" for i in range(100_000)]})),
    "itself": (400, chat_of({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})),
    "parts that double": (400, chat_of({"$defs": {"d0": {"minimum": 1}} | {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i - 1}", key: i} for key in ("minimum", "maximum")]} for i in range(1, 21)}, "$ref": "#/$defs/d20"})),
    "thousands of which one holds": (400, chat_of({"oneOf": [{"const": i} for i in range(8000)]})),
    "arrays without end": (400, chat_of({"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}, "$ref": "#/$defs/a"})),
    "a regular expression that looks back": (200, {"structured_outputs": {"regex": "(.|\n)*a(.|\n){200}"}, "max_tokens": 100}),
    "stars of stars": (400, {"structured_outputs": {"regex": "((((.*)*)*)*)*z"}, "max_tokens": 100}),
    "stop strings that begin alike": (200, {"stop": ["q" * (i + 1) for i in range(3000)], "max_tokens": 100, "ignore_eos": True}),
    "more answers than the server takes": (400, {"prompt": ["x"] * 1000, "n": 16384}),
}


def test_requests_that_explode_delay_nobody(server):
    before = choices(server)
    for name, (status, body) in EXPLODING.items():
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        body = body if "messages" in body else {"model": NAME, "prompt": "x"} | body
        answers = []
        asker = threading.Thread(target=lambda: answers.append(server.ask("POST", path, body)))
        asker.start()
        while asker.is_alive():
            begun = time.monotonic()
            assert choices(server) == before and time.monotonic() - begun < 5, name
        assert answers[0][0] == status, (name, answers[0])


def test_broken_weights_beside_streams_change_no_answer(server, talker, work):
    """Answers under way and those that wait end as they should, whichever way the update asks for, and clients that vanish meanwhile are let go."""
    broken = work / "broken"
    shutil.copytree(talker, broken)
    whole = (broken / "model.safetensors").read_bytes()
    stream = {"model": NAME, "prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
    for mode, weights in (("keep", whole[:len(whole) // 2]), ("wait", b"\xff" * 1000), ("abort", b"")):
        (broken / "model.safetensors").write_bytes(weights)
        clients = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(8)]
        for client in clients:
            client.sendall(raw(stream))
        assert clients[0].recv(100).startswith(b"HTTP/1.1 200 OK")
        for client in clients[4:]:
            client.close()
        status, _, answer = server.ask("POST", "/update_weights", {"checkpoint": str(broken), "mode": mode})
        assert status in (400, 500) and b"model.safetensors" in answer, answer
        for client in clients[:4]:
            said = b""
            while not said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                part = client.recv(1 << 16)
                assert part, said
                said += part
            client.close()
        assert json.loads(server.get("/is_paused")) == {"is_paused": False}
