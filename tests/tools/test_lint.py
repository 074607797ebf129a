"""tools/lint: what it takes for a comment that hangs in the air, for a command and its output, and what it leaves for clang."""
import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import lint_commands
import lint_documents
import lint_tidy


def load_lint():
    loader = importlib.machinery.SourceFileLoader("lint", str(ROOT / "tools/lint"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("lint", loader))
    loader.exec_module(module)
    return module


lint = load_lint()


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_no_checkout_is_checked_whole(tmp_path, inside):
    """A release that was unpacked, perhaps inside of a checkout that knows nothing of it."""
    if inside:
        subprocess.run(["git", "-C", tmp_path, "init", "-q"], check=True)
    (tmp_path / ".gitignore").write_text("release/\n")
    (tmp_path / "release/build/x").mkdir(parents=True)
    (tmp_path / "release/build/x/made.cc").write_text("// Which is built.\n")
    shutil.copytree(ROOT / "tools", tmp_path / "release/tools")
    (tmp_path / "release/a.cc").write_text("// Which is first.\n")
    done = subprocess.run([tmp_path / "release/tools/lint", "comments"], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "a.cc:1: // Which is first." in done.stdout and "made.cc" not in done.stdout, done.stdout


@pytest.mark.parametrize("line, hangs", [
    ("// Which of them is first.", True),
    ("  int x;  // Of the rank.", True),
    ("// In which order they come.", True),
    ("// How they come.", True),
    ("// And the last.", True),
    ("// Order of the ranks.", False),
    ("// The rank that is first.", False),
    ("// Ofter than that.", False),
    ('  print("// Which");', False),
])
def test_comment_hangs(line, hangs):
    assert any(lint.HANGING.match(text) for _, text in lint.comment_openings([line], "//")) == hangs


def test_a_comment_opens_with_its_first_line():
    lines = ["// The first line", "// Which goes on.", "//", "// Of another paragraph.", "int x;  // Whose is x"]
    assert [number for number, _ in lint.comment_openings(lines, "//")] == [1, 4, 5]


def test_paragraphs_and_list_items_open_outside_code():
    lines = ["# Where to begin", "What it is", "and goes on.", "", "- Of lists:", "1. Those", "```console", "What is code", "```", "Which follows."]
    assert list(lint.paragraph_openings(lines)) == [(1, "# Where to begin"), (2, "What it is"), (5, "Of lists:"), (6, "Those"), (10, "Which follows.")]


@pytest.mark.parametrize("name, text, found", [
    ("a.cc", "// Which goes.\n", 1),
    ("a.py", "# Which goes.\n", 1),
    ("a.py", 'def f():\n    """What it is."""\n', 1),
    ("meson.build", "# Which goes.\n", 1),
    ("script", "#!/bin/bash\n# Which goes.\n", 1),
    ("a.md", "What it is.\n", 1),
    ("a.txt", "What it is.\n", 0),
])
def test_comments_of_each_kind_of_file_are_held_to_it(name, text, found, tmp_path, monkeypatch):
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    (tmp_path / name).write_text(text)
    assert lint.check_comments([name], None) == (1 - found, found, 0)


@pytest.mark.parametrize("name, text, lines", [
    ("a.cc", "// It is first. Of the rank it is last.\nint x;\n", [1]),
    ("a.cc", "// It is first.\n// Those of others are last.\n", [2]),
    ("a.cc", "// It is first,\n// Of course.\n", []),
    ("a.cc", 'say("It is first. Of the rank.");\n', []),
    ("a.py", "# It is first. Which is it?\n", [1]),
    ("a.md", "It is first. Behind it comes\nthe second.\n\n```\nA. Of B.\n```\n## 1. Which\n", [1]),
    ("a.md", "It is first. What follows is second.\n", []),
])
def test_sentences_inside_a_paragraph_are_held_to_it(name, text, lines, tmp_path, monkeypatch):
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    (tmp_path / name).write_text(text)
    assert list(lint.sentences(name)) == lines


def test_only_comments_that_were_added_count(tmp_path, monkeypatch):
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    monkeypatch.setattr(lint, "added_lines", lambda name, base: {1, 3})
    (tmp_path / "a.cc").write_text("int x;\n// Which was here before.\nint y;  // Whose is new.\n")
    lines = []
    monkeypatch.setattr(lint, "say", lines.append)
    lint.check_comments(["a.cc"], "base")
    assert lines[:-1] == ["a.cc:3: int y;  // Whose is new."]


def test_lines_since_the_base_commit_are_the_added_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]

    def commit(text):
        (tmp_path / "a.cc").write_text(text)
        subprocess.run(["git", "-C", tmp_path, *identity, "add", "a.cc"], check=True)
        subprocess.run(["git", "-C", tmp_path, *identity, "commit", "-qm", "x"], check=True)

    subprocess.run(["git", "-C", tmp_path, "init", "-q", "-b", "main"], check=True)
    commit("one\ntwo\nthree\n")
    assert lint.base_commit() is None  # there is no history yet
    commit("one\nnew\ntwo\nthree\n")
    before = lint.git("rev-parse", "HEAD^").strip()
    assert lint.base_commit() == before  # on main its last commit counts
    subprocess.run(["git", "-C", tmp_path, "checkout", "-qb", "branch"], check=True)
    commit("one\nnew\ntwo\nthree\nfour\n")
    (tmp_path / "a.cc").write_text("one\nnew\ntwo\nthree\nfour\nfive\n")
    (tmp_path / "b.cc").write_text("all\nnew\n")
    base = lint.base_commit()
    assert base == lint.git("rev-parse", "main").strip()
    assert lint.changed_files(base) == ["a.cc", "b.cc"]
    assert sorted(lint.added_lines("a.cc", base)) == [5, 6] and list(lint.added_lines("b.cc", base)) == [1, 2]


def test_session_has_commands_and_what_they_print():
    assert lint_commands.parse_session("$ one \\\n  two\nprinted\n\nmore\n$ three\n") == [("one \\\n  two", ["printed", "", "more"]), ("three", [])]


@pytest.mark.parametrize("shown, printed, equal", [
    (["in 0.0 s (16.8 MB/s)"], ["in 1.25 s (1,900 kB/s)"], True),
    (["in 0.0 s"], ["after 0.0 s"], False),
    (["target /data/out/release"], ["target /work/x/out/release"], True),
    (["94 kB"], ["95 kB"], False),
    (["a", "...", "z"], ["a", "b", "c", "z"], True),
    (["a", "..."], ["a"], True),
    (["a"], ["a", "b"], False),
])
def test_output_differs_only_where_machines_do(shown, printed, equal):
    assert lint_commands.matches([lint_commands.steady(line) for line in shown], [lint_commands.steady(line) for line in printed]) == equal


def run_document(tmp_path, text):
    """-> (right, wrong, not run), what was said"""
    programs = tmp_path / "programs"
    programs.mkdir()
    ferry = 'case "$*" in "sort --help") echo "--up  upwards";; "sort --up") echo up; exit 1;; *) exit 2;; esac'
    for name, script in {"ferry": ferry, "ferry-torch": "exit"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "root/tests/data/hf_llama/hf").mkdir(parents=True)
    (tmp_path / "root/doc.md").write_text(text)
    said = []
    counts = lint_commands.run(tmp_path / "root", ["doc.md"], tmp_path / "folder", os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}, said.append)
    return counts, "\n".join(said)


