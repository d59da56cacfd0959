"""A real browser without a window, driven over its own protocol through two pipes: no package is needed for it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)


class Browser:
    """One tab."""

    def __init__(self, profile: Path, *options: str) -> None:
        theirs_in, self._write = os.pipe()
        self._read, theirs_out = os.pipe()
        # the protocol is on the descriptors 3 and 4
        command = f"exec {CHROMIUM} --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
        command += f" --hide-scrollbars --disable-extensions --user-data-dir={profile} --remote-debugging-pipe"
        command += "".join(f" {shlex.quote(option)}" for option in options)
        command += f" about:blank 3<&{theirs_in} 4>&{theirs_out}"
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        self._pages: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _send(self, method: str, parameters: dict[str, Any]) -> int:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._number

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = self._send(method, parameters)
        until = time.monotonic() + 60
        while True:
            for found in self._messages(until):
                if found.get("id") == number:
                    assert "error" not in found, found
                    return dict(found["result"])
                self._hear(found)

    def _hear(self, message: dict[str, Any]) -> None:
        """What a page complains about: a refused script, a resource from elsewhere, an error."""
        about = message.get("params", {})
        if message.get("method") == "Fetch.requestPaused":
            headers = [{"name": "content-type", "value": "text/html; charset=utf-8"}]
            body = base64.b64encode(self._pages[about["request"]["url"]].encode()).decode()
            answer = {"requestId": about["requestId"], "responseCode": 200, "responseHeaders": headers, "body": body}
            self._send("Fetch.fulfillRequest", answer)
        if message.get("method") == "Log.entryAdded" and about["entry"]["level"] == "error":
            if about["entry"].get("url", "").endswith("/favicon.ico"):
                return  # browsers ask for it by themselves
            self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(about["exceptionDetails"]["text"])

    def _messages(self, until: float) -> Iterator[dict[str, Any]]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser has ended"
            self._buffer += piece
        *whole, self._buffer = self._buffer.split(b"\0")
        yield from [json.loads(one) for one in whole]

    # --- what a person does ---

    def go(self, address: str) -> None:
        self._call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < until, f"{script} at {self.run('location.href')}: {self.text()[:500]}"
            time.sleep(0.1)

    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def press(self, label: str) -> None:
        """Presses a button or follows a link, as the keyboard would: focus, then Enter."""
        script = f"[...document.querySelectorAll('button, a')].find(e => e.textContent.trim() === {json.dumps(label)})"
        self.wait(f"!!({script})")
        self.run(f"({script}).focus()")
        self.enter()

    def enter(self) -> None:
        """Presses Enter where the focus is, and waits for the page that comes."""
        before = self.run("performance.timeOrigin")
        self._key("Enter", 13, "\r")
        self.wait(f"performance.timeOrigin !== {before} && document.readyState === 'complete'")

    def tab_to(self, label: str, most: int = 60) -> None:
        """Moves the focus by Tab alone, until it is on what is labelled so."""
        seen = []
        for _ in range(most):
            self._key("Tab", 9)
            seen.append(self.focused())
            if seen[-1] == label:
                return
        raise AssertionError(f"Tab does not come to {label!r}: {seen}")

    def focused(self) -> str:
        """The text of what has the focus."""
        return str(self.run("document.activeElement.textContent.trim()"))

    def _key(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            said = {"text": text} if text and kind == "keyDown" else {}
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **said)

    def choose(self, label: str, *files: Path) -> None:
        """Chooses files for an input, found by its label as a screen reader would."""
        found = self._call("Runtime.evaluate", expression=self._labelled(label))["result"]
        self._call("DOM.setFileInputFiles", files=[str(path) for path in files], objectId=found["objectId"])

    def write(self, label: str, text: str) -> None:
        """Types into a field, found by its label."""
        self.run(f"{self._labelled(label)}.focus()")
        self._call("Input.insertText", text=text)

    def _labelled(self, label: str) -> str:
        return (
            "[...document.querySelectorAll('label')]"
            f".find(e => e.textContent.trim().startsWith({json.dumps(label)})).control"
        )

    def size(self, width: int, height: int = 900, dark: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def without_scripts(self, off: bool = True) -> None:
        self._call("Emulation.setScriptExecutionDisabled", value=off)

    def serve(self, address: str, text: str) -> None:
        """What another server answers at this address while its name leads there; all else goes where it leads now."""
        self._pages[address] = text
        self._call("Fetch.enable", patterns=[{"urlPattern": one} for one in self._pages])

    def frames(self) -> list[tuple[str, str]]:
        """Address and text of each frame in this page, as they are inside, whatever may look into them."""
        found = []
        for child in self._call("Page.getFrameTree")["frameTree"].get("childFrames", []):
            frame = child["frame"]
            world = self._call("Page.createIsolatedWorld", frameId=frame["id"])["executionContextId"]
            script = "document.body ? document.body.innerText : ''"
            inside = self._call("Runtime.evaluate", expression=script, contextId=world, returnByValue=True)
            found.append((frame.get("url", ""), str(inside["result"].get("value", ""))))
        return found

    def picture(self, path: Path) -> None:
        found = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def browser(profile: Path, *options: str) -> Iterator[Browser]:
    """A browser; `options`: of chromium's command line."""
    made = Browser(profile, *options)
    try:
        yield made
    finally:
        made.close()


def kept_pictures(folder: Path) -> Path:
    """Where pictures go: kept, if ROOM_PICTURES says where."""
    pictures = Path(os.environ.get("ROOM_PICTURES", str(folder / "pictures")))
    pictures.mkdir(parents=True, exist_ok=True)
    return pictures


def no_wider_than_the_screen(tab: Browser) -> bool:
    return bool(tab.run("document.documentElement.scrollWidth <= window.innerWidth"))
