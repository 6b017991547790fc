r"""Verifier of mathematical answers.

The answer is in the response after its thinking: the content of the last `\boxed{...}`, or
else of the last line with `Answer:` (the format of DAPO-Math-17k) or `####` (that of GSM8K). It is
right if it equals the ground truth by the rules of its kind (`megatron_rl.rewards.answers`).
"""

import ast
import contextlib
import json
import re
from functools import lru_cache

from megatron_rl.rewards.answers.equality import equal
from megatron_rl.rewards.answers.kinds import Text
from megatron_rl.rewards.answers.reading import read
from megatron_rl.rewards.thinking import CUT_THINKING, after_thinking, has_end
from megatron_rl.rewards.verifier import NO_ANSWER, UNPARSABLE_TRUTH

CUT_BOX = r"no answer: \boxed is not closed"

# An escaped brace, as in \{1, 2\}, is not a delimiter; `\boxed 5` has no braces.
_BRACES = re.compile(
    r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>(?=[-+.]*\d|\\[a-zA-Z])[^\s${}]+(?:\{[^\s${}]*\})*))"
    r"|\\.|[{}]",
    re.DOTALL,
)
# Between the boxes of one answer, as in `x = \boxed{3}, y = \boxed{5}`.
_BETWEEN_BOXES = re.compile(
    r"[\s$]*(?:\\text\{)?\s*(?:[,;]\s*(?:and|or)?|and|or)\s*\}?(?:\\[,;:! ]|\\q?quad|[\s$&])*"
    r"(?:\\?[a-zA-Z]\w{0,9}\s*=)?[\s$]*"
)
_NAME_BEFORE_BOX = re.compile(r"(\\?[a-zA-Z]\w{0,9})\s*=[\s$]*\Z")
_ANSWER_LINE = re.compile(
    # In many languages an adjective and a verb follow the noun: `réponse finale :`.
    r"(?:(?:answer(?:\s+is)?|(?:respuesta|réponse|antwort|resposta|risposta|ответ|答え|解答|정답|답"
    r"|câu trả lời|الجواب|(?<!\w)(?:đáp án|odpowiedź|odpověď|răspuns|cevap|svar|antwoord|vastaus"
    r"|jawaban|उत्तर))(?:[ \t]+[^\W\d_]{1,12}){0,3})(?:[ \t]*\([^\W\d_]{1,12}\))?"
    r"\W{0,3}?[:\uff1a]|答案\s*[:\uff1a是为]+)"
    r"[ \t*_]*+(?:\s*(?:\$\$|\\\[)[ \t]*\n)?(?P<line>\S[^\n]*|\s++[^\n]+)"
    r"|^[ \t]*####[ \t]*(?P<number>[-+$€£]{0,2}\d[\d,. /]*%?)[ \t\r]*$",
    re.IGNORECASE | re.MULTILINE,
)
_SPECIAL_TOKENS = re.compile(r"<\|\w+\|>")
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_LONGEST_ANSWER = 2000  # characters; longer answers are prose, and slow to parse
_DEEPEST_ANSWER = 12  # nested brackets; each level doubles the time of the parser
_LONGEST_TEXT = 1_000_000  # characters; only the end of a longer text is read


def verify_math_answer(
    text: str, ground_truth: str, data_source: str
) -> tuple[float, str, str | None]:
    """Return reward 1 for the right answer, otherwise 0, with reason and extracted answer."""
    final = after_thinking(text[-_LONGEST_TEXT:])
    if final is None:
        return 0.0, CUT_THINKING, None
    if (answer := extract_answer(final)) is None:
        return 0.0, CUT_BOX if _last_boxes(final) is None else NO_ANSWER, None
    return grade(answer, ground_truth)


def verify_after_thinking(
    text: str, ground_truth: str, data_source: str
) -> tuple[float, str, str | None]:
    """Grade like `verify_math_answer` a response whose prompt has opened the thinking.

    Such a response shows its thinking only by its end, so one without an end has no answer.
    """
    if not has_end(text[-_LONGEST_TEXT:]):
        return 0.0, CUT_THINKING, None
    return verify_math_answer(text, ground_truth, data_source)


def verify_anywhere(
    text: str, ground_truth: str, data_source: str
) -> tuple[float, str, str | None]:
    r"""Grade the last closed `\boxed{...}` or answer line, also in thinking or before a cut."""
    answer = extract_answer(text[-_LONGEST_TEXT:], is_cut_allowed=True)
    return (0.0, NO_ANSWER, None) if answer is None else grade(answer, ground_truth)


def grade(answer: str, ground_truth: str) -> tuple[float, str, str | None]:
    """Compare an extracted answer with the ground truth, or with each of a list of right answers.

    The list is a JSON or Python text of texts, as `["36", "36.0"]`; `[3, 6]` is one answer.
    """
    results = [_grade(answer, truth) for truth in right_answers(ground_truth)]
    return max(results, key=lambda result: result[0])


