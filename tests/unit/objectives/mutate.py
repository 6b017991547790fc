"""Change one expression of a function for the time of a test."""

import contextlib
import inspect
import textwrap
from functools import cached_property


@contextlib.contextmanager
def mutated(function, old, new):
    """Replace `old`, which must occur exactly once in the function's source, by `new`.

    The code object is swapped, so every importer sees the mutant. Properties are unwrapped.
    """
    if isinstance(function, cached_property):
        function = function.func
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :]  # without decorators
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {function}"
    namespace = dict(function.__globals__)
    exec(
        compile("from __future__ import annotations\n" + source.replace(old, new), "m", "exec"),
        namespace,
    )
    original = function.__code__
    function.__code__ = namespace[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = original
