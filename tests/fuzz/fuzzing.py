"""Feed damaged documents to every parser of files from outside, and measure what happens.

    python tests/fuzz/fuzzing.py --inputs 10000 --seed 0 [--only NAME …]

Each target of :mod:`fuzz_targets` has valid documents and a function that reads one. Each input is a valid document
with random damage, or a document that is known to hurt parsers. A parser must return a value or raise one of our
errors, in one line, within five seconds, and must not take more than 512 MiB. Each parser runs in a process of its own.
The seed and the number of an input reproduce it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import fuzz_targets  # noqa: E402 - both folders are on the path only now

SECONDS = 5
"""The longest processor time for one input."""
MEBIBYTES = 512
"""The most memory that a parser may take in addition to what the process has before the first input."""
_BACKSTOP = 8 << 30
"""Address space that a parser may add. It protects the machine, not the parser."""

NASTY = (
    b"[" * 100_000,
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    b"1" * 10_000,
    b"Infinity",
    b"-Infinity",
    b"NaN",
    b'{"format": 1e999}',
    b"null",
    b'"\\ud800"',
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b"",
    b"{}",
    b"[]",
    b"\0" * 100,
    b'{"a": 1, "a": [], "a": {}}',
    b"a = " + b"[" * 5_000,
    b"\x1b]0;owned\x07\x1b[2J",
)
"""Documents on which parsers are known to fail in ways that they do not document."""
_PIECES = (
    *(b"[", b"}", b"\0", b"9" * 400, b"-", b"1e999", b"\xff", b"Infinity", b"{% for", b"\n", b"\r", b'"', b",", b"\\u"),
    *(b"\xff" * 8, b"\x80\0\0\0\0\0\0\0", b"\x1b[31m", b"\xe2\x80\xae", b"\xed\xa0\x80", b"../", b"null", b"[" * 3_000),
)


class TooSlow(BaseException):
    """An input took longer than it may. It is no Exception, so that no parser catches it."""


def damaged(dice: Random, valid: bytes) -> bytes:
    """Return the document with random damage."""
    if dice.random() < 0.02:
        return dice.choice(NASTY)
    if dice.random() < 0.05:
        return dumped(_value(dice))
    if dice.random() < 0.5:
        return _structure_damaged(dice, valid)
    data = valid
    for _ in range(dice.choice((1, 1, 1, 2, 4, 8))):
        data = _bytes_damaged(dice, data)
    return data


def _structure_damaged(dice: Random, valid: bytes) -> bytes:
    """Return JSON, or one line of JSON lines, with changed fields; other documents get damaged bytes."""
    lines = valid.split(b"\n")
    try:
        document = json.loads(valid)
    except (ValueError, RecursionError):
        number = dice.randrange(len(lines))
        try:
            document = json.loads(lines[number])
        except (ValueError, RecursionError):
            return _bytes_damaged(dice, valid)
        lines[number] = dumped(_changed(dice, document))
        return b"\n".join(lines)
    for _ in range(dice.choice((1, 1, 2, 3))):
        document = _changed(dice, document)
    return dumped(document)


def dumped(value: Any) -> bytes:
    """Return JSON as Python writes it, with NaN, Infinity and lone surrogates."""
    return json.dumps(value).encode()


def _bytes_damaged(dice: Random, data: bytes) -> bytes:
    place = dice.randint(0, len(data))
    match dice.randrange(7):
        case 0:
            return data[:place]
        case 1 if data:
            changed = bytearray(data)
            changed[min(place, len(data) - 1)] ^= 1 << dice.randrange(8)
            return bytes(changed)
        case 2:
            piece = dice.randbytes(dice.choice((1, 2, 4, 8)))
            return data[:place] + piece + data[place + len(piece) :]
        case 3:
            end = dice.randint(place, min(len(data), place + 64))
            return data[:place] + data[end:]
        case 4:
            end = dice.randint(place, min(len(data), place + 64))
            return data[:end] + data[place:end] * dice.choice((1, 2, 50)) + data[end:]
    piece = dice.choice(_PIECES)
    return data[:place] + piece + data[place + (len(piece) if dice.random() < 0.5 else 0) :]


def _changed(dice: Random, value: Any) -> Any:
    """Return the document with one place, however deep, changed, removed, renamed or moved."""
    if isinstance(value, dict) and value and dice.random() < 0.8:
        name = dice.choice(sorted(value))
        rest = {key: each for key, each in value.items() if key != name}
        match dice.randrange(10):
            case 0:
                return rest
            case 1:
                return {**rest, _text(dice): value[name]}
            case 2:
                return {**value, name: value[dice.choice(sorted(value))]}
        return {**value, name: _changed(dice, value[name])}
    if isinstance(value, list) and value and dice.random() < 0.8:
        place = dice.randrange(len(value))
        match dice.randrange(10):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return value + value[place : place + 1] * dice.choice((1, 100))
        return [*value[:place], _changed(dice, value[place]), *value[place + 1 :]]
    return _near(dice, value) if dice.random() < 0.4 else _value(dice)


def _near(dice: Random, value: Any) -> Any:
    """Return a value of the same type that is a little or far off."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return dice.choice(
            (
                value + 1,
                value - 1,
                -value,
                value * 2,
                0,
                2**31,
                2**63,
                value << 64,
                value + 0.5 if abs(value) < 2**60 else 0,
            )
        )
    if isinstance(value, float):
        return dice.choice((-value, value * 1e300, float("nan"), float("inf"), 0.0))
    if isinstance(value, str):
        place = dice.randint(0, len(value))
        return value[:place] + _text(dice) + value[dice.choice((place, len(value))) :]
    return _value(dice)


