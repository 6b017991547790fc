# ruff: noqa: SIM905 - lists of words
r"""Values of mathematical expressions, compared exactly.

math-verify's parser (latex2sympy2_extended) turns LaTeX into a tree that it does not evaluate. A
rational tree is computed with integers; any other is evaluated to more digits than its numbers
have, at a few values of its variables, which distinguishes 1/2004! from 1/2006!. Nothing is
simplified or solved, and what would be too large (9^{9^9}, factorials of millions) is never
computed, so that the time is bounded by the length of the text.
"""

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from sympy import Rational
from sympy.core.expr import UnevaluatedExpr

_MOST_EXACT_BITS = 400_000  # of a number that is computed with integers, such as 20000!
_MOST_BITS = 20_000  # of all numbers of an expression that is evaluated numerically
_GUARD_DIGITS = 40
_POINTS = 8  # of which two must be in the domain of both expressions
_LONGEST_BINOMIAL = 4  # digits; the parser itself computes it
_LONGEST_NUMBER = 1000  # digits
_COMMANDS = frozenset(
    "frac sqrt cdot div pi infty pm mp ln log exp binom circ degree "
    "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth arsinh arcosh artanh "
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho "
    "sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega "
    "lfloor rfloor lceil rceil gcd lcm max min".split()
)
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_REPEATING = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\{(\d+)\}|\((\d+)\))(?!\d)")
# Two numbers side by side, as in `5 3`, have no meaning; `3\frac{1}{2}` is a mixed number.
_SIDE_BY_SIDE = re.compile(r"\d +\d|\d[a-zA-Z]*\s*\(\\frac|\.\d+ ?\(\d")
# The parser adds two numbers in 2(3).
_FACTOR_IN_BRACKETS = re.compile(r"((?<![_^\d.])\d+|\)) ?\((?=[\d\\.])")
# What is the divisor in 1/2x?
_AMBIGUOUS = re.compile(r"\d ?/ ?\d+ ?(?:[a-zA-Z(]|\\(?:pi|sqrt)(?![a-zA-Z]))|!!|'")
# Words of a sentence, which the parser would take for products of letters.
_PROSE = re.compile(
    r"(?<![a-zA-Z\\])(?:[a-zA-Z]{5,}|(?<= )(?:to|of|in|on|at|is|or|if|by|for|and|the|out|when|with"
    r"|than|from|per|not)(?= ))(?![a-zA-Z])"
)
_PLAIN = re.compile(
    r"(?P<sign>[+-]?) ?(?:(?P<whole>\d{1,300}) ?(?=\\frac|\d+ ?/ ?\d))??"
    r"(?:\\frac\{ ?(?P<top>-?\d{1,300}) ?\}\{ ?(?P<bottom>-?\d{1,300}) ?\}"
    r"|(?P<before>\d{1,300}) ?/ ?(?P<after>-?\d{1,300})"
    r"|(?P<decimal>\d{0,300}\.\d{1,300}|\d{1,300}\.?)(?:[eE](?P<exponent>[+-]?\d{1,3}))?)"
)
_MIXED = re.compile(r"(?P<sign>[+-]?) ?(?P<whole>\d{1,300}) (?P<top>\d{1,300}) ?/ ?(?P<bottom>\d+)")


_MIXED_FACTOR = re.compile(r"(?<![\d.}^_])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}")


_BINOMIAL = re.compile(r"\\binom\s*\{([^{}]*)\}\s*\{([1-9])\}")


class TooLargeError(ValueError):
    """A number that is too large to compute."""


