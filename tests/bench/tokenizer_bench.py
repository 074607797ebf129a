#!/usr/bin/env python3
"""Measures Ferry's tokenizer beside the tokenizers package, in one run: the same tokenizers, the same texts, arms alternating.

    ninja -C build tests/tokenizer_bench && source build/peers/env.sh
    build/peers/bin/python tests/bench/tokenizer_bench.py --program build/tests/tokenizer_bench [--mb 16] [--vocab 32000]

The tokenizers are trained first, with the components of each family (tests/interop/tokenizer_families.py), on code and text of the
installed packages; other files of these are encoded.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "interop"))

PEER = """
import json, os, resource, sys, time
path, corpus, threads, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
os.environ["RAYON_NUM_THREADS"] = str(threads)
from tokenizers import Tokenizer
data, texts, begin = open(corpus, "rb").read(), [], 0
while begin < len(data):
    end = min(begin + (64 << 10), len(data))
    line = data.find(b"\\n", end - 1)
    end = line + 1 if line >= 0 else end
    texts.append(data[begin:end].decode())
    begin = end
resident = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
start = time.perf_counter()
tokenizer = Tokenizer.from_file(path)
read, encode, decode = time.perf_counter() - start, 1e9, 1e9
for _ in range(rounds):
    start = time.perf_counter()
    # the package's encode_batch_fast builds no offsets, as Ferry does not
    encodings = tokenizer.encode_batch_fast(texts) if threads > 1 else [tokenizer.encode_batch_fast([t])[0] for t in texts]
    encode = min(encode, time.perf_counter() - start)
    ids = [e.ids for e in encodings]
    start = time.perf_counter()
    for one in ids:
        tokenizer.decode(one)
    decode = min(decode, time.perf_counter() - start)
print(json.dumps({"read": read, "encode": encode, "decode": decode, "mb": len(data) / 1e6, "tokens": sum(map(len, ids)),
                  "mib": resident()}))
"""


def measured(command):
    return json.loads(subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--mb", type=float, default=16)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--families", nargs="*", default=["gpt2", "llama2", "llama3", "qwen2", "deepseek_v3", "gemma", "mistral"])
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizer_families import SCRIPTS, families, files
    code = files({".py", ".h", ".cpp", ".md", ".txt", ".rst"}, int(options.mb * 2e6))
    half = len(code) // 2
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        text = "".join(code[half:] + [SCRIPTS] * 300)
        corpus.write_bytes(text.encode()[:int(options.mb * 1e6)].decode(errors="ignore").encode())
        makers = families(code[:half // 3] + [SCRIPTS] * 30, options.vocab)
        print("| tokenizer | threads | ferry, MB/s | tokenizers, MB/s | ratio | decode, ratio | read, ms | tokenizers, ms | MiB | tokenizers, MiB |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for family in options.families:
            path = Path(folder) / f"{family}.json"
            makers[family]().save(str(path))
            for threads in (1, 2):
                ours = measured([options.program, path, corpus, threads, options.rounds])
                theirs = measured([sys.executable, "-c", PEER, path, corpus, threads, options.rounds])
                assert ours["tokens"] == theirs["tokens"], (family, ours, theirs)
                print(f"| {family} | {threads} | {ours['mb'] / ours['encode']:.1f} | {theirs['mb'] / theirs['encode']:.1f} | "
                      f"{theirs['encode'] / ours['encode']:.1f} | {theirs['decode'] / ours['decode']:.1f} | {ours['read'] * 1e3:.0f} | "
                      f"{theirs['read'] * 1e3:.0f} | {ours['mib']:.0f} | {theirs['mib']:.0f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