def _value(dice: Random, deep: int = 0) -> Any:
    """Return any JSON, and what Python's parser accepts as JSON."""
    kind = dice.randrange(9 if deep < 3 else 6)
    if kind == 6:
        return [_value(dice, deep + 1) for _ in range(dice.randrange(4))]
    if kind == 7:
        return {_text(dice): _value(dice, deep + 1) for _ in range(dice.randrange(4))}
    if kind == 8:
        nested: Any = 1
        for _ in range(dice.choice((10, 100, 400))):
            nested = [nested] if dice.random() < 0.5 else {"a": nested}
        return nested
    number = dice.choice((0, -1, 1, dice.randint(-(2**70), 2**70), 10**400, dice.randint(-9, 99), 2**31, 10**12))
    real = dice.choice((0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan"), dice.random()))
    return (None, True, number, number, real, _text(dice))[kind]


def _text(dice: Random) -> str:
    if dice.random() < 0.05:
        return dice.choice(("../../x", "/etc/passwd", "\x1b[2J", "a" * 100_000, "<!--<script>", "$(HOME)", "a\nb", ""))
    return "".join(chr(dice.choice((dice.randrange(128), 0xE9, 0xD800, 0x1F600))) for _ in range(dice.randrange(8)))


# -- one target -------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What happened to the inputs of one parser."""

    parser: str
    inputs: int = 0
    refused: int = 0
    longest: float = 0.0
    """Seconds for one input."""
    mebibytes: int = 0
    """Memory at its peak, in addition to what the process had before the first input."""
    findings: tuple[str, ...] = ()
    """What went wrong, once for each place in the source."""

    @property
    def accepted(self) -> int:
        """The number of inputs from which the parser made a value."""
        return self.inputs - self.refused


@contextmanager
def _limited() -> Iterator[None]:
    """Limit the processor time; also the time by the clock, by more, because other programs may use the machine."""

    def too_slow(*_: object) -> None:
        raise TooSlow(f"more than {SECONDS} s")

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, 12 * SECONDS))
    before = [signal.signal(number, too_slow) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def _peak() -> int:
    """Return the highest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def inputs_of(valid: tuple[bytes, ...], seed: int, first: int, count: int) -> Iterator[bytes]:
    """Yield the valid documents, the nasty ones, and then damaged ones, each with a seed of its own."""
    fixed = (*valid, *NASTY)
    for number in range(first, first + count):
        if number < len(fixed):
            yield fixed[number]
        else:
            dice = Random(f"{seed} {number}")
            yield damaged(dice, dice.choice(valid))


def run(name: str, count: int, seed: int, scratch: Path, first: int = 0) -> Result:
    """Feed inputs to one parser and return what happened."""
    valid, read = fuzz_targets.open_target(name, scratch)
    random.seed(seed)  # retries choose their pauses at random
    for data in valid:
        read(data)
    before, result, findings = _peak(), Result(name), dict[str, str]()
    for number, data in enumerate(inputs_of(valid, seed, first, count), first):
        fuzz_targets.OUTCOME.refused = fuzz_targets.OUTCOME.accepted = False
        began = time.perf_counter()
        problem = ""
        try:
            with _limited():
                read(data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - anything that is not one of our errors is a finding
            problem = f"{type(error).__name__} at {_raised_at(error)}"
            detail = f": {' '.join(str(error).split())[:160]}"
        result.inputs += 1
        result.refused += fuzz_targets.OUTCOME.refused and not fuzz_targets.OUTCOME.accepted
        result.longest = max(result.longest, time.perf_counter() - began)
        result.mebibytes = max(result.mebibytes, _peak() - before)
        if not problem and result.mebibytes > MEBIBYTES:
            problem, detail = f"more than {MEBIBYTES} MiB", ""
        if problem:
            findings.setdefault(problem, f"seed {seed} input {number}: {problem}{detail}: {data[:300]!r}")
    result.findings = tuple(findings.values())
    return result


def _raised_at(error: BaseException) -> str:
    """Return the last place in our own source that the error passed."""
    found, trace = "", error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if "/spile/" in path or not found:
            found = f"{Path(path).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


# -- the command ------------------------------------------------------------------------------------------------------


def _run_child(name: str, count: int, seed: int, first: int, answer: Connection) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _BACKSTOP, hard))
    with tempfile.TemporaryDirectory() as scratch:
        answer.send(run(name, count, seed, Path(scratch), first))


def _run_in_process(name: str, count: int, seed: int, first: int) -> Result:
    """Run one target in a forked process, so that a crash of a native library is a finding too."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run_child, args=(name, count, seed, first, theirs))
    child.start()
    theirs.close()
    try:
        result: Result = ours.recv()
    except EOFError:
        child.join()
        result = Result(name, findings=(f"seed {seed}: the process ended with exit code {child.exitcode}",))
    child.join()
    return result


def main(words: list[str] | None = None, log: Callable[[str], None] = print) -> int:
    """Run the command; return 1 if a parser failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--only", nargs="+", choices=fuzz_targets.NAMES, default=fuzz_targets.NAMES)
    asked = parser.parse_args(words)
    log(f"seed {asked.seed}, {asked.inputs:,} inputs for each of {len(asked.only)} parsers")
    log("| parser | inputs | accepted | refused | longest | memory |")
    log("|---|---|---|---|---|---|")
    findings: list[str] = []
    for name in asked.only:
        found = _run_in_process(name, asked.inputs, asked.seed, asked.first)
        row = (name, f"{found.inputs:,}", f"{found.accepted:,}", f"{found.refused:,}")
        log(f"| {' | '.join(row)} | {found.longest:.2f} s | {found.mebibytes} MiB |")
        findings += found.findings
        for each in found.findings:
            log(f"  FINDING in {name}: {each}")
    return int(bool(findings))


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
