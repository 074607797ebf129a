"""Prints where Arrow is: the folder of a pyarrow wheel, then its libraries of Parquet and of Arrow, one a line.

    find_arrow.py [FOLDER]      FOLDER is that of a pyarrow wheel (the one with include/); else that of this Python's pyarrow
"""
import importlib.util
import pathlib
import re
import sys

OLDEST = 24  # whose reader returns results

if len(sys.argv) > 1:
    root = pathlib.Path(sys.argv[1]).resolve()
else:
    spec = importlib.util.find_spec("pyarrow")
    if spec is None or spec.origin is None:
        sys.exit("find_arrow: this Python has no pyarrow: name the folder of a wheel by -Darrow_root")
    root = pathlib.Path(spec.origin).parent
if not (root / "include" / "parquet" / "arrow" / "reader.h").exists():
    sys.exit(f"find_arrow: {root} holds no include/parquet")
version = int(re.search(r"ARROW_VERSION_MAJOR (\d+)", (root / "include/arrow/util/config.h").read_text())[1])
if version < OLDEST:
    sys.exit(f"find_arrow: {root} is of pyarrow {version}: {OLDEST} or newer is needed")
print(root)
for name in ["libparquet.so", "libarrow.so"]:
    libraries = sorted(root.glob(name + ".*"))  # a wheel has them under the name with the version only
    if len(libraries) != 1:
        sys.exit(f"find_arrow: {root} holds {len(libraries)} files {name}.*, one is expected")
    print(libraries[0])