@pytest.mark.parametrize("text, counts, said", [
    ("```console\n$ echo a\na\n```\n", (1, 0, 0), ""),
    ("```console\n$ echo a\nb\n```\n", (0, 1, 0), "doc.md:1: $ echo a\nprints otherwise"),
    ("```console\n$ false\n```\n", (0, 1, 0), "exit status 1"),
    ("```console\n$ ferry sort --up\nup\n```\n", (1, 0, 0), ""),
    ("```console\n$ ferry sort --down\n```\n", (0, 1, 0), "ferry sort has no option --down"),
    ("```sh\nferry mix --up\n```\n", (0, 1, 0), "ferry mix is no command"),
    ("<!-- not run: needs a GPU -->\n```console\n$ ferry sort --up=1\n```\n", (0, 0, 1), "doc.md:2: not run: needs a GPU"),
    ("<!-- not run: needs a GPU -->\n```console\n$ ferry sort --down\n```\n", (0, 1, 0), "no option --down"),
    ("<!-- first: echo a > file -->\n```console\n$ cat file\na\n```\n", (1, 0, 0), ""),
    ("```text\n$ false\n```\n", (0, 0, 0), ""),
])
def test_block_is_right_wrong_or_says_why_it_is_not_run(tmp_path, text, counts, said):
    found, output = run_document(tmp_path, text)
    assert found == counts and said in output


def test_arguments_for_clang_have_no_output_and_no_precompiled_header():
    command = ("ccache c++ -Ia.p -include pch.h -isystem /x -idirafter /torch -Wall -Winvalid-pch -std=c++20 '-DHEADER=\"a.h\"' -MD -MQ a.o -MF a.o.d "
               "-o a.o -c ../a.cc")
    assert lint_tidy.clang_arguments(command) == ["-Ia.p", "-isystem", "/x", "-idirafter", "/torch", "-Wall", "-std=c++20", '-DHEADER="a.h"']


@pytest.fixture
def units(tmp_path):
    """A build of one unity, of two sources; a.cc includes first what b.cc and b.h lack."""
    files = {"a.cc": '#include <string>\n#include "b.h"\nstd::string a() { return b(); }\n', "b.cc": '#include "b.h"\n',
             "b.h": "#pragma once\nstd::string b();\n", "c.h": "int c();\n", ".clang-tidy": "Checks: '-*,bugprone-*'\n",
             "build/x.p/x-unity0.cpp": f"#include<{tmp_path}/build/../a.cc>\n#include<{tmp_path}/build/../b.cc>\n", "tools/lint_tidy.py": ""}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    entry = {"directory": f"{tmp_path}/build", "file": "x.p/x-unity0.cpp", "command": "c++ -std=c++20 -o x.o -c x.p/x-unity0.cpp"}
    (tmp_path / "build/compile_commands.json").write_text(json.dumps([entry]))
    return lint_tidy.Units(tmp_path, tmp_path / "build")


