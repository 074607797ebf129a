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
# transformers names and packs the weights of these otherwise than files do: experts of a layer in one tensor, other prefixes.
OF_MODULES = ("qwen2_moe", "mixtral", "ernie4_5_moe", "minimax_m2", "mistral3", "qwen2_5_vl")


@functools.lru_cache(maxsize=1)
def sharded_runs():
    folder = Path(tempfile.mkdtemp(prefix="ferry_sharded_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    done = subprocess.run([sys.executable, HERE / "fsdp_worker.py", str(WORLD), folder / "out"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    return folder / "out"
