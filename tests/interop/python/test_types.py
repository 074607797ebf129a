"""The types of the module ferry, by mypy: its own source, its stub beside the extension, and a program that uses it."""
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from support import DATA, ROOT

ferry = pytest.importorskip("ferry", reason="the Python module is not built")
PROGRAM = Path(__file__).parent / "typed_program.py"


def run_mypy(*arguments, module="mypy", **environment):
    """-> exit status, and what it says. The types of torch are kept in build/mypy."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, "MYPY_CACHE_DIR": str(ROOT / "build/mypy"), **environment})
    return done.returncode, done.stdout


@pytest.fixture
def installed(work):
    """A Python that has the built module among its installed packages, as pip leaves it, beside those of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", work / "env"], check=True)
    (packages,) = (work / "env/lib").glob("python*/site-packages")
    (packages / "ferry.pth").write_text(f"{ROOT / 'build/python'}\n{sysconfig.get_path('purelib')}\n")
    return work / "env/bin/python"


def test_the_source_has_strict_types():
    code, said = run_mypy("python/ferry")
    assert code == 0, said


def test_the_stub_of_the_extension_names_what_it_has(work):
    """Alone in a folder, they are compared without the package and its peers."""
    for path in (ROOT / "build/python/ferry").glob("_ferry.*"):
        if path.is_file():
            (work / path.name).symlink_to(path)
    code, said = run_mypy("_ferry", module="mypy.stubtest", PYTHONPATH=str(work), MYPYPATH=str(work))
    assert code == 0, said


def test_a_program_that_uses_the_installed_package_has_its_types(installed, work):
    code, said = run_mypy("--python-executable", installed, PROGRAM)
    assert code == 0, said
    done = subprocess.run([installed, PROGRAM, DATA / "hf_llama/hf", work], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
