"""Runs verl 0.9.1's own model merger. Usage: merge_with_verl.py < COMMANDS, which are JSON: [[arguments of `python -m verl.model_merger`], ...]

Each command runs in a fork of this process, which has imported what all take. Prints JSON: [[exit status, what it said], ...].

Its modules model_merger and utils.transformers_compat are the real ones; the package's front door, which imports ray, is not opened, and there is no
tokenizer to be found in the folders of the tests.
"""
import importlib
import json
import os
import sys
import tempfile
import types
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from forks import start  # noqa: E402

VERL = Path(os.environ["PEERS"]) / "verl091/verl"


def package(name, folder, **attributes):
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    vars(module).update(attributes)
    sys.modules[name] = module


package("verl", VERL)
package("verl.utils", VERL / "utils", hf_tokenizer=lambda *_, **__: None, hf_processor=lambda *_, **__: None)
merger = importlib.import_module("verl.model_merger.__main__")
for backend in ("fsdp", "base"):
    importlib.import_module(f"verl.model_merger.{backend}_model_merger")


def merge(command):
    sys.argv[1:] = command
    merger.main()
    return 0


def run(command):
    with tempfile.TemporaryFile() as said:
        process = start(lambda: merge(command), said.fileno(), (1, 2), failed=1)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        said.seek(0)
        return status, said.read().decode(errors="replace")


print(json.dumps([run(command) for command in json.load(sys.stdin)]))
