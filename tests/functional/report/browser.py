"""Headless Chromium, controlled with the WebDriver protocol."""

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
    """One browser window that records its console output."""

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
        """Load a report; always reload, even if only the fragment differs."""
        self._ask("POST", "/url", {"url": "about:blank"})
        self._ask("POST", "/url", {"url": page.resolve().as_uri() + fragment})
        self.until("return document.body.dataset.drawn", "true")

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page and return its value."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, wanted: Any) -> None:
        """Wait until a script returns the expected value."""
        deadline = time.monotonic() + 120
        while (got := self.run(script)) != wanted:
            assert time.monotonic() < deadline, got
            time.sleep(0.05)

    def output(self) -> list[str]:
        """Return the console output since the last call."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page, also below the smallest one of a window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
        self._ask("POST", "/chromium/send_command_and_get_result", command)

    def screenshot(self) -> bytes:
        """Return a screenshot as PNG."""
        return base64.b64decode(self._ask("GET", "/screenshot"))

    def _ask(self, method: str, path: str, body: dict | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())["value"]
