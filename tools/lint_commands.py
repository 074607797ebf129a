"""Runs the commands that the documents show, and compares their output with the output shown.

A ```console block is a shell session: lines after "$ " are commands (a backslash at the end continues one), the others are what the command
before them prints on stdout, where "..." stands for any lines. Times, rates, thread counts and folders may differ. Blocks run in order, in one
folder for all documents, in which `hf` is tests/data/hf_llama/hf and `ferry` is the build's. A comment before a block can say

    <!-- first: COMMAND -->    what the block needs beforehand
    <!-- not run: REASON -->   why it cannot run here

Each option after a `ferry SUBCOMMAND`, run or not, has to be one that its --help names.
"""
import re
import shutil
import subprocess

BLOCK = re.compile(r"((?:^<!-- .*? -->\n+)*)^```(console|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ANNOTATION = re.compile(r"<!-- (first|not run): (.*?) -->")
UNSTEADY = [  # what another machine, another day prints otherwise
    (re.compile(r"\d[\d.,]* [kMG]?B/s"), "N B/s"),
    (re.compile(r"\d[\d.,]* m?s\b"), "N s"),
    (re.compile(r"\d+ threads?, .* of staging buffers"), "N threads, N of staging buffers"),
    (re.compile(r"(?<!\S)/\S*/"), ""),
]


def parse_session(text):
    """-> [(command, [lines that it prints])]"""
    session, continued = [], False
    for line in text.splitlines():
        if line.startswith("$ "):
            session.append((line[2:], []))
        elif continued:
            session[-1] = (session[-1][0] + "\n" + line, [])
        elif session:
            session[-1][1].append(line)
        continued = session and not session[-1][1] and session[-1][0].endswith("\\")
    return session


def steady(line):
    for pattern, replacement in UNSTEADY:
        line = pattern.sub(replacement, line)
    return line.rstrip()


def matches(expected, printed):
    """True if the lines are those expected, "..." being any."""
    if not expected:
        return not printed
    if expected[0] == "...":
        return any(matches(expected[1:], printed[start:]) for start in range(len(printed) + 1))
    return bool(printed) and expected[0] == printed[0] and matches(expected[1:], printed[1:])


def run_command(command, expected, folder, environment):
    """-> what is wrong, or None"""
    done = subprocess.run(["bash", "-c", "set -euo pipefail\n" + command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", timeout=120)
    shown, printed = [steady(line) for line in expected], [steady(line) for line in done.stdout.splitlines()]
    while shown and not shown[-1]:
        shown.pop()
    while printed and not printed[-1]:
        printed.pop()
    if shown and not matches(shown, printed):
        return "prints otherwise than is shown:\n" + done.stdout + done.stderr
    if done.returncode not in ((0, 1) if shown else (0,)):  # 1 is an answer, and what is printed says which
        return f"ends with exit status {done.returncode}:\n{done.stdout}{done.stderr}"
    return None


class Flags:
    """The options that `ferry SUBCOMMAND --help` names."""

    def __init__(self, environment):
        self.environment, self.known = environment, {}

    def help(self, words):
        done = subprocess.run([*words, "--help"], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", done.stdout)) if done.returncode == 0 else None

    def unknown(self, text):
        """-> the first subcommand or option that is none, or None"""
        for call in re.findall(r"(?:^|[\s(])ferry ((?:[^|;&\n>#]|\\\n)*)", text):
            words = call.replace("\\\n", " ").split()
            depth = 2 if words[:1] in (["bench"], ["train"]) else 1
            command = tuple(word for word in words[:depth] if re.fullmatch(r"[a-z]+", word))
            if not command:
                continue
            command += tuple({"--logits", "--numerics"} & set(words))  # of verify: a command with options of its own
            if command not in self.known:
                self.known[command] = self.help(["ferry", *command])
            if self.known[command] is None:
                return f"ferry {' '.join(command)} is no command"
            for word in words:
                option = word.split("=")[0]
                if re.fullmatch(r"--?[a-zA-Z][\w-]*", option) and option not in self.known[command]:
                    return f"ferry {' '.join(command)} has no option {option}"
        return None


def run(root, documents, folder, environment, say):
    """-> (blocks that are right, blocks that are not, blocks that were not run)"""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copytree(root / "tests/data/hf_llama/hf", folder / "hf")
    for name in ("tests", "docs", "tools"):
        (folder / name).symlink_to(root / name)
    flags, models = Flags(environment), shutil.which("ferry-torch", path=environment["PATH"])
    right = wrong = skipped = 0
    for document in documents:
        text = (root / document).read_text()
        for block in BLOCK.finditer(text):
            where = f"{document}:{text.count(chr(10), 0, block.start(3))}"
            notes = ANNOTATION.findall(block[1])
            trouble, reason = flags.unknown(block[3]), next((value for name, value in notes if name == "not run"), None)
            if trouble and not models:
                trouble, reason = None, reason or "this build has no models"
            if block[2] == "console" and not trouble and not reason:
                session = [(value, []) for name, value in notes if name == "first"] + parse_session(block[3])
                for command, expected in session:
                    trouble = run_command(command, expected, folder, environment)
                    if trouble:
                        trouble = f"$ {command}\n{trouble}"
                        break
            if trouble:
                say(f"{where}: {trouble}")
            elif block[2] == "console" and reason:
                say(f"{where}: not run: {reason}")
            wrong += bool(trouble)
            right += not trouble and block[2] == "console" and not reason
            skipped += not trouble and block[2] == "console" and bool(reason)
    shutil.rmtree(folder)
    say(f"commands of the documents: {right} blocks are right, {wrong} are not, {skipped} were not run")
    return right, wrong, skipped
