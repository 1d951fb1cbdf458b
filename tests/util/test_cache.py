"""Where caches go for users with and without a home, and paths with ~."""

import os
import pwd
import stat
import tempfile

import pytest

from vitmods.data.sources import open_source
from vitmods.util.cache import user_cache
from vitmods.util.errors import UserError


@pytest.fixture
def homeless(tmp_path, monkeypatch):
    """As in a container whose user id has no entry in the list of users."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"vitmods-{os.getuid()}"


def test_a_user_without_a_home_has_a_cache_of_their_own(homeless):
    assert user_cache() == user_cache() == homeless
    assert stat.S_IMODE(homeless.stat().st_mode) == 0o700


@pytest.mark.parametrize("foreign", ["open", "link", "file"])
def test_a_temporary_cache_of_somebody_else_is_refused(homeless, foreign):
    if foreign == "open":
        homeless.mkdir()
        homeless.chmod(0o777)
    elif foreign == "link":
        homeless.symlink_to(homeless.parent)
    else:
        homeless.touch()
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        user_cache()


def test_a_relative_cache_home_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache() == tmp_path / ".cache" / "vitmods"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "given"))
    assert user_cache() == tmp_path / "given" / "vitmods"


@pytest.mark.parametrize("spec", ["~nosuchuser/x", "wds:~nosuchuser/x", "imagenet:~nosuchuser/x"])
def test_a_home_that_is_not_there_is_named(spec):
    with pytest.raises(UserError, match="The home folder of ~nosuchuser/x is unknown"):
        open_source(spec)


def test_a_home_of_nobody_is_named(homeless):
    with pytest.raises(UserError, match="The home folder of ~/x is unknown"):
        open_source("~/x")
