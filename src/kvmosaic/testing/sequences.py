"""Which token follows which, and which mark stands for a prefix: the truth that the modelled engine is judged by.

A sequence is a prompt with its one continuation, so every token is known before any schedule computes it. The mark
of a prefix depends on each of its tokens, on the images in it, and on the salt and adapter of the request. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Tokens

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15


def next_token(tokens: Tokens[int]) -> int:
    """The only continuation of these tokens."""
    return 1 + sum(tokens[-3:]) % 250


def mix(value: int) -> int:
    """Spread every bit over all 64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mark_of(text: str, mark: int = 1) -> int:
    """Go on from `mark` by a text."""
    for byte in text.encode():
        mark = mix((mark * _ODD + byte) & _MASK)
    return mark


class Sequence:
    """`extra`: what the bytes of every token depend on; `images[p]`: what those from position p on do."""

    def __init__(self, prompt: Tokens[int], extra: str = "", images: Mapping[int, str] | None = None) -> None:
        self._tokens = list(prompt)
        self._images = dict(images or {})
        self._last = mark_of(extra)
        self._marks: Marks = np.array([self._last], dtype=np.uint64)

    def token(self, position: int) -> int:
        while len(self._tokens) <= position:
            self._tokens.append(next_token(self._tokens))
        return self._tokens[position]

    def tokens(self, start: int, end: int) -> list[int]:
        return [self.token(position) for position in range(start, end)]

    def marks(self, lengths: Ints) -> Marks:
        """The marks of the prefixes of these lengths."""
        longest = int(lengths.max(initial=0))
        if longest >= len(self._marks):
            self._grow(longest + 64)
        found: Marks = self._marks[lengths]
        return found

    def _grow(self, longest: int) -> None:
        more = []
        for position in range(len(self._marks) - 1, longest):
            mark = mix((self._last * _ODD + self.token(position)) & _MASK)
            self._last = mark_of(self._images.get(position, ""), mark)
            more.append(self._last)
        self._marks = np.concatenate([self._marks, np.array(more, dtype=np.uint64)])
