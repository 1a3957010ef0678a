"""``spile monitor``: each stream's samples, shards, state and rate, once or live."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from spile.errors import SpecError, UserError

__all__ = ["monitor"]


def monitor(
    root: Annotated[str, Parameter(help="A folder, gs://bucket/prefix or s3://bucket/prefix.")] = "./activations",
    *,
    interval: Annotated[float, Parameter(help="Seconds between looks.")] = 60.0,
    once: Annotated[bool, Parameter(negative="", help="Look once and exit.")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="One look, as JSON.")] = False,
) -> int:
    """Watch a dataset grow, from its ledgers and its workers' heartbeats. It reads and never commands.

    Ctrl+C stops watching; everything goes on. Ends by itself when every stream is done.
    """
    from spile.dashboard.terminal import watch
    from spile.objects import open_folder
    from spile.status.snapshot import SnapshotReader
    from spile.store.layout import RUN
    from spile.store.run import read_run

    if not 0.1 <= interval <= 86400:
        raise SpecError("--interval", expected="from 0.1 to 86400 seconds", found=f"{interval:g}")
    folder = open_folder(root)
    if read_run(folder) is None:
        raise UserError(f"no dataset at {folder.url}", expected=f"a folder with {RUN}", found="none")
    reader = SnapshotReader(folder)
    if as_json:
        print(json.dumps(reader.take().to_json(), indent=1))
        return 0
    watch(reader.take, Console(highlight=False), interval=interval, once=once)
    return 0
