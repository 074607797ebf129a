"""Checks that the documents name things that exist, and that their lines can be read.

    links      the file of a relative link, and the heading behind its "#"
    paths      `distckpt/base/box.h` and `box.h`: a file or folder of the checkout. {a,b} and * stand for several, TARGET for any name
    mentions   documents below docs/ in the sources, and paths of files in their comments: `trainer/run/run_start.h` exists, below the root or a folder
               of the source, unless the name of its project stands before it, as in `verl's trainer/main_ppo.py`
    lines      at most 160 columns outside of tables, code and links; at most 300 characters in the cell of a table
    README.md  at most 120 lines
    folders    docs/architecture.md names every folder of a room that holds C++

Code blocks are not read. A document names files that only its example has in a comment: <!-- no such file: PATH PATH -->
"""
import re
from pathlib import Path

ROOMS = "distckpt|converter|models|rollout|serve|trainer|cli|tests|docs|tools"
FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(rf"`((?:{ROOMS})(?:/[\w.{{}},*-]+)+/?|[\w{{}},]+\.(?:\{{[\w,]+\}}|cc|h|cu|cuh|py))`")
MADE_UP = re.compile(r"<!-- no such file: (.*?) -->")
FOLDER = re.compile(r"((?:distckpt|converter|models|rollout|serve|trainer|cli)/[^/]+)/(?:.*/)?[^/]+\.(?:cc|h|cu|cuh)$")
ARCHITECTURE = "docs/architecture.md"
MENTION = re.compile(r"docs/[\w/]+\.md")
SOURCES = (".cc", ".h", ".cu", ".cuh", ".py", "meson.build")
NAMED = re.compile(rf"(?<![\w/.-])(?:{ROOMS}|python)/(?:[\w.{{}},*-]+/)*[\w{{}},*-]+\.(?:cc|h|cuh?|py)\b(?!/)")
FOREIGN = re.compile(r"\b(?:verl|slime|SGLang|transformers [\d.]+)(?:'s|:|,)?\s+$")
WIDTH, CELL, README = 160, 300, 120


def blank(match):
    """-> as many lines, all empty: line numbers stay"""
    return "\n" * match[0].count("\n")


def slugs(text):
    """-> the names under which links find the headings"""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub(blank, text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def expand(path):
    """-> the paths that a{b,c} stands for"""
    match = re.search(r"\{([^}]*)\}", path)
    return [path] if not match else [one for choice in match[1].split(",") for one in expand(path[:match.start()] + choice + path[match.end():])]


def link_trouble(root, document, target):
    if re.match(r"[a-z]+:", target):
        return None
    name, _, anchor = target.partition("#")
    file = (root / document).parent / name if name else root / document
    if not file.exists():
        return f"there is no {target}"
    if anchor and anchor not in slugs(file.read_text()):
        return f"{name or document} has no heading #{anchor}"
    return None


def path_trouble(root, names, path):
    for one in expand(re.sub(r"\b[A-Z]+$", "*", path)):
        if not (any(root.glob(one)) if "/" in one else one in names):
            return f"there is no {one}"
    return None


def line_trouble(line):
    if line.startswith("|"):
        cells = re.split(r"(?<!\\)\|", line)
        return f"a cell has more than {CELL} characters" if max(map(len, cells)) > CELL else None
    return f"a line has more than {WIDTH} columns" if len(LINK.sub("]", line)) > WIDTH and not line.startswith("<!--") else None


def trouble_of(root, names, document):
    """-> [(line number, what is wrong)]"""
    text = (root / document).read_text()
    made_up = {path for paths in MADE_UP.findall(text) for path in paths.split()}
    found = []
    for number, line in enumerate(FENCE.sub(blank, text).splitlines(), 1):
        troubles = [link_trouble(root, document, target) for target in LINK.findall(line)]
        troubles += [path_trouble(root, names, path) for path in PATH.findall(line) if path not in made_up]
        found += [(number, trouble) for trouble in [*troubles, line_trouble(line)] if trouble]
    length = text.count("\n")
    if document == "README.md" and length > README:
        found.append((length, f"{length} lines, and it has at most {README}: the rest belongs to docs/"))
    return found


def remarks(name, text):
    """-> (number of its first line, text without marks) of each comment and docstring"""
    mark = "#" if name.endswith((".py", "meson.build")) else "//"
    for match in re.finditer(rf"(?:^[ \t]*{mark} .*\n)+|(?<=  ){mark} .*", text, re.MULTILINE):
        yield text.count("\n", 0, match.start()) + 1, re.sub(rf"^[ \t]*{mark} ", "", match[0], flags=re.MULTILINE)
    if name.endswith(".py"):
        for match in re.finditer(r'"""(.*?)"""', text, re.DOTALL):
            yield text.count("\n", 0, match.start()) + 1, match[1]


def mention_trouble(root, name):
    """-> [(line number, what is wrong)] of a source"""
    text = (root / name).read_text()
    found = [(1, f"there is no {path}") for path in MENTION.findall(text) if not (root / path).exists()] if name.endswith(SOURCES[:-1]) else []
    for first, remark in remarks(name, text):
        for match in NAMED.finditer(remark):
            bases = [root, *(folder for folder in (root / name).parents if root in folder.parents)]
            if not FOREIGN.search(remark[:match.start()]) and all(path_trouble(base, (), match[0]) for base in bases):
                found.append((first + remark.count("\n", 0, match.start()), f"there is no {match[0]}"))
    return found


def folders_left_out(root, files):
    """-> folders of rooms that the architecture does not name"""
    text = (root / ARCHITECTURE).read_text() if ARCHITECTURE in files else ""
    folders = {match[1] for name in files if (match := FOLDER.match(name))} if text else set()
    return sorted(folder for folder in folders if not re.search(rf"`{folder}\b", text))


def run(root, files, say):
    """files: all of the checkout's -> (documents that are right, documents that are not, 0)"""
    names = {Path(name).name for name in files}
    documents = [name for name in files if name.endswith(".md")]
    troubles = {name: trouble_of(root, names, name) for name in documents}
    for name in files:
        if name.endswith(SOURCES) and (found := mention_trouble(root, name)):
            troubles.setdefault(name, []).extend(found)
    for folder in folders_left_out(root, files):
        troubles[ARCHITECTURE].append((1, f"does not name the folder {folder}"))
    for name, found in troubles.items():
        for number, trouble in found:
            say(f"{name}:{number}: {trouble}")
    wrong = sum(bool(found) for found in troubles.values())
    say(f"documents: {len(documents)}" + (f", {wrong} files are wrong" if wrong else ""))
    return len(troubles) - wrong, wrong, 0
