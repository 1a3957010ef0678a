"""The Hugging Face hub: only the files that are needed, and its errors as one line that says what to do."""

from __future__ import annotations

import os
from pathlib import Path

from spile.errors import Failure, ModelError
from spile.weights.files import SMALL_FILES

__all__ = ["download"]


def download(name: str, revision: str | None) -> tuple[Path, str]:
    """The model's folder in the hub's cache, and the commit it is."""
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=[*SMALL_FILES, "model*.safetensors"],
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
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(name, error) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        if status in (401, 403):
            raise ModelError(f"the hub refused {name}", found=f"HTTP {status}", fix=_token_fix(name)) from error
        raise Failure(f"the hub failed to give {name}", found=f"HTTP {status}", fix="try again") from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # the transport's, whichever it is
        raise _unreachable(name, error) from error
    return folder, folder.name


def _token_fix(name: str) -> str:
    if os.environ.get("HF_TOKEN"):
        return f"HF_TOKEN holds a token without access: ask for it at huggingface.co/{name}"
    return f"ask for access at huggingface.co/{name} and set HF_TOKEN to your token"


def _unreachable(name: str, error: BaseException) -> ModelError:
    return ModelError(
        f"no folder {name} here, and the hub cannot be reached for a model of that name",
        found=type(error.__cause__ or error).__name__,
        fix="check the name and the network, or give a folder that holds the model",
    )
