"""Forks of a process that has imported what all of them take."""
import contextlib
import ctypes
import os
import signal
import sys
import traceback


def start(body, said, outputs, failed):
    """Calls body() in a fork, whose `outputs` (1, 2) go to the descriptor `said`. -> its process, which ends with what body() returns, with `failed`
    behind a traceback, or with this process. It does not return: one that came back would go on as a second of this process."""
    PR_SET_PDEATHSIG = 1
    sys.stdout.flush()
    if process := os.fork():
        return process
    status = failed
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whoever stops the first, by a timeout too, stops all
        for output in outputs:
            os.dup2(said, output)
        status = int(body())
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
