"""Checkpoints at addresses: https and http, the hub, S3. Their servers run on 127.0.0.1; networks are as bad as a proxy makes them."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from servers import COMMIT, make_certificate, serve_faults, serve_files, serve_hub, serve_s3
from support import digest_of, ferry, ferry_json, llama_config, refuse, run_ok, tree

CONFIG = llama_config(hidden_size=256, intermediate_size=768, vocab_size=2000)  # 8 MB
QUICK = {**os.environ, "FERRY_HTTP_TIMEOUT": "1", "FERRY_HTTP_RETRIES": "3"}


def is_weights(request):
    return request.path.endswith(".safetensors") and "bytes=0-" not in request.headers.get("Range", "")


# ------------------------------------------------------------------------------------------------------------ files

def test_http_source_gives_the_bytes_of_the_folder(model, files, work):
    run_ok("convert", f"{files.url}/hf", work / "remote", "--tp", "2")
    run_ok("convert", model, work / "local", "--tp", "2")
    assert tree(work / "remote") == tree(work / "local")


@pytest.mark.parametrize("command", ["digest", "inspect"])
def test_http_source_reports_what_the_folder_reports(command, model, files):
    local, remote = (ferry_json(command, where) for where in (model, f"{files.url}/hf"))
    for report in (local, remote):
        for key in ("source", "path", "root", "folder"):
            report.pop(key, None)
    assert local == remote


def test_verify_compares_an_address_with_a_folder(model, files):
    run_ok("verify", f"{files.url}/hf/", model)
    run_ok("diff", model, f"{files.url}/hf")


def test_server_that_lists_nothing_serves_a_model_by_its_names(model, work):
    with serve_files(model.parent, lists=False) as server:
        run_ok("convert", f"{server.url}/hf", work / "out", "--to", "hf")
        refuse("digest", f"{server.url}/hf", words=["the server lists no files"])
    assert tree(work / "out") == tree(model)


def test_megatron_checkpoint_is_read_from_a_server_that_lists(model, work):
    run_ok("convert", model, work / "mcore", "--tp", "2", "--pp", "2")
    with serve_files(work) as server:
        run_ok("convert", f"{server.url}/mcore", work / "back")
    assert tree(work / "back") == tree(model)


@pytest.mark.parametrize("address, words", [
    ("http://user:secret@127.0.0.1/model", ["a user's name or password"]),
    ("http://127.0.0.1/model?token=secret", ["a query names no folder"]),
    ("http://127.0.0.1/a/../b", ["..", "empty name"]),
])
def test_address_that_could_leak_or_mislead_is_refused(address, words):
    assert "secret" not in refuse("inspect", address, words=words)


def test_host_that_is_not_found_is_said_so():
    """A label of 64 letters is none that a resolver would ask a server for."""
    refuse("inspect", f"https://{'a' * 64}.example/hf", words=["Could not resolve host", "4 times"], env=QUICK)


def test_server_that_nobody_runs_is_given_up_soon():
    """Patience is for servers that were reached before."""
    begin = time.monotonic()
    refuse("inspect", "http://127.0.0.1:9/hf", words=["Couldn't connect", "4 times"])
    assert time.monotonic() - begin < 8


def trusting(certificate):
    others = {name: value for name, value in os.environ.items() if name != "CURL_CA_BUNDLE"}
    return {**others, "SSL_CERT_FILE": str(certificate)}


def test_https_source_with_a_certificate_that_is_trusted(model, work):
    certificate = make_certificate(work / "server.pem")
    with serve_files(model.parent, certificate=certificate) as server:
        run_ok("convert", f"{server.url}/hf", work / "out", "--to", "hf", env=trusting(certificate))
    assert tree(work / "out") == tree(model)


@pytest.mark.parametrize("trusted, certificate", [(False, {}), (True, {"address": "127.0.0.2"}), (True, {"days": -0.5})],
                         ids=["signed by nobody", "of another host", "expired"])
def test_https_source_with_a_bad_certificate_is_refused(trusted, certificate, model, work):
    certificate = make_certificate(work / "server.pem", **certificate)
    with serve_files(model.parent, certificate=certificate) as server:
        message = refuse("convert", f"{server.url}/hf", work / "out", words=["certificate"], env=trusting(certificate) if trusted else None)
    assert "times" not in message and not (work / "out").exists()


def test_without_libcurl_files_are_read_and_addresses_say_why_not(model, files, work):
    for name in ("libcurl.so.4", "libcurl-gnutls.so.4"):
        (work / name).write_text("no library\n")
    env = {**os.environ, "LD_LIBRARY_PATH": str(work)}
    run_ok("inspect", model, env=env)
    refuse("inspect", f"{files.url}/hf", env=env, words=["libcurl, which reads all addresses, cannot be loaded", "libcurl.so.4", "apt-get install libcurl4"])


def test_address_of_a_web_server_as_target_is_refused(model):
    refuse("convert", model, "http://127.0.0.1:9/out", words=["a conversion is written to a folder or to S3"])


# ----------------------------------------------------------------------------------------------------------- faults

def digest_through(files, fault, env=QUICK):
    with serve_faults(files.url, fault) as proxy:
        return ferry("digest", f"{proxy.url}/hf", "--tensors-only", "--json", env=env), proxy


def assert_survives(model, files, fault):
    done, _ = digest_through(files, fault)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == digest_of(model)[0]


def assert_refused(files, fault, *words):
    done, _ = digest_through(files, fault)
    assert done.returncode == 2 and all(word in done.stderr for word in words), done.stderr


def test_cut_connections_are_resumed_at_the_byte_where_they_broke(model, files):
    cuts = []

    def fault(n, request, answer):
        if is_weights(request) and len(answer.body) > 100000 and len(cuts) < 5:
            answer.cut = 70000
            cuts.append(request.headers["Range"])
    with serve_faults(files.url, fault) as proxy:
        assert digest_of(f"{proxy.url}/hf") == digest_of(model)
        ranges = [r.headers.get("Range") for r in proxy.log]
    first = int(cuts[0].removeprefix("bytes=").split("-")[0])
    assert any(r and r.startswith(f"bytes={first + 70000}-") for r in ranges)


def test_busy_server_is_asked_again(model, files):
    def fault(n, request, answer):
        if n % 7 == 0:
            answer.status, answer.body = 503, b"slow down"
            answer.set("Content-Length", None)
    assert_survives(model, files, fault)


def test_server_that_stays_busy_is_given_up(files):
    def fault(n, request, answer):
        if is_weights(request):
            answer.status, answer.body = 503, b"slow down"
            answer.set("Content-Length", None)
    assert_refused(files, fault, "answered 503", "4 times")


def test_slow_bytes_are_given_up_and_asked_again(model, files):
    slow = []

    def fault(n, request, answer):
        if is_weights(request) and not slow:
            slow.append(n)
            answer.seconds = 0.05
    assert_survives(model, files, fault)
    assert slow


def test_object_that_is_replaced_midway_is_an_error(files):
    def fault(n, request, answer):
        if is_weights(request) and n > 15:
            answer.set("ETag", '"another"')
    assert_refused(files, fault, "was changed by someone else while it was read")


def test_object_that_is_replaced_after_it_was_read_is_an_error(files):
    seen = {}

    def fault(n, request, answer):
        if request.path.endswith("model-00001-of-00003.safetensors") and "bytes=0-131071" == request.headers.get("Range"):
            seen["heads"] = seen.get("heads", 0) + 1
            if seen["heads"] > 1:
                answer.set("ETag", '"another"')
    assert_refused(files, fault, "model-00001-of-00003.safetensors: was replaced by another file while it was read")


def test_object_that_becomes_shorter_is_an_error(files):
    def fault(n, request, answer):
        if is_weights(request):
            first, rest = dict(answer.headers)["Content-Range"].split("-", 1)
            answer.set("Content-Range", f"{first}-{rest.split('/')[0]}/1000000")
    assert_refused(files, fault, "the server answers bytes")


def test_wrong_range_is_an_error(files):
    def fault(n, request, answer):
        if is_weights(request):
            answer.set("Content-Range", "bytes 0-9/10")
    assert_refused(files, fault, "the server answers bytes 0-9/10")


def test_length_that_lies_is_an_error(files):
    def fault(n, request, answer):
        if is_weights(request):
            answer.set("Content-Length", str(len(answer.body) + 10))
            answer.body += b"0123456789"
    assert_refused(files, fault, "the server announces")


def test_endless_body_is_an_error(files):
    def fault(n, request, answer):
        if is_weights(request):
            answer.body *= 3
            answer.set("Content-Length", None)
            answer.set("Transfer-Encoding", "chunked")
            answer.body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(answer.body), answer.body)
    assert_refused(files, fault, "sends more than the")


def test_compressed_body_is_an_error(files):
    def fault(n, request, answer):
        if is_weights(request):
            answer.set("Content-Encoding", "gzip")
    assert_refused(files, fault, "sends gzip where plain bytes were asked for")


def test_server_without_ranges_is_an_error(files):
    def fault(n, request, answer):
        if request.path.endswith(".safetensors"):
            answer.status = 200
            answer.set("Content-Range", None)
            answer.body = bytes(300000)
            answer.set("Content-Length", None)
    assert_refused(files, fault, "answers no ranges of bytes")


def test_server_without_versions_is_an_error(files):
    def fault(n, request, answer):
        answer.set("ETag", None)
    assert_refused(files, fault, "neither ETag nor Last-Modified")


def test_circle_of_redirects_is_an_error(files):
    def fault(n, request, answer):
        answer.status, answer.body = 302, b""
        answer.set("Content-Length", None)
        answer.set("Location", request.path)
    assert_refused(files, fault, "redirects in circles")


def test_redirect_whose_query_holds_an_address_stays_on_its_server(model, files):
    def fault(n, request, answer):
        if request.path.endswith(".safetensors"):
            answer.status, answer.body = 302, b""
            answer.set("Content-Length", None)
            answer.set("Location", request.path + "?from=http://192.0.2.1/elsewhere")
    assert_survives(model, files, fault)


def test_conversion_that_a_server_ended_is_resumed(model, files, work):
    broken = [True]

    def fault(n, request, answer):
        if broken[0] and request.path.endswith("model-00003-of-00003.safetensors") and is_weights(request):
            answer.status, answer.body = 500, b""
            answer.set("Content-Length", None)
    with serve_faults(files.url, fault) as proxy:
        said = refuse("convert", f"{proxy.url}/hf", work / "out", "--threads", "1", env=QUICK, words=["answered 500"])
        assert "--resume" in said
        broken[0] = False
        report = ferry_json("convert", f"{proxy.url}/hf", work / "out", "--resume", "--threads", "1", env=QUICK)
    assert report["resumed_bytes"] > 0
    run_ok("convert", model, work / "local")
    assert tree(work / "out") == tree(work / "local")


# -------------------------------------------------------------------------------------------------------------- hub

def hub_environment(hub, work, **more):
    ours = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    return {**ours, "HF_ENDPOINT": hub.url, "HF_HOME": str(work / "hf_home"), "HF_HUB_DISABLE_XET": "1", **more}


def download(hub, work, *ignored):
    """huggingface_hub downloads the model into its cache. -> the folder of the snapshot"""
    code = f"import huggingface_hub as h; print(h.snapshot_download('org/model', ignore_patterns={list(ignored)!r}))"
    done = subprocess.run([sys.executable, "-c", code], env=hub_environment(hub, work), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return Path(done.stdout.strip())


def test_hub_is_one_that_huggingface_hub_downloads_from(model, work):
    """... so that what the next tests show of it holds for the hub, too."""
    with serve_hub(model) as hub:
        assert tree(download(hub, work)) == tree(model)


def test_hub_model_gives_the_bytes_of_the_folder(model, work):
    with serve_hub(model) as hub:
        run_ok("convert", "hf://org/model", work / "out", "--to", "hf", env=hub_environment(hub, work))
        run_ok("inspect", f"hf://org/model@{COMMIT}", env=hub_environment(hub, work))
        refuse("inspect", "hf://org/model@other", words=["no such model or revision"], env=hub_environment(hub, work))
    assert tree(work / "out") == tree(model)


def test_private_model_needs_the_token_which_goes_to_no_other_host_and_into_no_text(model, files, work):
    with serve_faults(files.url) as cdn, serve_hub(model, token="hf_secret", cdn=f"http://localhost:{cdn.server_port}/hf") as hub:
        refuse("inspect", "hf://org/model", words=["answers 401: Access to model org/model is restricted", "set HF_TOKEN"],
               env=hub_environment(hub, work))
        env = hub_environment(hub, work, HF_TOKEN="hf_secret")
        done = run_ok("digest", "hf://org/model", "--output", work / "manifest", env=env)
        requests = [r for r in cdn.log if r.path.startswith("/hf/model-")]
        assert requests and not [r for r in requests if r.headers.get("Authorization")]
    said = done.stdout + done.stderr + (work / "manifest").read_text()
    assert "hf_secret" not in said and "Signature" not in said


def test_cache_of_the_hub_is_read_in_place_of_the_network(model, files, work):
    with serve_hub(model) as hub:
        env = hub_environment(hub, work)
        download(hub, work, "model-00002-of-00003.safetensors")
        with serve_faults(hub.url) as proxy:
            run_ok("digest", "hf://org/model", env={**env, "HF_ENDPOINT": proxy.url})
            asked = {r.path.split("/")[-1].split("?")[0] for r in proxy.log}
        assert asked == {"main", "model-00002-of-00003.safetensors"}
    offline = {**env, "HF_HUB_OFFLINE": "1"}
    refuse("inspect", "hf://org/model", env=offline, words=["model-00002-of-00003.safetensors: is not in the hub's cache"])
    with serve_hub(model) as hub:
        download(hub, work)
    assert ferry_json("digest", "hf://org/model", "--tensors-only", env=offline)["model"] == digest_of(model)[0]


# --------------------------------------------------------------------------------------------------------------- S3

@pytest.fixture(scope="module")
def s3(model):
    """moto's server, with the model in s3://models/a/hf; `boto` is a client of boto3."""
    with serve_s3() as server:
        server.boto.create_bucket(Bucket="models")
        for path in model.iterdir():
            server.boto.upload_file(str(path), "models", f"a/hf/{path.name}")
        server.boto.put_object(Bucket="models", Key="a/hf2/config.json", Body=b"{}")  # begins as the other does
        yield server


