"""tools/configure, on a project that copies two files, with the real Meson and ninja: whatever a build folder went through, the next run
configures what has to be, and makes nothing again that was made."""
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MESON_BUILD = """
project('stub', meson_version: '>=1.0.0')
compile = [find_program('cp'), '@INPUT@', '@OUTPUT@']
custom_target('base', input: 'base.c', output: 'base.o', command: compile, build_by_default: true)
if get_option('torch_root') != ''
  custom_target('models', input: 'models.c', output: 'models.o', command: compile, build_by_default: true)
endif
extra = find_program('extra', required: false)
"""
OPTIONS = ("option('torch_root', type: 'string', value: '')\noption('arrow_root', type: 'string', value: '')\n"
           "option('fuzz', type: 'boolean', value: false)\n")


class Checkout:
    def __init__(self, root):
        self.root, self.programs = root, root.parent / "programs"
        (root / "tools").mkdir(parents=True)
        self.programs.mkdir()
        for name in ("configure", "install_packages"):
            shutil.copy(ROOT / "tools" / name, root / "tools")
        for name, text in {"meson.build": MESON_BUILD, "meson_options.txt": OPTIONS, "base.c": "", "models.c": ""}.items():
            (root / name).write_text(text)
        self.install_packages("1.0")

    @property
    def build(self):
        return self.root / "build"

    @property
    def environment(self):
        return os.environ | {"PATH": f"{self.programs}:{os.environ['PATH']}"}

    def program(self, name, script):
        (self.programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.programs / name).chmod(0o755)

    def install_packages(self, version):
        self.program("dpkg-query", f"echo libextra-dev {version} installed")

    def unpack_libraries(self):
        for package in ("torch", "pyarrow"):
            (self.build / "peers/lib/python3.11/site-packages" / package).mkdir(parents=True)

    def start(self, *arguments):
        return subprocess.Popen([self.root / "tools/configure", *arguments], env=self.environment, cwd=self.root, start_new_session=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def configure(self, *arguments, code=0):
        """-> what it said; "" is: nothing had to be configured"""
        process = self.start(*arguments)
        output = process.communicate()[0]
        assert process.returncode == code, output
        return output

    def compile(self):
        """-> what was made, of what had to be made"""
        done = subprocess.run(["ninja", "-C", self.build, "-v"], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout
        return [name for name in ("base.o", "models.o") if f" {name}\n" in done.stdout]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path / "checkout")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """One for all that leave it as they found it: configured and compiled."""
    checkout = Checkout(tmp_path_factory.mktemp("compiled") / "checkout")
    assert "configuring build: it was not configured yet" in checkout.configure()
    assert checkout.compile() == ["base.o"]
    return checkout


def test_second_run_does_nothing(compiled):
    assert compiled.configure() == ""
    assert compiled.compile() == []


def test_libraries_that_come_later_are_found(compiled):
    compiled.unpack_libraries()
    assert compiled.configure() == ""  # pip is still at work, or was interrupted
    (compiled.build / "peers/finished-libraries").write_text("pins\n")
    said = compiled.configure()
    assert "LibTorch and Arrow changed" in said and f"torch_root: {compiled.build}/peers/lib/python3.11/site-packages/torch" in said
    assert compiled.compile() == ["models.o"]
    assert compiled.configure() == ""


def test_package_that_comes_later_is_found(compiled):
    compiled.program("extra", "exit")
    assert compiled.configure() == ""
    compiled.install_packages("1.1")
    said = compiled.configure()
    assert "packages changed" in said and "Program extra found: YES" in said
    assert compiled.compile() == []


def test_another_meson_configures_anew(compiled):
    compiled.program("meson", f'exec {shutil.which("meson")} "$@"')
    assert "meson changed" in compiled.configure()
    assert compiled.compile() == []


@pytest.mark.parametrize("name", ["build.ninja", "meson-private/coredata.dat", "meson-private/configured_with.json"])
def test_file_that_is_lost_or_cut_short_configures_anew(compiled, name):
    path = compiled.build / name
    if name == "meson-private/coredata.dat":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-20])
    assert "configuring build" in compiled.configure()
    assert compiled.compile() == []


def test_failure_is_told_and_tried_again(compiled):
    description = compiled.root / "meson.build"
    description.write_text(MESON_BUILD + "error('no such thing')\n")
    compiled.install_packages("1.2")
    assert "no such thing" in compiled.configure(code=1)
    description.write_text(MESON_BUILD)
    assert "configuring build" in compiled.configure()
    assert compiled.compile() == []


def test_kill_at_any_time_is_mended_by_the_next_run(checkout):
    started = time.monotonic()
    checkout.configure()
    whole = time.monotonic() - started
    for part in (0.5, 0.7, 0.9):
        (checkout.build / "build.ninja").unlink(missing_ok=True)
        process = checkout.start()
        time.sleep(part * whole)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    checkout.configure()
    assert checkout.compile() == ["base.o"]
    assert checkout.configure() == ""


def test_options_given_by_hand_stay(checkout):
    subprocess.run(["meson", "setup", checkout.build, checkout.root, "--buildtype=debug"], env=checkout.environment, check=True)
    checkout.compile()
    assert "by hand" in checkout.configure()
    assert checkout.compile() == []
    assert "buildtype = debug" in (checkout.build / "meson-private/cmd_line.txt").read_text()


def test_checkout_that_moved_configures_anew(checkout):
    checkout.unpack_libraries()
    (checkout.build / "peers/finished-libraries").write_text("pins\n")
    checkout.configure()
    checkout.root = checkout.root.rename(checkout.root.parent / "elsewhere")
    said = checkout.configure()
    assert "checkout changed" in said and f"torch_root: {checkout.build}/peers" in said
    assert checkout.compile() == ["base.o", "models.o"]


def test_another_folder_has_options_of_its_own(checkout):
    assert "configuring other" in checkout.configure("other", "-Doptimization=1")
    assert checkout.configure("other", "-Doptimization=1") == ""
    assert "options changed" in checkout.configure("other", "-Doptimization=2")
    assert not checkout.build.exists()


def test_fuzz_targets_wait_for_no_libraries(checkout):
    assert "configuring build-fuzz" in checkout.configure("build-fuzz", "-Dfuzz=true")
    checkout.unpack_libraries()
    (checkout.build / "peers/finished-libraries").write_text("pins\n")
    assert checkout.configure("build-fuzz", "-Dfuzz=true") == ""
