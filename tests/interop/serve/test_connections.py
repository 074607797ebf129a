"""ferry serve and its connections: keys, clients that vanish, limits, signals."""
import http.client
import json
import re
import signal
import socket
import subprocess
import time
import urllib.request

import openai
import pytest

from served import NAME, serve
from support import FERRY

LONG = {"model": NAME, "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "seed": 1}


def send(server, path, body, extra=""):
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n{extra}\r\n".encode() + data)
    return connection


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_client_that_goes_frees_what_it_held(server):
    def running():
        return server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting")

    for stream in (True, False):
        clients = [send(server, "/v1/completions", LONG | {"stream": stream, "n": 2}) for _ in range(8)]
        until(lambda: running() >= 1)
        if stream:
            assert clients[0].recv(100).startswith(b"HTTP/1.1 200 OK")
        for client in clients:
            client.close()
        until(lambda: running() == 0)
    assert server.complete("y", max_tokens=3)["usage"]["completion_tokens"] <= 3


def test_a_sequence_is_as_long_as_the_cache_holds(talker):
    """A chat without max_tokens has the room that there is. Both engines of --dp have a cache of their own."""
    with serve(talker, "--num-blocks", 4, "--dp", 2) as server:
        assert "sequences  256 tokens at most, not 4096: the KV cache holds no more\n" in server.said
        chat = {"model": NAME, "messages": [{"role": "user", "content": "x"}]}
        answer = server.post("/v1/chat/completions", **chat, ignore_eos=True)
        assert (answer["usage"]["total_tokens"], answer["choices"][0]["finish_reason"]) == (256, "length")
        error = server.post("/v1/chat/completions", 400, **chat, max_tokens=256)["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens") and error["message"].startswith("the KV cache holds 256 tokens")
        assert server.post("/tokenize", **chat)["max_model_len"] == 256
        assert json.loads(server.get("/v1/models"))["data"][0]["max_model_len"] == 256
        assert list(json.loads(server.get("/version"))) == ["version"]


def test_a_key_is_asked_for(talker):
    with serve(talker, "--api-key", "one", "--api-key", "two") as server:
        assert server.get("/health") == server.get("/ping") == b""
        assert json.loads(server.get("/v1/models", 401))["error"]["type"] == "authentication_error"
        for key in ("one", "two"):
            assert openai.OpenAI(base_url=f"{server.url}/v1", api_key=key).models.list().data[0].id == NAME
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="on").models.list()


def test_more_requests_than_may_wait_are_refused_for_now(talker):
    with serve(talker, "--max-num-seqs", 2, "--max-queued-requests", 1) as server:
        clients = [send(server, "/v1/completions", LONG | {"stream": True}) for _ in range(3)]
        assert clients[0].recv(100).startswith(b"HTTP/1.1 200 OK")
        status, headers, answer = server.ask("POST", "/v1/completions", LONG)
        assert (status, headers["Retry-After"]) == (429, "1") and json.loads(answer)["error"]["type"] == "rate_limit_error"
        for client in clients:
            client.close()
        until(lambda: server.metric("vllm:num_requests_running") == 0)
        assert server.complete("y", max_tokens=3)["choices"]


def test_connections_leave_descriptors_to_weights(talker):
    with serve(talker, descriptors=256) as server:
        assert any(line.startswith("connections 128 at a time, not 4096") for line in server.said)
        early = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        early.request("GET", "/health")
        assert early.getresponse().read() == b""
        crowd = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(400)]
        refused = [one.recv(12) for one in crowd[127:167]]  # those far beyond them have no descriptor, and are closed
        assert set(refused) == {b"HTTP/1.1 503"}
        until(lambda: server.descriptors() < 200)
        early.request("POST", "/update_weights", json.dumps({"checkpoint": str(talker)}), {"Content-Type": "application/json"})
        assert early.getresponse().status == 200
        for one in crowd:
            one.close()
        until(lambda: server.descriptors() < 30)
        assert server.complete("y", max_tokens=3)["usage"]["completion_tokens"] <= 3


def test_an_answer_that_takes_too_long_is_given_up(talker):
    with serve(talker, "--request-timeout", 0.3) as server:
        status, _, answer = server.ask("POST", "/v1/completions", LONG)
        assert status == 504 and json.loads(answer)["error"]["code"] == "timeout"


@pytest.mark.parametrize("options", [(), ("--shutdown-timeout", "1e30", "--request-timeout", "1e30")], ids=["default", "ages"])
def test_sigterm_lets_answers_end(talker, options):
    with serve(talker, *options) as server:
        client = send(server, "/v1/completions", LONG | {"max_tokens": 1000, "stream": True}, "Connection: close\r\n")
        received = client.recv(100)
        server.process.send_signal(signal.SIGTERM)
        while part := client.recv(1 << 16):
            received += part
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b'"finish_reason":"length"' in received
        assert server.process.wait(timeout=20) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))
        server.process.poll = lambda: None  # it has ended as it should
        server.process.send_signal = lambda _: None


def test_an_address_of_ipv6_is_written_as_one(talker):
    with subprocess.Popen([FERRY, "serve", talker, "--host", "::1", "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
        address = next(line.split()[1] for line in process.stderr if line.startswith("serving"))
        assert re.fullmatch(r"http://\[::1\]:\d+", address)
        with urllib.request.urlopen(f"{address}/health") as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0


def test_a_port_in_use_is_an_error(server, talker):
    with pytest.raises(AssertionError, match="Address already in use"):
        with serve(talker, port=server.port):
            pass