def s3_environment(server, **more):
    ours = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    return {**ours, "AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "s3_secret", **more}


def test_s3_source_gives_the_bytes_of_the_folder(model, s3, work):
    done = run_ok("convert", "s3://models/a/hf", work / "out", "--to", "hf", env=s3_environment(s3))
    assert tree(work / "out") == tree(model)
    assert "s3_secret" not in done.stdout + done.stderr


def test_s3_requests_bear_the_signatures_of_botocore(model, s3, work):
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials
    s3.boto.put_object(Bucket="models", Key="a/odd/a b+c=\u00e9&d.json", Body=b"{}")
    for path in model.iterdir():
        s3.boto.upload_file(str(path), "models", f"a/odd/{path.name}")
    with serve_faults(s3.url) as proxy:
        run_ok("digest", "s3://models/a/odd", env=s3_environment(proxy, AWS_SESSION_TOKEN="token", AWS_REGION="eu-west-3"))
        assert len(proxy.log) > 10
        for request in proxy.log:
            scheme, rest = request.headers["Authorization"].split(" ", 1)
            fields = dict(field.strip().split("=", 1) for field in rest.split(","))
            signed = fields["SignedHeaders"].split(";")
            assert {"host", "x-amz-security-token", "x-amz-content-sha256"} <= set(signed)
            again = AWSRequest(method=request.command, url=proxy.url + request.path, headers={h: request.headers[h] for h in signed})
            again.context["timestamp"] = request.headers["X-Amz-Date"]
            auth = S3SigV4Auth(Credentials("key", "s3_secret"), "s3", "eu-west-3")
            auth.headers_to_sign = lambda r: auth_headers(r)
            wanted = auth.signature(auth.string_to_sign(again, auth.canonical_request(again)), again)
            assert fields["Signature"] == wanted, request.path


def auth_headers(request):
    from botocore.compat import HTTPHeaders
    return HTTPHeaders.from_dict({k.lower(): v for k, v in request.headers.items()})


AWS_KEYS = """[default]
aws_access_key_id = default-key
aws_secret_access_key = default_secret

[runs]
aws_access_key_id = runs-key
aws_secret_access_key = s3_secret=+/#
aws_session_token = runs-token
"""
AWS_CONFIG = """# of a user
[default]
region = eu-west-3
endpoint_url = {default}

[profile runs]
region = us-west-2
services = local
s3 =
  addressing_style = path

[services local]
s3 =
  endpoint_url = {runs}
"""


@pytest.mark.parametrize("profile", [None, "runs"])
def test_s3_settings_of_files_are_those_of_botocore(profile, model, s3, work):
    import botocore.session
    with serve_faults(s3.url) as default, serve_faults(s3.url) as runs:
        (work / "keys").write_text(AWS_KEYS)
        (work / "config").write_text(AWS_CONFIG.format(default=default.url, runs=runs.url))
        env = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        env |= {"AWS_SHARED_CREDENTIALS_FILE": str(work / "keys"), "AWS_CONFIG_FILE": str(work / "config"), "TMPDIR": str(work)}
        env |= {"AWS_PROFILE": profile} if profile else {}
        done = run_ok("convert", "s3://models/a/hf", f"s3://models/{profile}/out", "--tp", "2", env=env)
        assert "secret" not in done.stdout + done.stderr
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("AWS_")]:
                patch.delenv(name)
            for name in [name for name in env if name.startswith("AWS_")]:
                patch.setenv(name, env[name])
            session = botocore.session.Session()
            keys, region = session.get_credentials(), session.get_config_variable("region")
            endpoint = session.create_client("s3").meta.endpoint_url
        asked, other = (default, runs) if endpoint == default.url else (runs, default)
        assert endpoint == asked.url and len(asked.log) > 5 and not other.log
        for request in asked.log:
            assert f"Credential={keys.access_key}/" in request.headers["Authorization"] and f"/{region}/s3/" in request.headers["Authorization"]
            assert request.headers.get("x-amz-security-token") == keys.token
    run_ok("verify", f"s3://models/{profile}/out", model, env=s3_environment(s3))


