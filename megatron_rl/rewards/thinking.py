"""The part of a response after its thinking, by the marks that published models write."""

import re

CUT_THINKING = "no answer: thinking does not end"

# gpt-oss's marks are special tokens, which decoding removes: `analysis...assistantfinal...` remains
# of its channels. Other templates' marks are ordinary text.
_ENDS = re.compile(
    r"</think(?:ing)?>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>|</thought>|</reasoning>"
    r"|</seed:think>|<\|END_THINKING\|>|<\|channel\|>final<\|message\|>|(?<=\S)assistantfinal"
)
_BEGINS = re.compile(
    r"<think(?:ing)?>|\[THINK\]|◁think▷|<\|begin_of_thought\|>|<thought>|<reasoning>"
    r"|<seed:think>|<\|START_THINKING\|>|<\|channel\|>(?:analysis|commentary)|\Aanalysis(?=\w)"
)

_AT_THE_END = re.compile(rf"(?:{_BEGINS.pattern})\s*\Z")


def after_thinking(text: str) -> str | None:
    """Return what follows the last end of thinking; None if thinking begins and does not end.

    Thinking that the prompt opened shows only by its end: a response without any mark is returned
    as it is.
    """
    end = 0
    for match in _ENDS.finditer(text):
        end = match.end()
    return None if _BEGINS.search(text, end) else text[end:]


def without_thinking(text: str) -> str:
    """Return what a response has outside of thinking, which may also begin or end with it.

    Makes a single pass over the text: a model may repeat a mark until it is cut.
    """
    parts, start = [], 0
    begin = _BEGINS.search(text)
    while True:
        if begin is not None and begin.start() < start:
            begin = _BEGINS.search(text, start)
        end = _ENDS.search(text, start)
        if end is not None and (begin is None or end.start() < begin.start()):
            start = end.end()  # of thinking that began before
            continue
        parts.append(text[start : len(text) if begin is None else begin.start()])
        if begin is None or (end := _ENDS.search(text, begin.end())) is None:
            return "".join(parts)
        start = end.end()


def ends_inside_thinking(prompt: str, *, last_message: str) -> bool:
    """Return True if a rendered prompt opens the thinking that the response continues.

    A mark at the very end does, and after the last message, whose text may mention marks, one that
    the template continues with a few words.
    """
    _, found, rest = prompt.rpartition(last_message.strip())
    return opens_thinking(prompt) or (bool(found) and after_thinking(rest) is None)


def opens_thinking(context: str) -> bool:
    """Return True if the text before a turn ends with the mark that begins thinking."""
    return bool(_AT_THE_END.search(context))


def has_end(text: str) -> bool:
    """Return True if thinking ends somewhere in the response."""
    return _ENDS.search(text) is not None
