"""Checks a built site in a real browser: `python docs/site/browser.py build/site`, which needs Chromium.

Every page and every drawing is opened once and measured on a desktop and on a phone, light and dark, and as print: what
is wider than the window, cut off, shrunk until it cannot be read, or pale; and what the browser's console reports. With
`--pictures FOLDER` and the names of pages, these are saved as images to look at instead.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync", "--disable-extensions",
         "--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND",
         "--hide-scrollbars", "--remote-debugging-pipe"]  # fmt: skip
PATIENCE = 120
MEASURE = (Path(__file__).parent / "browser.js").read_text(encoding="utf-8")


SETTLED = """(async () => {
  const chosen = picture => [...picture.querySelectorAll("source")].find(s => matchMedia(s.media).matches)?.srcset
    ?? picture.querySelector("img").getAttribute("src");
  const waits = () => [...document.querySelectorAll("picture")].some(picture => {
    const image = picture.querySelector("img");
    return !image.complete || image.currentSrc != new URL(chosen(picture), document.baseURI).href; });
  for (let i = 0; i < 200 && waits(); i++) await new Promise(done => setTimeout(done, 20));
})()"""
"""waits until every picture shows the image for this window"""


class State(NamedTuple):
    """How a page is shown."""

    name: str
    width: int
    media: str = "screen"
    scheme: str = "light"


STATES = (
    State("desktop", 1280),
    State("desktop, dark", 1280, scheme="dark"),
    State("phone", 390),
    State("phone, dark", 390, scheme="dark"),
    State("print", 688, media="print", scheme="dark"),  # A4 without margins; paper is light whatever the screen
)


def find() -> str | None:
    """The browser's program, if it is installed."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One page in a browser, which is driven through a pair of pipes."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = os.fdopen(send, "wb", buffering=0), os.fdopen(receive, "rb", buffering=0)
        self._rest, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return what a command of the browser's protocol answers; events until then are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        self._send.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._receive], [], [], PATIENCE)[0]:
                raise RuntimeError(f"The browser has not answered for {PATIENCE} seconds.")
            if not (more := self._receive.read(1 << 20)):
                raise RuntimeError("The browser has ended.")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, address: str) -> None:
        """Show a page and wait until it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def show(self, state: State, height: int = 900) -> None:
        """Set the window and the reader's settings."""
        self.call("Emulation.setDeviceMetricsOverride", width=state.width, height=height, deviceScaleFactor=1,
                  mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": state.scheme}
        self.call("Emulation.setEmulatedMedia", media=state.media, features=[scheme])
        self.evaluate(SETTLED)

    def evaluate(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def picture(self, whole: bool = True) -> bytes:
        """Return what is shown as PNG, down to the end of the page or of the window."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def console(self) -> Iterator[str]:
        """Errors that the page has reported since it was opened."""
        for event in self.events:
            values = event.get("params", {})
            if event.get("method") == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                yield values["entry"]["text"]
            if event.get("method") == "Runtime.exceptionThrown":
                yield str(values["exceptionDetails"].get("exception", values["exceptionDetails"])["description"])
            if event.get("method") == "Runtime.consoleAPICalled" and values["type"] in ("error", "assert"):
                yield " ".join(str(part.get("value")) for part in values["args"])


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """Start the browser with a profile of its own, and end it."""
    pipes = [os.pipe(), os.pipe()]
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (pipes[0][0], pipes[1][1])]
    ours = pipes[0][1], pipes[1][0]

    def become_3_and_4() -> None:
        os.dup2(theirs[0], 3)
        os.dup2(theirs[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=become_3_and_4, pass_fds=(3, 4))
        for end in (pipes[0][0], pipes[1][1], *theirs):
            os.close(end)
        try:
            shown = Browser(*ours)
            yield shown
            shown._session = ""
            shown.call("Browser.close")
        finally:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def problems(site: Path, program: str, names: Sequence[str] = ()) -> list[str]:
    """A line for each thing that is wrong with the pages and drawings of a site.

    names: only of these files
    """
    files = [site / name for name in names] or [
        path
        for kind in ("html", "svg")
        for path in sorted(site.rglob(f"*.{kind}"))
        if not {"_static", "_modules"} & set(path.parts)
    ]
    found: dict[str, list[str]] = {}
    with browser(program) as shown:
        for path in files:
            name = path.relative_to(site).as_posix()
            shown.show(STATES[0])
            shown.open(path.resolve().as_uri())
            for state in STATES:
                shown.show(state)
                for fault in shown.evaluate(MEASURE):
                    found.setdefault(f"{name}: {fault}", []).append(state.name)
            for line in shown.console():
                found.setdefault(f"{name}: the console says {line}", [])
    return [f"{fault} ({'; '.join(states)})" if states else fault for fault, states in found.items()]


def save_pictures(site: Path, program: str, names: Sequence[str], folder: Path) -> None:
    """Save pages in every state as images."""
    folder.mkdir(parents=True, exist_ok=True)
    with browser(program) as shown:
        for name in names:
            shown.show(STATES[0])
            shown.open((site / name).resolve().as_uri())
            for state in STATES:
                shown.show(state)
                file = f"{name.replace('/', '-').rpartition('.')[0]}-{state.name.replace(', ', '-')}.png"
                (folder / file).write_bytes(shown.picture())


def main(arguments: list[str]) -> int:
    """Exit code 1 with a line for each thing that is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("site", type=Path, help="folder of the built site")
    parser.add_argument("names", nargs="*", help="of pages below it; default: all")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="save the named pages as images")
    options = parser.parse_args(arguments)
    if (program := find()) is None:
        print("Pages were not checked in a browser: install Chromium for that.")
        return 0
    if options.pictures:
        save_pictures(options.site, program, options.names, options.pictures)
        return 0
    wrong = problems(options.site, program, options.names)
    for line in wrong:
        print(line, file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
