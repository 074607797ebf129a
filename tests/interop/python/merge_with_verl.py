"""Runs verl 0.9.1's own model merger. Usage: merge_with_verl.py OPERATION --backend ... (arguments of `python -m verl.model_merger`)

Its modules model_merger and utils.transformers_compat are the real ones; the package's front door, which imports ray, is not opened, and there is no
tokenizer to be found in the folders of the tests.
"""
import importlib
import os
import sys
import types
from pathlib import Path

VERL = Path(os.environ["PEERS"]) / "verl091/verl"


def package(name, folder, **attributes):
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    vars(module).update(attributes)
    sys.modules[name] = module


package("verl", VERL)
package("verl.utils", VERL / "utils", hf_tokenizer=lambda *_, **__: None, hf_processor=lambda *_, **__: None)
importlib.import_module("verl.model_merger.__main__").main()
