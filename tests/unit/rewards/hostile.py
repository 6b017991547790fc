"""Answers that a model may write to a verifier's harm, drawn from a seed; no torch here."""

import random

EXPLOSIVE = (
    "100000000!", "9^{9^{9^{9}}}", "10**10**10", r"2^{2^{2^{2^{2^{2^2}}}}}", "(((7!)!)!)!",
    r"\binom{10^9}{5\cdot 10^8}", r"\sum_{k=1}^{10^{12}} \frac{1}{k!}", r"(x+1)^{100000}",
)  # fmt: skip
_ATOMS = (
    "0", "1", "42", "-7", "3.14", "1/3", "x", "y_1", r"\pi", r"\infty", "e", "i", "", " ",
    "\\", "$",
    r"\frac{1}{2}", r"\sqrt{2}", r"\text{no}", "{", "}", r"\{", r"\}", "[1,2)", "(1,2)", "1,000",
    "\x00", "\ud800", "\udfff\ud800", "\u202e", "é", "\uff10", "∞", "😀", "\n", "\r", "\x1b[2J",
    "%", "#", "nan", "inf", "-inf", "1e999", "0x41", "None", "True", "1_000", "5\\%", "°",
)  # fmt: skip
_JOINTS = (
    "+",
    "-",
    "*",
    "/",
    "^",
    "=",
    "<",
    r"\le",
    ",",
    " ",
    r"\cdot",
    "!",
    "_",
    ";",
    r"\cup",
    "..",
)
_WRAPPERS = (
    "({})", "{{{}}}", r"\sqrt{{{}}}", r"\frac{{{}}}{{0}}", r"\left({}\right)", "|{}|", "-{}",
    r"\text{{{}}}", r"\boxed{{{}}}", r"\begin{{pmatrix}}{}\end{{pmatrix}}", "[{}]", r"\log_{{{}}}",
    r"\sin {}", "{}!", r"\int {} dx", r"\lim_{{x\to 0}} {}", r"\{{ {} \}}", "${}$", "{}_{{{}}}",
)  # fmt: skip
_CODE = (
    '__import__("os").system("touch {canary}")', 'open("{canary}","w")',
    'exec("open(\'{canary}\',\'w\')")', "$(touch {canary})", "`touch {canary}`",
    'eval("__import__(\'pathlib\').Path(\'{canary}\').touch()")',
    r"\input{{{canary}}}", r"\write18{{touch {canary}}}", "lambda: open('{canary}','w')",
    "().__class__.__bases__[0].__subclasses__()", "{{{{7*7}}}}", "%n%n%s",
    "'; DROP TABLE rewards; --",
)  # fmt: skip


def hostile_answers(count, *, seed, canary):
    """So many responses; what runs any of them as code would make the file `canary`."""
    chance = random.Random(seed)
    return [_response(chance, canary) for _ in range(count)]


def _response(chance, canary):
    kind = chance.random()
    if kind < 0.02:
        answer = chance.choice(_CODE).format(canary=canary)
    elif kind < 0.03:  # longer than anything that is parsed, and as deep
        piece = chance.choice(
            ("{", "}", r"\boxed{", "(", "9", r"\frac{", "-", "Answer: ", "$", "\\")
        )
        answer = piece * chance.choice((3_000, 100_000, 1_000_000))
    elif kind < 0.06:  # as deep as an answer that is parsed may be
        deep = chance.choice((("{", "}"), ("(", ")"), (r"\sqrt{", "}"), ("-", ""), ("[", "]")))
        levels = chance.randrange(10, 280)
        answer = deep[0] * levels + "1" + deep[1] * chance.choice((levels, levels - 1))
    else:
        answer = _expression(chance, depth=chance.randrange(4))
    shape = chance.randrange(5)
    return (
        answer, f"so \\boxed{{{answer}}}.", f"so \\boxed{{{answer}}}.", f"Answer: {answer}",
        f"\\boxed{{1}} \\boxed{{{answer}",
    )[shape]  # fmt: skip


def _expression(chance, *, depth):
    if depth == 0:
        return chance.choice(_ATOMS)
    parts = [_expression(chance, depth=depth - 1) for _ in range(chance.randrange(1, 4))]
    inner = chance.choice(_JOINTS).join(parts)
    wrapper = chance.choice(_WRAPPERS) if chance.random() < 0.5 else "{}"
    return wrapper.format(*[inner] * wrapper.replace("{{", "").replace("}}", "").count("{}"))