def test_files_of_a_unity_and_headers_have_its_arguments(units):
    assert [bool(units.of(name)) for name in ("a.cc", "b.cc", "b.h", "c.h")] == [True, True, True, False]


@pytest.mark.skipif(not shutil.which("clang-tidy-14"), reason="tools/install_packages lint")
def test_header_has_to_compile_alone(units):
    found, before = lint_tidy.check(units, "b.h", units.of("b.h"))
    assert len(found) == 1 and found[0].startswith("b.h:2: error: use of undeclared identifier 'std'") and not before
    (units.root / "b.h").write_text("#pragma once\n#include <string>\nstd::string b();\n")
    assert lint_tidy.check(units, "b.h", units.of("b.h")) == ([], False)
    assert lint_tidy.check(units, "b.h", units.of("b.h")) == ([], True)
    (units.root / ".clang-tidy").write_text("Checks: '-*,modernize-use-using'\n")
    assert lint_tidy.check(units, "b.h", units.of("b.h")) == ([], False)


@pytest.mark.parametrize("line, troubles", [
    ("[a](a.md)", []),
    ("[a](a.md#the-first-one)", []),
    ("[a](#the-first-one)", []),
    ("[a](https://example.com/b.md)", []),
    ("[b](b.md)", ["there is no b.md"]),
    ("[a](a.md#the-second)", ["a.md has no heading #the-second"]),
    ("`tools/one.py` `one.py` `tools/*.py` `tools/{one,two}.py` `tools/NAME`", []),
    ("`tools/three.py`", ["there is no tools/three.py"]),
    ("`tools/{one,three}.py`", ["there is no tools/three.py"]),
    ("`three.py`", ["there is no three.py"]),
    ("`verl/three.py` `build/cli/ferry` three.py", []),
    ("<!-- no such file: tools/three.py --> `tools/three.py`", []),
    ("```\n`tools/three.py`\n```", []),
    ("x" * 160, []),
    ("x" * 161, ["a line has more than 160 columns"]),
    ("[a](https://example.com/" + "x" * 160 + ")", []),
    ("| " + "x" * 298 + " | " + "x" * 298 + " |", []),
    ("| " + "x" * 299 + " | x |", ["a cell has more than 300 characters"]),
])
def test_documents_name_what_exists(tmp_path, line, troubles):
    (tmp_path / "docs").mkdir()
    (tmp_path / "tools").mkdir()
    for name in ("one.py", "two.py"):
        (tmp_path / "tools" / name).touch()
    (tmp_path / "docs" / "a.md").write_text("# The `first` one\n" + line + "\n")
    assert lint_documents.trouble_of(tmp_path, {"one.py", "two.py", "a.md"}, "docs" + "/a.md") == [(2, trouble) for trouble in troubles]


def test_readme_has_at_most_120_lines(tmp_path):
    for count, found in ((120, []), (121, [(121, "121 lines, and it has at most 120: the rest belongs to docs/")])):
        (tmp_path / "README.md").write_text("a\n" * count)
        assert lint_documents.trouble_of(tmp_path, {"README.md"}, "README.md") == found


def test_sources_mention_documents_that_exist(tmp_path):
    (tmp_path / "a.cc").write_text("// docs" + "/none.md says so.\n")
    said = []
    assert lint_documents.run(tmp_path, ["a.cc"], said.append) == (0, 1, 0)
    assert said[0] == "a.cc:1: there is no docs" + "/none.md"


@pytest.mark.parametrize("name, text, line", [
    ("trainer/a.cc", "int a;  // see {room}/none.h\n", 1),
    ("trainer/a.cc", "// As\n// {room}/none.h says.\n", 2),
    ("trainer/a.cc", "// See {room}/a.cc, and a.cc.\n", 0),
    ("trainer/deep/b.h", "// See deep/c.h and {room}/deep/*.h.\n", 0),
    ("trainer/a.cc", "// The losses of verl's\n// {room}/none.py.\n", 0),
    ("trainer/a.cc", 'auto a = "{room}/none.h";\n', 0),
    ("trainer/a.py", 'def a():\n    """Those of {room}/none.h"""\n', 2),
    ("trainer/a.py", "a = 1  # {room}/none.py\n", 1),
])
def test_comments_name_files_that_exist(tmp_path, name, text, line):
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text.replace("{room}", "trainer"))
    assert [number for number, _ in lint_documents.mention_trouble(tmp_path, name)] == ([line] if line else [])


def test_architecture_names_every_folder_of_a_room(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/architecture.md").write_text("`models/spec` describes, and `serve/http/` speaks.\n")
    files = ["docs/architecture.md", "models/spec/a.cc", "models/spec/deep/b.h", "models/kernels/c.cu", "models/d.cc", "serve/http/e.h", "tests/f/g.cc"]
    assert lint_documents.folders_left_out(tmp_path, files) == ["models/kernels"]
