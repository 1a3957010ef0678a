"""Every parser of untrusted data: for any bytes it returns a value or one of our errors, and it ends.

A short run for every change. ``make fuzz`` feeds 10,000 inputs to each parser: see :mod:`fuzzing`.
"""

from __future__ import annotations

import json
from pathlib import Path

import fuzz_targets
import fuzzing
import pytest

from spile.errors import SpileError
from spile.models.families import read_config
from spile.store.ledger import unseal


@pytest.mark.parametrize("name", fuzz_targets.NAMES)
def test_only_our_errors_come_out(name: str, tmp_path: Path) -> None:
    assert fuzzing.run(name, 150, 1, tmp_path).findings == ()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", fuzz_targets.NAMES)
def test_only_our_errors_come_out_of_ten_thousand(name: str) -> None:
    assert fuzzing.main(["--only", name]) == 0


_DEEP = b"[" * 100_000
_MARKED = "{{ messages[0].content }}{% if '\ue0f0' in messages[0].content %}MARKS{% endif %}"
_QUEUED = '{"queuedResources": [{"name": "a/b/c/d", "tpu": {"nodeSpec": [{"multisliceParams": {"nodeCount": 1e12}}]}}]}'
FINDINGS: dict[str, tuple[str, bytes]] = {
    "an adapter's config that is nested too deeply": ("adapter", _DEEP),
    "an adapter's tensor with one dimension": ("adapter_tensors", b"one dimension"),
    "an adapter's tensor of integers": ("adapter_tensors", b"integers"),
    "a queued resource of a million million nodes": ("api_replies", _QUEUED.encode()),
    "a page that names itself as the next one": ("api_replies", b'{"nextPageToken": "again"}'),
    "a page that is no list": ("api_replies", b'{"nodes": 3, "locations": 3, "permissions": 3}'),
    "a zone without a name": ("api_replies", b'{"locations": [{}], "acceleratorTypes": [{}]}'),
    "a reply that is nested too deeply": ("api_replies", _DEEP),
    "settings of gcloud without a section": ("gcloud_settings", b"project = p"),
    "a zone that is no text": ("metadata_server", b"\xff"),
    "suspects without end": ("suspects", b'{"stream": "s", "groups": [], "careful": Infinity}'),
    "suspects beyond all samples": (
        "suspects",
        b'{"stream": "s", "launch": "", "careful": 1, "trial": [[3, 92233720368547758080]], "controlled": false, '
        b'"ended": "", "groups": []}',
    ),
    "suspects that are nested too deeply": ("suspects", _DEEP),
    "a claim that is nested too deeply": ("claim", _DEEP),
    "a record of a deployment that is nested too deeply": ("deployed", _DEEP),
    "a file of flags that is nested too deeply": ("config_file", b"a = " + _DEEP[:5_000]),
    "an event that is no JSON": ("host_events", b"{"),
    "an end without an exit code": ("host_events", b'{"event": "exit"}'),
    "a host whose shell prints nothing": ("host_events", b"rsync"),
    "an answer without an augmentation's colours": ("predictions", b"no colours"),
    "a spec with a number that no float can hold": ("spec", b"huge"),
    "a task that can be read but not written": (
        "row",
        b'{"train": ' + b"[" * 400 + b"]" * 400 + b', "test": []}',
    ),
    "a template that writes our marks": ("template", _MARKED.replace("MARKS", "\ue0f08\ue0f1\ue0f09\ue0f1").encode()),
    "a template that writes a long mark": (
        "template",
        _MARKED.replace("MARKS", f"\ue0f0{'9' * 5_000}\ue0f1").encode(),
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_stays_repaired(name: str, tmp_path: Path) -> None:
    target, data = FINDINGS[name]
    valid, read = fuzz_targets.open_target(target, tmp_path)
    if target == "adapter_tensors":
        header = json.loads(valid[0])
        first = header[next(iter(header))]
        elements = first["shape"][0] * first["shape"][1]
        first |= {"shape": [elements]} if name.endswith("one dimension") else {"dtype": "I32"}
        data = json.dumps(header).encode()
    if target == "spec":
        data = json.dumps({**json.loads(valid[0]), "shard_size_gb": 10**400}).encode()
    if target == "predictions":
        data = valid[0].replace(b'"colors"', b'"colours"')
    read(data)


def test_a_right_seal_lets_nonsense_through_to_the_parser() -> None:
    assert unseal(fuzz_targets._resealed(b'{"a": 1}'), "x")["a"] == 1


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_config_without_end_is_a_models_fault(name: str) -> None:
    """The size is checked before memory is allocated."""
    config = json.loads((fuzz_targets.load_embedded() / "config.json").read_bytes())
    read_config(config)
    for number in (10**10, 10**400):
        with pytest.raises(SpileError, match=f"config.json's {name}: expected 0 to"):
            read_config({**config, name: number})