def right_answers(ground_truth: str) -> list[str]:
    """Return the right answers of a ground truth: usually one."""
    if re.match(r"\s*\[\s*[\"']", ground_truth):
        for parse in (json.loads, ast.literal_eval):  # the second: as `str` writes a list
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                found = parse(ground_truth)
                if all(isinstance(one, str) and one.strip() for one in found):
                    return list(found)
    return [ground_truth]


def can_be_right(ground_truth: str) -> bool:
    """Return True if an answer gets 1: the truth, in a box or on a line, in two spellings of it.

    Where only the very same text would, because it is of no kind that is compared, False.
    """
    for truth in right_answers(ground_truth):
        bare = _bare_truth(truth)
        if verify_math_answer(rf"\boxed{{{bare}}}", truth, "")[0] == 1 and not isinstance(
            read(bare), Text
        ):
            return True
    return False


def _grade(answer: str, ground_truth: str) -> tuple[float, str, str | None]:
    truth = _bare_truth(ground_truth)
    if answer == truth:
        return 1.0, "same text", answer
    if len(answer) > _LONGEST_ANSWER:
        return 0.0, "answer too long", answer[:_LONGEST_ANSWER]
    if _depth(answer) > _DEEPEST_ANSWER:
        return 0.0, "answer too deep", answer
    return (*_compare(answer, truth), answer)


def extract_answer(text: str, *, is_cut_allowed: bool = False) -> str | None:
    r"""Extract the last `\boxed{...}`, or else the last line with an answer, if any.

    Boxes joined by a comma or `and` are one answer. If the last box is not closed, the text was
    cut and has no answer; is_cut_allowed: the last closed box is the answer instead.
    """
    boxes = _last_boxes(text, is_cut_allowed=is_cut_allowed)
    if boxes is None:
        return None
    if boxes:
        return ", ".join(boxes) or None
    lines = [match["line"] or match["number"] for match in _ANSWER_LINE.finditer(text)]
    return (_SPECIAL_TOKENS.sub("", lines[-1]).strip(" \t\r\n*_$.") or None) if lines else None


def _last_boxes(text: str, *, is_cut_allowed: bool = False) -> list[str] | None:
    """Return the contents of the last boxes that are joined; None if the last one is cut."""
    boxes = _find_boxes(text)
    if is_cut_allowed:
        boxes = [box for box in boxes if box[2] >= 0]
    if not boxes:
        return []
    if boxes[-1][2] < 0:
        return None
    last = len(boxes) - 1
    while last and _BETWEEN_BOXES.fullmatch(text, boxes[last - 1][2] + 1, boxes[last][0]):
        last -= 1
    contents = [text[start:end].strip() for _, start, end in boxes[last:]]
    if len(set(contents)) == 1:
        return contents[:1]
    names = [_NAME_BEFORE_BOX.search(text, max(0, box[0] - 20), box[0]) for box in boxes[last:]]
    return [
        f"{name[1]} = {content}" if name else content
        for name, content in zip(names, contents, strict=True)
    ]


def _find_boxes(text: str) -> list[list[int]]:
    """Return [start of the command, start and end of the content] by start; end -1: not closed.

    Makes a single pass over the text.
    """
    boxes: list[list[int]] = []
    open_braces: list[list[int] | None] = []  # a box, or None for another brace
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            open_braces.append(None)
        elif token == "}":
            if open_braces and (box := open_braces.pop()) is not None:
                box[2] = match.start()
        elif match["bare"]:
            boxes.append([match.start(), *match.span("bare")])
        elif token.endswith("{") and len(token) > 2:
            boxes.append([match.start(), match.end(), -1])
            open_braces.append(boxes[-1])
    return boxes


def _bare_truth(ground_truth: str) -> str:
    """Return the answer of a ground truth that is a solution, as GSM8K's `... #### 72`."""
    truth = ground_truth.rpartition("####")[2].strip()
    boxes = _last_boxes(truth) if "boxed" in truth else None
    return boxes[-1] if boxes else truth


def _depth(answer: str) -> int:
    """Return the maximum nesting depth of brackets."""
    deepest = depth = 0
    for character in answer:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


@lru_cache(maxsize=10_000)
def _compare(answer: str, ground_truth: str) -> tuple[float, str]:
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(ground_truth):  # the common case
        return (1.0, "equal") if int(answer) == int(ground_truth) else (0.0, "wrong answer")
    truth, given = read(ground_truth), read(answer)
    if truth == given and given == Text(""):
        return 0.0, UNPARSABLE_TRUTH
    if equal(truth, given):
        return 1.0, "equal"
    if isinstance(truth, Text):
        return 0.0, UNPARSABLE_TRUTH
    return 0.0, "answer not understood" if isinstance(given, Text) else "wrong answer"


read(r"\frac{1}{2} x + \sqrt{2}")  # builds the tables of the grammar before the worker is ready
