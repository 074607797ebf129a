#!/usr/bin/env python3
"""A small S3 server over files, for measuring: file_s3.py FOLDER [PORT]. It prints its port. Bodies go from and to files
by sendfile and readinto, parts stay files of their own, so that a client and not the server is measured. No signature is checked. FILE_S3_CRC32=0:
the server knows no checksum but Content-MD5."""
import base64
import hashlib
import os
import re
import sys
import threading
import urllib.parse
import uuid
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.sax.saxutils import escape

LOCK = threading.Lock()
KNOWS_CRC32 = os.environ.get("FILE_S3_CRC32") != "0"
OBJECTS = {}  # "bucket/key" -> (ETag, [(path, size)])
UPLOADS = {}  # id -> (name, {number: (md5, path, size)})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a head and a body that are sent apart would wait 40 ms for each other
    wbufsize = 0

    def log_message(self, *arguments):
        pass

    def answer(self, status, body="", **headers):
        data = body.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def place(self):
        url = urllib.parse.urlsplit(self.path)
        return urllib.parse.unquote(url.path).strip("/"), dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))

    def take_body(self):
        """-> (md5, path, size) of the body, in a file; boto3 sends it in chunks with a checksum behind"""
        path, wanted = ROOT / uuid.uuid4().hex, self.headers.get("x-amz-checksum-crc32")
        digest, size, crc = hashlib.md5(), 0, 0
        with open(path, "wb") as file:
            def take(left):
                nonlocal size, crc
                size += left
                while left:
                    data = self.rfile.read(min(left, 1 << 20))
                    digest.update(data)
                    if wanted:
                        crc = zlib.crc32(data, crc)
                    file.write(data)
                    left -= len(data)
            if "aws-chunked" in self.headers.get("Content-Encoding", "") or "Transfer-Encoding" in self.headers:
                while length := int(self.rfile.readline().split(b";")[0], 16):
                    take(length)
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    pass
            else:
                take(int(self.headers["Content-Length"]))
        assert not wanted or wanted == base64.b64encode(crc.to_bytes(4, "big")).decode()
        return digest.hexdigest(), path, size

    def do_GET(self):
        name, query = self.place()
        if "list-type" in query:
            return self.list(name, query)
        if "uploads" in query:
            return self.answer(200, "<ListMultipartUploadsResult></ListMultipartUploadsResult>")
        found = OBJECTS.get(name)
        if not found:
            return self.answer(404, "<Error><Code>NoSuchKey</Code></Error>")
        etag, files = found
        total = sum(size for _, size in files)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), min(int(asked[2] or total), total - 1)) if asked else (0, total - 1)
        if first >= total and asked:
            return self.answer(416)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{total}")
        for header, value in (("ETag", f'"{etag}"'), ("Content-Length", last - first + 1), ("Accept-Ranges", "bytes"),
                              ("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")):
            self.send_header(header, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        at = 0
        for path, size in files:
            begin, end = max(first, at), min(last + 1, at + size)
            if begin < end:
                with open(path, "rb") as file:
                    offset = begin - at
                    while offset < end - at:
                        offset += os.sendfile(self.connection.fileno(), file.fileno(), offset, end - at - offset)
            at += size

    do_HEAD = do_GET

    def list(self, bucket, query):
        prefix = f"{bucket}/{query.get('prefix', '')}"
        rows = "".join(f"<Contents><Key>{escape(n[len(bucket) + 1:])}</Key><Size>{sum(s for _, s in f)}</Size><ETag>\"{e}\"</ETag></Contents>"
                       for n, (e, f) in sorted(OBJECTS.items()) if n.startswith(prefix))
        self.answer(200, f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>')

    def do_PUT(self):
        name, query = self.place()
        md5, path, size = self.take_body()
        with LOCK:
            if "partNumber" in query:
                UPLOADS[query["uploadId"]][1][int(query["partNumber"])] = (md5, path, size)
            else:
                OBJECTS[name] = (md5, [(path, size)])
        self.answer(200, ETag=f'"{md5}"')

    def do_POST(self):
        name, query = self.place()
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "uploads" in query:
            upload = uuid.uuid4().hex
            UPLOADS[upload] = (name, {})
            headers = {"x-amz-checksum-algorithm": "CRC32"} if KNOWS_CRC32 and self.headers.get("x-amz-checksum-algorithm") == "CRC32" else {}
            return self.answer(200, f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>", **headers)
        parts = [part for _, part in sorted(UPLOADS.pop(query["uploadId"])[1].items())]
        etag = f"{hashlib.md5(b''.join(bytes.fromhex(md5) for md5, _, _ in parts)).hexdigest()}-{len(parts)}"
        OBJECTS[name] = (etag, [(path, size) for _, path, size in parts])
        self.answer(200, f'<CompleteMultipartUploadResult><ETag>"{etag}"</ETag></CompleteMultipartUploadResult>')

    def do_DELETE(self):
        name, query = self.place()
        files = OBJECTS.pop(name, ("", []))[1] if "uploadId" not in query else [p[1:] for p in UPLOADS.pop(query["uploadId"], (0, {}))[1].values()]
        for path, _ in files:
            path.unlink()
        self.answer(204)


if __name__ == "__main__":
    ROOT = Path(sys.argv[1])
    ROOT.mkdir(parents=True, exist_ok=True)
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2]) if len(sys.argv) > 2 else 0), Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()
