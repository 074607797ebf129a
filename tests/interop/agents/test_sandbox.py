"""`ferry sandbox`: what a program in it can do, and all that it cannot."""
import json
import os
import subprocess
import sys
import tempfile

import pytest

from support import FERRY, ROOT

PROBE = subprocess.run([FERRY, "sandbox", "--", "true"], stderr=subprocess.PIPE, text=True)
pytestmark = pytest.mark.skipif("no namespaces" in PROBE.stderr, reason=f"this system allows no sandbox: {PROBE.stderr.strip()}")


def run(program, *options, **more):
    return subprocess.run([FERRY, "sandbox", *options, "--", sys.executable, "-c", program], capture_output=True, text=True, timeout=60, **more)


def refused(program):
    """The error of the system that the program's last line raises."""
    done = run(program)
    assert done.returncode == 1, (done.stdout, done.stderr)
    return done.stderr.splitlines()[-1].split(":")[0]


def test_a_tool_answers_as_outside():
    asked = "".join(json.dumps({"id": i, "session": 1, "name": "calculator", "arguments": {"expression": f"{i}*7"}}) + "\n" for i in range(3))
    said = subprocess.run([FERRY, "sandbox", "--", sys.executable, ROOT / "docs/examples/calculator.py"], input=asked, capture_output=True, text=True,
                          timeout=60)
    assert (said.returncode, said.stderr) == (0, "")
    assert [json.loads(line) for line in said.stdout.splitlines()] == [{"id": i, "content": str(7 * i)} for i in range(3)]


def test_it_has_threads_processes_and_a_folder_for_what_passes():
    done = run("import subprocess, tempfile, threading, time\n"
               "with tempfile.TemporaryFile() as file: file.write(b'x' * 1000)\n"
               "thread = threading.Thread(target=print, args=('thread',)); thread.start(); thread.join()\n"
               "print(subprocess.run(['echo', 'process'], capture_output=True, text=True).stdout, end='')")
    assert (done.stdout, done.returncode) == ("thread\nprocess\n", 0), done.stderr


def test_it_changes_no_file(tmp_path):
    assert refused(f"open({str(tmp_path / 'new')!r}, 'w')") == "OSError"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("number", [0, 1, 2])
def test_it_opens_no_standard_file_again(number, tmp_path):
    """A file among them is written to as the program's output alone, also where output and error are one file."""
    path = tmp_path / "file"
    path.write_text("before\n")
    program = f"import sys\nprint(sys.stdin.readline(), end='')\nprint('end', file=sys.stderr)\nopen('/proc/self/fd/{number}', 'w').write('seen\\n')"
    with open(path, "r+" if number == 0 else "a") as file:
        files = {"stdin": file} if number == 0 else {"input": "asked\n", ("stdout" if number == 1 else "stderr"): file}
        done = subprocess.run([FERRY, "sandbox", "--", sys.executable, "-c", program], text=True, timeout=60,
                              **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | files))
    if number == 0:
        assert path.read_text() == "before\n" and done.stdout == "before\n"
    else:
        assert path.read_text() == {1: "before\nseen\nasked\n", 2: "before\nend\nseen\n"}[number] and done.returncode == 0, done
    with open(path, "w") as file:
        run = [FERRY, "sandbox", "--", "sh", "-c", "echo one; echo two >&2; echo three; exit 3"]
        assert subprocess.run(run, stdout=file, stderr=file, timeout=60).returncode == 3
    assert path.read_text() == "one\ntwo\nthree\n"


def test_it_has_no_memory_that_no_process_maps():
    assert refused("import os; os.memfd_create('x')") == "PermissionError"


@pytest.mark.parametrize("program", ["import os; os.mkfifo('/dev/shm/x')", "import ctypes, os; c = ctypes.CDLL(None, use_errno=True)\n"
                                     "if c.msgget(0, 0o1600) < 0 and c.semget(0, 1, 0o1600) < 0: raise PermissionError"])
def test_it_makes_no_named_pipe_and_no_queue(program):
    assert refused(program) == "PermissionError"


def test_what_it_keeps_in_sockets_counts_as_memory():
    fill = """import socket, time
held = []
for i in range(400):
    held.append(socket.socketpair())
    held[-1][0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    held[-1][0].setblocking(False)
    try:
        while True: held[-1][0].send(b"x" * 4096)
    except BlockingIOError: pass
size = held[0][0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
assert size == socket.socketpair()[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
time.sleep(1)
print("done")"""
    assert run(fill, "--memory", "8GiB").stdout == "done\n"
    stopped = run(fill, "--memory", "100MiB")
    assert stopped.returncode == 137 and stopped.stdout == "" and "hold more than 104857600 bytes" in stopped.stderr


