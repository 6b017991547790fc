"""Kinds of the fields of rows and messages, by type, property and words of their names.

Nothing here knows the names of one data set: media are found by their types, choices by the answer
that names one of them, and flags of training by words such as `weight` or `mask`.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_MEDIA = {
    "image", "images", "img", "imgs", "picture", "pictures", "photo", "photos", "video", "videos",
    "audio", "audios",
}  # fmt: skip
_MEDIA_FILE = re.compile(
    r"\S*/\S+\.(?:png|jpe?g|gif|bmp|webp|tiff?|svg|mp[34]|wav|flac|ogg|webm|avi|mov|mkv)(?:\?\S*)?",
    re.IGNORECASE,
)
_DATA_URL = re.compile(r"data:(?:image|audio|video)/")
_TRAINED = {
    "weight", "weights", "train", "trained", "training", "trainable", "loss", "learn", "supervise",
    "supervised", "grad", "gradient",
}  # fmt: skip
_NOT_TRAINED = {"masked", "ignore", "ignored", "skip", "skipped", "exclude", "excluded", "frozen"}
_MASKS = {"mask", "masks"}  # of what is trained, or of what is not
# Of a message: who wrote it, when, and where it belongs.
_LABELS = {
    "id", "ids", "uuid", "index", "idx", "name", "names", "model", "type", "kind", "lang",
    "language", "source", "author", "sender", "time", "timestamp", "date", "created", "updated",
    "at", "tokens", "turn", "step", "position", "status", "finish", "role", "category", "tag",
    "tags", "url", "hash", "rank", "version",
}  # fmt: skip
_CHOICES = {"choice", "choices", "option", "options", "candidates", "endings", "alternatives",
            "distractors"}  # fmt: skip
_CHOICE_STEMS = _CHOICES | {"op", "opt", "ending", "alternative", "candidate", "sol", "answer",
                            "ans", "distractor"}  # fmt: skip
# Of what a question is about, in a column of its own.
_PASSAGES = {
    "context", "contexts", "passage", "passages", "premise", "article", "articles", "document",
    "documents", "paragraph", "paragraphs", "history", "background",
}  # fmt: skip
# The place of an image or a sound in a text: `<image>`, `<|image_pad|>`, `![](a.png)`.
_PLACE = re.compile(
    r"<\|?(?:image|video|audio)(?:_pad|_?\d+)?\|?>|!\[[^\]\n]*\]\(\S+\)|<img\s[^>]*>", re.IGNORECASE
)
# Choices in one text: `A) 38, B) 27`, `a ) 38 , b ) 27`, or one in a line.
_WRITTEN = re.compile(r"(?<!\w)[(\[]?\s*[A-Ja-j]\s?[)\].:]\s+|\s*[\n|;]\s*")
_LETTERED = re.compile(r"(?<!\w)[(\[]?[Aa][)\].:](?!\w)")


def words_of(name: str) -> set[str]:
    """Return the words of a field's name in lower case: of `lossMask`, loss and mask."""
    return {word.lower() for word in _WORD.findall(name)}


def is_media(name: str, value: Any) -> bool:
    """Return True for an image, a sound or a video: bytes, or the place of one by its name.

    A field of a message or a column. An empty one, a number, an id and a caption are none.
    """
    if value is None or isinstance(value, bool | int | float):
        return False
    if isinstance(value, str):
        words, plain = words_of(name), value.strip()
        is_place = bool(plain) and not re.search(r"\s", plain) and bool(words & _MEDIA)
        is_label = bool(words & {"id", "ids", "index", "idx", "type", "size", "count"})
        is_file = bool(_MEDIA_FILE.fullmatch(plain))
        return bool(_DATA_URL.match(value)) or ((is_place or is_file) and not is_label)
    if isinstance(value, bytes | bytearray):
        return len(value) > 0
    if isinstance(value, list | tuple):
        return any(is_media(name, one) for one in value)
    if isinstance(value, Mapping):
        if {"bytes", "path"} <= value.keys() or {"array", "sampling_rate"} <= value.keys():
            return any(
                one is not None and len(one) for one in value.values() if hasattr(one, "__len__")
            )
        return any(is_media(f"{name}_{key}", one) for key, one in value.items())
    return type(value).__module__.split(".")[0] in ("PIL", "torchcodec")  # as `datasets` decodes


def find_place_of_media(text: str) -> str | None:
    """Return the mark of an image, a sound or a video in a text, if there is one."""
    found = _PLACE.search(text)
    return found[0] if found else None


def find_passage(row: Mapping[str, Any], text: str, *, skip: Sequence[str] = ()) -> str | None:
    """Return the column of a passage or of earlier turns that a question of one text lacks.

    A passage is in the text if the beginnings of half of its texts are, whatever their white space.
    skip: columns that are read.
    """
    plain = " ".join(text.split())
    for name, value in row.items():
        if name in skip or not words_of(name) or not words_of(name) <= _PASSAGES:
            continue
        beginnings = [" ".join(one.split())[:40] for one in _all_texts(value)]
        if sum(one not in plain for one in beginnings) > len(beginnings) / 2:
            return name
    return None


