"""ferry serve under load that nobody here wrote (wrk), a thousand connections, malformed bodies by the thousand, clients that vanish and
clients that do not read: answers keep their bytes, and memory, descriptors and blocks come back."""
import json
import random
import re
import shutil
import socket
import subprocess
import threading
import time

import pytest

from served import NAME, serve

WITNESS = {"prompt": "The witness", "max_tokens": 24, "seed": 9, "temperature": 0.8, "logprobs": 1, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(talker):
    """Without the products that PyTorch keeps for each number of rows, by which memory grows for a while as chance has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
        with serve(talker, "--max-model-len", 512, "--kv-cache-memory-bytes", "256MiB") as served:
            yield served


def choices(server):
    return server.complete(**WITNESS)["choices"]


def is_idle(server):
    return server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def nothing_leaks(server):
    """Around each test: the same answer before and after, the same threads and descriptors, no block of the cache in use."""
    before = choices(server)
    threads, descriptors = server.threads(), server.descriptors()
    yield
    until(lambda: is_idle(server))
    assert choices(server) == before
    until(lambda: server.descriptors() <= descriptors)
    assert server.threads() == threads
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def raw(body, path="/v1/completions"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def test_a_thousand_connections_have_their_answers(server):
    """Half of them ask for text, all at once; then everybody has an answer, and the same one for the same seed."""
    expected = {}
    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(1000)]
    for i, client in enumerate(clients):
        client.sendall(raw({"model": NAME, "prompt": "Again", "max_tokens": 4, "seed": i % 5, "stream": i % 2 == 1})
                       if i % 2 else b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    for i, client in enumerate(clients):
        received = b""
        while not (received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if i % 2 else received.endswith(b"\r\n\r\n")):
            part = client.recv(1 << 16)
            assert part, received
            received += part
        assert received.startswith(b"HTTP/1.1 200 OK")
        if i % 2:
            text = "".join(json.loads(event)["choices"][0]["text"] for event in re.findall(rb"data: ({.*})", received))
            assert expected.setdefault(i % 5, text) == text
    for client in clients:
        client.close()
    assert len(expected) == 5


def test_wrk_keeps_it_busy_with_many_connections(server, work):
    if not shutil.which("wrk"):
        pytest.skip("wrk is not there: tools/install_packages tests")
    script = work / "post.lua"
    body = json.dumps({"model": NAME, "prompt": "wrk", "max_tokens": 3, "seed": 1})
    script.write_text(f"wrk.method = 'POST'\nwrk.headers['Content-Type'] = 'application/json'\nwrk.body = [[{body}]]\n")
    for path, connections, script_arguments in (("/v1/completions", 64, ["-s", script]), ("/health", 1000, [])):
        done = subprocess.run(["wrk", "-t2", f"-c{connections}", "-d2s", "--timeout", "20s", *map(str, script_arguments), f"{server.url}{path}"],
                              stdout=subprocess.PIPE, text=True, timeout=60)
        assert done.returncode == 0 and "Non-2xx" not in done.stdout and "Socket errors" not in done.stdout, done.stdout
        assert int(re.search(r"(\d+) requests in", done.stdout)[1]) > 20


def mutated(body, random):
    data = bytearray(body)
    for _ in range(random.randrange(1, 4)):
        at = random.randrange(len(data))
        kind = random.randrange(4)
        if kind == 0:
            data[at] = random.randrange(256)
        elif kind == 1:
            del data[at:at + random.randrange(1, 9)]
        elif kind == 2:
            data[at:at] = random.choice([b"[", b"{", b'"', b"\\ud800", b"1e999", b"null", b"-", b"\x00", b"[" * 3000])
        else:
            data[at:at] = data[random.randrange(len(data)):][:20]
    return bytes(data)


def test_malformed_bodies_by_the_thousand_are_refused_one_by_one(server):
    """Each has an answer: 200, or an error in OpenAI's form."""
    chance = random.Random(5)
    bodies = [json.dumps(body).encode() for body in (
        {"model": NAME, "prompt": "x", "max_tokens": 1, "n": 1, "stop": ["a"], "temperature": 0.5, "logprobs": 1},
        {"model": NAME, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 1, "tools": [{"type": "function"}]})]
    counts = {}
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    reader = client.makefile("rb")
    for i in range(3000):
        client.sendall(raw(mutated(bodies[i % 2], chance), ("/v1/completions", "/v1/chat/completions")[i % 2]))
        status = int(reader.readline().split()[1])
        length = 0
        while (line := reader.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        answer = json.loads(reader.read(length))
        counts[status] = counts.get(status, 0) + 1
        assert status in (200, 400, 404), answer
        assert status == 200 or set(answer["error"]) == {"message", "type", "param", "code"}
    client.close()
    assert counts[400] > 1000 and counts[200] > 50


def test_malformed_requests_close_their_connection_alone(server):
    chance = random.Random(6)
    request = raw({"model": NAME, "prompt": "x", "max_tokens": 1})
    for _ in range(300):
        client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        client.sendall(mutated(request[:90], chance) + request[90:])
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(1 << 16):
            answer += part
        client.close()
        assert not answer or answer.startswith(b"HTTP/1.1 ")


def test_clients_that_vanish_leave_nothing(server):
    """Each of 6,000 goes at another moment: in its request, before its answer, in its answer. The largest steps of the first rounds set the memory
    that the allocator keeps; the last 3,000 clients add less than 32 KB each."""
    chance = random.Random(7)
    request = raw({"model": NAME, "prompt": "x" * 50, "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 2})

    def one(seed):
        mine = random.Random(seed)
        client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        if mine.random() < 0.3:
            client.sendall(request[:mine.randrange(len(request))])
        else:
            client.sendall(request)
            time.sleep(mine.random() * 0.3)
            client.setblocking(False)
            try:
                client.recv(mine.randrange(1, 5000))
            except BlockingIOError:
                pass
        if mine.random() < 0.5:  # a reset
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        client.close()

    witnesses, resident = [], []
    for _ in range(20):
        threads = [threading.Thread(target=one, args=(chance.random(),)) for _ in range(300)]
        for i, thread in enumerate(threads):
            thread.start()
            if i % 100 == 50:
                witnesses.append(choices(server))
        for thread in threads:
            thread.join()
        until(lambda: is_idle(server))
        resident.append(server.resident_bytes())
    assert all(witness == witnesses[0] for witness in witnesses)
    assert resident[19] < resident[9] + (92 << 20), resident


def test_slow_readers_delay_nobody(server):
    """100 clients ask for long streams and read nothing; another one has its answer meanwhile, and then they have theirs whole."""
    request = raw({"model": NAME, "prompt": "slow", "max_tokens": 150, "ignore_eos": True, "stream": True, "seed": 1, "return_token_ids": True})
    slow = []
    for _ in range(100):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", server.port))
        client.sendall(request)
        slow.append(client)
    assert len(choices(server)) == 1
    until(lambda: is_idle(server))
    streams = set()
    for client in slow:
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += client.recv(1 << 16)
        client.close()
        streams.add(b"".join(re.findall(rb'"token_ids":\[[^\]]*\],?', received)))
    assert len(streams) == 1
