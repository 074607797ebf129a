"""Runs fsdp_worker.py once for all tests: four ranks of real torch.distributed."""
import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from support import HERE

WORLD = 4


@functools.lru_cache(maxsize=1)
def sharded_runs():
    folder = Path(tempfile.mkdtemp(prefix="ferry_sharded_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    log = open(folder / "log", "w")
    ranks = [subprocess.Popen([sys.executable, HERE / "fsdp_worker.py", str(rank), str(WORLD), str(folder / "store"), str(folder / "out")],
                              stdout=log, stderr=log, cwd=HERE) for rank in range(WORLD)]
    failed = [rank.wait(timeout=300) for rank in ranks]
    assert not any(failed), (folder / "log").read_text()[-3000:]
    return folder / "out"
