"""tools/make_release: the parts that need no build of minutes. `tools/make_release --twice` itself builds, installs and converts."""
import importlib.machinery
import importlib.util
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

loader = importlib.machinery.SourceFileLoader("make_release", str(ROOT / "tools/make_release"))
make_release = importlib.util.module_from_spec(importlib.util.spec_from_loader("make_release", loader))
loader.exec_module(make_release)


def test_a_tarball_does_not_depend_on_order_and_owner():
    files = [("ferry/bin/ferry", b"program", 0o755), ("ferry/share/doc/ferry/LICENSE", b"words", 0o644)]
    one, other = io.BytesIO(), io.BytesIO()
    make_release.write_tar(one, files, 1000)
    make_release.write_tar(other, files[::-1], 1000)
    assert one.getvalue() == other.getvalue()
    with tarfile.open(fileobj=io.BytesIO(one.getvalue())) as archive:
        assert [(member.name, member.mode, member.mtime, member.uid) for member in archive if member.isfile()] == \
            [("ferry/bin/ferry", 0o755, 1000, 0), ("ferry/share/doc/ferry/LICENSE", 0o644, 1000, 0)]


@pytest.mark.parametrize("symbols, policy", [("GLIBC_2.17 GLIBC_2.34 GLIBCXX_3.4 GLIBCXX_3.4.29", 34), ("GLIBC_2.34 GLIBCXX_3.4.30 GLIBCXX_3.4.9", 35),
                                             ("GLIBC_2.38 GLIBCXX_3.4.30", 38), ("GLIBC_2.28 GLIBCXX_3.4.32", 39), ("GLIBC_2.29", 29)])
def test_a_policy_has_the_libstdcxx_of_a_program(symbols, policy):
    assert make_release.oldest_policy(symbols) == policy


def test_a_libstdcxx_that_no_policy_has_is_named():
    with pytest.raises(SystemExit, match="GLIBCXX_3.4.99"):
        make_release.oldest_policy("GLIBC_2.34 GLIBCXX_3.4.99")


def test_pythons_are_of_different_versions():
    found = make_release.pythons()
    assert found and len({path.name for path in found}) == len(found)


def test_the_tools_are_pinned():
    lines = [line for line in (ROOT / "tools/release/requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all("==" in line for line in lines) and {"auditwheel", "meson-python", "abi3audit"} <= {line.split("==")[0] for line in lines}


def test_links_name_the_oldest_c_library_and_bring_the_compilers_runtime(tmp_path):
    driver, source, compiled = ROOT / "tools/release/linked_by_zig", tmp_path / "one.c", tmp_path / "one.o"
    source.write_text("int one(void) { return 1; }\n")
    subprocess.run([driver, "cc", "-c", source, "-o", compiled], check=True, env={**os.environ, "ZIG": "/nowhere/zig"})
    said = subprocess.run([driver, "c++", "-shared", "-static-libstdc++", "-o", "one.so", compiled], check=True, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "ZIG": "echo"}).stdout.split()
    assert said[:3] == ["cc", "-target", f"{os.uname().machine}-linux-gnu.2.28"]
    assert "-static-libstdc++" not in said and said[3:5] == ["-shared", "-o"]
    assert [Path(part).name for part in said if part.endswith(".a")] == ["libstdc++.a", "libgcc_eh.a", "libgcc.a"]
