"""The Hugging Face hub: only the files that are needed, tried again while it is out, its refusals as one line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spile.errors import Failure, ModelError
from spile.weights.files import SMALL_FILES

if TYPE_CHECKING:
    from spile.objects.cloud.failures import RequestFailure

__all__ = ["download"]


def download(name: str, revision: str | None, *, weights: bool = True, files: Sequence[str] = ()) -> tuple[Path, str]:
    """The model's folder in the hub's cache, and the commit it is. Without ``weights``: its small files alone.

    ``files``: these instead, of a repository that is no model (an adapter).

    A hub that is out (503, 429, no network) is tried again as a bucket is, for ``SPILE_RETRY_SECONDS``; then it is a
    failure, not the user's mistake: a worker that is started again tries again.
    """
    from spile.objects.cloud.failures import RequestFailure
    from spile.objects.retry import Retry, while_out

    retry = Retry.from_environment()
    wanted = files or [*SMALL_FILES, *(["model*.safetensors"] if weights else [])]
    try:
        return while_out(name, lambda: _download(name, revision, wanted), retry)
    except RequestFailure as outage:
        raise Failure(
            f"no folder {name} here, and the hub does not give a model of that name",
            found=outage.cause,
            fix=f"tried for {retry.total:.0f} s: check the name and the network, or try again later",
        ) from outage


def _download(name: str, revision: str | None, files: Sequence[str]) -> tuple[Path, str]:
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(files),
                endpoint=os.environ.get("HF_ENDPOINT") or None,
            )
        )
    except errors.GatedRepoError as error:
        raise ModelError(f"{name} is gated on the hub", fix=_token_fix(name)) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            f"{name} has no such revision", found=repr(revision), fix="name a branch, tag or commit of it"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"no such model: {name}",
            expected="a folder here, or a public name on the hub",
            found="neither",
            fix=f"check the spelling; if it is private, {_token_fix(name)}",
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(f"no such model: {name}", expected="a folder, or a name such as Qwen/Qwen2.5-0.5B") from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # the transport's, whichever it is
        raise _outage(name, error) from error
    return folder, folder.name


def _outage(name: str, error: BaseException) -> RequestFailure | ModelError:
    """What may pass, with the status or the connection's trouble that lies at its bottom; or a refusal."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    from spile.objects.cloud.failures import RequestFailure, from_status

    for cause in _causes(error):
        if isinstance(cause, OfflineModeIsEnabled):
            return ModelError(
                f"{name} is not in the hub's cache", found="HF_HUB_OFFLINE is set", fix="unset it, or give a folder"
            )
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in (401, 403):
            return ModelError(f"the hub refused {name}", found=f"HTTP {status}", fix=_token_fix(name))
        if isinstance(status, int):
            return from_status(status)
    *_, bottom = _causes(error)
    return RequestFailure(f"no answer: {type(bottom).__name__}", transient=True)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _token_fix(name: str) -> str:
    if os.environ.get("HF_TOKEN"):
        return f"HF_TOKEN holds a token without access: ask for it at huggingface.co/{name}"
    return f"ask for access at huggingface.co/{name} and set HF_TOKEN to your token"
