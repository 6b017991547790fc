# ruff: noqa: RUF001, RUF002, SIM905 - characters that look alike are the subject
r"""One spelling for every way to write the same mathematics.

`tidy` turns Unicode (`½`, `√2`, `x²`, `１２`), plain text (`sqrt(2)`, `2*3`, `<=`) and the variants
of LaTeX (`\dfrac43`, `\left(`, `10\,000`) into one form. It changes no meaning: the kinds of
answers are distinguished afterwards, in `megatron_rl.rewards.answers.reading`.
"""

import re
import unicodedata
from typing import Any

_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lamda mu nu xi omicron pi rho sigma "
    "tau upsilon phi chi psi omega"
).split()  # as Unicode names them
_SYMBOLS = {
    "−–—‐‑‒﹣": "-", "×⋅·∙⨯∗": r"\cdot ", "÷": "/", "⁄∕": "/", "≤⩽": r"\le ", "≥⩾": r"\ge ",
    "≠": r"\ne ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "±": r"\pm ", "…⋯": r"\ldots ", "°": r"\degree ", "⟨〈": "(", "⟩〉": ")", "ℝ": r"\mathbb{R}",
    "∶": ":", "△": r"\triangle ", "∠": r"\angle ", "′’‘": "'", "ⅈ": "i", "→": r"\to ",
    "\u200b\u200c\u200d\u2060\ufeff\u200e\u200f\u202a\u202b\u202c\u202d\u202e": "",
    "≈": r"\approx ", "≡": r"\equiv ", "、；": ", ", "，": ",", "。": ".",
}  # fmt: skip
_UNICODE = {ord(one): latex for many, latex in _SYMBOLS.items() for one in many}
for _index, _name in enumerate(_GREEK):
    for _case, _command in (("SMALL", _name), ("CAPITAL", _name.capitalize())):
        _letter = unicodedata.lookup(f"GREEK {_case} LETTER {_name.upper()}")
        _UNICODE[ord(_letter)] = "\\" + _command.replace("amda", "ambda") + " "
_RAISED = dict(zip(map(ord, "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"), "0123456789+-n", strict=True))
_LOWERED = dict(zip(map(ord, "₀₁₂₃₄₅₆₇₈₉₊₋ₙ"), "0123456789+-n", strict=True))

