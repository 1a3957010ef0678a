"""docs/format.md is normative: its reader runs as it stands there, and its worked example is what the code writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.objects import open_folder
from spile.spec.sample import Role, Sample
from spile.spec.taps import SCALED, TapRows
from spile.store.ledger import FORMAT, Commit, seal
from spile.store.run import join_run
from spile.store.shard import ShardBuilder, ShardSchema, as_stored
from spile.store.writer import join_stream
from world import TAPS, items, produce, rows_of, run_identity, sample_of, stream_identity

PAGE = (Path(__file__).parents[3] / "docs" / "format.md").read_text()


def block(language: str, heading: str, which: int = 0) -> str:
    after = PAGE[PAGE.index(f"\n## {heading}") :]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", after, re.DOTALL | re.MULTILINE)
    return [text for kind, text in blocks if kind == language][which]


@pytest.fixture(scope="module")
def reader() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(block("python", "A reader in sixty lines"), "docs/format.md", "exec"), names)
    imports = re.findall(r"^(?:import|from) .*", block("python", "A reader in sixty lines"), re.MULTILINE)
    assert imports == ["import json, re, struct", "from pathlib import Path"]
    return names


@pytest.mark.parametrize("cut", [None, 4])
def test_the_reader_of_the_page_reads_everything(tmp_path: Path, reader: dict[str, Any], cut: int | None) -> None:
    produce(open_folder(str(tmp_path)), 30, cut=cut)
    wanted = [item for item in items(30) if isinstance(item, Sample)]
    found = list(reader["samples"](tmp_path))
    assert [(stream, index, task) for stream, index, task, _, _ in found] == [
        ("tpu_0", sample.index, sample.task_id) for sample in wanted
    ]
    for sample, (_, _, _, tokens, rows) in zip(wanted, found, strict=True):
        assert list(tokens) == sample.tokens.tolist()
        for number, tap in enumerate(TAPS):
            assert np.array_equal(np.array(rows[str(tap)], np.float32), rows_of(sample, number).astype(np.float32))


@pytest.mark.parametrize("dtype", SCALED)
def test_the_reader_of_the_page_decodes(tmp_path: Path, reader: dict[str, Any], dtype: str) -> None:
    root, run = open_folder(str(tmp_path)), run_identity(store_dtype=dtype)
    join_run(root, run)
    store = join_stream(root, 0, stream_identity(3), run)
    samples = [sample_of(index) for index in range(3)]
    builder = store.begin(samples)
    for tap in range(len(TAPS)):
        rows = np.concatenate([rows_of(sample, tap, dtype="float32") for sample in samples])
        builder.write(tap, 0, as_stored(rows, dtype))
    store.commit([builder.finish()])
    dataset = spile.open(str(tmp_path))
    for _, index, _, _, rows in reader["samples"](tmp_path):
        for tap in map(str, TAPS):
            given = dataset.sample(0, index).rows(tap)
            np.testing.assert_allclose(np.array(rows[tap]), given, rtol=1e-6)  # the page's multiplies in float64


def test_the_reader_of_the_page_notices_damage(tmp_path: Path, reader: dict[str, Any]) -> None:
    store = produce(open_folder(str(tmp_path)), 8)
    path = tmp_path / "tpu_0" / store.ledger.files[0].name
    data = bytearray(path.read_bytes())
    data[4100] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError, match=r"residual\.0 is damaged"):
        list(reader["samples"](tmp_path))
    (tmp_path / "tpu_0" / "stream.json").write_bytes(seal({"format": FORMAT}).replace(b"4", b"2", 1))
    with pytest.raises(AssertionError, match=r"stream\.json is damaged"):
        list(reader["samples"](tmp_path))


def test_the_crc_of_the_page_is_the_standards(reader: dict[str, Any]) -> None:
    assert f"{reader['crc32c'](b'123456789'):08x}" == "e3069283"
    assert "`123456789` is `e3069283`" in PAGE


def test_the_worked_example_is_what_the_code_writes(tmp_path: Path) -> None:
    first = Role.USER | Role.FIRST
    samples = [
        Sample(0, "a", np.array([7, 8], np.int32), np.array([first, Role.USER], np.uint8), "hi"),
        Sample(2, "b", np.array([9], np.int32), np.array([first], np.uint8), "yo"),
    ]
    builder = ShardBuilder(
        open_folder(str(tmp_path)),
        "shard_0001-a1b2c3d4e5f6.safetensors",
        samples,
        ShardSchema((TapRows("residual.0", (2,), "float32"),), "f" * 32, "0123456789abcdef"),
    )
    builder.write(0, 0, np.array([[0.5, -1], [2, 3], [4, -0.25]], np.float32))
    record = builder.finish()
    heading = "A worked example"
    length = bytes.fromhex(block("", heading))
    header = block("json", heading).replace("\n", "").encode()
    lines = [re.match(r"(?:[0-9a-f]{2} )+", line + " ") for line in block("", heading, 1).splitlines()]
    body = bytes.fromhex("".join(line[0] for line in lines if line))
    assert length + header.ljust(4088) + body == (tmp_path / record.name).read_bytes()
    assert f"{len(header)} bytes of JSON on one line (broken here), then {4088 - len(header)} spaces" in PAGE
    commit = Commit(1, "a1b2c3d4e5f6", "0123456789abcdef", (record,), created="2026-01-16T14:32:15Z", version="0.1.0")
    assert block("json", heading, 1) == commit.to_bytes().decode()
