"""`classes.txt`: the names of the classes, one a line."""

from collections import Counter
from pathlib import Path

from vitmods.data.records import printable
from vitmods.util.errors import UserError
from vitmods.util.limits import lines_of

CLASSES = "classes.txt"


def class_names(path: Path) -> list[str]:
    """The lines of the file that are not empty, in their order; none where there is no such file.

    Raises:
        UserError: it is no text in UTF-8, or names a class twice.
    """
    if not path.is_file():
        return []
    names = lines_of(path)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{printable(str(path))} names {printable(twice[0])} twice: leave one out.")
    return names
