"""Tables from outside: CSV with any usual delimiter and encoding, JSON Lines and Parquet, read as rows by column."""

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from unicodedata import normalize

from vitmods.util.errors import UserError, explaining, needs
from vitmods.util.limits import MOST_COLUMNS, parse_json, read_bytes
from vitmods.util.text import printable

TABLES = (".csv", ".tsv", ".txt", ".jsonl", ".ndjson", ".parquet")
"""endings of tables, in lower case"""
IMAGE_NAMES = "image file file_name filename image_id img path filepath image_path image_name id name".split()  # noqa: SIM905
"""usual headers of the column that names images"""
_JSON = "JSON Lines in UTF-8"
_DELIMITERS = ",;\t|"
_SAMPLE = 1 << 14  # characters
_OTHER_LETTERS = re.compile(r"[À-ÿ]{3}|[^\x00-\x7fÀ-ÖØ-öø-ÿŠŒŽšœžŸ€‘’“”–—…«»°²³µ·ºª§\xa0]")
_WHOLE = re.compile(r"\s*([+-]?\d+)(\.0*)?\s*")

K = TypeVar("K")
Row = tuple[int, dict[str, Any] | None]
"""The number of a line and its values by column; None for a line of JSON that is not an object."""


def whole_number(value: Any) -> int:
    """Read a number by its value: 3, 3.0, "3" and "3.0" are 3. Raises ValueError for anything else."""
    if not isinstance(value, bool) and (match := _WHOLE.fullmatch(str(value))):
        return int(match[1])
    if isinstance(value, float) and value.is_integer():  # 1e+20
        return int(value)
    raise ValueError(f"{value!r} is not a whole number")


def cell(value: Any) -> str:
    """The text of a value; a list becomes words between semicolons, and 1.0 is 1."""
    if isinstance(value, list | tuple):
        return ";".join(map(cell, value))
    text = "" if value is None or value != value else normalize("NFC", str(value).strip())
    return match[1] if (match := _WHOLE.fullmatch(text)) and match[2] else text


