"""Find a model by name: the embedded model, a folder, a folder in a bucket, or a name on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spile.errors import Failure, ModelError, untrusted
from spile.models.adapters import Adapter
from spile.models.architecture import ModelConfig
from spile.models.families import FAMILIES, read_config
from spile.models.safetensors_files import BucketSource, ByteSource, LocalSource, read_index
from spile.objects import is_remote, open_folder
from spile.objects.crc import crc32c
from spile.spec.run import EMBEDDED

if TYPE_CHECKING:
    from spile.objects.retry import RequestFailure


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/spile/models``, or ``~/.cache/spile/models``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "spile" / "models"


def find_in_bucket(url: str, *, weights: bool = True, read: ReadConfig = read_config) -> ModelFiles:
    """Find the model in a folder of a bucket: its small files are copied to the cache, its weights read by range."""
    folder = open_folder(url)
    present = {found.key for found in folder.list() if "/" not in found.key}
    if "config.json" not in present:
        raise ModelError(f"no config.json in {url}", fix="give the folder of a complete Hugging Face model")
    content = {name: folder.get(name) for name in SMALL_FILES if name in present}
    return describe(url, _keep(url, content), BucketSource(folder), present, None, weights=weights, read=read)


def _keep(url: str, content: dict[str, bytes]) -> Path:
    """Store files in a folder named by their content, so that it is never stale; each file is written atomically."""
    digest = hashlib.sha256(url.encode())
    for name, data in sorted(content.items()):
        digest.update(f"\n{name} {hashlib.sha256(data).hexdigest()}".encode())
    folder = cache_folder() / digest.hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        if not (folder / name).is_file():
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
                file.write(data)
            Path(file.name).replace(folder / name)
    return folder


def download(name: str, revision: str | None, *, weights: bool = True, files: Sequence[str] = ()) -> tuple[Path, str]:
    """Return the model's folder in the hub's cache and its commit. Without ``weights``, only small files are fetched.

    ``files``: the files to fetch instead, for a repository that is not a model, such as an adapter.

    If the hub is unavailable (503, 429, no network), the download is retried for ``SPILE_RETRY_SECONDS``, or for
    a few seconds without ``weights``. After that the error is a failure and not a mistake of the user, so a supervisor
    starts the worker again.
    """
    from spile.objects.retry import RequestFailure, Retry, retry_while_unavailable

    retry = Retry.for_name(name, patient=weights)
    wanted = files or [*SMALL_FILES, *(["model*.safetensors"] if weights else [])]
    try:
        return retry_while_unavailable(name, lambda: _download(name, revision, wanted), retry)
    except RequestFailure as outage:
        raise Failure(
            f"no folder {name} here, and the hub does not give a model of that name",
            found=f"{outage.cause}, after {retry.total:.0f} s of attempts",
            fix="check the name and the network, or try again later",
        ) from outage


def _download(name: str, revision: str | None, files: Sequence[str]) -> tuple[Path, str]:
    from huggingface_hub import errors, snapshot_download

    try:
        endpoint = os.environ.get("HF_ENDPOINT") or None
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(files), endpoint=endpoint))
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
    """Return a failure that may pass, with the status or the connection error at its root, or a refusal."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    from spile.objects.retry import RequestFailure, causes, from_status

    for cause in causes(error):
        if isinstance(cause, OfflineModeIsEnabled):
            return ModelError(
                f"{name} is not in the hub's cache", found="HF_HUB_OFFLINE is set", fix="unset it, or give a folder"
            )
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in (401, 403):
            return ModelError(f"the hub refused {name}", found=f"HTTP {status}", fix=_token_fix(name))
        if isinstance(status, int):
            return from_status(status)
    *_, bottom = causes(error)
    return RequestFailure(f"no answer: {type(bottom).__name__}", transient=True)


def _token_fix(name: str) -> str:
    if os.environ.get("HF_TOKEN"):
        return f"HF_TOKEN holds a token without access; ask for access at huggingface.co/{name}"
    return f"ask for access at huggingface.co/{name} and set HF_TOKEN to your token"


TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
SMALL_FILES = ("config.json", GENERATION, INDEX, *TOKENIZER_FILES)

_SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
_HASH_CHUNK = 64 << 20
ReadConfig = Callable[[Mapping[str, Any]], ModelConfig]


