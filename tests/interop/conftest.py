import shutil

import pytest

from support import FERRY


def pytest_sessionstart(session):
    if not session.config.option.collectonly and not FERRY.exists():
        pytest.exit(f"{FERRY} does not exist: build it first, or set FERRY", returncode=2)


@pytest.fixture
def work(tmp_path):
    """A folder of the test's own, gone when it passes or fails: checkpoints add up."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)
