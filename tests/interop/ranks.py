"""Starts runs of several ranks, and checks the errors of the others when one of them is lost."""
import itertools
import os
import resource
import socket
import subprocess
import time

from support import FERRY

TORCH_PROGRAM = FERRY.parent / "ferry-torch"


def ports_of_this_process():
    """Ports of no other process of the suite, below those that the kernel gives to connections: none is taken before the ranks listen."""
    first = 20000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 12 * 1000
    for port in itertools.cycle(range(first, first + 1000)):
        with socket.socket() as asked:
            asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                asked.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield str(port)


PORTS = ports_of_this_process()


def free_port():
    return next(PORTS)


def start_training(count, algorithm, arguments, limits={}, **environment):
    """`ferry train <algorithm>` as so many ranks, with the variables of torchrun; `limits`: {rank: called in it before it begins}."""
    return start_program(count, ["train", algorithm, *arguments], limits, **environment)


def start_program(count, arguments, limits={}, own={}, stdout=subprocess.DEVNULL, **environment):
    """`own`: {rank: arguments of it alone}."""
    port = free_port()
    # The program itself, not ferry that runs it: signals are for it.
    return [subprocess.Popen([TORCH_PROGRAM, *arguments, *own.get(rank, [])], stdout=stdout, stderr=subprocess.PIPE, text=True, preexec_fn=limits.get(rank),
                             env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1",
                                               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | environment) for rank in range(count)]


def finish(ranks, timeout=60):
    """(exit status, what it said) of each."""
    said = ["".join(text for text in rank.communicate(timeout=timeout) if text) for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, said)]


def finish_soon(ranks, failing, timeout=60):
    """finish(), where the rank `failing` ends by itself: the others are gone ten seconds later, however long they wait for messages."""
    done = finish([ranks[failing]], timeout)
    others = finish([rank for rank in ranks if rank is not ranks[failing]], timeout=10)
    return others[:failing] + done + others[failing:]


def memory_limit(mebibytes):
    """Called in a rank before it begins: its address space."""
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (mebibytes << 20, mebibytes << 20))


def address_spaces(ranks):
    """MiB of the last rank of a run, sampled until it ends well."""
    sizes = []
    while ranks[-1].poll() is None:
        try:
            with open(f"/proc/{ranks[-1].pid}/statm") as statm:
                sizes.append(int(statm.read().split()[0]) * resource.getpagesize() >> 20)
        except (OSError, IndexError):
            break
        time.sleep(0.002)
    assert {status for status, _ in finish(ranks)} == {0}
    return sizes


def wait_for(condition, process, seconds=60):
    until = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.001)
    assert condition()


def lose(ranks, lost, trouble):
    """`trouble()` befalls the rank `lost`. {rank: what it said} of the others, each of which ends with status 2 and names it."""
    try:
        trouble()
        done = {rank: finish([process])[0] for rank, process in enumerate(ranks) if rank != lost}
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert {status for status, _ in done.values()} == {2}, done
    assert all(f"rank {lost}" in said.partition("missing: ")[2] for _, said in done.values()), done
    return {rank: said for rank, (_, said) in done.items()}
