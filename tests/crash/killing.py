"""Workers in separate processes that are killed or stopped at a chosen step by a real signal, without clean-up.

On a local disk every system call that writes is a step, and a write in progress is torn in half. On a bucket
every request that writes is two steps, before it is sent and after it was answered.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from whole import assert_rows

from spile.errors import SpileError
from spile.objects import Folder, open_folder
from spile.spec.sample import Sample
from world import TAPS, items, produce, rows_of

__all__ = ["KILLED", "Switch", "assert_whole", "life", "start"]

KILLED = -signal.SIGKILL
_CALLS = ("open", "pwrite", "fsync", "ftruncate", "link", "rename", "unlink", "mkdir")
_REQUESTS = ("create", "put", "delete", "write_at", "move", "finish")


class Switch:
    """Counts steps and sends this process a signal at one of them."""

    def __init__(self, at: int | None, number: int = signal.SIGKILL, name: str | None = None) -> None:
        self.at, self.number, self.name, self.count = at, number, name, 0

    def step(self, name: str, half: Callable[[], Any] | None = None) -> None:
        if self.name is not None and self.name != name:
            return
        if self.count == self.at:
            if half is not None:
                half()
            self.count += 1
            os.kill(os.getpid(), self.number)
            return
        self.count += 1

    def patch_system(self) -> None:
        """Make every writing system call of this process a step."""
        for name in _CALLS:
            setattr(os, name, self._stepped(name, getattr(os, name)))

    def _stepped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            half = None
            if name == "pwrite":
                half = lambda: real(args[0], args[1][: len(args[1]) // 2], args[2])  # noqa: E731
            if name != "open" or args[1] & (os.O_WRONLY | os.O_RDWR):
                self.step(name, half)
            return real(*args, **options)

        return call


class Stepped:
    """A folder or a writer of one, with a step before and after everything that writes."""

    def __init__(self, inner: Any, switch: Switch) -> None:
        self._inner, self._switch = inner, switch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in ("child", "writer"):
            return lambda *args: Stepped(found(*args), self._switch)
        return self._around(name, found) if name in _REQUESTS else found

    def _around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            where = f"{name} {args[0]}" if isinstance(args[0], str) else name
            self._switch.step(f"before {where}")
            result = real(*args)
            self._switch.step(f"after {where}")
            return result

        return call


def life(url: str, samples: int, environment: Mapping[str, str], switch: Switch, options: dict[str, Any]) -> None:
    """Run one worker in this process and exit with the exit code of ``spile extract``."""
    os.environ.update(environment)
    folder: Any = open_folder(url)
    if "://" in url or (switch.name is not None and " " in switch.name):
        folder = Stepped(folder, switch)
    elif switch.at is not None:
        switch.patch_system()
    try:
        produce(folder, samples, **options)
    except SpileError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)
    except BaseException:  # noqa: BLE001  the parent sees the code, the trace goes to its log
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)
    os._exit(0)


def start(url: str, samples: int, switch: Switch | None = None, **options: Any) -> ForkServerProcess:
    """A process of :func:`life`, forked from a clean server that has everything imported."""
    context = multiprocessing.get_context("forkserver")
    here = Path(__file__).parent
    with _paths(str(here), str(here.parent)):
        context.set_forkserver_preload(["killing", "spile.objects.bucket"])
        names = ("STORAGE_EMULATOR_HOST", "AWS_", "AZURE_", "SPILE_", "NO_PROXY", "no_proxy")
        environment = {name: value for name, value in os.environ.items() if name.startswith(names)}
        process = context.Process(target=life, args=(url, samples, environment, switch or Switch(None), options))
        process.start()
    return process


class _paths:
    """PYTHONPATH for the fork server, which is started by the first process."""

    def __init__(self, *paths: str) -> None:
        self.paths = paths

    def __enter__(self) -> None:
        self.before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*self.paths, *filter(None, [self.before])])

    def __exit__(self, *_: object) -> None:
        if self.before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = self.before


def assert_whole(folder: Folder, samples: int) -> None:
    """Check that the dataset is verified and that every row equals that of an uninterrupted run."""
    wanted = [item for item in items(samples) if isinstance(item, Sample)]
    assert_rows(folder, wanted, TAPS, rows_of)
