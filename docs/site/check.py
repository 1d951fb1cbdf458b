"""What a built site may not have: parts that are loaded from elsewhere, and links that lead nowhere."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = dict.fromkeys(("script", "img", "iframe", "source", "video", "audio", "embed"), "src")
LOADS |= {"object": "data", "use": "href", "image": "href"}
TYPE = re.compile(r'<dt class="field-\w+">(?:Type|Return type)<.*?</dt>\s*<dd[^>]*>(.*?)</dd>', re.S)
TAG = re.compile(r"<[^>]+>")
CODE = re.compile(r"<(pre|code|script|style)\b.*?</\1>", re.S)
MARKUP = re.compile(r"``[^`\n]*|:\w+:`[^`\n]*|:(?:param|type|rtype|returns?|raises)\b[^\n]{,40}|(?<!\S)\.\. \w+::")
NAME = re.compile(r'<dt class="field-\w+">(?:Parameters|Variables)<.*?</dt>\s*<dd[^>]*>(.*?)</dd>', re.S)
NOT_LOADED = {"search", "canonical", "author", "license", "help", "index", "next", "prev"}  # of <link rel=...>


class Page(HTMLParser):
    """Of one page: its anchors, what it links to, what a browser fetches to show it, and what docstrings left in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.types = [html.unescape(TAG.sub("", found)).strip() for found in TYPE.findall(text)]
        self.markup = MARKUP.findall(html.unescape(TAG.sub("", CODE.sub("", text))))
        names = [name for field in NAME.findall(text) for name in re.findall(r"<strong>(.*?)</strong>", field)]
        self.misnamed = [name for name in names if not re.fullmatch(r"\*{0,2}\w+(?:, \*{0,2}\w+)*", name)]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and not set(values.get("rel", "").split()) & NOT_LOADED:
            self.loads.append(values.get("href", ""))
        if tag in LOADS and values.get(LOADS[tag]):
            self.loads.append(values[LOADS[tag]])
        if tag == "source" and "srcset" in values:
            self.loads += [part.split()[0] for part in values["srcset"].split(",")]
        self.loads += _urls_of(values.get("style", ""))


def problems(site: Path) -> list[str]:
    """A line for each thing that is wrong with a site."""
    site = site.resolve()
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = [
        f"{path.relative_to(site)}: {text}" for path, page in pages.items() for text in _of_page(path, page, pages)
    ]
    for sheet in sorted(site.rglob("*.css")):
        outside = filter(_is_outside, _urls_of(sheet.read_text(encoding="utf-8")))
        found += [f"{sheet.relative_to(site)}: loads {url}" for url in outside]
    return found


def _of_page(path: Path, page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    for words in page.types:
        yield f"has a field Type, '{words[:60]}': a docstring that was cut at its first colon"
    for words in page.markup:
        yield f"has markup in its text, '{words[:60]}': a docstring that was not understood"
    for name in page.misnamed:
        yield f"has a parameter '{name[:60]}': a list of fields that was not understood"
    for url in page.loads:
        if _is_outside(url):
            yield f"loads {url}"
        elif not urlsplit(url).scheme and not _file_of(path, url).exists():
            yield f"loads {url}, which is not there"
    for url in page.links:
        if urlsplit(url).scheme or url.startswith("//"):
            continue
        file, anchor = _file_of(path, url), unquote(urlsplit(url).fragment)
        if not file.exists():
            yield f"links to {url}, which is not there"
        elif anchor and file in pages and anchor not in pages[file].anchors:
            yield f"links to {url}, which has no such anchor"


def _file_of(page: Path, url: str) -> Path:
    path = unquote(urlsplit(url).path)
    return (page.parent / path).resolve() if path else page


def _is_outside(url: str) -> bool:
    return url.startswith("//") or urlsplit(url).scheme in ("http", "https", "ftp")


def _urls_of(css: str) -> list[str]:
    return [*re.findall(r"url\(\s*['\"]?([^'\")]+)", css), *re.findall(r"@import\s+['\"]([^'\"]+)", css)]
