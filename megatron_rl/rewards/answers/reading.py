r"""Reading an answer: one spelling for the same mathematics, its unit, and a reader for each kind.

`tidy` turns Unicode (`½`, `√2`, `x²`), plain text (`sqrt(2)`, `2*3`, `<=`) and the variants
of LaTeX (`\dfrac43`, `\left(`, `10\,000`) into one form. It changes no meaning: the kinds of
answers are distinguished afterwards.
"""

import math
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from megatron_rl.rewards.answers import values
from megatron_rl.rewards.answers.kinds import (
    INFINITY,
    MINUS_INFINITY,
    Assignment,
    Choice,
    Expression,
    Interval,
    Items,
    Number,
    Quantity,
    Relation,
    Text,
    Time,
    Union,
    Words,
    as_interval,
    flipped,
    half_line,
    intersection,
    parts_of,
    without,
)  # fmt: skip
from megatron_rl.rewards.answers.values import TooLargeError

# ruff: noqa: SIM905 - lists of words


_UNITS = {
    "mm": "millimeter millimetre 毫米", "cm": "centimeter centimetre 厘米 公分",
    "m": "meter metre 米 公尺", "km": "kilometer kilometre 千米 公里", "in": "inch inches",
    "ft": "foot feet", "yd": "yard", "mi": "mile", "mg": "milligram 毫克", "g": "gram 克",
    "kg": "kilogram 千克 公斤", "lb": "pound lbs", "oz": "ounce", "t": "ton tonne 吨",
    "ml": "milliliter millilitre mL 毫升", "l": "liter litre L 升", "s": "second sec secs 秒",
    "min": "minute mins 分钟", "h": "hour hr hrs 小时", "day": "天", "week": "", "month": "",
    "year": "yr yrs 年", "N": "newton", "J": "joule", "W": "watt", "V": "volt",
    "A": "ampere amp", "K": "kelvin", "Hz": "hertz", "Pa": "pascal", "kPa": "", "kJ": "", "kW": "",
    "ohm": "", "mol": "mole", "rad": "radian", "mi/h": "mph", "km/h": "kmh kmph kph",
    "m/s": "mps", "ft/s": "fps", "revolution/min": "rpm", "cm^3": "cc ccm",
    "degree": "degrees deg 度", "°C": "", "°F": "",
    "dollar": r"dollars \$ USD US$ bucks 美元", "cent": "cents ¢", "€": "euro euros EUR 欧元",
    "£": "GBP", "¥": "yen yuan JPY CNY RMB 元 日元 人民币", "₹": "rupee rupees INR Rs Rs. 卢比",
    "unit": "units", "th": "st nd rd",
}  # fmt: skip
_ALIASES = {alias: unit for unit, aliases in _UNITS.items() for alias in (unit, *aliases.split())}
_FACTORS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9,
            "trillion": 10**12, "dozen": 12, "万": 10**4, "亿": 10**8}  # fmt: skip
# Words after a number that say something else than what is counted.
_NOT_UNITS = frozenset(
    "is are was not or and plus minus times over than more less half squared cubed factorial to "
    "mod if for where with when but no none either neither both approximately about from per "
    "percent of in base wrong right true false between except without".split()
)
_FUNCTIONS = frozenset("sin cos tan cot sec csc ln log exp sqrt pi max min gcd lcm mod inf".split())
_BEFORE = re.compile(
    r"(-? ?)(\\\$|US\$|[€£¥₹]|\\text\{ ?(?:\\\$|[€£¥₹]|USD|EUR|GBP|Rs\.?) ?\}"
    r"|(?:USD|EUR|GBP|INR|Rs\.?)(?= ?\d)) ?(-?.*)"
)
_POWER = r"(?:\^ ?(?:\{ ?-?\d ?\}|-?\d))?"
_UNIT_WORD = rf"(?:\\text\{{[^{{}}]*\}}{_POWER}|[^\W\d_]+\.?{_POWER})"
_AFTER = re.compile(
    rf"(.*?(?:[\d}})!]|\\pi))( ?)((?:\\\$|[€£¥₹¢]|\\%|\\degree ?[CF]?|{_UNIT_WORD})"
    # A bound, because a word can match in two ways.
    rf"(?: ?(?:/|\\cdot) ?{_UNIT_WORD}| {_UNIT_WORD}"
    rf"| ?\\text\{{[^{{}}]*\}}{_POWER}| ?\\degree ?[CF]?){{0,6}}) ?"
)


