"""A user of the CUDA runtime, compiled here, so that these tests need no binary from elsewhere."""

import shutil

import pytest
from runtime_user import CALLED, user_of

from kvproof.hostrt import build, libraries


def pytest_collection_modifyitems(items):
    if shutil.which("cc") is None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no C compiler"))


@pytest.fixture(scope="session")
def user(tmp_path_factory):
    """A shared object that calls every name of CALLED."""
    return user_of(CALLED, tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="session")
def runtime(user, tmp_path_factory):
    """The CUDA runtime built for ``user``, in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return build.build(libraries.CUDA_RUNTIME_12, [user])
