"""CRC32C checksums, and the checksum of a whole computed from the checksums of its parts.

The ``crc32c`` package is used because it releases the interpreter lock for any buffer: with pieces of 1 MiB, one thread
reaches 24.8 GiB/s and two reach 48.9. ``google_crc32c`` releases it for ``bytes`` only, so two threads over arrays stay
at 24 GiB/s. The tests compare with it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from functools import lru_cache

from crc32c import crc32c as _crc32c
from typing_extensions import Buffer

CHUNK = 512 << 10
"""Bytes of a tensor that share one checksum. A partial read fetches whole chunks, so that it can check them.

Smaller chunks slow writers down, because a thread waits for the interpreter lock after each (``bench.chunks``)."""

_POLYNOMIAL = 0x82F63B78


def crc32c(data: Buffer, value: int = 0) -> int:
    """Return the checksum of ``data``, or, given the checksum of earlier bytes, of those followed by ``data``."""
    return int(_crc32c(data, value))


def to_hex(value: int) -> str:
    """Return eight lower-case hexadecimal digits, the form used in JSON."""
    return f"{value:08x}"


def to_base64(value: int) -> str:
    """Return the form that clouds use in headers."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def from_hex(text: object) -> int:
    """Return the checksum that :func:`to_hex` wrote; raise ValueError for any other text."""
    if not isinstance(text, str) or len(text) != 8:
        raise ValueError(f"not a checksum: {text!r}")
    return int(text, 16)


def _multiply(a: int, b: int) -> int:
    """Multiply two polynomials modulo the CRC polynomial, with reflected bits."""
    product = 0
    bit = 1 << 31
    while True:
        if a & bit:
            product ^= b
            if not a & (bit - 1):
                return product
        bit >>= 1
        if not bit:
            return product
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """Return the factor by which ``length`` more bytes change a checksum: x to the power of ``8 × length``."""
    power, result, square = length, 1 << 31, 1 << 23  # 1 and x^8
    while power:
        if power & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        power >>= 1
    return result


@lru_cache(maxsize=16)
def _shift_tables(length: int) -> list[list[int]]:
    """Return tables that apply ``length`` more bytes to a checksum byte by byte; the operation is linear."""
    bits = [_multiply(_shift(length), 1 << bit) for bit in range(32)]
    tables = []
    for byte in range(4):
        table = [0]
        for bit in bits[8 * byte : 8 * byte + 8]:
            table += [value ^ bit for value in table]
        tables.append(table)
    return tables


def combine(first: int, second: int, second_length: int) -> int:
    """Return the checksum of A followed by B from their checksums and the length of B."""
    return _multiply(_shift(second_length), first) ^ second if second_length else first


def combine_all(parts: Iterable[tuple[int, int]]) -> int:
    """Return the checksum of a concatenation from the (checksum, length) of each part."""
    value = 0
    for crc, length in parts:
        value = combine(value, crc, length)
    return value


def combine_chunks(chunks: Sequence[int], length: int, chunk: int = CHUNK) -> int:
    """Return the checksum of ``length`` bytes from those of their chunks, which have equal lengths except the last."""
    if len(chunks) == 1:  # making the tables takes a millisecond per chunk length
        return chunks[0]
    low, second, third, high = _shift_tables(chunk)
    whole, rest = divmod(length, chunk)
    value = 0
    for crc in chunks[:whole]:
        value = low[value & 255] ^ second[value >> 8 & 255] ^ third[value >> 16 & 255] ^ high[value >> 24] ^ crc
    return combine(value, chunks[whole], rest) if rest else value


class ChunkedCrc:
    """Checksums of a tensor's chunks, extended as bytes arrive. The tensor may later be cut where a write ended."""

    __slots__ = ("_marks", "_open", "_whole", "chunk", "length")

    def __init__(self, chunk: int = CHUNK) -> None:
        self.chunk = chunk
        self._whole: list[int] = []
        self._open = 0
        self._marks: dict[int, int] = {0: 0}
        self.length = 0

    def extend(self, data: memoryview) -> None:
        """Add the next bytes. :meth:`chunks` may cut at their end."""
        chunk, begun = self.chunk, self.length % self.chunk
        place = min(chunk - begun, len(data)) if begun else 0
        if place:
            self._take(data[:place])
        end = place + (len(data) - place) // chunk * chunk
        # Most bytes belong to whole chunks. Little else is done here, because threads contend for the lock.
        self._whole += [_crc32c(data[at : at + chunk]) for at in range(place, end, chunk)]
        self.length += end - place
        if end < len(data):
            self._take(data[end:])
        self._marks[self.length] = self._open

    def _take(self, part: memoryview) -> None:
        """Add part of a chunk, at most up to its end."""
        self._open = _crc32c(part, self._open)
        self.length += len(part)
        if self.length % self.chunk == 0:
            self._whole.append(self._open)
            self._open = 0

    def chunks(self, length: int) -> list[int]:
        """Return the chunks' checksums of the first ``length`` bytes; raise KeyError if no write ended there."""
        remainder = self._marks[length]
        whole = self._whole[: length // self.chunk]
        return [*whole, remainder] if length % self.chunk else whole
