"""The programs run where fmt and nlohmann's JSON are not installed: neither needs a shared library of theirs."""
import re
import subprocess

import pytest

from support import FERRY


def needed(program):
    """-> the shared libraries that the program names, without their versions"""
    text = subprocess.run(["readelf", "--dynamic", "--wide", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    return {name.split(".so")[0] for name in re.findall(r"\(NEEDED\).*\[([^\]]+)\]", text)}


@pytest.mark.parametrize("name", ["ferry", "ferry-torch"])
def test_no_library_of_fmt_or_json_is_needed(name):
    program = FERRY.parent / name
    if not program.exists():
        pytest.skip(f"{name} is not built")
    libraries = needed(program)
    assert "libc" in libraries
    assert [library for library in libraries if re.search("fmt|json|tomlplusplus|CLI11|curl", library)] == []
