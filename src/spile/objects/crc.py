"""crc32c (Castagnoli), and the crc of a whole from the crcs of its parts.

The ``crc32c`` package is used because it releases the interpreter's lock over any buffer: with 1 MiB pieces two threads
reach 48.9 GiB/s where one reaches 24.8. ``google_crc32c`` releases it for ``bytes`` alone, so two threads over arrays
stay at the 24 GiB/s of one (both measured on one machine, in cache); the tests use it as the judge.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from functools import lru_cache

from crc32c import crc32c as _crc32c
from typing_extensions import Buffer

__all__ = [
    "CHUNK",
    "ChunkedCrc",
    "brief_crc32c",
    "combine",
    "crc32c",
    "fold",
    "fold_chunks",
    "from_hex",
    "to_base64",
    "to_hex",
]

CHUNK = 512 << 10
"""Bytes of a tensor that share one checksum, at most: what a partial read must fetch whole to be verified.

Shorter ones cost writers: after each call a thread waits for its turn in the interpreter (``bench.chunks``)."""

_POLYNOMIAL = 0x82F63B78


def crc32c(data: Buffer, value: int = 0) -> int:
    """The checksum of ``data``, or of what ``value`` covers followed by ``data``."""
    return int(_crc32c(data, value))


def brief_crc32c(data: Buffer, value: int = 0) -> int:
    """The same for some 100 KiB: to give the interpreter's lock away and wait for it again would take longer."""
    return int(_crc32c(data, value, 0))


def to_hex(value: int) -> str:
    """Eight lower-case hexadecimal digits: how checksums are written in JSON."""
    return f"{value:08x}"


def to_base64(value: int) -> str:
    """How both clouds write checksums in headers."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def from_hex(text: object) -> int:
    """The inverse of :func:`to_hex`; ValueError for anything else."""
    if not isinstance(text, str) or len(text) != 8:
        raise ValueError(f"not a checksum: {text!r}")
    return int(text, 16)


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo the crc's, bits reflected."""
    product = 0
    place = 1 << 31
    while True:
        if a & place:
            product ^= b
            if not a & (place - 1):
                return product
        place >>= 1
        if not place:
            return product
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """What ``length`` more bytes do to a crc: x to the power of ``8 × length``."""
    power, result, square = length, 1 << 31, 1 << 23  # 1 and x^8
    while power:
        if power & 1:
            result = _times(square, result)
        square = _times(square, square)
        power >>= 1
    return result


@lru_cache(maxsize=16)
def _shift_tables(length: int) -> list[list[int]]:
    """What ``length`` more bytes do to each byte of a crc, whatever its value: the shift is linear."""
    bits = [_times(_shift(length), 1 << bit) for bit in range(32)]
    tables = []
    for byte in range(4):
        table = [0]
        for bit in bits[8 * byte : 8 * byte + 8]:
            table += [value ^ bit for value in table]
        tables.append(table)
    return tables


def combine(first: int, second: int, second_length: int) -> int:
    """The crc of A‖B from the crc of A, the crc of B and the length of B."""
    return _times(_shift(second_length), first) ^ second if second_length else first


def fold(parts: Iterable[tuple[int, int]]) -> int:
    """The crc of a concatenation from (crc, length) of each of its parts."""
    value = 0
    for crc, length in parts:
        value = combine(value, crc, length)
    return value


def fold_chunks(chunks: Sequence[int], length: int, chunk: int = CHUNK) -> int:
    """The crc of ``length`` bytes from those of their chunks. All but the last are alike, so tables do the shifts."""
    if len(chunks) == 1:  # tables take a millisecond to make, for each length that there is
        return chunks[0]
    low, second, third, high = _shift_tables(chunk)
    whole, rest = divmod(length, chunk)
    value = 0
    for crc in chunks[:whole]:
        value = low[value & 255] ^ second[value >> 8 & 255] ^ third[value >> 16 & 255] ^ high[value >> 24] ^ crc
    return combine(value, chunks[whole], rest) if rest else value


class ChunkedCrc:
    """The crcs of a tensor's chunks, extended as its bytes come, with the places where it may be cut."""

    __slots__ = ("_marks", "_open", "_whole", "chunk", "length")

    def __init__(self, chunk: int = CHUNK) -> None:
        self.chunk = chunk
        self._whole: list[int] = []
        self._open = 0
        self._marks: dict[int, int] = {0: 0}
        self.length = 0

    def extend(self, data: memoryview) -> None:
        """Take the next bytes. Their end becomes a place where :meth:`chunks` may cut."""
        chunk, begun = self.chunk, self.length % self.chunk
        place = min(chunk - begun, len(data)) if begun else 0
        if place:
            self._take(data[:place])
        end = place + (len(data) - place) // chunk * chunk
        # Most bytes are of whole chunks: nothing but the calls, between which a thread waits for its turn.
        self._whole += [_crc32c(data[at : at + chunk]) for at in range(place, end, chunk)]
        self.length += end - place
        if end < len(data):
            self._take(data[end:])
        self._marks[self.length] = self._open

    def _take(self, part: memoryview) -> None:
        """A part of a chunk, up to its end at most."""
        self._open = _crc32c(part, self._open)
        self.length += len(part)
        if self.length % self.chunk == 0:
            self._whole.append(self._open)
            self._open = 0

    def chunks(self, length: int) -> list[int]:
        """The crcs of the chunks of the first ``length`` bytes; KeyError if no write ended there."""
        remainder = self._marks[length]
        whole = self._whole[: length // self.chunk]
        return [*whole, remainder] if length % self.chunk else whole
