import pytest

from served import make_talker, serve


@pytest.fixture(scope="session")
def talker(tmp_path_factory):
    return make_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="module")
def server(talker):
    with serve(talker) as served:
        yield served
