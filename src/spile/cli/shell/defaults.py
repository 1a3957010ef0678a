"""The defaults of the old guides for a model and a dataset that the command line does not name.

The defaults of the run spec are the embedded model and tasks, wherever the output is. Commands of the old guides, which
show in ``--gcs-bucket``, a worker number, a pod or a variable of the guides, have the guides' defaults instead; a line
of output says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from spile.cli.shell.aliases import VARIABLES
from spile.errors import SpecError
from spile.spec.run import STREAM_FILE

if TYPE_CHECKING:
    from spile.cli.flags import RunFlags

__all__ = ["GUIDES_DATASET", "GUIDES_MODEL", "GUIDES_STREAMS", "settled", "with_model", "worker_number"]

GUIDES_MODEL = "Qwen/Qwen2.5-0.5B"
GUIDES_STREAMS = "./data/streams"
GUIDES_DATASET = "barc0/200k_HEAVY_gpt4o-description-gpt4omini-code_generated_problems"
_WORKER = "TPU_WORKER_ID"


def settled(
    flags: RunFlags,
    environment: Mapping[str, str],
    log: Callable[[str], None],
    *,
    pod: bool = False,
    every_stream: bool = False,
) -> RunFlags:
    """With number, model and data named. ``pod``: of one of a pod's hosts; ``every_stream``: of all workers."""
    if not pod and not every_stream:  # on a pod the variable is the host's number, not the stream's
        flags = flags.replaced(worker_id=worker_number(flags, environment, log))
    why = _guide_signal(flags, environment, pod)
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
    return flags.replaced(dataset_dir=GUIDES_STREAMS)


def with_model(flags: RunFlags, why: str, log: Callable[[str], None]) -> RunFlags:
    """The guides' model where none is named."""
    if flags.model is not None:
        return flags
    log(f"no model was named, with {why}: {GUIDES_MODEL}, as in the guides (--model embedded: the embedded one)")
    return flags.replaced(model=GUIDES_MODEL)


def worker_number(flags: RunFlags, environment: Mapping[str, str], log: Callable[[str], None]) -> int | None:
    """``--worker-id``, else the number in the stream's own name, else TPU_WORKER_ID; None where nothing says it."""
    if flags.worker_id is not None:
        return int(flags.worker_id)
    text = environment.get(_WORKER, "").strip()
    if text and not text.isdecimal():
        raise SpecError(_WORKER, expected="the stream's number", found=repr(text))
    named = STREAM_FILE.fullmatch(flags.dataset or "") if flags.dataset_dir is None else None
    if named is None:
        return int(text) if text else None
    if text and int(text) != int(named[1]):
        log(f"{_WORKER}={text} does not count: {flags.dataset} is stream {int(named[1])} (--worker-id says otherwise)")
    return int(named[1])


def _guide_signal(flags: RunFlags, environment: Mapping[str, str], pod: bool) -> str:
    """Return what shows that this is a command of the old guides, or an empty string."""
    if pod:
        return "a pod"
    if flags.gcs_bucket:
        return "--gcs-bucket"
    set_here = [name for name in (_WORKER, *VARIABLES) if environment.get(name, "").strip()]
    if set_here:
        return set_here[0]
    return f"worker {flags.worker_id}" if flags.worker_id is not None else ""