def split_unit(text: str) -> tuple[str, str, Fraction] | None:
    """Return the number's text, the unit in one spelling, and the factor of a word like million.

    None if the text does not end with a unit. The unit is empty for a factor alone.
    """
    if match := _BEFORE.fullmatch(text):
        rest = split_unit(match[3])
        number, unit, factor = rest or (match[3], "", Fraction(1))
        currency = _ALIASES.get(re.sub(r"\\text|[{} ]", "", match[2]), "")
        return (match[1] + number, currency, factor) if unit in ("", currency) else None
    match = _AFTER.fullmatch(text)
    if match is None:
        return None
    number, space, written = match.groups()
    words = _words(written)
    factor = Fraction(1)
    while words and (one := words[0].lower().removesuffix("s")) in _FACTORS:
        factor *= _FACTORS[one]
        del words[0]
    if not words:
        return number, "", factor
    if not _is_unit(words, written, is_apart=bool(space)):
        return None
    if len(written.strip()) == 1 and written.isascii() and not re.fullmatch(r"-?[\d.,]+", number):
        return None  # `\frac{1}{2} m` is a product
    return number, _spelling(" ".join(words)), factor


def _words(written: str) -> list[str]:
    plain = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", written)
    plain = plain.replace(r"\degree", " degree ").replace(r"\%", "%").replace(r"\cdot", " ")
    plain = re.sub(r"\s*\^ ?\{? ?(-?\d) ?\}?", r"^\1", re.sub(r"\s*/\s*", "/", plain))
    return plain.split()


def _is_unit(words: list[str], written: str, *, is_apart: bool) -> bool:
    """Return True if words after a number are what it counts, not mathematics or a sentence."""
    bare = [word.split("^")[0].split("/")[0].rstrip(".") for word in words]
    known = [_ALIASES.get(word, _ALIASES.get(word.lower())) for word in bare]
    sentence = [word for word in words if word.lower() in _NOT_UNITS - {"per", "of"}]
    if len(words) > 4 or sentence or ("%" in words and "of" in words):
        return False
    if "\\" in written or any(one in written for one in "€£¥₹¢"):
        return True
    if not words[0].isascii():
        return True
    if any(word.lower() in _FUNCTIONS for word in bare):
        return False
    if is_apart and bare[0].lower() in ("sq", "cu", "square", "cubic"):
        return len(words) > 1
    if known[0] is not None:  # `5cm` and `5 m` are lengths, `5m` is five times m
        return is_apart or len(bare[0]) > 1
    return is_apart and len(bare[0]) > 2


def _spelling(unit: str) -> str:
    """Return one spelling for `sq cm`, `square centimeters`, `cm^2` and so on."""
    unit = unit.replace("degree C", "°C").replace("degree F", "°F")
    unit = re.sub(r"^degrees? (?:celsius|centigrade)$", "°C", unit, flags=re.IGNORECASE)
    unit = re.sub(r"^degrees? fahrenheit$", "°F", unit, flags=re.IGNORECASE)
    unit = re.sub(r" an? (?=hour|minute|second|day)", " per ", unit)
    power = ""
    if match := re.match(r"(?:sq\.?|square|(cu\.?|cubic)) (.+)", unit, re.IGNORECASE):
        unit, power = match[2], "^3" if match[1] else "^2"
    return "/".join(_one(word) for word in re.split(r"\s*(?:/|\bper\b)\s*", unit)) + power