_COMMA = re.compile(r"[,;]|\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])")
# Tried in this order, each over the whole text.
_REWRITES: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?", ""),
        (r"\{([,:.])\}", r"\1"),
        (r"\\!\s*", ""),
        (r"\\(?:underline|(?:textcolor|color|colorbox)\s*\{[^{}]*\})\s*(?=[{\d\\])", ""),
        (r"\{\s*([^{}]*?)\s*\\over(?![a-zA-Z])\s*([^{}]*?)\s*\}", r"\\frac{\1}{\2}"),
        (r"\{\s*([^{}]*?)\s*\\choose(?![a-zA-Z])\s*([^{}]*?)\s*\}", r"\\binom{\1}{\2}"),
        (r"\\(?:mathbf|boldsymbol|bm|mathit|hat|vec)\s*\{\s*([a-z])\s*\}", r" \1"),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
        (r"\\(?:displaystyle|textstyle|limits|hfill|null)(?![a-zA-Z])", ""),
        (r"(=[^=,;]*?)(?:\\q?quad)+(?=[^=,;]{1,20}=)", r"\1, "),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])|\\[hv]space\*?\{[^{}]*\}|\s", " "),
        (r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|math(?:rm|bf|it|sf|tt)|mbox|hbox|emph"
         r"|operatorname\*?|boldsymbol|bm)\s*(?=\{)", r"\\text"),
        (r"\\frac\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}",
         r" \\text{\1/\2}"),
        (r"\(?(?:\\[pb]?mod|\\text\s*\{\s*mod\s*\}|(?<=[( ])mod)(?![a-zA-Z])\s*"
         r"(\{[^{}]*\}|[\d\w]+)\)?", r" \\pmod \1"),
        (r"(?<=\d)\s*\^\s*(?:\{\s*(?:o|\\text\s*\{\s*o\s*\})\s*\}|\\text\s*\{\s*o\s*\}"
         r"|o(?![a-zA-Z]))", r"\\degree "),
        (r"\^\s*(-\d+)", r"^{\1}"),
        (r"(?<=\d) x (?=\d)", r"\\cdot "),
        (r"\{\s*\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}"),
        (r"\\text\s*\{\s*([^a-zA-Z{}\\$]*?)\s*\}", r" \1"),
        (r"\\text\{\s*([^{}]+?)\s+(and|or)\s*\}", r"\\text{ \1}\\text{ \2 }"),
        (r"\^\s*(?:\{\s*(?:\\text\{)?|\\text\{)\s*(th|st|nd|rd)\s*\}\s*\}?", r"\\text{\1}"),
        (r"\\(?:boxed|fbox)\s*(?=\{)", ""),
        (r"(?<!\\)\\[()\[\]]", " "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\[dt]binom", r"\\binom"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\(?:degree|textdegree|deg)(?![a-zA-Z])",
         r"\\degree "),
        (r"\\?%|\s*\\text\{\s*(?:percent|percentage|pct)\s*\}|\b(?:percent(?:age)?|pct)\b", r"\\%"),
        (r"\\(?:leq(?:slant|q)?|le)(?![a-zA-Z])|<=|=<", r"\\le "),
        (r"\\(?:geq(?:slant|q)?|ge)(?![a-zA-Z])|>=|=>", r"\\ge "),
        (r"\\(?:neq?|not\s*=)(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\in(?![a-zA-Z])\s*", r"\\in "),
        (r"\\lt(?![a-zA-Z])", "<"), (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:lbrace|rbrace)(?![a-zA-Z])", lambda match: "\\{" if "l" in match[0] else "\\}"),
        (r"\\(?:langle|lparen)(?![a-zA-Z])", "("), (r"\\(?:rangle|rparen)(?![a-zA-Z])", ")"),
        (r"\\lbrack(?![a-zA-Z])", "["), (r"\\rbrack(?![a-zA-Z])", "]"),
        (r"\\[lr]?vert(?![a-zA-Z])", "|"),
        (r"\\(?:dotsc|dotsb|dots|cdots|hdots|ldots)(?![a-zA-Z])|\.\.\.+", r"\\ldots "),
        (r"\\(?:varnothing|emptyset)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\(?:infin|infty)(?![a-zA-Z])|(?<![a-zA-Z\\])(?:infinity|inf)(?![a-zA-Z])",
         r"\\infty "),
        (r"\\mathbb\s*R|\\(?:R|Reals|reals)(?![a-zA-Z])|\\mathbf\{R\}", r"\\mathbb{R}"),
        (r"\\colon(?![a-zA-Z])", ":"),
        (r"\+\s*/?\s*-(?=\s*[\d\\])", lambda match: r"\pm " if "/" in match[0] else match[0]),
        (r"(?<=[\w)}])\s*\*\*\s*(?=[\w({\\-])", "^"),
        (r"\*\*|__", ""),
        (r"\\(?:times|cdot|ast)(?![a-zA-Z])|\*", r"\\cdot "),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"(?<![a-zA-Z\\])(?:pi|Pi)(?![a-zA-Z])", r"\\pi "),
        (r"(?:\\sqrt|(?<![a-zA-Z\\])sqrt|√)\s*\(([^()]*)\)|√\s*\{([^{}]*)\}|√\s*([\d.]+|[a-zA-Z])"
         r"|(?<![a-zA-Z\\])sqrt(\d+)",
         lambda match: rf"\sqrt{{{match[1] or match[2] or match[3] or match[4]}}}"),
        (r"\\sqrt\s*\[\s*([3579])\s*\]\s*\{\s*-\s*(\d+)\s*\}", r"(-\\sqrt[\1]{\2})"),
        (r"\\log_\s*(\d)(?=\s)", r"\\log_{\1}"),
        (r"∛\s*\(?([\d.]+|[a-zA-Z])\)?", r"\\sqrt[3]{\1}"),
        (r"\\sqrt\s*([\da-zA-Z])", r"\\sqrt{\1}"),
        (r"(?<![a-zA-Z\\])(sin|cos|tan|cot|sec|csc|ln|log|exp)(?=\s*[\s(\d^_])", r"\\\1"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*(?=\{)", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\frac\s*\{", r"\\frac{"),
        # Intervals as France writes them: ]0,1].
        (r"([\[\]])([^\[\]()]*,[^\[\]()]*)(?<!\\sqrt)([\[\]])",
         lambda match: "[("[match[1] == "]"] + match[2] + "])"[match[3] == "["]),
        (r"\s+", " "),
        (r"(?<![\d.,/])(\d{1,3}(?: \d{3})+)(?![\d/]| /| \d)",
         lambda match: match[0].replace(" ", "")),
    ]
]  # fmt: skip
_PHRASE = re.compile(
    r"(?:\\text\{)?\s*(?:thus|so|hence|therefore)?,?\s*(?:the )?(?:final )?(?:answer|result|value)"
    r"(?: is)?\s*[:=]?\s*(?:\})?\s*(?=\S)|=\s*|(?:option|choice) (?=\(?[A-Z]\)?$)",
    re.IGNORECASE,
)

