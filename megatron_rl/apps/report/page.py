"""Self-contained HTML page with escaped data, styles and scripts."""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

SCRIPTS = ("uplot.js", "dom.js", "glossary.js", "charts.js", "figures.js", "life.js", "main.js")
STYLES = ("uplot.css", "style.css")


def render_page(data: Mapping[str, Any]) -> str:
    """Render the page for `data`, which may contain arbitrary text.

    A content security policy allows only these scripts, by their hashes, and no network requests.
    The data is base64 until the scripts unpack it and insert it as text nodes.
    """
    library, *own = map(_asset, SCRIPTS)
    script = "\n".join((library, "(async () => {", *own, "})();"))
    style = "\n".join(_asset(name) for name in STYLES)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(data['title'])}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            "<noscript>This report needs JavaScript.</noscript>",
            f'<script type="text/plain" id="data">{pack(data)}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        )
    )


def pack(data: Mapping[str, Any]) -> str:
    """Encode data as JSON with five-digit floats, gzip and base64."""
    text = json.dumps(_rounded(data), separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}") if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def _asset(name: str) -> str:
    return (files("megatron_rl.apps.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
