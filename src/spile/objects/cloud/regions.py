"""Where a bucket and a machine are, and what moving bytes between them costs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import urllib3

from spile.objects.cloud.metadata import METADATA_SERVER, ask_metadata, google_metadata_url

__all__ = ["PRICES_OF", "Region", "egress_price", "machine_place"]

PRICES_OF = "2025"
"""The year of the list prices below, in US dollars per GiB, rounded. They change rarely, their magnitude never."""

_BETWEEN = {  # Google's network, between regions; the dearer end counts
    frozenset({"us"}): 0.02,
    frozenset({"europe"}): 0.02,
    frozenset({"us", "europe"}): 0.05,
}
_BETWEEN_AT_ALL = 0.08
_DEAR = {"southamerica": 0.14, "africa": 0.11, "me": 0.11, "australia": 0.10}
_AWS_BETWEEN = 0.02
_TO_THE_INTERNET = {"gs": 0.12, "s3": 0.09}

_SAME_CONTINENT = {"northamerica": "us", "nam": "us", "eur": "europe", "eu": "europe"}
_DUAL = {
    "nam4": ("us-central1", "us-east1"),
    "eur4": ("europe-north1", "europe-west4"),
    "eur5": ("europe-west1", "europe-west2"),
    "eur7": ("europe-west2", "europe-west3"),
    "eur8": ("europe-west3", "europe-west6"),
    "asia1": ("asia-northeast1", "asia-northeast2"),
}
_PATIENCE = urllib3.Timeout(connect=0.4, read=0.8)


@dataclass(frozen=True)
class Region:
    """A cloud (``gs`` for Google's, ``s3`` for Amazon's) and a region of it."""

    cloud: str
    region: str

    @property
    def continent(self) -> str:
        """Google's names for them."""
        word = self.region.partition("-")[0].rstrip("0123456789")
        return _SAME_CONTINENT.get(word, word)

    def holds(self, other: Region) -> bool:
        """Whether a bucket here is at home where the other place is: the same region, or one it spans."""
        if self.cloud != other.cloud:
            return False
        spans = "-" not in self.region and not self.region[-1].isdigit() and self.continent == other.continent
        return self.region == other.region or spans or other.region in _DUAL.get(self.region, ())


def egress_price(machine: Region, bucket: Region) -> float:
    """Dollars per GiB that the machine's owner pays to write to the bucket."""
    if bucket.holds(machine):
        return 0.0
    if machine.cloud != bucket.cloud:
        return _TO_THE_INTERNET[machine.cloud]
    if machine.cloud == "s3":
        return _AWS_BETWEEN
    ends = frozenset({machine.continent, bucket.continent})
    dear = max((_DEAR.get(end, 0.0) for end in ends), default=0.0)
    return dear or _BETWEEN.get(ends, _BETWEEN_AT_ALL)


def machine_place(environment: Mapping[str, str] = os.environ) -> Region | None:
    """Where this machine says it is; None for one that is in neither cloud, after about a second."""
    if named := environment.get("SPILE_MACHINE_REGION"):  # gs/us-central1, s3/eu-west-1, or empty for nowhere
        cloud, _, region = named.partition("/")
        return Region(cloud, region) if region else None
    return _google_place(environment) or _amazon_place(environment)


def _google_place(environment: Mapping[str, str]) -> Region | None:
    if environment.get("NO_GCE_CHECK", "").lower() == "true":
        return None
    zone = _ask("GET", google_metadata_url("instance/zone", environment), {"Metadata-Flavor": "Google"})
    return Region("gs", zone.rpartition("/")[2].rpartition("-")[0]) if zone else None


def _amazon_place(environment: Mapping[str, str]) -> Region | None:
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    base = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{METADATA_SERVER}").rstrip("/")
    token = _ask("PUT", f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    if not token:
        return None
    region = _ask("GET", f"{base}/latest/meta-data/placement/region", {"X-aws-ec2-metadata-token": token})
    return Region("s3", region) if region else None


def _ask(method: str, url: str, headers: dict[str, str]) -> str | None:
    return ask_metadata(method, url, headers, _PATIENCE)
