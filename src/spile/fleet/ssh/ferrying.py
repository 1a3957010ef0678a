"""Files to and from many hosts at once: this side of the ferry, one thread a host."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import IO, BinaryIO, Protocol

from spile.errors import Failure, SpileError, UserError
from spile.fleet.ssh.failures import explain, together
from spile.fleet.ssh.hosts import Access, Host
from spile.fleet.ssh.remote import ferry, guard
from spile.fleet.ssh.session import remote_program

__all__ = ["Pipes", "ferry_all"]


class Pipes(Protocol):
    """What to do with a connected host: read from it, write to it."""

    def __call__(self, host: Host, source: BinaryIO, sink: BinaryIO) -> ferry.Tally:
        """Move one host's files."""


class _Crossing:
    """One host's ssh and the thread that talks through it."""

    def __init__(self, host: Host, words: Sequence[str]) -> None:
        self.host = host
        self.process = subprocess.Popen(  # noqa: S603
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._words = b""
        self._reader = threading.Thread(target=self._listen, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def _listen(self, stream: IO[bytes]) -> None:
        for line in stream:
            self._words = (self._words + line)[-8192:]

    def cross(self, talk: Pipes) -> ferry.Tally:
        """Run the conversation; an error here or there becomes one line."""
        source, sink = self.process.stdout, self.process.stdin
        assert source is not None and sink is not None  # noqa: S101, PT018
        try:
            tally = talk(self.host, source, sink)  # type: ignore[arg-type]
            with suppress(BrokenPipeError):
                sink.close()
            code = self.process.wait()
        except (ferry.FerryError, BrokenPipeError) as error:
            code = self._after_break()
            raise self._error(code, str(error)) from error
        except OSError as error:
            raise Failure(f"{self.host.label}: a file here failed", found=str(error)) from error
        if code != 0:
            raise self._error(code, "")
        return tally

    def _after_break(self) -> int:
        try:
            return self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _error(self, code: int, what: str) -> SpileError:
        self._reader.join(timeout=5)
        lines = [
            line for line in self._words.decode("utf-8", "replace").split("\n") if line
        ]  # the mark is a line's end too
        for line in lines:
            if line.startswith(guard.MARK):
                reason = json.loads(line.removeprefix(guard.MARK))["reason"]
                return UserError(f"{self.host.label}: {reason}")
        if code == 0 or (code < 0 and not lines):
            return Failure(
                f"{self.host.label}: the copy broke off", found=what or f"signal {-code}", fix="run it again"
            )
        return explain(self.host, code, "\n".join(lines))

    def close(self) -> None:
        """Leave nothing running."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(timeout=5)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def ferry_all(
    hosts: Sequence[Host],
    access: Access,
    call: Callable[[Host], str],
    talk: Pipes,
    *,
    compress: bool = False,
) -> list[ferry.Tally]:
    """Talk with every host's ferry at once. The first failure ends all, and is told with how many failed."""
    access.check(hosts)
    crossings: list[_Crossing] = []
    try:
        for host in hosts:
            words = access.command(host, remote_program(ferry, call(host)), compress=compress)
            crossings.append(_Crossing(host, words))
        with ThreadPoolExecutor(max_workers=len(hosts)) as threads:
            try:
                futures = [threads.submit(crossing.cross, talk) for crossing in crossings]
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                own = [future.exception() for future in futures if future.done()]
                for crossing in crossings:
                    if crossing.process.poll() is None:
                        crossing.process.kill()
    finally:
        for crossing in crossings:
            crossing.close()
    errors = [error for error in own if error is not None]
    for error in errors:
        if not isinstance(error, SpileError):
            raise error
    if errors:
        raise together([error for error in errors if isinstance(error, SpileError)], len(hosts))
    return [future.result() for future in futures]
