"""Runs of the programs of this folder: training that ends in any case, and checks side by side that print a line each."""
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

INTEROP = Path(__file__).resolve().parent.parent / "interop"
sys.path += [str(INTEROP / folder) for folder in ("", "train", "seeing", "agents")]

from ranks import finish, start_program  # noqa: E402

STARTS = threading.Lock()  # ports come from one generator
LONGEST = 300  # seconds of a run


def train(algorithm, ranks, arguments):
    """(exit status, what it said) of each rank; none is left, whatever happens."""
    return run_ranks(ranks, ["train", algorithm, *arguments])


def verify(ranks, arguments):
    """The same of `ferry verify --logits`, with its report of what differs."""
    return run_ranks(ranks, ["verify", "--logits", *arguments], stdout=subprocess.PIPE)


def run_ranks(ranks, arguments, **more):
    with STARTS:
        started = start_program(ranks, arguments, **more)
    try:
        return finish(started, timeout=LONGEST)
    finally:
        for rank in started:
            rank.kill()
            rank.wait()


def add_options(parser):
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=8, help="runs at a time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries this program, and no GPU")


def measure(jobs, at_a_time):
    """jobs: [(model, check, call that returns what is wrong, or nothing)] -> the program's exit status"""

    def one(job):
        model, check, call = job
        begun = time.monotonic()
        try:
            fault = call()
        except subprocess.TimeoutExpired:
            fault = f"no end within {LONGEST} s"
        except Exception as error:  # of any run, such as metrics of too few steps: the others go on
            fault = repr(error)
        print(f"{model:14}{check:24}{time.monotonic() - begun:6.1f} s  {fault or 'ok'}", flush=True)
        return not fault
    with ThreadPoolExecutor(at_a_time) as pool:
        good = list(pool.map(one, jobs))
    print(f"{sum(good)} passed, {len(good) - sum(good)} failed")
    return not all(good)
