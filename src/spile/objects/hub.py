"""A dataset repository on the Hugging Face hub as a folder: ``hf://datasets/OWNER/NAME[@REVISION][/PREFIX]``.

It can only be read, at the commit that the revision named when it was first used. ``spile push`` writes repositories.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NoReturn
from urllib.parse import quote

from spile.errors import SpecError, SpileError, StoreError, UserError
from spile.objects.folder import NotFound, ObjectInfo, Stats, Unfinished, Unwritable, checked_key, read_ahead

_URL = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+?)(?:@([\w.-]+))?(?:/(.*))?", re.ASCII)
_PARALLEL = 8


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Translate the errors of the hub's client to ours, with a way to fix them."""
    from huggingface_hub import errors

    try:
        yield
    except (errors.HTTPError, OSError, RuntimeError) as error:  # type: ignore[attr-defined]  # the transport's, whichever
        upload = isinstance(error, RuntimeError) and error.__cause__ is not None
        raise _our_error(error.__cause__ if upload else error, name) from error


def _our_error(error: BaseException | None, name: str) -> SpileError:
    from huggingface_hub import errors

    if isinstance(error, errors.RemoteEntryNotFoundError):
        return NotFound(f"no such file on the hub: {name}")
    if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError):
        fix = "check its name and revision, and for a private one set HF_TOKEN or run: hf auth login"
        return UserError(f"{name} is not on the hub, or you have no access to it", fix=fix)
    if not isinstance(error, errors.HfHubHTTPError):
        found = next(iter(str(error).splitlines()), type(error).__name__)
        return StoreError(f"the hub cannot be reached for {name}", found=found, fix="run the command again")
    status = error.response.status_code
    found = f"{status} {error.server_message or ''}".strip()
    if status in (401, 403):
        fix = "set HF_TOKEN to a token that may write, or run: hf auth login"
        return UserError(f"the hub refused {name}", found=found, fix=fix)
    return StoreError(f"the hub failed for {name}", found=found, fix="run the command again")


@dataclass(frozen=True)
class HubFolder:
    """A folder of a dataset repository, at one commit."""

    repository: str
    revision: str | None = None
    prefix: str = ""
    stats: Stats = field(default_factory=Stats, compare=False)
    local_path = None

    @classmethod
    def parse(cls, url: str) -> HubFolder:
        """Parse ``hf://datasets/OWNER/NAME@REVISION/PREFIX``; raise :class:`SpecError` if it names no dataset."""
        found = _URL.fullmatch(url.rstrip("/"))
        if found is None:
            raise SpecError("not a dataset on the hub", expected="hf://datasets/OWNER/NAME", found=url)
        return cls(found[1], found[2], (found[3] or "").strip("/"))

    @property
    def url(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://datasets/{self.repository}{revision}" + (f"/{self.prefix}" if self.prefix else "")

    @cached_property
    def commit(self) -> str:
        """The commit that the revision named when it was first used."""
        from huggingface_hub import HfApi

        with hub_errors(self.url):
            self.stats.add(requests=1)
            return HfApi().dataset_info(self.repository, revision=self.revision, timeout=30).sha or "main"

    def child(self, path: str) -> HubFolder:
        return HubFolder(self.repository, self.commit, self._path(path), self.stats)

    def _path(self, key: str) -> str:
        return f"{self.prefix}/{checked_key(key)}" if self.prefix else checked_key(key)

    def _read(self, key: str, span: str = "") -> bytes:
        from huggingface_hub import constants
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, by its documentation
            build_hf_headers,
            hf_raise_for_status,
            http_backoff,
        )

        where = f"datasets/{self.repository}/resolve/{self.commit}/{quote(self._path(key))}"
        headers = build_hf_headers() | ({"range": f"bytes={span}"} if span else {})
        with hub_errors(f"{self.url}/{key}"):
            answer = http_backoff("GET", f"{constants.ENDPOINT}/{where}", headers=headers, timeout=60)
            hf_raise_for_status(answer)
        self.stats.add(requests=1, bytes_read=len(answer.content))
        return answer.content

    def get(self, key: str) -> bytes:
        return self._read(key)

    def get_many(self, keys: Iterable[str]) -> Iterator[bytes]:
        return read_ahead((partial(self.get, key) for key in keys), _PARALLEL)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        found = self._read(key, f"{start}-{start + length - 1}") if length else b""
        if len(found) != length:
            raise StoreError(f"{self.url}/{key}", expected=f"{length:,} bytes from {start:,}", found=f"{len(found):,}")
        return found

    @cached_property
    def _files(self) -> dict[str, ObjectInfo]:
        from huggingface_hub import HfApi, RepoFile

        with hub_errors(self.url):
            self.stats.add(requests=1)
            found = HfApi().list_repo_tree(
                self.repository,
                self.prefix or None,
                recursive=True,
                repo_type="dataset",
                revision=self.commit,
            )
            files = [each for each in found if isinstance(each, RepoFile)]
        cut = len(self.prefix) + 1 if self.prefix else 0
        keys = sorted((each.path[cut:], each) for each in files)
        return {
            key: ObjectInfo(key, each.size, 0.0, each.lfs.sha256 if each.lfs else each.blob_id) for key, each in keys
        }

    def info(self, key: str) -> ObjectInfo:
        if key not in self._files:
            raise NotFound(f"no such file on the hub: {self.url}/{key}")
        return self._files[key]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        try:
            found = self._files
        except NotFound:  # A folder without files does not exist on the hub.
            return
        yield from (each for key, each in found.items() if key.startswith(prefix))

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:  # noqa: ARG002
        """Yield nothing: a commit of the hub is complete."""
        return iter(())

    def _read_only(self, *_: Any, **__: Any) -> NoReturn:
        raise Unwritable(
            f"{self.url} cannot be written to",
            fix="write to a folder or a bucket, and then: spile push ROOT hf://datasets/OWNER/NAME",
        )

    put = create = delete = writer = discard = _read_only