def test_s3_profile_that_is_not_there_is_said_so(s3, work):
    (work / "keys").write_text(AWS_KEYS)
    env = s3_environment(s3, AWS_SHARED_CREDENTIALS_FILE=str(work / "keys"), AWS_CONFIG_FILE=str(work / "none"), AWS_PROFILE="run")
    refuse("inspect", "s3://models/a/hf", words=["there is no profile run in", str(work / "keys"), str(work / "none")], env=env)


def test_megatron_root_in_a_bucket_is_read_by_its_tracker(model, s3, work):
    run_ok("convert", model, work / "mcore", "--tp", "2")
    for path in (p for p in (work / "mcore").rglob("*") if p.is_file()):
        s3.boto.upload_file(str(path), "models", f"run/{path.relative_to(work / 'mcore')}")
    run_ok("convert", "s3://models/run", work / "back", env=s3_environment(s3))
    assert tree(work / "back") == tree(model)
    run_ok("verify", "s3://models/run", "s3://models/a/hf", env=s3_environment(s3))


def test_list_of_objects_is_read_page_by_page(model, s3):
    def rewrite(path):
        return path + "&max-keys=2" if "list-type=2" in path else path
    with serve_faults(s3.url, rewrite=rewrite) as proxy:
        run_ok("verify", "s3://models/a/hf", model, env=s3_environment(proxy))
        assert len([r for r in proxy.log if "continuation-token" in r.path]) >= 4


def test_s3_address_that_is_not_there_is_said_so(s3):
    refuse("inspect", "s3://models/nothing", words=["s3://models/nothing: is not there"], env=s3_environment(s3))
    refuse("inspect", "s3://no-such-bucket/x", words=["NoSuchBucket"], env=s3_environment(s3))
    refuse("inspect", "s3:///x", words=["holds an empty name"], env=s3_environment(s3))


def test_s3_object_that_is_replaced_midway_is_an_error(s3):
    def fault(n, request, answer):
        if is_weights(request):
            answer.set("ETag", '"another"')
    with serve_faults(s3.url, fault) as proxy:
        refuse("digest", "s3://models/a/hf", words=["was changed by someone else"], env=s3_environment(proxy))
