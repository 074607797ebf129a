"""Answers of servers that say when to come back, what is wrong, or less than they might."""
import email.utils
import os
import time

import pytest

from servers import FileHandler, serve, serve_faults, serve_files, serve_hub, serve_s3
from support import ferry_json, llama_config, refuse, run_ok, tree

CONFIG = llama_config(hidden_size=128, intermediate_size=384, vocab_size=2000)
QUICK = {**os.environ, "FERRY_HTTP_TIMEOUT": "2", "FERRY_HTTP_RETRIES": "1"}


def digest(path, env=None):
    return ferry_json("digest", path, "--tensors-only", env=env)["model"]


@pytest.fixture(scope="module")
def s3(model):
    with serve_s3() as server:
        server.boto.create_bucket(Bucket="models")
        yield server


def s3_environment(server, **more):
    ours = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    return {**ours, "AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "s3_secret", "FERRY_HTTP_RETRIES": "1", **more}


WORDS = {"seconds": lambda now: {"Retry-After": "2"},
         "date": lambda now: {"Retry-After": email.utils.formatdate(now + 2, usegmt=True), "Date": email.utils.formatdate(now, usegmt=True)},
         "date_of_another_clock": lambda now: {"Retry-After": email.utils.formatdate(now - 86398, usegmt=True),
                                               "Date": email.utils.formatdate(now - 86400, usegmt=True)},
         "hub": lambda now: {"RateLimit": '"resolvers";r=0;t=2', "RateLimit-Policy": '"fixed window";"resolvers";q=5000;w=300'}}


@pytest.mark.parametrize("words", WORDS)
def test_server_is_asked_again_when_it_said(words, model, files):
    answered = []

    def fault(n, request, answer):
        if len(answered) < 2:
            answered.append(time.monotonic())
        if len(answered) == 1:
            answer.status, answer.body = 429, b""
            for name, value in {"Content-Length": None, **WORDS[words](time.time())}.items():
                answer.set(name, value)
    with serve_faults(files.url, fault) as proxy:
        assert digest(f"{proxy.url}/hf", QUICK) == digest(model)
    assert answered[1] - answered[0] > 1.9


@pytest.mark.parametrize("words", ["-5", "soon", "Thu, 01 Jan 1970 00:00:00 GMT", "9" * 30], ids=str)
def test_pause_that_cannot_be_meant_is_none(words, model, files):
    def fault(n, request, answer):
        if n == 1:
            answer.status, answer.body = 503, b""
            answer.set("Content-Length", None)
            answer.set("Retry-After", words)
    begun = time.monotonic()
    with serve_faults(files.url, fault) as proxy:
        assert digest(f"{proxy.url}/hf", QUICK) == digest(model)
    assert time.monotonic() - begun < 10


ERRORS = {
    "expired": (400, "ExpiredToken", {}, "", ["ExpiredToken", "renew AWS_SESSION_TOKEN"]),
    "skewed": (403, "RequestTimeTooSkewed", {"Date": "Fri, 27 Nov 2026 06:20:56 GMT"}, "",
               ["RequestTimeTooSkewed", "the clock of this machine is wrong: at the store it is Fri, 27 Nov 2026 06:20:56 GMT"]),
    "redirected": (301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-3"}, "", ["answered 301", "the bucket is in the region eu-west-3: set AWS_REGION"]),
    "malformed": (400, "AuthorizationHeaderMalformed", {}, "<Region>eu-west-3</Region>", ["the bucket is in the region eu-west-3: set AWS_REGION"]),
    "denied": (403, "AccessDenied", {"x-amz-bucket-region": "eu-west-3"}, "", ["AccessDenied"]),
}


@pytest.mark.parametrize("asked", ["list-type", "config.json", "safetensors"])
@pytest.mark.parametrize("error", ERRORS)
def test_error_of_s3_says_what_to_mend(error, asked, model, s3):
    for path in model.iterdir():
        s3.boto.upload_file(str(path), "models", f"hf/{path.name}")
    status, code, headers, more, words = ERRORS[error]

    def fault(n, request, answer):
        if asked in request.path and (asked != "safetensors" or "bytes=0-" not in request.headers["Range"]):
            answer.status, answer.body = status, f"<Error><Code>{code}</Code>{more}</Error>".encode()
            for name, value in {"Content-Length": None, **headers}.items():
                answer.set(name, value)
    with serve_faults(s3.url, fault) as proxy:
        said = refuse("digest", "s3://models/hf", words=words, env=s3_environment(proxy, AWS_SESSION_TOKEN="session_secret"))
    assert "secret" not in said and ("AWS_REGION" in said) == any("AWS_REGION" in word for word in words)


class PlainHandler(FileHandler):
    """A server of HTTP/1.0, which closes each connection and does not say how long a body is."""
    protocol_version = "HTTP/1.0"

    def send_header(self, name, value):
        if name != "Content-Length":
            super().send_header(name, value)


class ChunkHandler(FileHandler):
    """Bodies in chunks, without a length."""

    def answer(self, status, body=b"", headers=()):
        self.send_response(status)
        for name, value in [*headers, ("Transfer-Encoding", "chunked")]:
            self.send_header(name, value)
        self.end_headers()
        for begin in range(0, len(body), 5000) if self.command != "HEAD" else ():
            chunk = body[begin:begin + 5000]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n" if self.command != "HEAD" else b"")


@pytest.mark.parametrize("handler", [PlainHandler, ChunkHandler])
def test_bodies_without_a_length_are_read_by_their_range(handler, model, work):
    with serve(handler, root=model.parent, lists=True) as server:
        run_ok("convert", f"{server.url}/hf", work / "out", "--to", "hf")
    assert tree(work / "out") == tree(model)


def test_part_that_is_another_version_by_a_weak_etag_is_an_error(files):
    def fault(n, request, answer):
        late = request.path.endswith(".safetensors") and "bytes=0-" not in request.headers.get("Range", "")
        answer.set("ETag", 'W/"2"' if late else 'W/"1"')
    with serve_faults(files.url, fault) as proxy:
        refuse("digest", f"{proxy.url}/hf", words=["was changed by someone else"], env=QUICK)


def test_file_that_a_server_says_is_empty_is_no_checkpoint(files):
    def fault(n, request, answer):
        if request.path.endswith("00002-of-00003.safetensors"):
            answer.status, answer.body = 416, b""
            answer.set("Content-Length", None)
    with serve_faults(files.url, fault) as proxy:
        refuse("digest", f"{proxy.url}/hf", words=["00002-of-00003.safetensors"], env=QUICK)


def test_index_that_a_server_refuses_is_an_error(model):
    def fault(n, request, answer):
        if request.path.endswith(".index.json") and request.command == "GET":
            answer.status, answer.body = 403, b"<html>no</html>"
            answer.set("Content-Length", None)
    with serve_files(model.parent, lists=False) as server, serve_faults(server.url, fault) as proxy:
        refuse("digest", f"{proxy.url}/hf", words=["model.safetensors.index.json: the server answers 403"], env=QUICK)


KEYS = ["with space", "a+b", "100%25 sure", "\u6f22\u5b57 \u00e9", "q?x=1&y", "h#sh", "semi;colon,'quote'(1)!*~", 'double"quote', "tilde~$@:=", "a&amp;b<c>"]


@pytest.mark.parametrize("key", KEYS)
def test_folder_of_any_name_is_written_and_read_in_a_bucket(key, model, s3, work):
    address = f"s3://models/{key}/out"
    run_ok("convert", model, address, "--to", "hf", "--max-shard-size", "1GB", env=s3_environment(s3))
    found = [o["Key"] for o in s3.boto.list_objects_v2(Bucket="models", Prefix=f"{key}/out/")["Contents"]]
    assert f"{key}/out/model.safetensors" in found
    assert digest(address, s3_environment(s3)) == digest(model)
    run_ok("convert", address, work / "back", "--to", "hf", env=s3_environment(s3))
    run_ok("verify", model, work / "back")


@pytest.mark.parametrize("name", ["with space", "a+b", "100% sure", "\u6f22\u5b57", "semi;colon,'quote'(1)!*", 'double"quote', "a&amp;b<c>"])
def test_folder_of_any_name_is_read_from_a_web_server(name, model, work):
    (work / "root" / name).mkdir(parents=True)
    for path in model.iterdir():
        (work / "root" / name / path.name).symlink_to(path)
    with serve_files(work / "root") as server:
        assert digest(f"{server.url}/{name}") == digest(model)


def test_redirect_to_another_host_and_back_carries_no_token(model):
    """The other host sends the request on to the first, whose token it would thereby learn to use."""
    seen = []

    class Elsewhere(FileHandler):
        def do_GET(self):
            seen.append((self.path, self.headers.get("Authorization"), self.headers.get("Cookie")))
            self.answer(302, b"", [("Location", f"{self.server.back}/org/model/resolve/main/config.json")])
        do_HEAD = do_GET
    with serve(Elsewhere, back=None) as elsewhere, serve_hub(model, token="hf_secret", cdn=elsewhere.url) as hub:
        elsewhere.back = hub.url
        said = refuse("digest", "hf://org/model", words=["401"], env={**QUICK, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret", "HF_HUB_CACHE": "/nowhere",
                                                                                "HF_HUB_OFFLINE": "0"})
    assert seen and all(token is None and cookie is None for _, token, cookie in seen) and "hf_secret" not in said