def rational(text: str) -> Fraction | None:
    r"""Read an integer, decimal, fraction or mixed number: 1.5e3, 0.\overline{3}, 3 1/2."""
    if match := _MIXED.fullmatch(text):
        sign, whole, top, bottom = match.group("sign", "whole", "top", "bottom")
        return _signed(sign, int(whole), int(top), int(bottom))
    if match := _REPEATING.fullmatch(text.lstrip("+-")):
        return _signed(text[0], 0, *_repeating(match).as_integer_ratio())
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    if match["decimal"] and not match["whole"]:
        exponent = Fraction(10) ** int(match["exponent"] or 0)
        return Fraction(f"{match['sign']}{match['decimal']}".removesuffix(".")) * exponent
    if match["decimal"]:
        return None
    return _signed(match["sign"], int(match["whole"] or 0), int(match["top"] or match["before"]),
                   int(match["bottom"] or match["after"]))  # fmt: skip


def _signed(sign: str, whole: int, top: int, bottom: int) -> Fraction | None:
    if not bottom or (whole and top < 0):
        return None
    value = whole + Fraction(top, bottom)
    return -value if sign == "-" else value


def _repeating(match: re.Match[str]) -> Fraction:
    whole, fixed, cycle = match[1] or "0", match[2], match[3] or match[4]
    tail = Fraction(int(cycle), 10 ** len(cycle) - 1) / 10 ** len(fixed)
    return Fraction(f"{whole}.{fixed or '0'}") + tail


