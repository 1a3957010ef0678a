"""What is taken for a model or a dataset that nobody named: never a toy where the user's own run is meant.

The embedded model and tasks are for ``spile extract`` alone, on one machine, into a local folder. With a bucket, a
fleet, a pod, a worker's number or any variable of the guides, what is missing is the guides' default, said aloud, or
one line of error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from spile.cli.shell.aliases import VARIABLES
from spile.errors import SpecError
from spile.objects.opening import is_remote

if TYPE_CHECKING:
    from spile.cli.extract import ExtractFlags

__all__ = ["GUIDES_DATASET", "GUIDES_MODEL", "GUIDES_STREAMS", "STREAM_FILE", "settled", "with_model", "worker_number"]

GUIDES_MODEL = "Qwen/Qwen2.5-0.5B"
GUIDES_STREAMS = "./data/streams"
GUIDES_DATASET = "barc0/200k_HEAVY_gpt4o-description-gpt4omini-code_generated_problems"
STREAM_FILE = re.compile(r"(?:.*/)?stream_(\d{3,})\.jsonl", re.ASCII)
_WORKER = "TPU_WORKER_ID"


def settled(
    flags: ExtractFlags,
    environment: Mapping[str, str],
    log: Callable[[str], None],
    *,
    pod: bool = False,
    every_stream: bool = False,
) -> ExtractFlags:
    """With number, model and data named. ``pod``: of one of a pod's hosts; ``every_stream``: of all workers."""
    if not pod and not every_stream:  # on a pod the variable is the host's number, not the stream's
        flags = replace(flags, worker_id=worker_number(flags, environment, log))
    why = _meant_in_earnest(flags, environment, pod)
    if not why:
        return flags
    flags = with_model(flags, why, log)
    if flags.dataset is not None or flags.dataset_dir is not None:
        return flags
    if not Path(GUIDES_STREAMS).is_dir():
        raise SpecError(
            f"no dataset, with {why}",
            expected="--dataset FILE or --dataset-dir DIR",
            found=f"neither, and no {GUIDES_STREAMS} here",
            fix="--dataset embedded takes the embedded tasks all the same",
        )
    if flags.worker_id is None and not pod and not every_stream:
        raise SpecError("which stream?", expected=f"--worker-id N or {_WORKER}", found=f"only {GUIDES_STREAMS}")
    log(f"no dataset was named: {GUIDES_STREAMS}, as in the guides")
    return replace(flags, dataset_dir=GUIDES_STREAMS)


def with_model(flags: ExtractFlags, why: str, log: Callable[[str], None]) -> ExtractFlags:
    """The guides' model where none is named."""
    if flags.model is not None:
        return flags
    log(f"no model was named, with {why}: {GUIDES_MODEL}, as in the guides (--model embedded: the embedded one)")
    return replace(flags, model=GUIDES_MODEL)


def worker_number(flags: ExtractFlags, environment: Mapping[str, str], log: Callable[[str], None]) -> int | None:
    """``--worker-id``, else the number in the stream's own name, else TPU_WORKER_ID; None where nothing says it."""
    if flags.worker_id is not None:
        return flags.worker_id
    text = environment.get(_WORKER, "").strip()
    if text and not text.isdecimal():
        raise SpecError(_WORKER, expected="the stream's number", found=repr(text))
    named = STREAM_FILE.fullmatch(flags.dataset or "") if flags.dataset_dir is None else None
    if named is None:
        return int(text) if text else None
    if text and int(text) != int(named[1]):
        log(f"{_WORKER}={text} does not count: {flags.dataset} is stream {int(named[1])} (--worker-id says otherwise)")
    return int(named[1])


def _meant_in_earnest(flags: ExtractFlags, environment: Mapping[str, str], pod: bool) -> str:
    """What says that this is no try-out on one machine; empty where nothing does."""
    if pod:
        return "a pod"
    if flags.gcs_bucket:
        return "--gcs-bucket"
    if flags.output is not None and is_remote(flags.output):
        return f"--output {flags.output}"
    set_here = [name for name in (_WORKER, *VARIABLES) if environment.get(name, "").strip()]
    if set_here:
        return set_here[0]
    return f"worker {flags.worker_id}" if flags.worker_id is not None else ""
