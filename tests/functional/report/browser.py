"""A headless Chromium, spoken to as the WebDriver standard has it."""

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromedriver")
PACKAGES = ("chromium", "chromium-driver")
ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--window-size=1360,1000", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """One window; everything that its console says is kept."""

    def __enter__(self) -> "Browser":
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := re.search(r"successfully on port (\d+)", line):
                break
        self._address = f"http://127.0.0.1:{found[1]}"
        options = {"binary": shutil.which("chromium"), "args": list(ARGUMENTS)}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/session/{session['sessionId']}"
        return self

    def __exit__(self, *exception: object) -> None:
        self._ask("DELETE", "")
        self._driver.terminate()
        self._driver.wait(timeout=20)

    def open(self, page: Path, fragment: str = "") -> None:
        """Load a report, from the beginning also where only the fragment differs."""
        self._ask("POST", "/url", {"url": "about:blank"})
        self._ask("POST", "/url", {"url": page.resolve().as_uri() + fragment})
        self.until("return document.body.dataset.drawn", "true")

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script in the page returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, wanted: Any) -> None:
        """Wait for a script to return what is wanted: some events come a moment later."""
        deadline = time.monotonic() + 120
        while (got := self.run(script)) != wanted:
            assert time.monotonic() < deadline, got
            time.sleep(0.05)

    def said(self) -> list[str]:
        """What the console has said since it was last asked."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def screenshot(self) -> bytes:
        """The window as a PNG."""
        return base64.b64decode(self._ask("GET", "/screenshot"))

    def _ask(self, method: str, path: str, body: dict | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())["value"]