def test_it_shares_no_memory_but_by_files():
    assert refused("import mmap; mmap.mmap(-1, 1 << 20)") == "PermissionError"
    done = run("import mmap\nheld = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
               "zero = open('/dev/zero', 'r+b', buffering=0)\nprint(zero.read(3))\nmmap.mmap(zero.fileno(), 4096)")
    assert done.stdout == "b'\\x00\\x00\\x00'\n" and "No such device" in done.stderr
    done = run("import multiprocessing.sharedctypes\nprint(len(multiprocessing.sharedctypes.RawArray('b', 1000)))")
    assert done.stdout == "1000\n", done.stderr


@pytest.mark.parametrize("call", ["libc.vmsplice(end, iov, 1, 0)", "libc.tee(begin, end, 1, 0)", "libc.splice(file, None, end, None, 1, 0)",
                                  "libc.sendfile(end, file, None, 1)"])
def test_it_leaves_no_pages_in_pipes(call):
    done = run("import ctypes, errno, os, sys\nlibc = ctypes.CDLL(None, use_errno=True)\nbegin, end = os.pipe()\n"
               "file = os.open(sys.executable, os.O_RDONLY)\niov = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.c_char(b'x')), 1)\n"
               f"print({call}, errno.errorcode[ctypes.get_errno()])")
    assert done.stdout == "-1 ENOSYS\n", done.stderr


def test_libraries_copy_files_without_those_calls(tmp_path):
    done = run("import shutil, sys\nshutil.copyfile(sys.executable, '/dev/shm/x')\nprint(open('/dev/shm/x', 'rb').read() == open(sys.executable, 'rb').read())")
    assert done.stdout == "True\n", done.stderr


def test_sockets_on_their_way_count_as_memory():
    fill = """import socket, time
carriers = [socket.socketpair() for _ in range(5)]
for i in range(400):
    pair = socket.socketpair()
    pair[0].setblocking(False)
    try:
        while True: pair[0].send(b"x" * 65536)
    except BlockingIOError: pass
    socket.send_fds(carriers[i // 100][0], [b"x"], [end.fileno() for end in pair])
    for end in pair: end.close()
time.sleep(1)
print("done")"""
    assert run(fill, "--memory", "8GiB").stdout == "done\n"
    stopped = run(fill, "--memory", "100MiB")
    assert stopped.returncode == 137 and stopped.stdout == "" and "hold more than 104857600 bytes" in stopped.stderr


def test_it_has_bounds_on_files():
    done = run("import os, resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE), os.statvfs('/dev/shm').f_files)")
    assert done.stdout == "(1024, 1024) 16384\n"


@pytest.mark.parametrize("option, path", [("--writable", "/dev/shm"), ("--writable", "/proc/sys"), ("--writable", "/"), ("--hide", "/"), ("--hide", "/proc")])
def test_paths_that_are_its_own_are_refused(option, path):
    done = run("", option, path)
    assert done.returncode == 2 and f"{option} {path}: " in done.stderr and "the sandbox's own" in done.stderr


def test_what_lies_in_dev_is_hidden_as_all_of_it():
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        done = run(f"import os; print(os.path.exists({file.name!r}))", "--hide", file.name)
        assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_a_folder_that_is_hidden_is_not_writable(tmp_path):
    done = run("", "--writable", tmp_path, "--hide", tmp_path.parent)
    assert done.returncode == 2 and f"--writable {tmp_path}: it is within what --hide {tmp_path.parent} makes empty" in done.stderr


@pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])
def test_it_changes_the_folder_in_which_it_runs_if_that_is_named(relative, tmp_path):
    done = run("open('new', 'w').write('x')", "--writable", "." if relative else tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "new").read_text() == "x"


def test_it_changes_the_folders_that_are_named(tmp_path):
    (tmp_path / "mine").mkdir()
    done = run(f"open({str(tmp_path / 'mine/new')!r}, 'w').write('x')\nopen({str(tmp_path / 'other')!r}, 'w')", "--writable", tmp_path / "mine")
    assert done.returncode == 1 and (tmp_path / "mine/new").read_text() == "x" and not (tmp_path / "other").exists()


def test_it_has_no_network():
    assert refused("import socket; socket.create_connection(('192.0.2.1', 80), 5)") == "OSError"


def test_it_reaches_no_service_by_a_socket_of_a_file(tmp_path):
    import socket
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(tmp_path / "service"))
        service.listen()
        assert refused(f"import socket; socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'service')!r})") == "PermissionError"


@pytest.mark.parametrize("kind", ["SOCK_DGRAM", "SOCK_RAW"])
def test_it_sends_nothing_to_a_socket_of_a_file(kind, tmp_path):
    import socket
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service:
        service.bind(str(tmp_path / "service"))
        service.setblocking(False)
        assert refused("import socket; socket.socketpair(socket.AF_UNIX, "
                       f"socket.{kind} | socket.SOCK_CLOEXEC)[0].sendto(b'x', {str(tmp_path / 'service')!r})") == "PermissionError"
        with pytest.raises(BlockingIOError):
            service.recv(1)


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_SEQPACKET"])
def test_its_processes_talk_by_pairs_of_sockets(kind):
    done = run(f"import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.{kind} | socket.SOCK_NONBLOCK)\na.send(b'x')\nprint(b.recv(1))")
    assert (done.returncode, done.stdout) == (0, "b'x'\n"), done.stderr


