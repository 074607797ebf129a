import sys

import pytest

from support import ROOT

MODULE = ROOT / "build/python"
sys.path.insert(0, str(MODULE))


def pytest_collection_modifyitems(items):
    if not list(MODULE.glob("ferry/_ferry*.so")):
        reason = f"{MODULE} has no module: Python.h is missing (apt-get install libpython3-dev), or `ninja -C build` did not run"
        for item in items:
            if item.path.is_relative_to(__file__.rsplit("/", 1)[0]):
                item.add_marker(pytest.mark.skip(reason=reason))
