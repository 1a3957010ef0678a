"""Find a model by name: the embedded model, a folder, a folder in a bucket, or a name on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spile.errors import Failure, ModelError, untrusted
from spile.models.adapters import Adapter
from spile.models.architecture import ModelConfig
from spile.models.families import FAMILIES, read_config
from spile.models.safetensors_files import read_bytes
from spile.objects import Folder, is_remote, open_folder
from spile.objects.crc import crc32c
from spile.objects.local import LocalFolder
from spile.spec.run import EMBEDDED

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
    except (errors.HTTPError, OSError, errors.HFValidationError) as error:  # type: ignore[attr-defined]
        raise _translated(error, name, revision) from error
    return folder, folder.name


def _translated(error: Exception, name: str, revision: str | None) -> Exception:
    """Return the error for the user, or :class:`RequestFailure` if the hub is temporarily unavailable."""
    from huggingface_hub import errors

    from spile.objects.retry import RequestFailure, causes, from_status

    token = f"ask for access at huggingface.co/{name} and set HF_TOKEN to your token"
    if os.environ.get("HF_TOKEN"):
        token = f"HF_TOKEN holds a token without access; ask for access at huggingface.co/{name}"
    if isinstance(error, errors.GatedRepoError):
        return ModelError(f"{name} is gated on the hub", fix=token)
    if isinstance(error, errors.RevisionNotFoundError):
        fix = "name a branch, tag or commit of it"
        return ModelError(f"{name} has no such revision", found=repr(revision), fix=fix)
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        expected = "a folder here, or a public name on the hub"
        fix = f"check the spelling; if it is private, {token}"
        return ModelError(f"no such model: {name}", expected=expected, found="neither", fix=fix)
    chain = list(causes(error))
    if any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in chain):
        fix = "unset it, or give a folder"
        return ModelError(f"{name} is not in the hub's cache", found="HF_HUB_OFFLINE is set", fix=fix)
    statuses = (getattr(getattr(cause, "response", None), "status_code", None) for cause in chain)
    status = next((each for each in statuses if isinstance(each, int)), None)
    if status in (401, 403):
        return ModelError(f"the hub refused {name}", found=f"HTTP {status}", fix=token)
    no_answer = RequestFailure(f"no answer: {type(chain[-1]).__name__}", transient=True)
    return no_answer if status is None else from_status(status)


@dataclass(frozen=True)
class ModelFiles:
    """A model that was found: its config, and the places of its tokenizer and weights. No large file is read yet."""

    name: str
    """The name as the user gave it."""
    revision: str | None
    """The commit on the hub; None for other places."""
    config: ModelConfig
    tokenizer_folder: Path
    folder: Folder
    """The place of the weight files."""
    weight_files: tuple[str, ...]
    adapter: Adapter | None = None
    """The adapter that is merged into the weights as they are read."""
    untied: bool = False
    """Whether the LM head is the embedding in the files but not in the model, because the adapter changes it alone."""

    def with_adapter(self, adapter: Adapter) -> ModelFiles:
        """Return the model with an adapter. If the LM head is the embedding, only the head changes, as in PEFT."""
        head = FAMILIES[self.config.architecture].names.head
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
            for size in (self.folder.info(file).size,)
            for start in range(0, max(size, 1), _HASH_CHUNK)
        ]
        with ThreadPoolExecutor(8) as threads:
            sums = list(threads.map(lambda part: crc32c(read_bytes(self.folder, part[0], *part[2:]).data), parts))
        content = [[file, size, start, crc] for (file, size, start, _), crc in zip(parts, sums, strict=True)]
        adapted = [] if self.adapter is None else [self.adapter.digest()]
        canonical = json.dumps([self.config.hashed_fields(), content, *adapted], sort_keys=True, separators=(",", ":"))
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
    folder, commit = _find_folder(name, revision, weights=weights)
    if folder.local_path is not None:
        present = {path.name for path in folder.local_path.iterdir() if path.is_file()}
    else:
        present = {found.key for found in folder.list() if "/" not in found.key}
    if "config.json" not in present:
        raise ModelError(f"no config.json in {folder.url}", fix="give the folder of a complete Hugging Face model")
    small = folder.local_path or _copy_to_cache(folder, [file for file in SMALL_FILES if file in present])
    with untrusted(ModelError, f"config.json of {name} is not JSON"):
        raw = json.loads((small / "config.json").read_bytes())
    if not isinstance(raw, dict):
        raise ModelError(f"config.json of {name}", expected="a JSON object", found=type(raw).__name__)
    with untrusted(ModelError, f"config.json of {name} is invalid"):
        config = read(raw)
    files = _weight_files(name, small, present) if weights else ()
    return ModelFiles(name, commit, config, small, folder, files)


def _find_folder(name: str, revision: str | None, *, weights: bool) -> tuple[Folder, str | None]:
    """Return the folder of a model, and its commit if it is of the hub."""
    path = Path(__file__).parent / EMBEDDED if name == EMBEDDED else Path(name).expanduser()
    if is_remote(name) or path.is_dir():
        if revision is not None:
            raise ModelError("--revision", expected="a model of the Hugging Face hub", found=name)
        return open_folder(name if is_remote(name) else str(path)), None
    mistyped = "/" in name and path.parent.is_dir()  # a folder here, not an owner on the hub
    if not _HUB_NAME.fullmatch(name) or path.exists() or mistyped:
        raise ModelError(
            f"no such model: {name}",
            expected="a folder, or a name such as Qwen/Qwen2.5-0.5B",
            found="a file" if path.exists() else "neither",
        )
    path, commit = download(name, revision, weights=weights)
    return open_folder(str(path)), commit


def _copy_to_cache(folder: Folder, names: Sequence[str]) -> Path:
    """Copy files of a bucket to a local folder named by their content, so that it is never stale."""
    content = {name: folder.get(name) for name in names}
    digest = hashlib.sha256(folder.url.encode())
    for name, data in sorted(content.items()):
        digest.update(f"\n{name} {hashlib.sha256(data).hexdigest()}".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = LocalFolder(cache / "spile" / "models" / digest.hexdigest()[:32])
    for name, data in content.items():
        if not (kept.path / name).is_file():
            kept.put(name, data)
    return kept.path


def _weight_files(name: str, small: Path, present: set[str]) -> tuple[str, ...]:
    if INDEX in present:
        files = sorted(read_index((small / INDEX).read_bytes(), f"{INDEX} of {name}"))
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


def read_index(content: bytes, where: str) -> set[str]:
    """Return the names of the weight files that an index lists."""
    with untrusted(ModelError, f"{where} is not an index of weights", expected='JSON with a "weight_map"'):
        files = {str(file) for file in json.loads(content)["weight_map"].values()}
    outside = sorted(file for file in files if "/" in file or "\\" in file or file.startswith("."))
    if outside:
        raise ModelError(f"{where} names a file outside its folder", found=outside[0])
    return files