def read_rows(path: Path, layout: str = "", errors: str = "strict", delimiter: str = "") -> tuple[list[str], list[Row]]:
    """Read the header and the lines that are not empty; unless given, the delimiter is the one that divides the header.

    Raises UserError: it cannot be read, or a line has more columns than the header. layout: a sentence for the errors.
    """
    name, layout, ending = printable(str(path)), f" {layout}" if layout else "", path.suffix.lower()
    kinds = {".jsonl": _JSON, ".ndjson": _JSON, ".json": "a JSON list of rows", ".parquet": "Parquet"}
    what = kinds.get(ending, "a CSV file in UTF-8")
    with explaining(lambda error: f"{name} cannot be read as {what}: {error}.{layout}", OSError, ValueError, csv.Error):
        raw = read_bytes(path, "text")
        if what == "Parquet":
            with needs(f"Reading {name} needs pyarrow", "hf"):
                from pyarrow import ArrowException, BufferReader, parquet  # type: ignore[import-untyped]
            try:
                table = parquet.read_table(BufferReader(raw))
            except ArrowException as error:
                raise ValueError(error) from error
            return table.column_names, list(enumerate(table.to_pylist(), 1))
        if "JSON" in what:
            text, rows = raw.decode("utf-8-sig"), list[Row]()
            if what == _JSON:
                rows = [(number, _object(line)) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
            else:
                content = parse_json(text)
                if isinstance(content, dict) and not any(isinstance(v, dict | list) for v in content.values()):
                    content = [{"file": name, "label": value} for name, value in content.items()]
                elif isinstance(content, dict) and {*map(str.lower, content)} & {*IMAGE_NAMES}:
                    content = _transposed(content)
                elif isinstance(content, dict) and not any(isinstance(v, dict) for v in content.values()):
                    content = [{"file": name, "label": labels} for name, labels in content.items()]
                if not isinstance(content, list):
                    raise ValueError("it is not a list of rows, or names and their labels")
                rows = [(number, row if isinstance(row, dict) else None) for number, row in enumerate(content, 1)]
            return list(dict.fromkeys(column for _, row in rows for column in row or ())), rows
        if raw.startswith((b"PK\3\4", b"\xd0\xcf\x11\xe0")):
            raise ValueError("it is a workbook: save it as CSV")
        return _csv_rows(_decoded(raw, errors), name, layout, delimiter)


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Read the number and the text of each line that is not empty. Raises UserError for what is not text."""
    with explaining(
        lambda error: f"{printable(str(path))} cannot be read as text in UTF-8: {error}.", OSError, ValueError
    ):
        lines = io.StringIO(_decoded(read_bytes(path, "text"), "strict"), newline=None)
    return [(number, text) for number, line in enumerate(lines, 1) if (text := line.strip())]


def divided(line: str, mark: str) -> list[str]:
    """The cells of a line. Raises ValueError."""
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=mark, skipinitialspace=True))]
    except csv.Error as error:
        raise ValueError(error) from error


def _decoded(raw: bytes, errors: str) -> str:
    """UTF-8, UTF-16, or what Windows writes in the West: of its letters at most two stand together beyond ASCII."""
    marks = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
    if how := marks.get(raw[:2]) or {b"\0": "utf-16-be"}.get(raw[:1]) or {b"\0": "utf-16-le"}.get(raw[1:2]):
        return raw.decode(how)
    try:
        return raw.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        with suppress(UnicodeDecodeError):
            text = raw.decode("cp1252")
            if b"\0" not in raw and not _OTHER_LETTERS.search(text):
                return text
        raise error


def cells_of(header: Sequence[str]) -> list[str]:
    """The cells of the first line, of which those that repeat another were named with their column."""
    plain = [name.removesuffix(f" ({number})") for number, name in enumerate(header, 1)]
    return [cell if plain.count(cell) > 1 else name for cell, name in zip(plain, header, strict=True)]


def _transposed(columns: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Rows of columns that are lists, or mappings of numbers of rows as pandas writes them; None for anything else."""
    keyed = [dict(enumerate(column)) if isinstance(column, list) else column for column in columns.values()]
    if not all(isinstance(column, dict) and column.keys() == keyed[0].keys() for column in keyed):
        return None
    return [{name: column[key] for name, column in zip(columns, keyed, strict=True)} for key in keyed[0]]


def _object(line: str) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _csv_rows(text: str, name: str, layout: str, delimiter: str) -> tuple[list[str], list[Row]]:
    strict = not delimiter
    if match := re.match(r"sep=(.)\r?\n", text):  # a line of Excel's
        text, delimiter = text[match.end() :], match[1]
    first = next((line for line in io.StringIO(text, newline="") if line.strip()), "")
    counts = {mark: len(next(csv.reader([first], delimiter=mark), [])) for mark in delimiter or _DELIMITERS}
    most = [mark for mark in counts if counts[mark] == max(counts.values())]
    if len(most) > 1 and counts[most[0]] > 1:
        with suppress(csv.Error):  # the lines do not decide it
            most = [csv.Sniffer().sniff(text[:_SAMPLE], "".join(most)).delimiter]
    how: dict[str, Any] = {"delimiter": most[0], "strict": strict, "skipinitialspace": most[0] != "\t"}
    if not delimiter and max(counts.values()) < 2 and len(first.split()) > 1:
        how["delimiter"] = " "
    reader = csv.reader(io.StringIO(text, newline=""), **how)
    header, rows = list[str](), list[Row]()
    lines = [(reader.line_num, values) for values in reader if any(value.strip() for value in values)]
    if how["delimiter"] == " " and not is_header(lines[0][1]) and len({len(values) for _, values in lines}) > 1:
        lines = [
            (number, line.split(maxsplit=1)) for number, line in enumerate(text.splitlines(), 1)
        ]  # labels of words
    for number, values in lines:
        if not any(value.strip() for value in values):
            continue
        if not header:
            header = [value.strip() or f"column {i}" for i, value in enumerate(values, 1)]
            twice = {name for name, count in Counter(header).items() if count > 1}
            header = [f"{name} ({i})" if name in twice else name for i, name in enumerate(header, 1)]
            if len(header) > MOST_COLUMNS:
                raise ValueError(f"it has more than {MOST_COLUMNS:,} columns")
            continue
        if any(values[len(header) :]):
            mark = {"\t": "tab", ",": "comma", ";": "semicolon", " ": "space"}.get(how["delimiter"], most[0])
            raise UserError(
                f"Line {number} of {name} has more columns than its first line: remove the extra {mark}, or "
                f"put the value that has it in double quotes.{layout}"
            )
        values += [""] * (len(header) - len(values))
        rows.append((number, dict(zip(header, values, strict=False))))
    return header, rows


def read_table(
    path: Path,
    columns: Iterable[str],
    layout: str = "",
    *,
    same: Mapping[str, str] = {},
    errors: str = "strict",
    delimiter: str = "",
) -> list[tuple[int, dict[str, str]]]:
    """Read a table that has at least these columns: the number of each line, and its text by column in lower case.

    same: other names of columns, which hold where the table does not have the column itself. Raises UserError.
    """
    file, (header, rows) = printable(str(path)), read_rows(path, layout, errors, delimiter)
    names = renamed(header, same)
    if missing := [column for column in columns if column not in names.values()]:
        if not any(header):
            raise UserError(f"{file} cannot be read as a table: it is empty. {layout}".rstrip())
        wanted, first = " and ".join(missing), printable(",".join(header))
        raise UserError(f'{file} does not have the column {wanted}: its first line is "{first}". {layout}'.rstrip())
    if (odd := next((line for line, row in rows if row is None), None)) is not None:
        raise UserError(f"Line {odd} of {file} is not a JSON object. {layout}".rstrip())
    return [
        (
            line,
            {
                name: value if isinstance(value := (row or {}).get(key), str) else cell(value)
                for key, name in names.items()
            },
        )
        for line, row in rows
    ]


def renamed(header: Iterable[str], same: Mapping[str, str]) -> dict[str, str]:
    """Header -> name in lower case; the first header of `same` replaces a column that is not there by its own name."""
    names = {name: name.lower() for name in header}
    for other, column in same.items():
        if column not in names.values() and (found := next((n for n in names if names[n] == other), None)):
            names[found] = column
    return names


def _loose(name: str) -> str:
    """The name of a file without differences of case, and without its ending and zeros in front where it is a number:
    spreadsheets take these away. The slash tells such a name from those of files."""
    return f"/{match[1]}" if (match := re.fullmatch(r"0*(\d+)\.\w*", name)) else f"/{name.casefold()}"


class Finder:
    """Finds images by what a table calls them: the path, its end, or either without the ending of the file."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = set(ids)
        self._ending_in: dict[str, list[str]] = {}
        for name in ids:
            last = name.rpartition("/")[2]
            for key in {last, last.rpartition(".")[0] or last, _loose(last)}:
                self._ending_in.setdefault(key, []).append(name)

    def find(self, text: str) -> str | None:
        """The image of this name, or None. Raises ValueError where several could be meant."""
        text = normalize("NFC", text.strip().replace("\\", "/").removeprefix("./"))
        if text in self._ids or not text:
            return text or None
        *folders, last = PurePosixPath(text).parts
        found = next(filter(None, map(self._ending_in.get, (last, cell(last), _loose(last), _loose(f"{last}.")))), [])
        for count in range(1, len(folders) + 1):  # the folder above it has to agree; those above that choose
            above = "/".join(["", *folders[-count:]]).casefold()
            closer = [name for name in found if f"/{name.casefold()}".rpartition("/")[0].endswith(above)]
            if not closer:
                found = [] if count == 1 else found
                break
            found = closer
        if len(found) > 1:
            raise ValueError(
                f"could be {printable(found[0])} or {printable(found[1])}: write its folder and ending too"
            )
        return found[0] if found else None


def is_header(cells: Iterable[str]) -> bool:
    """Whether a line has a usual name of the column that names images."""
    return any(cell.lower().replace(" ", "_") in IMAGE_NAMES for cell in cells)


def find_any(find: Callable[[str], str | None], text: str) -> str | None:
    """The image of a name, or the name itself where several could be meant, or None."""
    try:
        return find(text)
    except ValueError:
        return text


def naming(columns: Mapping[K, Sequence[str]], find: Callable[[str], str | None]) -> list[K]:
    """The column of which more than half of the texts name images, most of them or with more of their path; several
    columns where these are equal and name different images."""
    images = {key: tuple(find_any(find, text) for text in texts) for key, texts in columns.items()}
    ranks = {}
    for key, found in images.items():
        texts = {image: text for image, text in zip(found, columns[key], strict=True) if image}
        rank = sum(1 + min(len(re.findall(r"[./\\]", name)) for name in pair) for pair in texts.items())
        ranks[key] = rank if 2 * sum(map(bool, found)) > len(found) else 0
    best = [key for key, rank in ranks.items() if rank and rank == max(ranks.values())]
    return [*{images[key]: key for key in reversed(best)}.values()]
