"""The module ferry between processes, threads and signals: fork, threads that outlive the interpreter, Ctrl-C before a server answers."""
import os
import subprocess
import sys

import pytest

from support import ROOT
from test_module import large_checkpoint

ferry = pytest.importorskip("ferry", reason="the Python module is not built")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large") / "hf"
    large_checkpoint(folder, 30)  # 440 MB, sparse
    return folder


def run(program, *arguments):
    """-> exit status and stdout of a Python that runs the program"""
    done = subprocess.run([sys.executable, "-c", f"import os, signal, sys, threading, time, ferry\n{program}", *map(str, arguments)],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT / "build/python")})
    assert done.returncode == 0, done.stderr
    return done.stdout


FORK = """
stream = ferry.open(sys.argv[1]).tensors(read_ahead="64MiB", threads=2)
next(stream)
child = os.fork()
if child == 0:
    signal.alarm(30)
    try:
        {}
    except ferry.Error as error:
        print(error.message, flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1], len(list(stream)))
"""


def test_a_forked_process_leaves_the_iterator_to_the_other(large):
    assert run(FORK.format("del stream"), large).split() == ["0", "272"]
    assert run(FORK.format("list(stream)"), large).split("\n")[:2] == ["the tensors are read by another process, which this one was forked from", "0 272"]


def test_a_forked_process_reads_on_its_own(large):
    assert run(FORK.format("print(len(list(ferry.open(sys.argv[1]).tensors())), flush=True)"), large).split() == ["273", "0", "272"]


def test_a_daemon_thread_that_reads_lets_the_interpreter_end(large):
    program = """
def read():
    while True:
        for _ in ferry.open(sys.argv[1]).tensors(read_ahead=1):
            pass
threading.Thread(target=read, daemon=True).start()
time.sleep(0.3)
"""
    assert run(program, large) == ""


@pytest.mark.parametrize("act", ["ferry.open(url)", "ferry.inspect(url)", "ferry.convert(url, 'out', progress=False)", "ferry.delta_inspect(url)"])
def test_an_interrupt_is_heard_while_a_server_is_silent(act):
    program = f"""
import socket
signal.signal(signal.SIGINT, signal.default_int_handler)
listening = socket.create_server(("127.0.0.1", 0), backlog=50)
url = f"http://127.0.0.1:{{listening.getsockname()[1]}}/model"
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
begun = time.monotonic()
try:
    {act}
except KeyboardInterrupt:
    print("interrupted" if time.monotonic() - begun < 8 else "late")
"""
    assert run(program).split() == ["interrupted"]
