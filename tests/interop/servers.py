"""Servers on 127.0.0.1 for the tests of addresses: of files, of a hub, moto's S3, and a proxy that does what bad networks do."""
import base64
import hashlib
import html
import http.client
import json
import re
import ssl
import threading
import time
import urllib.parse
import zlib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a head and a body that are sent apart would wait 40 ms for each other

    def log_message(self, *arguments):
        pass

    def answer(self, status, body=b"", headers=()):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_file(self, path, headers=()):
        """The file, or the range of it that is asked for."""
        data = path.read_bytes()
        headers = [("ETag", f'"{hashlib.sha256(data).hexdigest()[:32]}"'), ("Accept-Ranges", "bytes"), *headers]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self.answer(200, data, headers)
        first, last = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
        if first >= len(data):
            return self.answer(416, b"", [*headers, ("Content-Range", f"bytes */{len(data)}")])
        self.answer(206, data[first:last + 1], [*headers, ("Content-Range", f"bytes {first}-{last}/{len(data)}")])


class FileHandler(Handler):
    def do_GET(self):
        path = self.server.root / urllib.parse.unquote(self.path.split("?")[0]).strip("/")
        if path.is_file() and not self.path.endswith("/"):
            return self.answer_file(path)
        if not path.is_dir() or not self.server.lists:
            return self.answer(404, b"no such file")
        names = sorted(p.name + "/" * p.is_dir() for p in path.iterdir())
        links = "".join(f'<a href="{urllib.parse.quote(n)}">{html.escape(n)}</a>\n' for n in ["../", *names])
        self.answer(200, f"<html><body>{links}</body></html>".encode(), [("Content-Type", "text/html; charset=utf-8")])

    do_HEAD = do_GET


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubHandler(Handler):
    """The part of the Hugging Face hub that huggingface_hub downloads from: the model org/model at `COMMIT`, which main names."""

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return self.answer(401, b'{"error":"Invalid credentials"}',
                               [("X-Error-Code", "GatedRepo"), ("X-Error-Message", "Access to model org/model is restricted.")])
        files = {str(p.relative_to(self.server.root)): p for p in sorted(self.server.root.rglob("*")) if p.is_file()}
        if found := re.fullmatch(r"/api/models/org/model(?:/revision/([^/]+))?", url.path):
            if found[1] not in (None, "main", "refs%2Fpr%2F1", COMMIT):
                return self.answer(404, b'{"error":"Invalid rev id"}', [("X-Error-Code", "RevisionNotFound")])
            siblings = [{"rfilename": n, "size": p.stat().st_size, "blobId": "0"} for n, p in files.items()]
            body = {"_id": "0", "id": "org/model", "modelId": "org/model", "sha": COMMIT, "private": False, "siblings": siblings, "tags": []}
            return self.answer(200, json.dumps(body).encode(), [("Content-Type", "application/json")])
        if re.fullmatch(rf"/api/models/org/model/tree/{COMMIT}/?.*", url.path):
            body = [{"type": "file", "path": n, "size": p.stat().st_size, "oid": "0"} for n, p in files.items()]
            return self.answer(200, json.dumps(body).encode(), [("Content-Type", "application/json")])
        found = re.fullmatch(r"/org/model/resolve/([^/]+)/(.+)", urllib.parse.unquote(url.path))
        if not found or found[1] not in ("main", COMMIT) or found[2] not in files:
            return self.answer(404, b"Entry not found", [("X-Error-Code", "EntryNotFound")])
        path = files[found[2]]
        headers = [("X-Repo-Commit", COMMIT)]
        if self.server.cdn and path.suffix == ".safetensors":
            sha = hashlib.sha256(path.read_bytes()).hexdigest()
            headers += [("X-Linked-Size", str(path.stat().st_size)), ("X-Linked-Etag", f'"{sha}"'),
                        ("Location", f"{self.server.cdn}/{found[2]}?X-Amz-Signature=secret")]
            return self.answer(302, b"", headers)
        self.answer_file(path, headers)

    do_HEAD = do_GET


