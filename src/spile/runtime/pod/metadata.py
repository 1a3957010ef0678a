"""The VM's metadata server: what it says, that it has no such thing, or that it does not answer.

The three are different answers to "am I alone?": a host of a slice that takes silence for a no would do the whole
slice's work by itself, and so would every other one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from spile.errors import PodError
from spile.objects.cloud.metadata import google_metadata_url

__all__ = ["Metadata", "NoMetadata", "Patience", "gce_metadata"]

Metadata = Callable[[str], str | None]
"""An attribute of the VM by its name; None where it has none; :class:`NoMetadata` where nobody answered."""

_GCE_NAMES = ("Google", "Google Compute Engine")
_CHIPS = ("accel[0-9]*", "vfio/[0-9]*")
"""The devices' files of a TPU VM's chips: up to v4, and since v5e."""
_PAUSE, _LONGEST_PAUSE = 0.25, 5.0


class NoMetadata(PodError):
    """A TPU VM's metadata server did not answer."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for an answer, in seconds."""

    whole: float
    """With one attribute, all tries together."""
    one: float
    """With the first try; each later one gets twice as long."""


_OF_A_TPU = Patience(60.0, 4.0)
_OF_ANOTHER = Patience(4.0, 2.0)
"""Of a VM without TPUs, which cannot be part of a slice: the answer does not matter much."""


def gce_metadata(
    environment: Mapping[str, str],
    *,
    product: Path = Path("/sys/class/dmi/id/product_name"),
    devices: Path = Path("/dev"),
    patience: Patience | None = None,
) -> Metadata | None:
    """The metadata server of this VM; None where this is no Google VM, found out without asking the network."""
    named = environment.get("GCE_METADATA_IP") or environment.get("GCE_METADATA_HOST")
    if not named and not (product.is_file() and product.read_text(errors="replace").strip() in _GCE_NAMES):
        return None
    base = google_metadata_url("instance/attributes/", environment)
    tpu = any(next(devices.glob(name), None) is not None for name in _CHIPS)
    return _MetadataServer(base, patience or (_OF_A_TPU if tpu else _OF_ANOTHER), tpu=tpu)


@dataclass
class _Tried:
    """One request: an answer, or why there is none."""

    answer: str | None = None
    trouble: str = "no answer"
    final: bool = False
    """Whether asking again is of no use."""
    slow: bool = False
    """Whether time ran out."""


class _MetadataServer:
    """Asks, and asks again while there is patience."""

    def __init__(self, base: str, patience: Patience, *, tpu: bool) -> None:
        self._base, self._patience, self._tpu = base, patience, tpu
        self._one = patience.one

    def __call__(self, key: str) -> str | None:
        began = time.monotonic()
        pause = _PAUSE
        while True:
            left = max(0.01, began + self._patience.whole - time.monotonic())
            tried = _within(min(self._one, left), self._base + key)
            if tried.final:
                break
            if time.monotonic() - began + pause >= self._patience.whole:
                break
            if tried.slow:
                self._one *= 2  # for the next attribute too
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if tried.trouble and self._tpu:
            raise _silence(key, tried.trouble, time.monotonic() - began)
        return tried.answer


def _silence(key: str, trouble: str, waited: float) -> NoMetadata:
    return NoMetadata(
        f"this TPU VM's metadata server does not say which host of which slice this is ({waited:.0f} s)",
        expected=f"an answer to {key}",
        found=trouble,
        fix="run it again, or say it: --process-id, --num-processes and --coordinator-address "
        "(--num-processes 1: this host works alone)",
    )


def _within(seconds: float, url: str) -> _Tried:
    """A request that is left to itself when time is up: finding the name, or a body in drips, has no timeout."""
    tried: list[_Tried] = []
    thread = threading.Thread(target=lambda: tried.append(_get(url, seconds)), name="spile-metadata", daemon=True)
    thread.start()
    thread.join(seconds * 1.1)
    return tried[0] if tried else _Tried(trouble=f"no answer within {seconds:.2g} s", slow=True)


def _get(url: str, seconds: float) -> _Tried:
    import requests

    try:
        with requests.Session() as session:
            session.trust_env = False  # it lives beside this machine, behind no proxy
            answer = session.get(url, headers={"Metadata-Flavor": "Google"}, timeout=seconds)
    except requests.Timeout:
        return _Tried(trouble=f"no answer within {seconds:.2g} s", slow=True)
    except requests.ConnectionError as error:
        return _Tried(trouble=_reason(error))
    except requests.RequestException as error:
        return _Tried(trouble=str(error))
    if answer.status_code == 404:
        return _Tried(trouble="", final=True)
    if answer.ok:
        return _Tried(answer.text, trouble="", final=True)
    again = answer.status_code >= 500 or answer.status_code == 429
    return _Tried(trouble=f"status {answer.status_code}", final=not again)


def _reason(error: BaseException) -> str:
    """What the operating system said, at the root of what requests made of it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror.lower()
        seen = getattr(seen, "reason", None) or seen.__cause__ or seen.__context__
    return "no connection"
