# ruff: noqa: SIM905 - lists of words
r"""The unit at the end of an answer, or the currency before it."""

import re
from fractions import Fraction

_UNITS = {
    "mm": "millimeter millimetre 毫米", "cm": "centimeter centimetre 厘米 公分",
    "m": "meter metre 米 公尺", "km": "kilometer kilometre 千米 公里", "in": "inch inches",
    "ft": "foot feet", "yd": "yard", "mi": "mile", "mg": "milligram 毫克", "g": "gram 克",
    "kg": "kilogram 千克 公斤", "lb": "pound lbs", "oz": "ounce", "t": "ton tonne 吨",
    "ml": "milliliter millilitre mL 毫升", "l": "liter litre L 升", "s": "second sec secs 秒",
    "min": "minute mins 分钟", "h": "hour hr hrs 小时", "day": "天", "week": "", "month": "",
    "year": "yr yrs 年", "N": "newton", "J": "joule", "W": "watt", "V": "volt",
    "A": "ampere amp", "K": "kelvin", "Hz": "hertz", "Pa": "pascal", "kPa": "", "kJ": "", "kW": "",
    "ohm": "", "mol": "mole", "rad": "radian", "mph": "", "kmh": "kmph km/h kph", "m/s": "",
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
_WORD = rf"(?:\\text\{{[^{{}}]*\}}{_POWER}|[^\W\d_]+\.?{_POWER})"
_AFTER = re.compile(
    rf"(.*?(?:[\d}})!]|\\pi))( ?)((?:\\\$|[€£¥₹¢]|\\%|\\degree ?[CF]?|{_WORD})"
    # A bound, because a word can match in two ways.
    rf"(?: ?(?:/|\\cdot) ?{_WORD}| {_WORD}"
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
    while words and words[0].lower() in _FACTORS:
        factor *= _FACTORS[words.pop(0).lower()]
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
    unit = re.sub(r"\bmiles? (?:per|an) hour\b|mi/hr?\b|miles?/hour", "mph", unit)
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
