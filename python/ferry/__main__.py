"""python -m ferry: runs the program that was installed with the package, or was built with it, or the first `ferry` of PATH."""
import os
import shutil
import sys
import sysconfig
from typing import Optional


def find_program() -> Optional[str]:
    """-> the path of the program; None if there is none"""
    schemes = ["", "posix_user"] if "posix_user" in sysconfig.get_scheme_names() else [""]
    for scheme in schemes:
        folder = sysconfig.get_path("scripts", scheme) if scheme else sysconfig.get_path("scripts")
        path = os.path.join(folder, "ferry")
        if os.access(path, os.X_OK):
            return path
    built = os.path.join(os.path.dirname(__file__), "../../cli/ferry")  # of build/python/ferry
    return os.path.realpath(built) if os.access(built, os.X_OK) else shutil.which("ferry")


if __name__ == "__main__":
    program = find_program()
    if program is None:
        sys.stderr.write("error: the program ferry is neither beside this Python nor in PATH\nhint: pip install ferry-ckpt brings it\n")
        sys.exit(2)
    os.execv(program, [program, *sys.argv[1:]])
