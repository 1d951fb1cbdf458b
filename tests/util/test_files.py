import errno
import json
import os

import pytest

from vitmods.util.errors import UserError
from vitmods.util.files import disk_errors, make_folder, progress_console, write_atomically, write_json


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path):
    def fail(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "full")

    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(UserError, match="disk is full"):
        write_atomically(path, fail)
    with pytest.raises(ValueError, match="Out of range"):
        write_json(path, {"loss": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_previous_file_is_kept(tmp_path):
    path, previous = tmp_path / "a", tmp_path / "b"
    for number in b"1", b"2", b"3":
        write_atomically(path, lambda file, number=number: file.write(number), keep_previous=previous)
    assert (path.read_bytes(), previous.read_bytes()) == (b"3", b"2")


def test_a_disk_error_inside_a_librarys_own_is_found_and_others_are_left_alone():
    def save_as_torch_does():
        with disk_errors("x"):
            try:
                raise OSError(errno.EDQUOT, "quota")
            except OSError:
                raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 - torch.save hides the reason so

    with pytest.raises(UserError, match="quota"):
        save_as_torch_does()
    with pytest.raises(RuntimeError, match="bug"), disk_errors("x"):
        raise RuntimeError("bug")


def test_a_file_in_the_way_of_a_folder_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another folder"):
        make_folder(tmp_path / "file")
    with pytest.raises(UserError, match="choose another folder"):
        make_folder(tmp_path / "file" / "below")


def test_an_unwritable_folder_is_one_clear_error(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    child = os.fork()
    if child == 0:  # root may write anywhere, so be somebody else
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(0o755)
        if os.geteuid() == 0:
            os.setuid(65534)
        try:
            make_folder(locked)
        except UserError as error:
            os._exit(0 if "may not be written" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_bar_goes_on_when_its_terminal_is_gone(monkeypatch):
    from rich.progress import track

    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, says rich, though it is a pipe
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", stream)
        console = progress_console()
        assert console.is_terminal
        assert list(track(range(3), console=console)) == [0, 1, 2]
        console.print("more")
