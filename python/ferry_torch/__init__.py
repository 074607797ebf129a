"""The console script ferry-torch: finds LibTorch in the environment's torch and becomes the program, which is in this package.

`ferry` runs it for verify --logits, generate, serve, bench and train.
"""
import importlib.util
import os
import re
import sys
from pathlib import Path

TORCH = "2.11"  # the release whose C++ interface the program was built against


def fail(message, hint):
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    sys.exit(2)


def find_package(name, hint):
    """-> the folder of a package, which is not imported"""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        fail(f"ferry-torch: {name} is not installed beside {sys.executable}", hint)
    return Path(list(spec.submodule_search_locations)[0])


def torch_version(torch):
    """-> "2.11.0+cpu", as torch/version.py says"""
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", (torch / "version.py").read_text(), re.MULTILINE)
    return found[1] if found else "of no version"


def library_folders():
    """-> the folders of the libraries that the program loads"""
    torch = find_package("torch", f"pip install 'torch=={TORCH}.*'")
    version = torch_version(torch)
    if not version.startswith(TORCH + "."):
        fail(f"ferry-torch: torch {version} in {torch}, the program was built for {TORCH}", f"pip install 'torch=={TORCH}.*'")
    arrow = find_package("pyarrow", "pip install ferry-torch, with what it needs")
    return [torch / "lib", torch, *sorted((torch.parent / "nvidia").glob("*/lib")), arrow]


def main():
    program = Path(__file__).resolve().parent / "bin/ferry-torch"
    folders = [str(folder) for folder in library_folders()]
    before = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(folders + ([before] if before else []))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as ferry does: threads that wait leave the cores to others
    os.execv(program, ["ferry", *sys.argv[1:]])
