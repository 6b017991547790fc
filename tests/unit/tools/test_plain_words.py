"""tools/plain_words.py: the docstrings and phrases that it counts."""

from tools.plain_words import docstring_openings, machine_verbs, phrases

SOURCE = '''"""What a module does."""


class Group:
    """Groups of prompts."""

    size: int = 8
    """of each prompt; it says how many"""


def wait():
    """Wait for a rank; asked for ever"""
    # computed anew, under
    return "beside"
'''


def test_openings_of_docstrings_are_counted_with_those_of_attributes():
    assert docstring_openings(SOURCE) == [(1, "What"), (8, "of")]


def test_machine_verbs_are_counted_in_docstrings_and_comments():
    assert machine_verbs(SOURCE) == [(8, "says")]
    assert machine_verbs("x = 'it says'  # held-out, held\n") == [(1, "held")]


def test_phrases_are_counted_in_docstrings_comments_and_strings():
    assert phrases(SOURCE) == [(8, "says"), (12, "for ever"), (13, "anew"), (14, "beside")]
