"""A headless Chromium, driven by its DevTools protocol over two pipes: no driver and no package is needed.

python -m tests.report.browser PAGE.html FOLDER        writes screenshots: wide and narrow, light and dark
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = f"no browser: expected one of {', '.join(NAMES)} (apt install chromium)"
_OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--disable-extensions", "--no-zygote", "--mute-audio", "--use-mock-keychain",
)  # fmt: skip


def find() -> str | None:
    """The path of an installed Chromium; None: there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. `events`: what the browser has reported, by method: console calls, exceptions, requests."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()

        def connect() -> None:  # Chromium reads commands from 3, and writes answers and events to 4
            low, high = os.dup(to_read), os.dup(to_write)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self._process = subprocess.Popen(
            [program, *_OPTIONS, f"--user-data-dir={self._folder.name}", "about:blank"],
            preexec_fn=connect,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": self._folder.name},
        )
        os.close(to_read)
        os.close(to_write)
        self.events: list[dict[str, Any]] = []
        self._left, self._number, self._session = b"", 0, ""
        (target,) = (one for one in self._call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        arguments = {"targetId": target["targetId"], "flatten": True}
        self._session = self._call("Target.attachToTarget", **arguments)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)  # the browser ends when its pipe is closed
        self._process.wait()
        os.close(self._in)
        self._folder.cleanup()

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a page of this machine, and wait until it is loaded. Forgets earlier events."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self._call("Page.navigate", url=path.resolve().as_uri())
        self._wait_for("Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; of a promise, what it resolves to.

        Raises:
            RuntimeError: it throws.
        """
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def move(self, x: float, y: float) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG file."""
        found = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def of(self, method: str) -> list[dict[str, Any]]:
        """The parameters of the events of a kind since the page was opened."""
        return [event["params"] for event in self.events if event["method"] == method]

    # Protocol ------------------------------------------------------------------------------------------------------

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(
            self._out, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _wait_for(self, method: str) -> None:
        while not self.of(method):
            self._next()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._left += part
        text, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message


def main() -> None:
    page, folder = Path(sys.argv[1]), Path(sys.argv[2])
    program = find()
    assert program is not None, MISSING
    folder.mkdir(parents=True, exist_ok=True)
    with Browser(program) as browser:
        for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
            browser.open(page, width=width, dark=dark)
            browser.screenshot(folder / f"{width}-{'dark' if dark else 'light'}.png")


if __name__ == "__main__":
    main()
