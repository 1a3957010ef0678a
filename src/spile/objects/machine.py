"""What this machine says about itself: its environment variables, cores and metadata server, and where it is."""

from __future__ import annotations

import http.client
import math
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from spile.errors import SpecError

METADATA_SERVER = "169.254.169.254"
"""Metadata server of all three clouds. The address is used because resolving Google's name can take ten seconds."""
_METADATA_SECONDS = 0.8
_METADATA_BYTES = 1 << 20

PRICE_YEAR = "2025"
"""Year of the list prices below, in US dollars per GiB, rounded."""
_BETWEEN_GOOGLE_REGIONS = {  # by the continents at both ends
    frozenset({"us"}): 0.02,
    frozenset({"europe"}): 0.02,
    frozenset({"us", "europe"}): 0.05,
}
_BETWEEN_OTHER_CONTINENTS = 0.08
_EXPENSIVE_CONTINENTS = {"southamerica": 0.14, "africa": 0.11, "me": 0.11, "australia": 0.10}
_BETWEEN_AWS_REGIONS = 0.02
_TO_THE_INTERNET = {"gs": 0.12, "s3": 0.09}
_CONTINENTS = {"northamerica": "us", "nam": "us", "eur": "europe", "eu": "europe"}
_DUAL_REGIONS = {
    "nam4": ("us-central1", "us-east1"),
    "eur4": ("europe-north1", "europe-west4"),
    "eur5": ("europe-west1", "europe-west2"),
    "eur7": ("europe-west2", "europe-west3"),
    "eur8": ("europe-west3", "europe-west6"),
    "asia1": ("asia-northeast1", "asia-northeast2"),
}


def positive_number(name: str, default: float) -> float:
    """Return the number in an environment variable, or ``default`` if it is not set.

    Raises:
        SpecError: The variable holds anything but a number above 0.

    """
    text = os.environ.get(name, "")
    if not text.strip():
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise SpecError(name, expected="a number above 0", found=repr(text), fix=f"unset {name}, or correct it")
    return value


def local_cores() -> tuple[int, ...]:
    """Return the cores that this process may use; in a container these can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def google_metadata_url(path: str, environment: Mapping[str, str]) -> str:
    """Return the URL of a value such as ``instance/zone`` on a Google VM's metadata server."""
    host = environment.get("GCE_METADATA_HOST") or environment.get("GCE_METADATA_IP") or METADATA_SERVER
    return f"http://{host}/computeMetadata/v1/{path}"


def metadata_reply(method: str, url: str, headers: Mapping[str, str], seconds: float) -> tuple[int, str]:
    """Return the status and the content of the metadata server's answer; 0 and what is wrong if there is none.

    Proxies are not used.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 - always http
    try:
        with opener.open(request, timeout=seconds) as reply:
            return reply.status, reply.read(_METADATA_BYTES).decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, f"status {error.code}"
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return 0, f"no answer within {seconds:.2g} s"
        return 0, (getattr(reason, "strerror", None) or str(reason)).lower()


def ask_metadata(method: str, url: str, headers: Mapping[str, str], seconds: float) -> str | None:
    """Return the metadata server's answer, or None if this machine has no such server."""
    status, content = metadata_reply(method, url, headers, seconds)
    return content.strip() if 200 <= status < 300 else None


@dataclass(frozen=True)
class Region:
    """A cloud (``gs`` for Google, ``s3`` for Amazon) and one of its regions."""

    cloud: str
    region: str

    @property
    def continent(self) -> str:
        """The continent, named as Google does."""
        word = self.region.partition("-")[0].rstrip("0123456789")
        return _CONTINENTS.get(word, word)

    def contains(self, other: Region) -> bool:
        """Return whether a bucket in this region can be written from ``other`` without a charge."""
        if self.cloud != other.cloud:
            return False
        multi_region = "-" not in self.region and not self.region[-1].isdigit() and self.continent == other.continent
        return self.region == other.region or multi_region or other.region in _DUAL_REGIONS.get(self.region, ())


def egress_price(machine: Region, bucket: Region) -> float:
    """Return the price in dollars per GiB for writing from the machine to the bucket."""
    if bucket.contains(machine):
        return 0.0
    if machine.cloud != bucket.cloud:
        return _TO_THE_INTERNET[machine.cloud]
    if machine.cloud == "s3":
        return _BETWEEN_AWS_REGIONS
    ends = frozenset({machine.continent, bucket.continent})
    expensive = max((_EXPENSIVE_CONTINENTS.get(end, 0.0) for end in ends), default=0.0)
    return expensive or _BETWEEN_GOOGLE_REGIONS.get(ends, _BETWEEN_OTHER_CONTINENTS)


def machine_region(environment: Mapping[str, str] = os.environ) -> Region | None:
    """Return this machine's region, or None, after about a second, for a machine outside Google's and Amazon's clouds.

    ``SPILE_MACHINE_REGION`` (``gs/us-central1``, ``s3/eu-west-1``, or ``none``) overrides the metadata server.
    """
    if named := environment.get("SPILE_MACHINE_REGION"):
        cloud, _, region = named.partition("/")
        return Region(cloud, region) if region else None
    return _google_region(environment) or _amazon_region(environment)


def _google_region(environment: Mapping[str, str]) -> Region | None:
    if environment.get("NO_GCE_CHECK", "").lower() == "true":
        return None
    url = google_metadata_url("instance/zone", environment)
    zone = ask_metadata("GET", url, {"Metadata-Flavor": "Google"}, _METADATA_SECONDS)
    return Region("gs", zone.rpartition("/")[2].rpartition("-")[0]) if zone else None


def _amazon_region(environment: Mapping[str, str]) -> Region | None:
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    base = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{METADATA_SERVER}").rstrip("/")
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = ask_metadata("PUT", f"{base}/latest/api/token", headers, _METADATA_SECONDS)
    if not token:
        return None
    headers = {"X-aws-ec2-metadata-token": token}
    region = ask_metadata("GET", f"{base}/latest/meta-data/placement/region", headers, _METADATA_SECONDS)
    return Region("s3", region) if region else None