def _one(word: str) -> str:
    base, caret, power = word.strip().partition("^")
    base = base.rstrip(".") or base
    for spelling in (
        base,
        base.lower(),
        base.lower().removesuffix("s"),
        base.lower().removesuffix("es"),
    ):
        if spelling in _ALIASES:
            return _ALIASES[spelling] + caret + power
    return base.lower().removesuffix("s") + caret + power


# ruff: noqa: RUF001, SIM905 - characters that look alike are the subject


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
        (r"\\?%|\s*\\text\{\s*(?:per ?cent|percentage|pct)\s*\}|\b(?:per ?cent(?:age)?|pct)\b",
         r"\\%"),
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
        (r"\\(frac|binom)\s*(\d)\s*(\d)", r"\\\1{\2}{\3}"),
        (r"\\(frac|binom)\s*(\d)\s*(?=\{)", r"\\\1{\2}"),
        (r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\frac\s*\{", r"\\frac{"),
        # Intervals as France writes them: ]0,1].
        (r"([\[\]])([^\[\]()]*[,;][^\[\]()]*)(?<!\\sqrt)([\[\]])",
         lambda match: "[("[match[1] == "]"] + match[2] + "])"[match[3] == "["]),
        (r"\s+", " "),
        (r"(?<![\d.,/])(\d{1,3}(?: \d{3})+)(?![\d/]| /| \d)",
         lambda match: match[0].replace(" ", "")),
    ]
]  # fmt: skip
_PHRASE = re.compile(
    r"(?:\\text\{)?\s*(?:thus|so|hence|therefore)?,?\s*(?:the )?(?:(?:final|correct) )?"
    r"(?:answer|result|value)(?: is)?\s*[:=]?\s*(?:\})?\s*(?=\S)|=\s*"
    r"|(?:option|choice)\s*[:=]?\s*(?=[(\[]?[A-Z][)\]]?(?:$|[.):]))",
    re.IGNORECASE,
)

# The end of a sentence or of a line of a formula, which is no part of the answer.
_END = re.compile(r"(?:[.,;: ]|\\\\|\\text(?:\{\s*[.,;:]?\s*\})?)+\Z")


def tidy(text: str) -> str:
    """Return an answer's text in the canonical spelling from which kinds are read."""
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
    r"""Return the index of the bracket that closes the bracket at `start`, or -1.

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
    """Split at commas, but not at commas of thousands, as in `1,000, 2,000`."""
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


_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
# 0.1666..., in which the last digits are written at least three times.
_REPEATED = re.compile(r"([+-]?\d*\.\d{0,20}?)(\d{1,10}?)\2{2,30} ?\\ldots")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
          "ten": 10, "twelve": 12, "sixteen": 16}  # fmt: skip
_BASED = re.compile(
    r"(-?)\s*(?:\(([\dA-Z]+)\)|([\dA-Z]+)|\\text\{ ?([\dA-Z]+) ?\})\s*_\s*"
    rf"(?:\{{\s*(\d\d?)\s*\}}|(\d)\b|\{{? ?\\text\{{ ?({'|'.join(_BASES)}) ?\}} ?\}}?)"
)
_TIME = re.compile(
    r"(\d{1,2}):(\d\d)(?::(\d\d))?\s*(?:\\text\{)?\s*([ap]\.?\s?m\.?)?\s*\}?"
    r"|(\d{1,2})\s*(?:\\text\{)?\s*([ap]\.?\s?m\.?)\s*\}?",
    re.IGNORECASE,
)
_DATE = re.compile(r"\d{4} ?([-/]) ?\d{1,2} ?\1 ?\d{1,2}|\d{1,2} ?([-/]) ?\d{1,2} ?\2 ?\d{4}")

_MONTHS = "january february march april may june july august september october november december"
_MONTH = "|".join(f"{month[:3]}(?:{month[3:]})?\\.?" for month in _MONTHS.split())
_DAY = r"(\d{1,2})(?: ?(?:st|nd|rd|th))?"
_WRITTEN_DATE = re.compile(
    rf"(?:{_DAY} (?:of )?({_MONTH})|({_MONTH}) {_DAY})(?:,? ?(\d{{4}}))?", re.IGNORECASE
)


def read_number(text: str) -> Number | None:
    if _THOUSANDS.fullmatch(text):
        parts = tuple(map(read_number, text.split(",")))
        value = values.rational(text.replace(",", ""))
        return None if value is None else Number(value, parts=Items(",", parts))
    if re.fullmatch(r"([+-]?) ?\\infty ?", text):
        return Number(-math.inf if text[0] == "-" else math.inf)
    if match := _REPEATED.fullmatch(text):
        text = rf"{match[1]}({match[2]})"
    value = values.rational(text)
    if value is None:
        return None
    digits = len(text.replace(".", "").lstrip("+-0")) if "." in text and text[-1] != ")" else 0
    return Number(value, digits=digits if "\\" not in text else 0)


def read_time(text: str) -> Time | None:
    """Read 10:30, 10:30 pm, 10 pm or 22:30, which is 10:30 pm."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    half = re.sub(r"[^apm]", "", (match[4] or match[6] or "").lower())
    hours, *rest = [int(one) for one in match.group(1, 2, 3) if one] or [int(match[5]), 0]
    if not half and 12 < hours < 24:
        hours, half = hours - 12, "pm"
    return Time((hours, *rest), half)


def read_date(text: str) -> Text | None:
    """Read `January 5th, 2026` and `5 January 2026`; keep 2026-01-05, which is no difference."""
    plain = re.sub(r" ?\\text\{([^{}]*)\}", r" \1", text)
    if match := _WRITTEN_DATE.fullmatch(re.sub(" +", " ", plain).strip(" ")):
        month = (match[2] or match[3])[:3].casefold()
        return Text(f"{month} {match[1] or match[4]} {match[5] or ''}")
    return Text(text.replace(" ", "")) if _DATE.fullmatch(text) else None


def read_based(text: str) -> Number | Text | None:
    """Read a numeral with its base, as 2516_8; its value is a number."""
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    sign, numeral = match[1], match[2] or match[3] or match[4]
    base = int(match[5] or match[6] or _BASES[match[7]])
    if numeral.isalpha() and (len(numeral) == 1 or base <= 10):
        return None  # a variable with an index
    try:
        return Number(Fraction(int(sign + numeral, base)))
    except ValueError:  # a digit that the base does not have
        return Text(text)


_OR = re.compile(r"\\cup(?![a-zA-Z])|\\text\{\s*or\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])")
_TO = re.compile(r":|\\text\{ ?to ?\}|(?<=\d) to (?=\d)")
_AND = re.compile(
    r"\\text\{\s*and\s*\}|(?<![a-zA-Z\\])and(?![a-zA-Z])|\\(?:land|wedge)(?![a-zA-Z])"
)
_AND_COMMA = re.compile(f"{_AND.pattern}|,")
_WITHOUT = re.compile(r"\\(?:setminus|backslash)(?![a-zA-Z])|(?<=\}) ?- ?(?=\\\{)")
_CUP = re.compile(r"\\cup(?![a-zA-Z])")
_PLAIN_NUMBER = re.compile(r"-?\d+(?:\.\d+)?|-?\d+/\d+|-?\\frac\{\d+\}\{\d+\}")
_INEQUALITY = re.compile(r"\\le |\\ge |\\ne |<|>")
_EQUALS = re.compile(r"=")
_ROUNDED = re.compile(r"\\(?:approx|simeq)(?![a-zA-Z])")
_NAME = re.compile(
    r"(?:\\text\{[^{}]*\}|\\?[a-zA-Z]+)(?:_(?:\w|\{\w+\}))?'*(?:\^\{-1\})?"
    r"(?:\s*\((?:[a-zA-Z](?:, ?[a-zA-Z])*|\d+)\))?|\([a-zA-Z](?:, ?[a-zA-Z])*\)"
)
_POINT = re.compile(r"([A-Z])(?:_\d)? ?(\([^()]*,[^()]*\))")
_CONGRUENCE = re.compile(r"(?:(.*)\\equiv )?(.*?)\\pmod ?(.+)")
_SYSTEM = re.compile(
    r"\\begin\{(cases|aligned|array|gathered|split)\}(?:\{[lcr]*\})?(.*)\\end\{\1\}"
)
_LINE_BREAK = re.compile(r"\\\\(?:\[[^\]]*\])?|\\cr(?![a-zA-Z])")
# In `x = 1 y = 2` and `x = 3 when n = 5` the name of another value follows a number.
_BESIDE_NAME = re.compile(
    r"(?:-?(?:[\d./]+|\\(?:frac\{\d+\}|sqrt)\{\d+\}) |.*[\d})] ?(?:\\text\{[^{}]*\}|[a-z]{2,}) ?)"
    r"\\?[a-zA-Z](?:_\w+)?"
)
_DISTANCE = re.compile(
    r"\| ?(\d+)? ?(\\?[a-zA-Z](?:_\w+)?) ?([+-] ?(?:\d+(?:[./]\d+)?|\\frac\{\d+\}\{\d+\}))? ?\|"
)
_BOUND = re.compile(r"\d+(?:[./]\d+)?|\\frac\{\d+\}\{\d+\}|(?:\d+ ?)?\\sqrt\{\d+\}")
_SET_BUILDER = re.compile(
    r"\\\{ ?[a-zA-Z](?: ?\\in ?\\mathbb\{R\})? ?(?:\\mid(?![a-zA-Z])|\||:) ?(.*)\\\}"
)
_MATRIX = re.compile(
    r"[(\[]? ?\\begin\{([pb]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\} ?[)\]]?", re.DOTALL
)
_CHOICE = re.compile(
    r"(?:\\text\{)?\s*\(\s*([A-Za-z])\s*\)\s*\}?[.:]?\s*"
    r"((?![,;]|and\b|or\b|\\text\{ *(?:and|or)\b).*)"
    r"|(?:\\text\{)?\s*([A-Z])(?:\s*\}?\s*[.):]\s*|\}\s+)(\S.*)"
    r"|(?:\\text\{)?\s*([A-J])[.):]?\s*\}?|\[\s*(?:\\text\{)?\s*([A-J])\s*\}?\s*\]"
)
_WORD = r"(?:[^\W\d_]{2,}(?:['-][^\W\d_]{2,})*|[^\W\d_](?:'[^\W\d_]+)?)\.?"
_WORDS = re.compile(rf"{_WORD}(?: {_WORD})*")
_ELEMENTS = (
    "He|Li|Be|Ne|Na|Mg|Al|Si|Cl|Ar|Ca|Sc|Ti|Cr|Mn|Fe|Co|Ni|Cu|Zn|Ga|Ge|As|Se|Br|Kr|Rb|Sr|Zr|Nb|Mo|"
    "Tc|Ru|Rh|Pd|Ag|Cd|In|Sn|Sb|Te|Xe|Cs|Ba|La|Ce|Pr|Nd|Pm|Sm|Eu|Gd|Tb|Dy|Ho|Er|Tm|Yb|Lu|Hf|Ta|Re|"
    "Os|Ir|Pt|Au|Hg|Tl|Pb|Bi|Po|At|Rn|Fr|Ra|Ac|Th|Pa|Np|Pu|Am|Cm|Bk|Cf|Es|Fm|Md|Lr|H|B|C|N|O|F|P|S|"
    "K|V|Y|I|W|U"
)
_FORMULA = re.compile(rf"(?!(?i:no)$)(?:{_ELEMENTS}){{1,8}}")  # `No` is an answer
_GEOMETRY = re.compile(
    r"\\(?:triangle|angle|overline|overrightarrow|vec|parallel|perp|cong|sim|square|odot)"
)


@lru_cache(maxsize=10_000)
def read(text: str) -> Any:
    """Return the reading of an answer as it was written."""
    return read_tidy(tidy(text))


def read_tidy(text: str) -> Any:
    """Return the reading of a part of a tidy answer."""
    text = unwrap(text.strip(" "))
    for reader in READERS:
        reading = reader(text)
        if reading is not None:
            return reading
    return _text(text)


def _text(text: str) -> Text:
    """Keep a text without the spaces next to signs and digits, which mean nothing."""
    return Text(re.sub(r"(?<![a-zA-Z]) | (?![a-zA-Z])", "", text))


def _read_choice(text: str) -> Choice | None:
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    letter = (match[1] or match[3] or match[5] or match[6]).upper()
    content = match[2] or match[4]
    return Choice(letter, read_tidy(content) if content else None)


def _read_geometry(text: str) -> Text | None:
    """Keep names of angles, segments and triangles as they are written."""
    return Text(text.replace(" ", "")) if _GEOMETRY.search(text) and "=" not in text else None


def _read_plus_minus(text: str) -> Items | None:
    if not re.search(r"\\[pm][pm](?![a-zA-Z])", text):
        return None
    up = text.replace(r"\pm", "+").replace(r"\mp", "-")
    down = text.replace(r"\pm", "-").replace(r"\mp", "+")
    return Items(",", (read_tidy(up.lstrip("+ ")), read_tidy(down)))


def _read_union(text: str) -> Any:
    if text == r"\mathbb{R}" or text.casefold() in ("all real numbers", "all reals"):
        return Interval(MINUS_INFINITY, INFINITY, "()")
    base, *points = _WITHOUT.split(text, maxsplit=1)
    if points and isinstance(interval := as_interval(read_tidy(base)), Interval):
        return without(interval, read_tidy(points[0]))
    if (both := _read_both(text)) is not None:
        return both
    parts = split(text, _CUP)
    if len(parts) == 1:
        parts = split(text, _OR)
        if not all(_INEQUALITY.search(part) for part in parts):
            return None
    if len(parts) == 1 or not all(parts):
        return None
    readings = [read_tidy(part) for part in parts]
    names = {one.name for one in readings if isinstance(one, Interval) and one.name}
    if len(names) > 1:
        return Text(text)
    return Union(tuple(inner for one in readings for inner in parts_of(one)))


def _read_both(text: str) -> Any:
    r"""Read inequalities that hold at once: `x > 1 and x < 2`, `x > 1 and x \ne 2`."""
    parts = split(text, _AND_COMMA if r"\ne " in text else _AND)
    if len(parts) != 2 or not all(_INEQUALITY.search(part) for part in parts):
        return None
    return intersection(*map(read_tidy, parts)) or _text(text)


def _read_items(text: str) -> Any:
    """Read a list, a tuple, a set or an interval."""
    parts = split_at_commas(text)
    if len(parts) > 1:
        return Items(",", _flat(parts))
    ratio = _TO.split(text)
    if len(ratio) > 1 and all(re.fullmatch(r" ?[\d./a-z\\ {}]+", part) for part in ratio):
        return Items(":", tuple(read_tidy(part) for part in ratio))
    opening, inner, end = bracketed(text)
    if not opening:
        return None
    parts = split_at_commas(inner, is_bracketed=True)
    if (opening + end == "()" and len(parts) == 1) or not all(parts):
        return None
    return Items(opening + end, _flat(parts) if opening == "{" else tuple(map(read_tidy, parts)))


def _flat(parts: list[str]) -> tuple[Any, ...]:
    r"""Read the items of a list, of which `\pm 3` is two."""
    readings = [read_tidy(part) for part in parts if part]
    return tuple(
        item
        for one in readings
        for item in (one.items if isinstance(one, Items) and one.brackets == "," else (one,))
    )


def _read_matrix(text: str) -> Items | None:
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    rows = [row for row in _LINE_BREAK.split(match[2]) if row.strip()]
    return Items("matrix", tuple(
        Items("row", tuple(read_tidy(entry) for entry in row.split("&"))) for row in rows
    ))  # fmt: skip


def _read_system(text: str) -> Items | Text | None:
    """Read lines of equations as a list, and a piecewise function as its lines."""
    match = _SYSTEM.fullmatch(text)
    if match is None:
        return Text(text) if r"\begin" in text or _LINE_BREAK.search(text) else None
    lines = [line for line in _LINE_BREAK.split(match[2]) if line.strip()]
    if all("=" in line for line in lines) and not re.search("&(?! ?=)", match[2]):
        return Items(",", _flat([line.replace("&", "").strip(" ,") for line in lines]))
    if match[1] == "array":
        return None
    pieces = [re.sub(r",? ?& ?(?:\\text\{ ?(?:if|for|when),? ?\} ?)?", "&", one) for one in lines]
    return Items("matrix", tuple(
        Items("row", tuple(read_tidy(part.strip(" ,.")) for part in piece.split("&")))
        for piece in pieces
    ))  # fmt: skip


def _read_congruence(text: str) -> Any:
    r"""Read `x \equiv 8 \pmod 5`: the residue, which is 3, and the modulus."""
    match = _CONGRUENCE.fullmatch(text)
    if match is None:
        return None
    left, residue, modulus = match[1] or "", read_tidy(match[2]), read_tidy(match[3])
    residues = residue.items if isinstance(residue, Items) else (residue,)
    numbers = [one.value for one in (modulus, *residues) if isinstance(one, Number)]
    if len(numbers) <= len(residues) or numbers[0] <= 0 or math.inf in map(abs, numbers):
        return _text(text)
    classes = Items("mod", (modulus, *sorted({one % numbers[0] for one in numbers[1:]})))
    return Assignment(_plain_name(left), classes) if left else classes


def _read_membership(text: str) -> Assignment | None:
    if match := _SET_BUILDER.fullmatch(text):
        return Assignment("", read_tidy(match[1]))
    if match := _POINT.fullmatch(text):
        return Assignment(match[1], read_tidy(match[2]))
    name, member, members = text.partition(r"\in ")
    if not member or not _NAME.fullmatch(name.strip()):
        return None
    return Assignment(_plain_name(name), read_tidy(members))


def _read_inequality(text: str) -> Any:
    parts = split(text, _INEQUALITY)
    if len(parts) == 2 and not parts[0] and _PLAIN_NUMBER.fullmatch(parts[1]):
        bare = text[: -len(parts[1])].strip()
        if bare != r"\ne":
            return half_line("", bare, read_tidy(parts[1]))  # of a variable without a name
    if len(parts) == 1 or not all(parts) or "=" in text:
        return None
    signs = [match[0].strip() for match in _INEQUALITY.finditer(text)]
    if len(signs) != len(parts) - 1:
        return Text(text)
    names = [bool(_NAME.fullmatch(part)) for part in parts]
    if len(parts) == 2:
        if names == [True, False] or names == [False, True]:
            return _half_line(parts, signs[0], name_first=names[0])
        (left, right), (sign,) = parts, signs
        return _read_distance(left, right, sign) or relation(left, sign, right)
    if len(parts) != 3 or not names[1] or r"\ne" in signs:
        return Text(text)
    if {sign[-1] in ">" or sign == r"\ge" for sign in signs} == {True}:
        parts, signs = parts[::-1], [flipped(sign) for sign in signs[::-1]]
    if not set(signs) <= {"<", r"\le"}:
        return Text(text)
    brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return Interval(read_tidy(parts[0]), read_tidy(parts[2]), brackets, _plain_name(parts[1]))


def _half_line(parts: list[str], sign: str, *, name_first: bool) -> Any:
    name, end = _plain_name(parts[0 if name_first else 1]), read_tidy(parts[1 if name_first else 0])
    return half_line(name, sign if name_first else flipped(sign), end)


def _read_distance(left: str, right: str, sign: str) -> Interval | Union | None:
    r"""Read `|2x - 1| \le 3` as an interval and `|x| > 1` as two half lines; no negative bound."""
    if "|" in right:
        left, right, sign = right, left, flipped(sign)
    match, bound = _DISTANCE.fullmatch(left), _BOUND.fullmatch(right)
    if match is None or bound is None or sign == r"\ne":
        return None
    factor, name, shift = match[1] or "1", _plain_name(match[2]), match[3] or "0"
    low, high = (read_tidy(rf"\frac{{{side}({right}) - ({shift})}}{{{factor}}}") for side in "-+")
    if sign in ("<", r"\le"):
        return Interval(low, high, "()" if sign == "<" else "[]", name)
    first, second = half_line(name, flipped(sign), low), half_line(name, sign, high)
    return Union((first, second))


def relation(left: str, sign: str, right: str) -> Relation | None:
    if sign in (">", r"\ge"):
        left, sign, right = right, flipped(sign), left
    difference = f"({left})-({right})"
    return Relation(sign, difference) if values.parse(difference) is not None else None


def _plain_name(name: str) -> str:
    """Return the name of a variable; labels in words, such as `Area`, are not compared."""
    name = re.sub(r"[\s{}]|\\text", "", name)
    return "" if re.fullmatch(r"[a-zA-Z]{2,}", name) else name


def _read_rounded(text: str) -> Any:
    r"""Read `\frac{40}{3} \approx 13.3` as the exact value."""
    sides = split(text, _ROUNDED)
    is_exact = len(sides) == 2 and sides[0] and not _NAME.fullmatch(sides[0])
    return read_tidy(sides[0]) if is_exact else None


def _read_equation(text: str) -> Any:
    sides = split(text, _EQUALS)
    if len(sides) == 1 or _INEQUALITY.search(text) or not all(sides):
        return None
    if any(_BESIDE_NAME.fullmatch(side) for side in sides[1:-1]):
        return _text(text)
    if len(sides) == 2 and re.fullmatch("[a-z]", sides[1]) and not _NAME.fullmatch(sides[0]):
        sides.reverse()
    if _NAME.fullmatch(sides[0]):
        return Assignment(_plain_name(sides[0]), read_tidy(sides[-1]))
    equation = relation(sides[0], "=", sides[1]) if len(sides) == 2 else None
    if equation is not None and values.parse(equation.difference).free_symbols:
        return equation
    return read_tidy(sides[-1])


def _read_quantity(text: str) -> Quantity | Number | None:
    found = split_unit(text)
    if found is None:
        return None
    value, unit, factor = found
    if unit == "degree" and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", value):
        return None  # the angle of a function
    reading = read_tidy(value)
    if isinstance(reading, Number):
        number = Number(reading.value * factor, digits=reading.digits if factor == 1 else 0)
        letters = text if re.fullmatch(r"[\d.,+-]+ [a-zA-Z]", text) else ""
        return Quantity(number, unit, letters) if unit else number
    return Quantity(reading, unit) if isinstance(reading, Expression) and unit else None


def _read_words(text: str) -> Words | None:
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).replace("$", "").strip(" ")
    if not _WORDS.fullmatch(plain) or (len(plain) == 1 and plain.isascii()):
        return None
    words = re.split(r"[ -]+", plain.strip(".").casefold())
    is_spelled = all(len(word) == 1 for word in words)
    formula = plain if _FORMULA.fullmatch(plain) else ""
    return Words(("" if is_spelled else " ").join(words), formula)


def _read_expression(text: str) -> Any:
    latex = re.sub(r"\\text\{\s*([a-zA-Z]|[^a-zA-Z{}]*)\s*\}", r"\1", text)
    latex = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", latex)
    tree = values.parse(latex)
    if tree is None:
        return None
    try:
        value = values.exact(tree)
    except TooLargeError:
        return Text(re.sub(r"\{(\w)\}", r"\1", text.replace(" ", "")))
    return Expression(latex) if value is None else Number(value)


READERS: tuple[Callable[[str], Any], ...] = (
    read_number,
    _read_choice,
    read_time,
    read_based,
    read_date,
    _read_matrix,
    _read_system,
    _read_congruence,
    _read_geometry,
    _read_union,
    _read_membership,
    _read_items,
    _read_plus_minus,
    _read_inequality,
    _read_rounded,
    _read_equation,
    _read_quantity,
    _read_words,
    _read_expression,
)
