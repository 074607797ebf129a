"""Runs clang-tidy on sources and headers, with the arguments of the build folder's compile_commands.json, several at a time.

A clean file is not checked again while it, the project's headers that it includes, its arguments and .clang-tidy stay the same: build/lint
remembers that.
"""
import concurrent.futures
import hashlib
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.MULTILINE)
UNKNOWN = re.compile("reference to local binding")  # clang 14 lacks that part of C++20; g++ compiles it
DIAGNOSTIC = re.compile(r"^(\S+?):(\d+):\d+: (?:warning|error): .*\[([\w.,-]+)\]$")


def clang_arguments(command):
    """-> g++'s arguments without those of its output, and without a precompiled header, which only g++ can read

    A source includes what it uses: it needs no header in front.
    """
    words, kept = iter(shlex.split(command)), []
    for word in words:
        if word in ("-o", "-MQ", "-MF", "-MT", "-include", "-c"):
            next(words)
        elif word.startswith("-") and word not in ("-MD", "-MMD", "-Winvalid-pch", "-fpch-preprocess"):
            kept.append(word)
            if word in ("-isystem", "-idirafter", "-I", "-D"):
                kept.append(next(words))
    return kept


class Units:
    """-> source: the entry of compile_commands.json that compiles it"""

    def __init__(self, root, build):
        self.root, self.build, self.by_source, self.known_includes = root, build, {}, {}
        for entry in json.loads((build / "compile_commands.json").read_text()):
            for source in self.sources(entry):
                self.by_source.setdefault(source, entry)

    def sources(self, entry):
        """-> what an entry compiles: its file, or all that are in it where the build is one of unities"""
        file = Path(entry["directory"]) / entry["file"]
        together = re.findall(r"^#include<(.+)>$", file.read_text(), re.MULTILINE) if re.search(r"-unity\d+\.cpp$", file.name) else [file]
        return [os.path.relpath(source, self.root) for source in together]

    def of(self, path):
        """-> the entry of a source; of a header that of its source, or of one that includes it; None where the build has none"""
        if path in self.by_source or not path.endswith(".h"):
            return self.by_source.get(path)
        stem = Path(path).stem
        users = [source for source in self.by_source if path in self.includes(source)]
        return self.by_source[min(users, key=lambda source: (Path(source).stem not in (stem, stem + "_test"), source))] if users else None

    def includes(self, path):
        if path not in self.known_includes:
            self.known_includes[path] = INCLUDE.findall((self.root / path).read_text()) if (self.root / path).exists() else []
        return self.known_includes[path]

    def closure(self, path):
        seen, todo = set(), [path]
        while todo:
            name = todo.pop()
            if name not in seen and (self.root / name).exists():
                seen.add(name)
                todo += self.includes(name)
        return sorted(seen)

    def key(self, path, arguments):
        digest = hashlib.sha256(json.dumps([path, arguments]).encode())
        for name in [".clang-tidy", "tools/lint_tidy.py", *self.closure(path)]:
            digest.update(name.encode() + b"\0" + (self.root / name).read_bytes())
        return digest.hexdigest()


def check(units, path, entry):
    """-> (what clang-tidy objects to in the file, whether it was clean before)

    The file is compiled alone, a header too: what it uses and does not include is an error, though in the build another file may
    include it first. Warnings of the compiler are g++'s affair.
    """
    arguments = ["-x", "c++", "-Wno-everything", *clang_arguments(entry["command"])]
    clean = units.build / "lint" / units.key(path, arguments)
    if clean.exists():
        return [], True
    command = ["clang-tidy-14", "--quiet", str(units.root / path), "--", *arguments]
    done = subprocess.run(command, cwd=entry["directory"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found = set()
    for line in done.stdout.splitlines():
        match = DIAGNOSTIC.match(line)
        if match and not UNKNOWN.search(line) and os.path.relpath(Path(entry["directory"]) / match[1], units.root) == path:
            found.add(f"{path}:{match[2]}:{line.split(':', 3)[3]}")
    if done.returncode not in (0, 1):
        found.add(f"{path}: clang-tidy ended with exit status {done.returncode}: {done.stderr.strip()[-500:]}")
    if not found:
        clean.parent.mkdir(exist_ok=True)
        clean.touch()
    return sorted(found), False


def run(root, build, paths, say):
    """-> (files that are clean, files that are not, files that the build does not compile)"""
    units = Units(root, build)
    known = [(path, entry) for path in paths if (entry := units.of(path))]
    clean = bad = before = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for found, cached in pool.map(lambda item: check(units, *item), known):
            bad, clean, before = bad + bool(found), clean + (not found), before + cached
            for line in found:
                say(line)
    left = len(paths) - len(known)
    say(f"clang-tidy: {clean} clean ({before} of them since the last time), {bad} not"
        + (f"; {left} are not compiled by this build" if left else ""))
    return clean, bad, left