# The end of a sentence or of a line of a formula, which is no part of the answer.
_END = re.compile(r"(?:[.,;: ]|\\\\|\\text(?:\{\s*[.,;:]?\s*\})?)+\Z")


def tidy(text: str) -> str:
    """Return the text of an answer in the one spelling that the kinds are read from."""
    text = _without_dollars(_from_unicode(text))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = unwrap(text.strip(" "))
    if match := _PHRASE.match(text):
        text = text[match.end() :]
    return unwrap(_END.sub("", text.strip(' `"“”')))


def unwrap(text: str) -> str:
    r"""Remove braces and `\text{...}` around the whole text."""
    text = strip_braces(text)
    while text.startswith(r"\text{") and closing(text, 5) == len(text) - 1:
        text = strip_braces(text[6:-1].strip(" "))
    return text


def strip_braces(text: str) -> str:
    """Remove braces around the whole text, which mean nothing in LaTeX."""
    while len(text) > 1 and text[0] == "{" and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip(" ")
    return text


def closing(text: str, start: int) -> int:
    r"""Return the index of the bracket that closes the one at `start`, or -1.

    Kinds of brackets are not distinguished, because `[0, 1)` is an interval; `\{` is a bracket.
    """
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] in "([{") - (text[index] in ")]}")
        if depth == 0:
            return index
    return -1


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split at the separators outside of all brackets."""
    parts, depth, start, index = [], 0, 0, 0
    while index < len(text):
        if depth == 0 and (match := separator.match(text, index)) and match.end() > index:
            parts.append(text[start:index])
            start = index = match.end()
            continue
        depth += (text[index] in "([{") - (text[index] in ")]}")
        index += 1
    return [part.strip(" ") for part in (*parts, text[start:])]


def bracketed(text: str) -> tuple[str, str, str]:
    """Return the brackets around the whole text, if any, and the text within."""
    for opening, end in ((r"\{", r"\}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")")):
        if text.startswith(opening) and text.endswith(end):
            start = len(opening) - 1
            if closing(text, start) == len(text) - 1:
                return opening[-1], text[len(opening) : -len(end)].strip(" "), end[-1]
    return "", text, ""


def split_at_commas(text: str, *, is_bracketed: bool = False) -> list[str]:
    """Split at commas, but not at those of thousands, as in `1,000, 2,000`."""
    parts = split(text, _COMMA)
    if len(parts) == 1:
        return parts
    joined = re.sub(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,]*\d)",
                    lambda match: match[0].replace(",", ""), text)  # fmt: skip
    parts_without = split(joined, _COMMA)
    return parts if is_bracketed and len(parts_without) == 1 else [p for p in parts_without if p]


def _from_unicode(text: str) -> str:
    if text.isascii():
        return text
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋ₙ]+", lambda m: f"_{{{m[0].translate(_LOWERED)}}}", text)
    text = re.sub("[¼½¾⅐-⅞]", _fraction, text)
    text = unicodedata.normalize("NFKC", text.translate(_UNICODE))
    return text.translate(_UNICODE)  # full-width forms of the symbols


def _fraction(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _without_dollars(text: str) -> str:
    """Remove the dollars around mathematics; one before a number is a currency."""
    bare = re.findall(r"(?<!\\)\$", text)
    if len(bare) % 2 == 0:
        return re.sub(r"(?<!\\)\$", " ", text) if bare else text
    return re.sub(r"(?<!\\)\$(?=\s*-?[\d.])", r"\\$", text, count=1).replace("$$", "$")
