"""Prints where LibTorch is: its folder, then the folders of the CUDA libraries that it loads, one a line.

    find_torch.py [FOLDER]      FOLDER is that of a torch wheel (the one with include/ and lib/); else that of this Python's torch
"""
import importlib.util
import pathlib
import sys

if len(sys.argv) > 1:
    root = pathlib.Path(sys.argv[1]).resolve()
else:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("find_torch: this Python has no torch: name the folder of a wheel by -Dtorch_root")
    root = pathlib.Path(spec.origin).parent
if not (root / "lib" / "libtorch_cpu.so").exists():
    sys.exit(f"find_torch: {root} holds no lib/libtorch_cpu.so")
print(root)
libraries = [root.parent / "nvidia", pathlib.Path("/usr/local/cuda/lib64")]
for folder in sorted({path.parent for base in libraries if base.exists() for path in base.rglob("*.so.*")}):
    print(folder)
