"""Datasets of the Hugging Face hub, streamed: a row at a time, never the whole of it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from spile.data.make.sources import SourceRow, check_columns
from spile.errors import DataError, SpileError, StoreError
from spile.objects.cloud.failures import RequestFailure, from_status
from spile.objects.retry import Retry, while_out

__all__ = ["Hub"]

Result = TypeVar("Result")


@dataclass(frozen=True)
class Hub:
    """One split of a dataset, by its name on the hub or by a folder in the same layout."""

    name: str
    split: str
    config_name: str | None
    columns: frozenset[str] = field(default_factory=frozenset)
    location: str | None = None
    """As the user named it, where that was a folder."""
    keep: tuple[str, ...] = ()

    @property
    def origin(self) -> dict[str, object]:
        """Its name, split and configuration."""
        return {"dataset": self.location or self.name, "split": self.split, "config_name": self.config_name}

    def rows(self, start: int, stop: int | None) -> Iterator[SourceRow]:
        """One per row; what lies before ``start`` is skipped by the library, shard by shard where it can.

        A hub that goes out in the middle is tried again, from the row that it did not give.
        """
        rows, number = _between(self._open(), start, stop), start
        while True:
            try:
                data = next(rows)
            except StopIteration:
                return
            except Exception as error:
                trouble = self._passing(error)
                if self.location is not None or not isinstance(trouble, RequestFailure):
                    raise self._failed(error) from error
                rows = self._again(number, stop)
            else:
                yield SourceRow(number, data, f"row {number}")
                number += 1

    def _again(self, number: int, stop: int | None) -> Iterator[Any]:
        """The rows from ``number`` on, once the hub gives that one."""
        from datasets import load_dataset

        def attempt() -> Iterator[Any]:
            rows = _between(self._reached(load_dataset), number, stop)
            try:
                return chain([next(rows)], rows)
            except StopIteration:
                return iter(())
            except Exception as error:
                raise self._passing(error) from error

        return self._while_out(attempt)

    def _while_out(self, attempt: Callable[[], Result]) -> Result:
        try:
            return while_out(self.name, attempt, Retry.from_environment())
        except RequestFailure as outage:
            raise _unreachable(self.name, outage.cause) from outage

    def _passing(self, error: Exception) -> Exception:
        """A :class:`RequestFailure` where the hub is out; else what it is."""
        failure = self._failed(error)
        failure.__cause__ = error
        out = isinstance(failure, StoreError) and _may_pass(failure)
        return RequestFailure(str(failure.found), transient=True) if out else failure

    def _open(self) -> Any:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise DataError("datasets of the hub need the datasets library", fix="pip install 'spile[data]'") from error
        if self.location is not None:
            return self._load(load_dataset)
        return self._while_out(lambda: self._reached(load_dataset))

    def _reached(self, load: Callable[..., Any]) -> Any:
        """One attempt at the hub; a :class:`RequestFailure` where it is out."""
        try:
            _reach(self.name)
            return self._load(load)
        except StoreError as error:
            if not _may_pass(error):
                raise
            raise RequestFailure(str(error.found), transient=True) from error

    def _load(self, load: Callable[..., Any]) -> Any:
        try:
            dataset = load(self.name, self.config_name, split=self.split, streaming=True)
            if dataset.column_names is not None:
                dataset = dataset.select_columns(
                    check_columns(dataset.column_names, self.columns, self.keep, self.name)
                )
        except SpileError:
            raise
        except Exception as error:
            raise self._failed(error) from error
        return dataset

    def _failed(self, error: Exception) -> SpileError:
        """One line for what the library raised, and what to do about it."""
        from datasets.exceptions import DatasetNotFoundError

        name, said = self.location or self.name, f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if _no_network(error):
            return _unreachable(name, said)
        if isinstance(error, DatasetNotFoundError):
            return DataError(
                f"no dataset {name} on the hub, or no access to it",
                found=said,
                fix="check its name, and for a private or gated one set HF_TOKEN",
            )
        if isinstance(error, ValueError):
            return DataError(f"{name} cannot be opened", found=said, fix="check --split and --config-name")
        return StoreError(f"{name} cannot be read", found=said)


def _between(dataset: Any, start: int, stop: int | None) -> Iterator[Any]:
    dataset = dataset.skip(start) if start else dataset
    return iter(dataset if stop is None else dataset.take(stop - start))


def _unreachable(name: str, said: str) -> StoreError:
    return StoreError(
        f"the hub cannot be reached for {name}",
        found=said,
        fix="check the network, or download it elsewhere and name the folder or file: --dataset DIR",
    )


def _reach(name: str) -> None:
    """Fail at once where there is no network: the library would retry by itself, line by line."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return
    url = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection(
            (url.hostname or "", url.port or (80 if url.scheme == "http" else 443)), timeout=10
        ).close()
    except OSError as error:
        trouble = ConnectionError(str(error))  # a name that does not resolve is none by its type
        raise _unreachable(name, f"{constants.ENDPOINT}: {error.strerror or error}") from trouble


def _may_pass(error: StoreError) -> bool:
    """Whether no network, or a status such as 503 or 429, is at the bottom of this."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:  # the user's own setting, which does not pass
        return False
    seen = error.__cause__
    while seen is not None:
        status = getattr(getattr(seen, "response", None), "status_code", None)
        if isinstance(status, int):
            return from_status(status).transient
        seen = seen.__cause__ or seen.__context__
    return error.__cause__ is not None and _no_network(error.__cause__)


def _no_network(error: BaseException) -> bool:
    """Whether a missing network is at the bottom of this."""
    seen: BaseException | None = error
    words = ("Connect", "Timeout", "Offline", "NameResolution", "Resolve", "LocalEntryNotFound")
    while seen is not None:
        if isinstance(seen, ConnectionError | TimeoutError) or any(word in type(seen).__name__ for word in words):
            return True
        seen = seen.__cause__ or seen.__context__
    return "Couldn't reach" in str(error) or "offline" in str(error).lower()
