"""A headless Chromium, driven by its DevTools protocol over a pipe: no package, no port.

Tests take it as the fixture `browser`, and skip where there is none. A page counts as loaded when the script of the viewer has
set `data-viewer`, or when the page has no viewer.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
"""Program of the browser; None if there is none."""

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--no-first-run"),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update"),
    # WebGL without a GPU
    *("--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"),
    *("--hide-scrollbars", "--mute-audio"),
)
_PATIENCE_S = 60
_READY = """new Promise((done) => {
  const look = () => document.readyState === "complete" &&
    (!document.querySelector(".viewer") || document.documentElement.dataset.viewer ||
     !document.querySelector(".viewer-absent").hidden) ? done(true) : setTimeout(look, 50);
  look();
})"""


class Page:
    """A page in the browser, with what it has asked for and complained about."""

    _session: str | None = None

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._number, self._rest = 0, b""
        self.requests: list[str] = []
        """Addresses of everything that was loaded, other than the page itself."""
        self.complaints: list[str] = []
        """Errors and warnings of the console, and exceptions."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, *, width: int = 640, height: int = 600, scale: float = 1) -> None:
        """Open a file, and wait until it is ready; `scale` is the zoom of the browser."""
        # zoom leaves fewer CSS pixels for the page
        size = {"width": round(width / scale), "height": round(height / scale)}
        self._call(
            "Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=scale, mobile=False
        )
        self.requests.clear()
        self.complaints.clear()
        self._call("Page.navigate", url=path.absolute().as_uri())
        # the first answer may be of the page before
        while self.run("location.href") != path.absolute().as_uri():
            pass
        self.run(_READY)

    def run(self, script: str) -> Any:
        options = {"awaitPromise": True, "returnByValue": True}
        answer = self._call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def dark(self, wanted: bool) -> None:
        value = "dark" if wanted else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def key(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if kind == "keyDown" and len(key) == 1 else {}
            self._call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def mouse(self, kind: str, selector: str, at: tuple[float, float], **options: Any) -> None:
        """Send an event of the mouse at a place of an element, in shares of its width and height."""
        box = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            "return [b.x, b.y, b.width, b.height]; })()"
        )
        x, y = (box[k] + at[k] * box[k + 2] for k in (0, 1))
        self._call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **options)

    def drag(self, selector: str, *places: tuple[float, float], button: str = "left") -> None:
        """Press a button at the first place of an element, move to the others, and let it go."""
        for kind, at in (("Pressed", places[0]), *(("Moved", one) for one in places)):
            self.mouse(
                kind, selector, at, button=button, buttons=2 - (button == "left"), clickCount=1
            )
        self.mouse("Released", selector, places[-1], button=button, clickCount=1)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def picture(self, path: Path, selector: str | None = None) -> "np.ndarray[Any, Any]":
        """Write a PNG of what is seen, or of one element, and return its pixels (rows, columns, 3)."""
        clip: dict[str, Any] = {}
        if selector is not None:
            box = self.run(
                f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
                "e.scrollIntoView(); const b = e.getBoundingClientRect();"
                "return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height}; })()"
            )
            clip = {"clip": {**box, "scale": 1}, "captureBeyondViewport": True}
        # two frames: the first may be drawn before the last change
        self.run("new Promise((d) => requestAnimationFrame(() => requestAnimationFrame(d)))")
        content = self._call("Page.captureScreenshot", format="png", **clip)["data"]
        path.write_bytes(base64.b64decode(content))
        with Image.open(path) as picture:
            return np.asarray(picture.convert("RGB")).astype(int)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._receive], [], [], _PATIENCE_S)
            assert ready, f"the browser has not answered for {_PATIENCE_S} s"
            part = os.read(self._receive, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        values = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                if values["type"] != "Document":
                    self.requests.append(values["request"]["url"][:200])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(values["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if values["type"] in {"error", "warning", "assert"}:
                self.complaints.append(str([one.get("value") for one in values["args"]])[:500])
            case "Log.entryAdded" if values["entry"]["level"] in {"error", "warning"}:
                self.complaints.append(values["entry"]["text"][:500])


@contextmanager
def opened_browser(*flags: str) -> Iterator[Page]:
    """Start Chromium with more flags, and end it afterwards."""
    assert CHROMIUM is not None
    to_browser, send = os.pipe()
    receive, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:

        def connect() -> None:
            # the browser reads from file 3 and writes to file 4
            first, second = os.dup(to_browser), os.dup(from_browser)
            os.dup2(first, 3)
            os.dup2(second, 4)

        process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", *flags, "about:blank"],
            preexec_fn=connect,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Page(send, receive)
        finally:
            os.close(send)
            os.close(receive)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
