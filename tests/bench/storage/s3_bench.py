#!/usr/bin/env python3
"""A conversion from a bucket to a bucket, beside boto3's download, a local conversion and boto3's upload; and inspect over a slow line.

    build/peers/bin/python tests/bench/storage/s3_bench.py [--ferry build/cli/ferry] [--folder build/bench/s3] [--only inspect|convert]

The model of 3 GB that is converted (make_checkpoint.py qwen2.5-1.5b), and the one of 642 GB that is inspected through a server that waits 20 ms
(deepseek-v3-671b, of holes), are made in FOLDER if they are not there; --model and --shape name others. It takes 16 GB of disk."""
import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "interop"))


def seconds(act):
    start = time.monotonic()
    act()
    return time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ferry", default="build/cli/ferry")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("build/bench/s3"))
    parser.add_argument("--only", choices=["inspect", "convert"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", default="2")
    arguments = parser.parse_args()
    if arguments.only != "convert":
        arguments.shape = arguments.shape or made(arguments.folder, "deepseek-v3-671b", "--sparse")
        inspect(arguments)
    if arguments.only != "inspect":
        arguments.model = arguments.model or made(arguments.folder, "qwen2.5-1.5b")
        convert(arguments)


def made(folder, shape, *options):
    path = folder / shape
    if not path.exists():
        unfinished = folder / f"{shape}.new"
        subprocess.run([sys.executable, HERE.parent / "make_checkpoint.py", shape, unfinished, *options], check=True)
        unfinished.rename(path)
    return path


def own_cpu_seconds():
    """... of this process and of those that it waited for"""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def cost_of(command, env):
    """-> seconds, CPU seconds, and the resident MiB at most"""
    start = time.monotonic()
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    return time.monotonic() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def convert(arguments):
    import boto3
    folder = arguments.folder.resolve() / "work"
    shutil.rmtree(folder, ignore_errors=True)
    server = subprocess.Popen([sys.executable, HERE / "file_s3.py", folder / "s3"], stdout=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        env = {**os.environ, "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "TMPDIR": str(folder)}
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="key", aws_secret_access_key="secret")
        size = 0
        for path in sorted(arguments.model.iterdir()):
            client.upload_file(str(path), "bench", f"hf/{path.name}")
            size += path.stat().st_size
        for i in range(arguments.rounds):
            cpu = -own_cpu_seconds()
            download = seconds(lambda: (folder / "hf").mkdir() or [
                client.download_file("bench", f"hf/{p.name}", str(folder / "hf" / p.name)) for p in sorted(arguments.model.iterdir())])
            local = seconds(lambda: subprocess.run([arguments.ferry, "convert", "-q", folder / "hf", folder / "out", "--tp", arguments.tp], check=True))
            upload = seconds(lambda: [client.upload_file(str(p), "bench", f"theirs{i}/{p.relative_to(folder / 'out')}")
                                      for p in sorted((folder / "out").rglob("*")) if p.is_file()])
            cpu += own_cpu_seconds()
            shutil.rmtree(folder / "hf")
            shutil.rmtree(folder / "out")
            ours, own_cpu, mib = cost_of([arguments.ferry, "convert", "-q", "s3://bench/hf", f"s3://bench/ours{i}", "--tp", arguments.tp], env)
            theirs = download + local + upload
            print(f"| {size / 1e9:.2f} GB | {download:.1f} + {local:.1f} + {upload:.1f} = {theirs:.1f} s, CPU {cpu:.1f} s "
                  f"| {ours:.1f} s, CPU {own_cpu:.1f} s, {mib:.0f} MiB | {theirs / ours:.1f} |", flush=True)
            delete = [o["Key"] for o in client.list_objects_v2(Bucket="bench").get("Contents", []) if o["Key"].startswith(("ours", "theirs"))]
            for key in delete:
                client.delete_object(Bucket="bench", Key=key)
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def inspect(arguments):
    from servers import FileHandler, serve

    class Slow(FileHandler):
        def answer_file(self, path, headers=()):
            """Only the first bytes of a sparse file are ever read here."""
            size = path.stat().st_size
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            last = min(last, size - 1)
            with open(path, "rb") as file:
                file.seek(first)
                data = file.read(last - first + 1)
            self.answer(206, data, [("ETag", f'"{size}"'), ("Content-Range", f"bytes {first}-{last}/{size}")])

        def do_GET(self):
            time.sleep(0.02)
            super().do_GET()

    with serve(Slow, root=arguments.shape.parent, lists=True) as server:
        for _ in range(arguments.rounds):
            took, cpu, mib = cost_of([arguments.ferry, "inspect", f"{server.url}/{arguments.shape.name}"], dict(os.environ))
            local, local_cpu, _ = cost_of([arguments.ferry, "inspect", arguments.shape], dict(os.environ))
            print(f"inspect, 20 ms: {took:.2f} s, CPU {cpu:.2f} s, {mib:.0f} MiB; a folder: {local:.2f} s, CPU {local_cpu:.2f} s", flush=True)


if __name__ == "__main__":
    main()
