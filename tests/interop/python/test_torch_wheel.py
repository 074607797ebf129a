"""The wheel ferry-torch: installed beside torch it runs models, and says what is wrong with another torch or none."""
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys

import pytest

from support import DATA, FERRY, HERE, ROOT

PROGRAM = FERRY.parent / "ferry-torch"
if not PROGRAM.exists():
    pytest.skip("ferry-torch is not built", allow_module_level=True)

loader = importlib.machinery.SourceFileLoader("make_release", str(ROOT / "tools/make_release"))
make_release = importlib.util.module_from_spec(importlib.util.spec_from_loader("make_release", loader))
loader.exec_module(make_release)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return make_release.make_torch_wheel(PROGRAM, "0.0.1", tmp_path_factory.mktemp("wheel"), 1700000000)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """bin/ of an environment that has the wheel, and the program ferry as its wheel would bring it"""
    folder = tmp_path_factory.mktemp("installed") / "env"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", wheel], check=True)
    shutil.copy2(FERRY, folder / "bin/ferry")
    return folder / "bin"


def run(program, *arguments, path=()):
    """Without the library paths of this machine; `path` are folders of packages."""
    env = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    return subprocess.run([program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300,
                          env={**env, "PYTHONPATH": os.pathsep.join(map(str, path))})


def test_the_program_has_no_paths_of_this_machine(installed):
    (program,) = installed.parent.glob("lib/python3*/site-packages/ferry_torch/bin/ferry-torch")
    dynamic = subprocess.run(["readelf", "--dynamic", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "NEEDED" in dynamic and "RPATH" not in dynamic and "RUNPATH" not in dynamic
    assert b"site-packages/torch/lib" not in program.read_bytes()


def test_ferry_finds_the_program_and_torch(installed, work):
    site = next(path for path in sys.path if path.endswith("site-packages"))
    hf = DATA / "hf_llama/hf"
    subprocess.run([sys.executable, HERE / "hf_reference.py", hf, work / "reference.safetensors", "--lengths", "24"], check=True)
    done = run(installed / "ferry", "verify", "--logits", hf, "--reference", work / "reference.safetensors", path=[site])
    assert done.returncode == 0 and "EQUAL" in done.stdout, done.stderr


def test_another_torch_or_none_is_named(installed, work):
    done = run(installed / "ferry", "generate", "x")
    assert done.returncode == 2 and "torch is not installed" in done.stderr and "pip install 'torch==2.11.*'" in done.stderr
    (work / "torch").mkdir()
    (work / "torch/__init__.py").write_text("raise RuntimeError('is not imported')")
    (work / "torch/version.py").write_text("__version__ = '2.10.1+cpu'\n")
    done = run(installed / "ferry", "generate", "x", path=[work])
    assert done.returncode == 2 and "torch 2.10.1+cpu" in done.stderr and "built for 2.11" in done.stderr


def test_a_second_wheel_has_the_same_bytes(wheel, work):
    assert make_release.make_torch_wheel(PROGRAM, "0.0.1", work, 1700000000).read_bytes() == wheel.read_bytes()
    assert wheel.name.startswith("ferry_torch-0.0.1-py3-none-manylinux_2_")
