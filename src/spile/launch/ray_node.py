"""What runs on a Ray node. The look at a node travels by value: it must work where spile is missing or another one.

So nothing of spile is imported here before it is known to be there.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["look_at_node", "run_stream"]

_POLL = 0.2
_COMMIT_WITHIN = 100.0


def look_at_node(output: str, token: str, inputs: Sequence[str]) -> dict[str, Any]:
    """The node's versions, and what of the run's places it cannot reach."""
    import ray

    found: dict[str, Any] = {"python": platform.python_version(), "ray": ray.__version__, "spile": None, "problem": ""}
    try:
        from spile.errors import SpileError
        from spile.objects import open_folder, split
        from spile.objects.folder import NotFound
        from spile.objects.preflight import preflight
        from spile.version import __version__
    except ImportError as error:
        found["problem"] = f"{type(error).__name__}: {error}"
        return found
    found["spile"] = __version__
    try:
        home = open_folder(output)
        try:
            home.info(token)
        except NotFound:
            found["problem"] = f"{output} is another folder there: expected a bucket, or a folder that all nodes share"
            return found
        preflight(home)
        for place in inputs:
            folder, name = split(place)
            if not any(True for _ in open_folder(folder).list(name)):
                found["problem"] = f"it does not see {place}"
                return found
    except (SpileError, OSError) as error:
        found["problem"] = str(error)
    return found


def run_stream(words: Sequence[str], env: Mapping[str, str], without: Sequence[str]) -> tuple[int, str, str]:
    """One worker, to its end: its exit code, its last lines, the node. Cancelled: it commits first."""
    import socket
    import time

    from spile.launch.local import WorkerProcess

    worker = WorkerProcess(words, env=env, without=without, hear=lambda line: print(line, flush=True))
    code = None
    try:
        while code is None:
            try:
                code = worker.wait(_POLL)
            except KeyboardInterrupt:  # how Ray cancels a task
                worker.stop()
                deadline = time.monotonic() + _COMMIT_WITHIN
                while code is None and time.monotonic() < deadline:
                    code = worker.wait(_POLL)
                break
    finally:
        worker.kill()
    return 130 if code is None else code, worker.said, socket.gethostname()