def _all_texts(value: Any) -> Iterator[str]:
    """Yield the texts of a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _all_texts(one)


def changes_training(name: str, value: Any, *, is_column: bool = False) -> bool:
    """Return True if a field that nothing reads asks for an answer to be trained otherwise.

    Of a message, every number and text is one that is no label and not neutral: texts are what the
    policy would write, numbers how it is weighted. is_column: a column of a row, of which only
    numbers count whose name asks for it.
    """
    if isinstance(value, Mapping):
        return any(
            changes_training(f"{name}.{key}", one, is_column=is_column)
            for key, one in value.items()
        )
    if isinstance(value, list | tuple):
        return any(changes_training(name, one, is_column=is_column) for one in value)
    words = words_of(name)
    if value is None or value == "":
        return False
    number = _as_number(value)
    if words & (_TRAINED | _NOT_TRAINED | _MASKS):
        if number is None:
            return not is_column
        if not words & (_TRAINED | _NOT_TRAINED):
            return True
        return number != (0 if words & {*_NOT_TRAINED, "no", "not"} else 1)
    if is_column:
        return isinstance(value, bool) and not value and "label" in words
    return not words & _LABELS


def _as_number(value: Any) -> float | None:
    if isinstance(value, bool | int | float):
        return float(value)
    plain = str(value).strip().lower()
    named = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}
    try:
        return named[plain] if plain in named else float(plain)
    except ValueError:
        return None


def find_choices(
    row: Mapping[str, Any], text: str, *, truth: str | None, skip: Sequence[str] = ()
) -> str | None:
    """Return the column, or columns, of choices of which a prompt lacks more than half.

    Columns are choices by name (`choices`, `option_a`), or if the answer is a letter of one and the
    prompt has no letters. truth: the answer, if the row has an answer. skip: columns that are read.
    """
    rest = {name: value for name, value in row.items() if name not in skip}
    for names, texts in (*_in_one(rest, truth, text), *_in_several(rest, truth)):
        shown = [re.search(rf"(?<!\w){re.escape(one.strip())}(?!\w)", text) for one in texts]
        if texts and sum(map(bool, shown)) < len(texts) / 2:
            return names
    return None


def _in_one(
    row: Mapping[str, Any], truth: str | None, text: str
) -> Iterator[tuple[str, list[str]]]:
    """Yield columns that have all choices."""
    for name, value in row.items():
        texts = _texts_of(value)
        if not texts and isinstance(value, str) and words_of(name) & _CHOICES:
            texts = [one.strip(" ,;") for one in _WRITTEN.split(value) if one.strip(" ,;")]
            texts = texts if len(texts) > 1 else []
        is_letter = (
            truth is not None and len(texts) > 1
            and truth.strip() in [chr(ord("A") + n) for n in range(len(texts))]
            and not _LETTERED.search(text)
        )  # fmt: skip
        if texts and (words_of(name) & _CHOICES or is_letter):
            yield name, texts


def _texts_of(value: Any) -> list[str]:
    """Return the texts of a list, of objects with a text each, or by letter; also if written."""
    if isinstance(value, str):
        if not value.lstrip().startswith(("[", "{")):
            return []
        for parse in (json.loads, ast.literal_eval):
            try:
                return [] if isinstance(parsed := parse(value), str) else _texts_of(parsed)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
        return []
    if isinstance(value, Mapping):
        if isinstance(value.get("text"), list | tuple):
            value = value["text"]
        else:
            value = [one for key, one in value.items() if re.fullmatch("[A-Za-z]|[0-9]", str(key))]
    if not isinstance(value, list | tuple):
        return []
    texts = [
        one.get("text", one.get("content")) if isinstance(one, Mapping) else one for one in value
    ]
    return [one for one in texts if isinstance(one, str) and one.strip()]


def _in_several(row: Mapping[str, Any], truth: str | None) -> Iterator[tuple[str, list[str]]]:
    """Yield columns with a choice each, whose names count in letters or digits."""
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name, value in row.items():
        found = re.fullmatch(r"(.*?)[_ ]?([a-z]|[A-Z]|\d)", name)
        if found and isinstance(value, str) and value.strip():
            kind = "A" if found[2].isupper() else "a" if found[2].islower() else "0"
            groups.setdefault((found[1], kind), {})[found[2]] = name
    for (stem, kind), names in groups.items():
        first = ord(min(names)) - ord(kind)
        is_counted = [ord(one) - ord(kind) - first for one in sorted(names)] == [*range(len(names))]
        if len(names) < 2 or not is_counted or first > (kind == "0"):
            continue
        texts = [row[name] for name in names.values()]
        answer = "" if truth is None else truth.strip()
        is_named = bool(words_of(stem) & _CHOICE_STEMS) or (stem == "" and kind == "A")
        if is_named or answer in texts or (kind != "0" and answer.upper() in map(str.upper, names)):
            yield ", ".join(names.values()), texts


def with_class_names(value: Any, feature: Any) -> Any:
    """Return a value of a data set with the names of its classes instead of their numbers.

    feature: its type, as `datasets` writes it; a number that is no class, as -1, is None.
    """
    if isinstance(feature, list):
        feature = {"feature": feature[0], "_type": "List"}
    if not isinstance(feature, Mapping) or value is None:
        return value
    kind = feature.get("_type")
    if kind == "ClassLabel":
        names = feature.get("names") or []
        if isinstance(value, list | tuple):
            return [with_class_names(one, feature) for one in value]
        is_class = isinstance(value, int) and 0 <= value < len(names)
        return names[value] if is_class else None
    if isinstance(kind, str):
        inner = feature.get("feature")
        if isinstance(value, list | tuple):
            return [with_class_names(one, inner) for one in value]
        return with_class_names(value, inner) if isinstance(value, Mapping) else value
    if isinstance(value, Mapping):
        return {key: with_class_names(one, feature.get(key)) for key, one in value.items()}
    return value


def has_classes(feature: Any) -> bool:
    """Return True if a type has classes somewhere."""
    return '"ClassLabel"' in json.dumps(feature, default=str)
