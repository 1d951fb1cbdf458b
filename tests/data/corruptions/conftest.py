import pytest

from .corruption_images import write_textures


@pytest.fixture(scope="session")
def textures(tmp_path_factory):
    """A folder with made-up frost textures."""
    folder = tmp_path_factory.mktemp("frost")
    write_textures(folder)
    return folder
