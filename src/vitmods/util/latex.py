"""Text and tables for LaTeX: ASCII that every engine reads, and tables that fit a column, without packages."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Container, Sequence

LINE = 229.0  # points of a column of `article` in two columns; those of conferences are as wide or wider
GAP = 2.0  # points on each side of a column of a table
SIZES = (("footnotesize", 8.5), ("scriptsize", 8.0), ("tiny", 6.9))
"""the sizes of letters, and how many points 1 em of `_width` has there"""
_SIGNS = {
    **{character: f"\\{character}" for character in "%_&#${}"},
    **{"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\textasciitilde{}", "`": r"\`{}", '"': "''"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "–": "--", "—": "---", "…": r"\dots{}"},
    **{"−": "$-$", "±": r"$\pm$", "×": r"$\times$", "≤": r"$\le$", "≥": r"$\ge$", "·": r"$\cdot$", "→": r"$\to$"},
    **{
        "α": r"$\alpha$",
        "β": r"$\beta$",
        "γ": r"$\gamma$",
        "λ": r"$\lambda$",
        "σ": r"$\sigma$",
        "µ": r"$\mu$",
        "°": r"$^\circ$",
    },
    **{"ß": r"{\ss}", "æ": r"{\ae}", "œ": r"{\oe}", "ø": r"{\o}", "å": r"{\aa}", "ł": r"{\l}", "ı": r"{\i}"},
    **{"Æ": r"{\AE}", "Œ": r"{\OE}", "Ø": r"{\O}", "Å": r"{\AA}", "Ł": r"{\L}", "\xa0": "~"},
}
_ACCENTS = {"\u0301": "'", "\u0300": "`", "\u0302": "^", "\u0303": "~", "\u0308": '"', "\u0304": "=", "\u0307": "."} | {
    "\u030c": "v", "\u0306": "u", "\u030b": "H", "\u030a": "r", "\u0327": "c",
}  # fmt: skip
_WIDTHS = {
    letter: width
    for width, letters in {
        0.31: "fijl.,:;'![]|",
        0.4: "rst()I- \xa0",
        0.5: "0123456789acegoz/*",
        0.84: "mw+=×±≥≤−→%@…—&<>",
        1.03: "MW",
    }.items()
    for letter in letters
}
_LONG = 12  # letters of a word from which on it may break after a sign
_RUN = 10  # letters without a sign that stay together in a name


def tex(text: str) -> str:
    """Escape text for LaTeX; a letter that LaTeX does not have becomes its code, `\\u6570`."""
    text = unicodedata.normalize("NFC", text)
    return "".join("-{}" if pair == "--" else _letter(pair[0]) for pair in map("".join, zip(text, f"{text[1:]} ")))


def _letter(letter: str) -> str:
    if letter in _SIGNS:
        return _SIGNS[letter]
    if " " <= letter <= "~":
        return letter
    base, *marks = list(unicodedata.normalize("NFD", letter))
    if base.isascii() and base.isalpha() and len(marks) == 1 and marks[0] in _ACCENTS:
        return f"{{\\{_ACCENTS[marks[0]]}{{{base}}}}}"
    return tex(ascii(letter)[1:-1]) if letter.isprintable() else " "


def breaking(text: str, run: int = 0) -> str:
    """Escape text whose long words may end a line after a sign, and after every `run` letters; 0: not there."""
    return " ".join(r"\allowbreak{}".join(map(tex, _parts(word, run))) for word in text.split(" "))


def _pieces(text: str, run: int) -> list[str]:
    """Divide a text where a line may end."""
    return [piece for word in text.split(" ") for piece in _parts(word, run)]


def _parts(word: str, run: int) -> list[str]:
    if len(word) <= _LONG or "\xa0" in word:
        return [word]
    parts = re.findall(r"[^(,=+_/.:)@-]+[(,=+_/.:)@-]*|[(,=+_/.:)@-]+", word)
    return [part[i : i + run] for part in parts for i in range(0, len(part), run)] if run else parts


def _width(text: str) -> float:
    """Bound the width of a text in em of Computer Modern."""
    return sum(_WIDTHS.get(letter, 0.79 if letter.isupper() else 0.56) for letter in text)


def tabular(header: Sequence[str], rows: Sequence[Sequence[str]], lines: Container[int] = ()) -> str:
    r"""Format a `tabular` that is no wider than a column: smaller letters, then columns of several lines.

    lines: rows that have a line above them. A row of one cell is a heading of those below it. A cell is divided at its
    blanks, and at "\xa0" only where letters would become tiny otherwise.
    """
    count = len(header)
    together = [tuple(header), *map(tuple, rows)]
    parted = [tuple(cell.replace("\xa0", " ") for cell in row) for row in together]
    room = LINE - 2 * GAP * (count - 1)
    tries = [(table, *size) for table, sizes in ((together, SIZES[:2]), (parted, SIZES[1:])) for size in sizes]
    for table, size, em in tries:  # noqa: B007 (the last one is used)
        columns = [[row[i] for row in table if len(row) == count] for i in range(count)]
        whole = [max(map(_width, column)) for column in columns]
        least = [max(_width(piece) for cell in column for piece in _pieces(cell, _RUN)) for column in columns]
        if sum(least) * em <= room:
            break
    widths = _shared(whole, least, room / em)
    fits = [given >= natural for given, natural in zip(widths, whole, strict=True)]
    kinds = [f"p{{{given * em / LINE:.3f}\\linewidth}}" for given in widths]
    kinds = ["l" if fit else kind for fit, kind in zip(fits, kinds, strict=True)]

    def line(row: Sequence[str]) -> str:
        if len(row) < count:
            span = rf"\multicolumn{{{count}}}{{@{{}}p{{\linewidth}}@{{}}}}"
            return rf"{span}{{\raggedright\itshape {breaking(row[0], _RUN)}}}\tabularnewline"
        flush = r"\raggedright\hspace{0pt}"
        cells = (tex(cell) if fit else flush + breaking(cell, _RUN) for cell, fit in zip(row, fits, strict=True))
        protected = "{}" * row[0].startswith(("*", "["))  # which the end of the row before would read as its own
        return f"{protected}{' & '.join(cells)}\\tabularnewline"

    first, *body = map(line, table)
    ruled = [r"\hline" * (i in lines) + cells for i, cells in enumerate(body)]
    start = rf"{{\{size}\setlength{{\tabcolsep}}{{{GAP:g}pt}}%"
    begin = rf"\begin{{tabular}}{{@{{}}{''.join(kinds)}@{{}}}}"
    return "\n".join([start, begin, r"\hline", first, r"\hline", *ruled, r"\hline", r"\end{tabular}}"])


def _shared(whole: Sequence[float], least: Sequence[float], room: float) -> list[float]:
    """Divide the room among columns: what each needs, or less where there are several lines of it."""
    widths = list(whole)
    while (excess := sum(widths) - room) > 1e-6:
        largest = [i for i in range(len(widths)) if widths[i] > least[i] + 1e-6]
        if not largest:
            return widths
        top = max(widths[i] for i in largest)
        cut = [i for i in largest if widths[i] >= top - 1e-6]
        below = max([widths[i] for i in largest if widths[i] < top - 1e-6] + [0.0])
        for i in cut:
            widths[i] = max(least[i], below, widths[i] - excess / len(cut))
    return widths
