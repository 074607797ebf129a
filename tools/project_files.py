"""The files of the project, and what git says about them, if it knows them."""
import os
import subprocess
from pathlib import Path


def git(root, *arguments):
    """-> what git says, or None where it says nothing of use: `root` is no checkout (a release that was unpacked, in another's checkout perhaps), or
    has no such commit"""
    def ask(*words):
        done = subprocess.run(["git", "-C", root, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return done.stdout if done.returncode == 0 else None

    top = ask("rev-parse", "--show-toplevel")
    return ask(*arguments) if top and Path(top.strip()).samefile(root) else None


def all_files(root):
    """-> names of all files: those that git knows and new ones; where there is no git, all but what is built or hidden"""
    names = git(root, "ls-files", "--cached", "--others", "--exclude-standard")
    if names is not None:
        return sorted(name for name in set(names.splitlines()) if (root / name).is_file())
    found = []
    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__")) and not (here == Path() and name.startswith("build"))]
        found += [str(here / name) for name in files if not name.endswith(".pyc")]
    return sorted(found)
