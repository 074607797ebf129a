"""An environment of `env_agent` behind a URL, served by Python's http.server: the same bytes as a program's, and each of its faults by name."""
import http.server
import json
import socket
import sys
import threading
import time

import pytest

from ppo_run import ACTOR, ROLLOUT, settings, train
from ranks import TORCH_PROGRAM, finish, start_training
from support import tree
from agent_world import CALLS, ENVIRONMENT, write_world

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("env_url"), CALLS)


def game(games, q):
    """The answers of ENVIRONMENT."""
    if q["method"] == "reset":
        time.sleep(len(games) % 2)  # connections of the others lie idle meanwhile
        games[q["session"]] = 0
        return {"observation": f"find {q['ground_truth']}"}
    if q["method"] == "close":
        return {"closed": games.pop(q["session"])}
    games[q["session"]] += 1
    good = len(q["action"]) % 2
    return {"observation": "go on", "reward": good / 4, "done": games[q["session"]] == 3, "info": {"acc": good}}


def send(handler, body, status=200, length=None):
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


def endlessly(handler, part, pause=0.):
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(part)
        handler.wfile.flush()
        time.sleep(pause)


def moved(handler):
    handler.send_response(307)
    handler.send_header("Location", "/games/step")
    send_nothing(handler)


def send_nothing(handler):
    handler.send_header("Content-Length", "0")
    handler.end_headers()


# The path of a step: what is done instead of an answer, and what the run says of it.
FAULTS = {
    "fails": (lambda h: send(h, b"out of order", 500), "the server answered 500: out of order"),
    "moved": (moved, "the server answered 307"),
    "text": (lambda h: send(h, b"hello"), "the answer is no JSON object: hello"),
    "list": (lambda h: send(h, b"[1]"), "the answer is no JSON object: [1]"),
    "bytes": (lambda h: send(h, b'{"observation": "\xff"}'), "the answer is no JSON object"),
    "deep": (lambda h: send(h, b'{"info":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"), "the answer is nested too deep"),
    "cut": (lambda h: send(h, b'{"done": tr', length=100), "transfer closed with"),
    "gone": (lambda h: h.connection.shutdown(socket.SHUT_RDWR), "the connection broke off before an answer"),
    "hangs": (lambda h: time.sleep(30), "timed out after"),
    "drips": (lambda h: endlessly(h, b" ", .1), "timed out after"),
    "endless": (lambda h: endlessly(h, b" " * 65536), "sends more than 16777216 bytes"),
    "number": (lambda h: send(h, b'{"observation": 1}'), "an observation is text"),
    "reward": (lambda h: send(h, b'{"observation": "x", "reward": 1e300}'), "a reward of 1e+300 is too large"),
    "silent": (lambda h: send(h, b"{}"), "it is not done, and says nothing"),
    "error": (lambda h: send(h, b'{"error": "no such game"}'), "no such game"),
}


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128

    def __init__(self):
        self.games, self.asked, self.idle = {}, [], 60
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=[.05], daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_):  # clients that are gone
        pass


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.connection.settimeout(self.server.idle)
        *_, kind, method = self.path.split("/")
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((kind, method))
        if method == "step" and kind in FAULTS:
            self.close_connection = True
            return FAULTS[kind][0](self)
        send(self, json.dumps(game(self.server.games.setdefault(kind, {}), question | {"method": method})).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


def asking(url):
    return {f"{ROLLOUT}.agent.default_agent_loop": "env_agent", f"{ROLLOUT}.agent.env_url": url, "reward_model.command": None,
            "data.max_prompt_length": 64, "data.max_response_length": 48, f"{ACTOR}.ppo_max_token_len_per_gpu": 256}


def test_it_has_the_bytes_of_a_program_and_is_played_again_without_a_server(server, world, work):
    """The server closes connections that lie idle for a moment, as servers do; limits end sessions, of which it is told."""
    server.idle = .8
    (work / "environment.py").write_text(ENVIRONMENT)
    more = asking(f"{server.url}/games/") | {f"{ROLLOUT}.multi_turn.max_assistant_turns": 2}
    far = train(world, work / "far", **more)
    near = {f"{ROLLOUT}.agent.env_url": "", f"{ROLLOUT}.agent.env_command": f"{sys.executable} {work / 'environment.py'}"}
    assert train(world, work / "near", **more | near) == far
    assert server.asked.count(("games", "reset")) == 16 and ("games", "close") in server.asked and not server.games["games"]
    again = {f"{ROLLOUT}.agent.env_url": "http://127.0.0.1:1/nobody", f"{ROLLOUT}.agent.replay_dir": str(work / "far/sessions")}
    assert train(world, work / "again", **more | again) == far
    for run in ("near", "again"):
        for folder in ("rollouts", "sessions"):
            assert tree(work / run / folder) == tree(work / "far" / folder)


def test_each_fault_ends_the_run_by_its_name(server, world, work):
    """All at a time, each a run. Nothing is asked twice."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        urls = {f"{server.url}/{kind}": said for kind, (_, said) in FAULTS.items()} | {dead: "Failed to connect"}
        runs = {url: start_training(1, "grpo", settings(world, work / str(i), **asking(url), **{f"{ROLLOUT}.agent.env_timeout": 5}))
                for i, url in enumerate(urls)}
        for url, said in urls.items():
            (status, told), = finish(runs[url], timeout=120)
            assert status == 2 and said in told, (url, told[-2000:])
            assert "session" in told if "reward" in url else f"{url}/" in told or "the environment" in told, told[-2000:]
    for kind in FAULTS:
        assert server.asked.count((kind, "reset")) == 8 and server.asked.count((kind, "step")) <= 8


def test_an_address_is_of_http(world, work):
    (status, told), = finish(start_training(1, "grpo", settings(world, work / "run", **asking("ftp://127.0.0.1/x"))), timeout=60)
    assert status == 2 and "agent.env_url" in told