@lru_cache(maxsize=10_000)
def parse(text: str) -> Any:
    """Return the tree of an expression, unevaluated; None for what is not one expression."""
    if _AMBIGUOUS.search(text):
        return None
    text = _FACTOR_IN_BRACKETS.sub(r"\1 \\cdot (", _BINOMIAL.sub(_product, text))
    if (
        not text
        or _PROSE.search(text)
        or _SIDE_BY_SIDE.search(text)
        or re.search(r"[=<>,;:?@#&%$\"`~]|[^\x00-\x7f]|\\\\", text)
        or any(len(number) > _LONGEST_NUMBER for number in re.findall(r"\d+", text))
        or not set(re.findall(r"\\([a-zA-Z]+)", text)) <= _COMMANDS
        or not all(len(one) <= _LONGEST_BINOMIAL and one.isdigit() for one in _binomials(text))
    ):
        return None
    latex = _DECIMAL.sub(_exact, _MIXED_FACTOR.sub(_improper, text)).replace(r"\degree", r"^\circ")
    try:
        tree = latex2sympy(
            latex,
            is_real=True,
            convert_degrees=True,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except Exception:  # noqa: BLE001 - the parser raises whatever it likes at text it cannot read
        return None
    return tree if isinstance(tree, sympy.Expr) and not tree.has(*_UNBOUNDED) else None


_UNBOUNDED = (
    sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative, sympy.nan, sympy.zoo,
    sympy.Float,
)  # fmt: skip

_GROWING = (
    sympy.exp | sympy.factorial | sympy.gamma | sympy.sinh | sympy.cosh | sympy.tanh | sympy.coth
)


def _binomials(text: str) -> Iterator[str]:
    for match in re.finditer(r"\\binom\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\})?", text):
        yield from (match[1] or "", match[2] or "")


def _product(match: re.Match[str]) -> str:
    r"""Write \\binom{n}{2} as n(n-1)/2!."""
    n, k = match.groups()
    if n.isdigit():
        return match[0]
    factors = r" \cdot ".join(f"(({n})-{index})" for index in range(int(k)))
    return rf"(\frac{{{factors}}}{{{math.factorial(int(k))}}})"


def _improper(match: re.Match[str]) -> str:
    whole, top, bottom = map(int, match.groups())
    return rf"(\frac{{{whole * bottom + top}}}{{{bottom}}})"


def _exact(match: re.Match[str]) -> str:
    """Write a decimal as a fraction, because floats are not exact."""
    return rf"(\frac{{{match[1]}{match[2]}}}{{{10 ** len(match[2])}}})"


def exact(tree: Any) -> Fraction | None:
    """Compute a rational expression with integers; None if not rational. Raises TooLargeError."""
    if isinstance(tree, Rational):
        return Fraction(int(tree.p), int(tree.q))
    if isinstance(tree, UnevaluatedExpr):
        return exact(tree.args[0])
    if not isinstance(tree, sympy.Add | sympy.Mul | sympy.Pow | sympy.factorial | sympy.Abs):
        return None
    values = [exact(argument) for argument in tree.args]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if isinstance(tree, sympy.Add):
        return sum(known, Fraction(0))
    if isinstance(tree, sympy.Mul):
        return math.prod(known, start=Fraction(1))
    if isinstance(tree, sympy.Abs):
        return abs(known[0])
    return _power(*known) if isinstance(tree, sympy.Pow) else _factorial(known[0])


def is_near(number: Any, value: Any) -> bool:
    """Return True if a number, rational or a tree, rounds to a value of 15 significant digits."""
    if not isinstance(number, int | float | Fraction):
        number = _evaluate_bounded(number)
        if number is None:
            return False
    return bool(abs(number - value) <= abs(value) / 10**14)


def _evaluate_bounded(tree: Any) -> Fraction | None:
    """Return the value of a tree without variables; None if it is too large to compute."""
    try:
        bits(tree)
    except TooLargeError:
        return None
    found = None if tree.free_symbols else _evaluate(tree, {}, _GUARD_DIGITS)
    try:
        size = 0.0 if found is None else abs(float(found))
    except (OverflowError, TypeError):  # beyond the numbers that it is compared with; imaginary
        return None
    return Fraction(str(found)) if 0 < size < math.inf else None


def is_endless(value: Any) -> bool:
    """Return True if a rational number has no finite decimal."""
    return isinstance(value, Fraction) and pow(10, 400, value.denominator) != 0


def rational_tree(value: Fraction) -> Any:
    """Return a rational number as a tree."""
    return Rational(value.numerator, value.denominator)


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator > 1:
        return _root(base, exponent)
    if not base and exponent < 0:
        return None
    if base not in (0, 1, -1) and abs(exponent) * _bits_of(base) > _MOST_EXACT_BITS:
        raise TooLargeError
    return base ** (exponent.numerator % 2 if base == -1 else exponent.numerator)


def _root(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Compute a root that is rational, as in 27^{1/3}; sympy does it for small numbers."""
    if base < 0 or max(_bits_of(base), _bits_of(exponent)) > 64:
        return None
    root = Rational(base.numerator, base.denominator) ** Rational(1, exponent.denominator)
    if not isinstance(root, Rational):
        return None
    return _power(Fraction(int(root.p), int(root.q)), Fraction(exponent.numerator))


def _factorial(number: Fraction) -> Fraction | None:
    if number.denominator > 1 or number < 0:
        return None
    if number * number.numerator.bit_length() > _MOST_EXACT_BITS:
        raise TooLargeError
    return Fraction(math.factorial(number.numerator))


def _bits_of(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def bits(tree: Any) -> float:
    """Bound the bits of the numbers that occur when the tree is evaluated. Raises TooLargeError."""
    if isinstance(tree, Rational):
        total = float(int(tree.p).bit_length() + int(tree.q).bit_length())
    else:
        total = sum((bits(argument) for argument in tree.args), start=1.0)
        total += _size(tree) if isinstance(tree, sympy.Pow | _GROWING) else 0
    if total > _MOST_BITS:
        raise TooLargeError
    return total


def _size(tree: Any) -> float:
    """Bound the binary logarithm of a value, also of one near 0, without computing it."""
    if isinstance(tree, Rational):
        return abs(math.log2(abs(int(tree.p))) - math.log2(int(tree.q))) if tree.p else 0.0
    if not tree.args:
        is_variable = isinstance(tree, sympy.Symbol) and tree.name != "i"
        return 4.0 if is_variable else 0.0 if isinstance(tree, sympy.Symbol) else 2.0
    inner = [_size(argument) for argument in tree.args]
    if isinstance(tree, sympy.Add):
        return max(inner) + len(inner)
    if isinstance(tree, sympy.Mul):
        return sum(inner)
    if isinstance(tree, sympy.Pow):
        exponent = tree.args[1]
        return inner[0] * (
            float(min(abs(exponent), 2**64))
            if isinstance(exponent, Rational)
            else 2.0 ** min(inner[1], 64)
        )
    return (inner[0] + 2) * 2.0 ** min(inner[0], 64) if isinstance(tree, _GROWING) else max(inner)


def same(first: Any, second: Any) -> bool:
    """Return True if two trees agree wherever both are defined. Raises TooLargeError."""
    return all_agree(first, second, lambda a, b, close: close(a[0], b[0]), at_once=1)


def proportional(first: Any, second: Any, *, positive: bool = False) -> bool:
    """Return True if one tree is a constant times the other: the same equation `tree = 0`.

    positive: the constant must be above 0, as for inequalities.
    """

    def agree(a: list[Any], b: list[Any], close: Any) -> bool:
        if not close(a[0] * b[1], a[1] * b[0]) or (close(a[0], 0) != close(b[0], 0)):
            return False
        return not positive or sympy.re(a[0] * b[0]) > 0 or close(a[0], 0)

    return all_agree(first, second, agree, at_once=2)


def all_agree(first: Any, second: Any, agree: Any, *, at_once: int) -> bool:
    """Compare the values of two trees at a few points, `at_once` consecutive points at a time."""
    digits = _GUARD_DIGITS + int(0.31 * (bits(first) + bits(second)))
    scale = sympy.Float(10, digits) ** (_GUARD_DIGITS // 2 - digits)

    def close(a: Any, b: Any) -> bool:
        return bool(abs(a - b) <= scale * max(1, abs(a), abs(b)))

    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    is_constant = all(one.name == "i" for one in symbols)
    points = _points(symbols, is_discrete=first.has(sympy.factorial) or second.has(sympy.factorial))
    window: list[tuple[Any, Any]] = []
    windows = 0
    for point in islice(points, at_once if is_constant else _POINTS):
        pair = _evaluate(first, point, digits), _evaluate(second, point, digits)
        if None in pair:
            continue
        window = [*window, pair][-at_once:]
        if len(window) == at_once:
            if not agree([one for one, _ in window], [one for _, one in window], close):
                return False
            windows += 1
    return windows >= (1 if is_constant else 2)


def _points(symbols: list[Any], *, is_discrete: bool) -> Iterator[dict[Any, Any]]:
    """Yield values of the variables: fractions of both signs, then integers; i is imaginary.

    is_discrete: integers only, because the expression has factorials.
    """
    for index in range(_POINTS):
        step = [Rational(7 + 4 * index, 11 + 3 * place) for place in range(len(symbols))]
        if index % 3 == 1:
            step = [-one for one in step]
        if is_discrete or index >= _POINTS - 3:
            step = [Rational(index + 2 * place) for place in range(len(symbols))]
        yield {
            symbol: sympy.I if symbol.name == "i" else value
            for symbol, value in zip(symbols, step, strict=True)
        }


def _evaluate(tree: Any, point: dict[Any, Any], digits: int) -> Any:
    """Return the value at a point, real unless the imaginary unit occurs; None if undefined."""
    try:
        tree = tree.xreplace(point)
        if not all(one.args[0].is_integer for one in tree.atoms(sympy.factorial)):
            return None
        value = tree.evalf(digits, maxn=digits + 50)
    except Exception:  # noqa: BLE001 - sympy raises many kinds of errors outside of a domain
        return None
    if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        return None
    imaginary = abs(sympy.im(value)) > sympy.Float(10) ** (-digits // 2)
    has_i = any(symbol.name == "i" for symbol in point)
    return None if imaginary and not has_i else value
