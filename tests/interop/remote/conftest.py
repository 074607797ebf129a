import pytest

from servers import serve_files
from support import llama_shapes, random_tensors, write_hf


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """The model of the file's CONFIG, in three files."""
    folder, config = tmp_path_factory.mktemp("model") / "hf", request.module.CONFIG
    write_hf(folder, config, random_tensors(llama_shapes(config)), shards=3)
    return folder


@pytest.fixture(scope="module")
def files(model):
    with serve_files(model.parent) as server:
        yield server
