"""Codes: names for programs, which stay as they are when the words for people change.

A code is defined where the thing is defined: as the attribute ``code`` of an error class (errors.py), or as that of an
enumeration's member. docs/codes.md lists all of them, and a test holds the two to each other.
"""

from __future__ import annotations

import enum
from typing import TypeVar

_Member = TypeVar("_Member", bound="CodedEnum")


class CodedEnum(enum.Enum):
    """An enumeration whose members are written ``NAME = "words for people", "code-for-programs"``; the value of a
    member is its words."""

    _value_: str
    #: Small letters, digits and hyphens; the same in every later version.
    code: str

    def __new__(cls: type[_Member], words: str, code: str) -> _Member:
        """Make a member of its words and its code."""
        member = object.__new__(cls)
        member._value_ = words
        member.code = code
        return member