class FaultHandler(Handler):
    """Hands requests on to another server. `fault(n, request, answer)` changes the n-th answer before it is sent."""

    def do_GET(self):
        server = self.server
        length = int(self.headers.get("Content-Length") or 0)
        sent = self.rfile.read(length)
        with server.lock:
            server.log.append(SimpleNamespace(command=self.command, path=self.path, headers=self.headers))
            number = len(server.log)
        if server.spoil:
            sent = server.spoil(self, sent)
        if server.checks and not is_sound(self, sent):
            return self.answer(400, b"<Error><Code>BadDigest</Code></Error>")
        upstream = http.client.HTTPConnection(urllib.parse.urlsplit(server.upstream).netloc, timeout=60)
        upstream.request(self.command, server.rewrite(self.path), sent, dict(self.headers))
        response = upstream.getresponse()
        answer = Answer(response.status, [(k, v) for k, v in response.getheaders() if k.lower() not in ("connection", "transfer-encoding")],
                        response.read())
        upstream.close()
        if server.checks:
            answer.set("x-amz-checksum-algorithm", self.headers["x-amz-checksum-algorithm"] if server.checks == "crc32" else None)
        time.sleep(server.delay)
        if server.fault:
            server.fault(number, self, answer)
        answer.send(self)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET


def is_sound(request, sent):
    """S3's checks, which moto leaves out: of a body by the checksum that a header has, of an upload's end by having one for each part."""
    if crc := request.headers.get("x-amz-checksum-crc32"):
        return crc == base64.b64encode(zlib.crc32(sent).to_bytes(4, "big")).decode()
    if md5 := request.headers.get("Content-MD5"):
        return md5 == base64.b64encode(hashlib.md5(sent).digest()).decode()
    return request.command != "PUT" and sent.count(b"<ChecksumCRC32>") == (request.server.checks == "crc32") * sent.count(b"<Part>")


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body
        self.cut = None     # bytes after which the connection breaks
        self.seconds = 0.0  # between bytes, after the first half

    def set(self, name, value):
        self.headers = [(k, v) for k, v in self.headers if k.lower() != name.lower()] + ([(name, value)] if value is not None else [])

    def send(self, handler):
        handler.send_response_only(self.status)
        for name, value in self.headers:
            handler.send_header(name, value)
        if not any(k.lower() in ("content-length", "transfer-encoding") for k, _ in self.headers) and self.status != 204:
            handler.send_header("Content-Length", str(len(self.body)))
        handler.end_headers()
        if handler.command == "HEAD":
            return
        body = self.body if self.cut is None else self.body[:self.cut]
        try:
            if self.seconds:
                half = len(body) // 2
                handler.wfile.write(body[:half])
                for byte in body[half:]:
                    handler.wfile.write(bytes([byte]))
                    handler.wfile.flush()
                    time.sleep(self.seconds)
            else:
                handler.wfile.write(body)
        except OSError:
            pass  # the client gave up, as it should
        if self.cut is not None:
            handler.close_connection = True


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the connections of a client with 16 threads at once: of one that finds no place here, the kernel asks again after a second


@contextmanager
def serve(handler, certificate=None, **state):
    """-> the server, whose `url` it answers at: HTTPS with a certificate, a file of it and its key"""
    server = Server(("127.0.0.1", 0), handler)
    server.url = f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_port}"
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    for name, value in state.items():
        setattr(server, name, value)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def serve_files(root, lists=True, certificate=None):
    return serve(FileHandler, certificate, root=root, lists=lists)


def make_certificate(path, address="127.0.0.1", days=1):
    """A certificate that signs itself, for `days` from yesterday; with its key, in one file."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    begin = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)
    certificate = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
                   .serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(begin + datetime.timedelta(days=1 + days))
                   .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
                   .sign(key, hashes.SHA256()))
    encoding = serialization.Encoding.PEM
    path.write_bytes(certificate.public_bytes(encoding) +
                     key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return path


def serve_hub(root, token=None, cdn=None):
    return serve(HubHandler, root=root, token=token, cdn=cdn)


def serve_faults(upstream, fault=None, delay=0.0, rewrite=lambda path: path, spoil=None, checks=None):
    """A proxy in front of the server, which `rewrite` changes paths for. Its `log` holds the requests. `spoil(request, sent)` -> other bytes for
    those that were sent. `checks`: the proxy checks what arrives, as S3 does ("crc32"), or a store that knows only Content-MD5 ("md5")."""
    return serve(FaultHandler, upstream=upstream, fault=fault, delay=delay, rewrite=rewrite, spoil=spoil, checks=checks, log=[],
                 lock=threading.Lock())


@contextmanager
def serve_s3():
    """moto's server. -> its `url`, and `boto`, a client of boto3"""
    import boto3
    from moto.server import ThreadedMotoServer
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="key", aws_secret_access_key="secret")
    try:
        yield SimpleNamespace(url=url, boto=client)
    finally:
        server.stop()
