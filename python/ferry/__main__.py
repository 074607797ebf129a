"""python -m ferry: runs the program that was installed with the package, or the first `ferry` of PATH."""
import os
import shutil
import sys
import sysconfig


def find_program() -> str:
    """-> the path of the program"""
    schemes = ["", "posix_user"] if "posix_user" in sysconfig.get_scheme_names() else [""]
    for scheme in schemes:
        folder = sysconfig.get_path("scripts", scheme) if scheme else sysconfig.get_path("scripts")
        path = os.path.join(folder, "ferry")
        if os.access(path, os.X_OK):
            return path
    found = shutil.which("ferry")
    if found is None:
        raise FileNotFoundError("the program ferry is neither beside this Python nor in PATH")
    return found


if __name__ == "__main__":
    program = find_program()
    os.execv(program, [program, *sys.argv[1:]])
