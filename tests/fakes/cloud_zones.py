"""The TPU types of each zone, as Google's page lists them.

Source: https://docs.cloud.google.com/tpu/docs/regions-zones (the version of September 2025). Rows outside of North
America are incomplete. The page lists TPU7x too, which the Cloud TPU API does not offer.
"""

from __future__ import annotations

from spile.planning.machines import known_machines

_ALL = {  # "All configurations"
    "v6e": ("us-central1-b", "us-east1-d", "us-east5-a", "us-east5-b", "europe-west4-a"),
    "v5p": ("us-central1-a", "us-east5-a"),
    "v5litepod": ("us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a", "europe-west4-b"),
    "v4": ("us-central2-b",),
}
_LARGE_V2 = ("v2-32", "v2-128", "v2-256", "v2-512")
_LARGE_V3 = ("v3-32", "v3-64", "v3-128", "v3-256", "v3-512", "v3-1024", "v3-2048")
_SOME = {
    "us-central1-a": (*_LARGE_V2, "v3-8"),
    "us-central1-b": ("v2-8", "v3-8"),
    "us-central1-c": ("v2-8",),
    "europe-west4-a": ("v2-8", *_LARGE_V2, "v3-8", *_LARGE_V3),
    "asia-east1-c": ("v2-8",),
}


def _types(zone: str) -> tuple[str, ...]:
    """Return the types of a zone, in the order of the table of machines."""
    return tuple(
        machine.name
        for machine in known_machines()
        if zone in _ALL.get(machine.name.partition("-")[0], ()) or machine.name in _SOME.get(zone, ())
    )


ZONES: tuple[str, ...] = tuple(dict.fromkeys([*_SOME, *(zone for zones in _ALL.values() for zone in zones)]))
TYPES: dict[str, tuple[str, ...]] = {zone: _types(zone) for zone in ZONES}
