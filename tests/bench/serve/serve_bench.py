#!/usr/bin/env python3
"""The rate of `ferry serve` beside that of the engine alone: the same load, by turns, each time in a new process.

    tests/bench/serve/serve_bench.py [--ferry PROGRAM] [--streams 256] [--input 32] [--output 64] [--rounds 3] [--layers 8] [--hidden 512]
                                     [--shape FOLDER] [--device cuda]

The model has random weights; --shape names a folder with the config.json of another one. All requests come at once, and each answer is a stream of token ids. Prints the tokens per second of each arm
and round, then the best of each, times of the server's clients, whose own work takes its time, and the share of the HTTP thread, the last one
that the server starts.
"""
import argparse
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

VOCABULARY = 32000


def write_shape(folder, layers, hidden):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": 3 * hidden,
              "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "head_dim": 64,
              "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": VOCABULARY,
              "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))


def engine_rate(options, folder):
    done = subprocess.run([options.ferry, "bench", "rollout", folder, "--load-format", "dummy", "--num-prompts", str(options.streams), "--input-len",
                           str(options.input), "--output-len", str(options.output), "--max-num-seqs", str(options.streams), "--device", options.device, "--json", "--quiet"],
                          stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)["output_tokens_per_second"]


def request_of(number, options):
    prompt = [(number * 7919 + i * 104729) % VOCABULARY for i in range(options.input)]
    body = json.dumps({"prompt": prompt, "max_tokens": options.output, "ignore_eos": True, "stream": True, "return_token_ids": True, "seed": number}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


class Stream:
    def __init__(self, port, request):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.request, self.first, self.tokens, self.end = request, None, 0, b""


def replay(port, options, first_number):
    """-> (seconds, seconds to each first token, tokens)"""
    streams = [Stream(port, request_of(first_number + i, options)) for i in range(options.streams)]
    poll = selectors.DefaultSelector()
    begin = time.monotonic()
    for stream in streams:
        stream.socket.send(stream.request)
        poll.register(stream.socket, selectors.EVENT_READ, stream)
    left = len(streams)
    while left:
        for key, _ in poll.select():
            stream, data = key.data, key.fileobj.recv(1 << 16)
            if not data:
                assert stream.end.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), stream.end
                poll.unregister(key.fileobj)
                key.fileobj.close()
                left -= 1
                continue
            stream.end = (stream.end + data)[-200:]
            count = data.count(b'"token_ids":[') - data.count(b'"token_ids":[]') - data.count(b'"prompt_token_ids":[')
            stream.tokens += count
            if count > 0 and stream.first is None:
                stream.first = time.monotonic() - begin
    return time.monotonic() - begin, sorted(stream.first for stream in streams), sum(stream.tokens for stream in streams)


def cpu_seconds(process):
    """-> of each thread, by its id"""
    seconds = {}
    for path in Path(f"/proc/{process.pid}/task").glob("*/stat"):
        fields = path.read_text().rsplit(")", 1)[1].split()
        seconds[int(path.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def server_rate(options, folder):
    process = subprocess.Popen([options.ferry, "serve", folder, "--load-format", "dummy", "--port", "0", "--max-num-seqs", str(options.streams),
                                "--device", options.device],
                               stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if found := re.match(r"serving +http://127\.0\.0\.1:(\d+)", line):
            break
    replay(int(found[1]), options, 0)  # warms up
    before = cpu_seconds(process)
    seconds, first, tokens = replay(int(found[1]), options, options.streams)
    used = {thread: now - before.get(thread, 0) for thread, now in cpu_seconds(process).items()}
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert abs(tokens - options.streams * options.output) <= options.streams, tokens  # a read may cut a word in two
    return {"rate": options.streams * options.output / seconds, "requests": options.streams / seconds, "first p50": first[len(first) // 2],
            "first max": first[-1], "token": seconds / options.output, "http": used[max(used)] / sum(used.values())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ferry", default="build/cli/ferry")
    for name, value in {"streams": 256, "input": 32, "output": 64, "rounds": 3, "layers": 8, "hidden": 512}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--shape", type=Path)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.shape or Path(name)
        if not options.shape:
            write_shape(folder, options.layers, options.hidden)
        alone, served = [], []
        for turn in range(options.rounds):
            alone.append(engine_rate(options, folder))
            served.append(server_rate(options, folder))
            print(f"round {turn + 1}: engine {alone[-1]:.0f} tokens/s, server {served[-1]['rate']:.0f}", flush=True)
    best = max(served, key=lambda one: one["rate"])
    print(f"best: engine {max(alone):.0f} tokens/s, server {best['rate']:.0f} ({1 - best['rate'] / max(alone):+.1%} lost), "
          f"{best['requests']:.1f} requests/s; first token after {best['first p50']:.2f} s (median), {best['first max']:.2f} s (last); "
          f"{1e3 * best['token']:.0f} ms a token; {min(one['http'] for one in served):.1%} of the processor's time in the HTTP thread")


if __name__ == "__main__":
    main()