@dataclass(frozen=True)
class ModelFiles:
    """A model that was found: its config, and the places of its tokenizer and weights. No large file is read yet."""

    name: str
    """The name as the user gave it."""
    revision: str | None
    """The commit on the hub; None for other places."""
    config: ModelConfig
    tokenizer_folder: Path
    source: ByteSource
    weight_files: tuple[str, ...]
    adapter: Adapter | None = None
    """The adapter that is merged into the weights as they are read."""
    untied: bool = False
    """Whether the LM head is the embedding in the files but not in the model, because the adapter changes it alone."""

    def adapted(self, adapter: Adapter) -> ModelFiles:
        """Return the model with an adapter. If the LM head is the embedding, only the head changes, as in PEFT."""
        head = FAMILIES[self.config.architecture].names.head.removesuffix(".weight")
        if not self.config.tied or head not in adapter.modules():
            return replace(self, adapter=adapter)
        return replace(self, adapter=adapter, config=replace(self.config, tied=False), untied=True)

    def weights_hash(self) -> str:
        """Return a hash over the config and the names, sizes and checksums of the weight files: 64 hex digits.

        Checksums are CRC-32C of each 64 MiB, so that threads can share a file.
        """
        parts = [
            (file, size, start, min(_HASH_CHUNK, size - start))
            for file in sorted(self.weight_files)
            for size in (self.source.size(file),)
            for start in range(0, max(size, 1), _HASH_CHUNK)
        ]
        with ThreadPoolExecutor(8) as threads:
            sums = list(threads.map(lambda part: crc32c(self.source.read(part[0], part[2], part[3]).data), parts))
        content = [[file, size, start, crc] for (file, size, start, _), crc in zip(parts, sums, strict=True)]
        adapted = [] if self.adapter is None else [self.adapter.digest()]
        canonical = json.dumps([self.config.meaning(), content, *adapted], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def tokenizer_hash(self) -> str:
        """Return a hash over the tokenizer's files: 64 hex digits."""
        present = [name for name in TOKENIZER_FILES if (self.tokenizer_folder / name).is_file()]
        if not present:
            raise ModelError(f"no tokenizer in {self.name}", expected="a tokenizer.json", found="none")
        digest = hashlib.sha256()
        for name in present:
            content = (self.tokenizer_folder / name).read_bytes()
            digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
        return digest.hexdigest()


def find(name: str, revision: str | None = None, *, weights: bool = True, read: ReadConfig = read_config) -> ModelFiles:
    """Find the model of this name, or raise a ModelError that says what to do.

    ``embedded``; a folder; ``gs://…`` or ``s3://…``; else a name on the Hugging Face hub (``HF_TOKEN`` for gated ones).
    Without ``weights`` its config and its tokenizer are enough, and no weights are fetched. ``read`` reads config.json.
    """
    path = Path(name).expanduser()
    bucket = is_remote(name)
    if revision is not None and (bucket or name == EMBEDDED or path.is_dir()):
        raise ModelError("--revision", expected="a model of the Hugging Face hub", found=name)
    if name == EMBEDDED:
        return _in_folder(name, Path(__file__).parent / "embedded", None, weights, read)
    if bucket:
        return find_in_bucket(name, weights=weights, read=read)
    if path.is_dir():
        return _in_folder(name, path, None, weights, read)
    mistyped = "/" in name and path.parent.is_dir()  # a folder here, not an owner on the hub
    if not _HUB_NAME.fullmatch(name) or path.exists() or mistyped:
        raise ModelError(
            f"no such model: {name}",
            expected="a folder, or a name such as Qwen/Qwen2.5-0.5B",
            found="a file" if path.exists() else "neither",
        )
    folder, commit = download(name, revision, weights=weights)
    return _in_folder(name, folder, commit, weights, read)


def _in_folder(name: str, folder: Path, revision: str | None, weights: bool, read: ReadConfig) -> ModelFiles:
    present = {path.name for path in folder.iterdir() if path.is_file()}
    if "config.json" not in present:
        raise ModelError(f"no config.json in {folder}", fix="give the folder of a complete Hugging Face model")
    return describe(name, folder, LocalSource(folder), present, revision, weights=weights, read=read)


def describe(
    name: str,
    small: Path,
    source: ByteSource,
    present: set[str],
    revision: str | None,
    *,
    weights: bool = True,
    read: ReadConfig = read_config,
) -> ModelFiles:
    """Read the small files of a model, and return what :func:`find` returns."""
    with untrusted(ModelError, f"config.json of {name} is not JSON"):
        raw = json.loads((small / "config.json").read_bytes())
    if not isinstance(raw, dict):
        raise ModelError(f"config.json of {name}", expected="a JSON object", found=type(raw).__name__)
    with untrusted(ModelError, f"config.json of {name} is invalid"):
        config = read(raw)
    return ModelFiles(
        name=name,
        revision=revision,
        config=config,
        tokenizer_folder=small,
        source=source,
        weight_files=_weight_files(name, small, present) if weights else (),
    )


def _weight_files(name: str, small: Path, present: set[str]) -> tuple[str, ...]:
    if INDEX in present:
        files = sorted(set(read_index((small / INDEX).read_bytes(), f"{INDEX} of {name}").values()))
        missing = [file for file in files if file not in present]
        if missing:
            raise ModelError(
                f"{name} does not have all weight files of its index",
                found=f"{len(missing)} missing, the first {missing[0]}",
                fix="download or copy the model again",
            )
        return tuple(files)
    if _SINGLE in present:
        return (_SINGLE,)
    pickles = sorted(file for file in present if file.endswith(_PICKLES))
    if pickles:
        raise ModelError(
            f"{name} has only pickled weights ({pickles[0]}), which can run code when they are read",
            fix="convert them to safetensors, or name a revision that has them",
        )
    raise ModelError(f"{name} has no weights", expected=f"{_SINGLE} or {INDEX}", found="neither")
