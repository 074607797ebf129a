"""`--tp 2` as two processes: a rank whose step fails ends the server, which says why at once, and one that stands still for a while does not."""
import json
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from served import NAME, serve

SMALL = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
LARGE = SMALL | {"prompt": [3 + i * 7 % 290 for i in range(3500)]}


def limit_memory(process):
    """Its address space stays as large as it is, and 2 MiB."""
    size = int(re.search(r"VmSize:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1]) * 1024
    subprocess.run(["prlimit", f"--pid={process.pid}", f"--as={size + (2 << 20)}"], check=True)


def ranks_of(served):
    return [served.process, *served.others]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_step_fails_ends_the_server(rank, talker):
    with serve(talker, "--tp", 2, "--timeout", 600, ranks=2, fails=True) as served:
        served.complete("Small", **SMALL)
        limit_memory(ranks_of(served)[rank])
        begin = time.monotonic()
        status, _, answer = served.ask("POST", "/v1/completions", {"model": NAME} | LARGE)
        message = json.loads(answer)["error"]["message"]
        assert status == 500 and re.search(f"{'rank 1, which failed: ' * rank}(out of memory|could not create a primitive)", message), message
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stands_still_for_a_while_is_waited_for(rank, talker):
    with serve(talker, "--tp", 2, "--timeout", 60, ranks=2) as served:
        before = served.complete("Wait", seed=1, **SMALL)["choices"]
        ranks_of(served)[rank].send_signal(signal.SIGSTOP)
        threading.Timer(5, ranks_of(served)[rank].send_signal, [signal.SIGCONT]).start()
        assert served.complete("Wait", seed=1, **SMALL)["choices"] == before