def test_a_pipe_keeps_its_size():
    assert refused("import fcntl, os; fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 1 << 20)") == "PermissionError"
    assert run("import fcntl, os; print(fcntl.fcntl(os.pipe()[1], fcntl.F_GETFL))").stdout == "1\n"


def test_it_sees_no_other_process():
    mine = subprocess.Popen(["sleep", "60"])
    try:
        assert refused(f"import os; os.kill({mine.pid}, 9)") == "ProcessLookupError"
        assert mine.poll() is None
    finally:
        mine.kill()
        mine.wait()


@pytest.mark.parametrize("call", ["libc.unshare(0x10000000)", "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)", "libc.ptrace(0, 0, 0, 0)",
                                  "libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0)"])
def test_the_kernel_refuses(call):
    done = run(f"import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nprint({call}, ctypes.get_errno())")
    assert done.stdout == "-1 1\n", done.stderr


def test_it_has_bounds():
    done = run("bytearray(1 << 30)", "--memory", "512MiB")
    assert done.returncode == 1 and "MemoryError" in done.stderr
    assert run("while True: pass", "--cpu-seconds", "1").returncode == 128 + 9


def test_it_has_no_more_processes_than_that():
    """Root's are counted, too."""
    done = run("import os, time\nfor i in range(200):\n    try:\n        if os.fork() == 0: time.sleep(60)\n    except OSError: break\nprint(i)", "--processes", "10")
    assert done.returncode == 0 and 1 <= int(done.stdout) < 10, (done.stdout, done.stderr)


def test_its_processes_have_memory_together():
    """Each is within its bound. Pages that they share count once."""
    fork = "import os, time\nfor i in range(6):\n    if os.fork() == 0: break\n"
    done = run(f"{fork}x = b'x' * (100 << 20)\ntime.sleep(30)", "--memory", "400MiB")
    assert done.returncode == 128 + 9 and "its processes together hold more than 419430400 bytes" in done.stderr
    done = run(f"x = b'x' * (100 << 20)\n{fork}time.sleep(1)\nif i == 5: print('over')", "--memory", "400MiB")
    assert (done.returncode, done.stderr) == (0, "")


def test_root_s_files_are_readable_for_it_and_it_is_nobody(tmp_path):
    (tmp_path / "mine").write_text("x")
    (tmp_path / "mine").chmod(0o600)
    tmp_path.chmod(0o700)
    done = run(f"import os\nprint(open({str(tmp_path / 'mine')!r}).read(), os.getresuid())")
    assert done.stdout == "x (65534, 65534, 65534)\n", done.stderr
    assert refused("import os; os.setuid(0)") == "PermissionError" if os.getuid() == 0 else "OSError"


def test_it_has_no_keys_of_the_environment():
    shown = "import os; print(sorted(os.environ.items()))"
    outside = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "WANDB_API_KEY": "secret", "OTHER": "1"}
    known = [("HOME", "/dev/shm"), ("LANG", "C.UTF-8"), ("PATH", "/usr/bin:/bin"), ("TMPDIR", "/dev/shm")]
    assert run(shown, env=outside).stdout == f"{known}\n"
    assert run(shown, "--env", "OTHER", "--env", "MORE=a=b", "--env", "ABSENT", env=outside).stdout == f"{sorted(known + [('OTHER', '1'), ('MORE', 'a=b')])}\n"


@pytest.mark.parametrize("by_run", [True, False], ids=["by the run", "by an option"])
def test_what_is_hidden_is_empty(by_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/samples").write_text("42")
    (tmp_path / "data").write_text("42")
    paths = [str(tmp_path / "run"), str(tmp_path / "data")]
    program = f"import os\nprint(os.listdir({paths[0]!r}), open({paths[1]!r}).read(), os.getcwd(), os.listdir('.') == os.listdir('/'))"
    options = [] if by_run else [word for path in paths for word in ("--hide", path)]
    more = {"env": os.environ | {"FERRY_SANDBOX_HIDE": ":".join(["/no/such", *paths])}} if by_run else {}
    done = run(program, *options, cwd=tmp_path / "run", **more)
    assert done.stdout == f"[]  {tmp_path / 'run'} False\n", done.stderr


def test_files_that_are_open_outside_are_not_open_inside(tmp_path):
    (tmp_path / "mine").write_text("x")
    with open(tmp_path / "mine") as file:
        done = run(f"import os; os.read({file.fileno()}, 1)", pass_fds=[file.fileno()])
    assert "Bad file descriptor" in done.stderr


def test_the_status_is_the_program_s():
    assert run("raise SystemExit(7)").returncode == 7
    assert run("import os; os.abort()").returncode == 128 + 6
    missing = subprocess.run([FERRY, "sandbox", "--", "/no/such/program"], capture_output=True, text=True)
    assert missing.returncode == 2 and "/no/such/program: No such file" in missing.stderr
