"""Checks of the numbers that caches are given: ints, or what counts as one, as NumPy's and tensors of one element."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

MOST_TOKENS = 2**31 - 1
"""Positions are int32 on the device."""


def refuse(where: str, argument: str, expected: str, got: Any) -> NoReturn:
    """Raise ValueError in the words of every flashq error; `where` is a class, with or without one of its methods."""
    raise ValueError(f"flashq.{where}: {argument}: expected {expected}, got {got}")


def as_integer(
    where: str, name: str, value: Any, least: int = 0, most: int | None = None, *, expected: str | None = None
) -> int:
    """`value` as an int from least to most (None: `MOST_TOKENS`), or ValueError; `expected` is for its message."""
    try:
        number = operator.index(value)
    except TypeError:
        refuse(where, name, expected or "an integer", repr(value))
    if not least <= number <= (MOST_TOKENS if most is None else most):
        bound = f"at least {least}" if number < least else f"at most {MOST_TOKENS}"
        refuse(where, name, expected or (bound if most is None else f"{least} to {most}"), number)
    return number


def as_integers(where: str, name: str, values: Any) -> int | list[int]:
    """`values` as an int or a list of ints, whichever they are, or ValueError."""
    try:
        several = iter(values)
    except TypeError:
        several = None
    try:
        return operator.index(values) if several is None else [operator.index(value) for value in several]
    except TypeError:
        refuse(where, name, "an integer or a sequence of integers", repr(values))
