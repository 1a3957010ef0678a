"""Every parser of untrusted data: for any bytes it returns a value or one of our errors, and it ends.

Each target has a valid document. What is tried are random JSON values in its place and in its fields, bytes flipped,
cut and put in, and what is known to hurt parsers: deep nesting, Infinity, numbers without end, lone surrogates.
"""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spile.data.chat import ChatTemplate
from spile.data.manifest import StreamsManifest
from spile.data.rows import chat_of, parse_row, task_of, text_of
from spile.data.tokens import load_tokenizer
from spile.errors import SpileError
from spile.fleet.cloud_tpu import read_node, read_operation, read_queued
from spile.fleet.home import FleetHome, Lease
from spile.fleet.provider import NodeRequest
from spile.fleet.spec import Bill, FleetSpec, History, Pending, WorkerHistory, ZoneBlock, plan_workers
from spile.models.families import read_config
from spile.models.model_files import describe
from spile.models.safetensors_files import LocalSource, read_index
from spile.objects import open_folder
from spile.objects.clouds import parse_uploads
from spile.objects.retry import RequestFailure, from_obstore, from_status
from spile.reading.dataset import open as open_dataset
from spile.reading.importing import read_pickle
from spile.reading.shuffle_order import _checksum
from spile.store.heartbeat import read_beat
from spile.store.ledger import Commit, seal, unseal
from spile.store.shard import parse_shard_header
from spile.store.snapshot import SnapshotReader
from spile.store.stream import join_run, read_run, read_stream
from spile.store.verification import verify
from spile.worker.pod.identity import Identity
from spile.worker.pod.rollcall import _Caller, _Roll
from world import produce, run_identity

OURS = (SpileError, RequestFailure)
NASTY = [
    b"[" * 100_000,
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    b"1" * 10_000,
    b"Infinity",
    b"-Infinity",
    b"NaN",
    b'{"format": 1e999}',
    b"null",
    b'"\\ud800"',
    b"\xff\xfe",
    b"",
    b"{}",
    b"[]",
    b"\0" * 100,
]
"""What parsers are known to fail on in ways that they do not document."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fuzz")
    produce(open_folder(str(root)), 12)
    return root


def _resealed(data: bytes) -> bytes:
    """A record of this content whose checksum is right: what a checksum does not keep out."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    return seal({"format": 1, **value}) if isinstance(value, dict) and _plain(value) else data


def _plain(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


class Targets:
    """For each parser: a valid document and the function that reads it."""

    def __init__(self, dataset: Path, scratch: Path) -> None:
        self._dataset, self._scratch = dataset, scratch
        self._root = open_folder(str(scratch))
        scratch.joinpath("tpu_0").mkdir(exist_ok=True)
        self._shard = next(dataset.glob("tpu_0/*.safetensors")).read_bytes()
        self._embedded = Path(str(load_embedded()))

    def commit(self) -> tuple[bytes, Callable[[bytes], object]]:
        def read(data: bytes) -> None:
            for form in (data, _resealed(data)):
                with_ours(lambda form=form: Commit.from_bytes(form, "commit").covered())  # type: ignore[misc]

        return (self._dataset / "tpu_0/commits/0001.json").read_bytes(), read

    def whole_dataset(self) -> tuple[bytes, Callable[[bytes], object]]:
        """A forged commit with a correct checksum, read by every reader of a dataset."""
        root = self._scratch / "whole"
        shutil.copytree(self._dataset, root)
        path, folder = root / "tpu_0/commits/0001.json", open_folder(str(root))

        def read_all() -> None:
            dataset = open_dataset(folder)
            for ref in dataset.samples:
                dataset.sample(ref.stream, ref.index).rows(dataset.taps[0])

        def read(data: bytes) -> None:
            path.write_bytes(_resealed(data))
            SnapshotReader(folder).take()
            with_ours(read_all)
            with_ours(lambda: verify(folder))

        valid = path.read_bytes()
        return valid[:-22] + b"}", read

    def reader_state(self) -> tuple[bytes, Callable[[bytes], object]]:
        """A state of the shuffled reader, also with a checksum that is right."""
        dataset = open_dataset(str(self._dataset))
        reader = dataset.shuffled("attn.1", 16, memory=2000, epochs=2)
        next(reader)
        state = reader.state()
        reader.close()

        def resume(state: Any) -> None:
            with dataset.shuffled("attn.1", 16, memory=2000, epochs=2, state=state) as again:
                next(again, None)

        def read(data: bytes) -> None:
            try:
                value = json.loads(data)
            except (ValueError, RecursionError):
                return
            forms = [value]
            if isinstance(value, dict):
                rest = {name: each for name, each in value.items() if name != "check"}
                forms.append({**rest, "check": _checksum(rest)})
            for form in forms:
                with_ours(lambda form=form: resume(form))  # type: ignore[misc]

        return json.dumps(state).encode(), read

    def pickle(self) -> tuple[bytes, Callable[[bytes], object]]:
        path, packed = self._scratch / "a.pkl", self._scratch / "b.pkl.gz"
        sample = {"sample_idx": 3, "activation": np.ones((2, 3), np.float32), "shape": (2, 3), "text_preview": "x"}

        def read(data: bytes) -> None:
            for place, content in ((path, data), (packed, gzip.compress(data, 1)), (packed, data)):
                place.write_bytes(content)
                with_ours(lambda place=place: read_pickle(place))  # type: ignore[misc]

        return pickle.dumps({0: [sample], 1: [sample]}, 2), read

    def run(self) -> tuple[bytes, Callable[[bytes], object]]:
        def read(data: bytes) -> None:
            for form in (data, _resealed(data)):
                (self._scratch / "run.json").write_bytes(form)
                with_ours(lambda: read_run(self._root))
                with_ours(lambda: join_run(self._root, run_identity()))

        return (self._dataset / "run.json").read_bytes(), read

    def stream(self) -> tuple[bytes, Callable[[bytes], object]]:
        def read(data: bytes) -> None:
            for form in (data, _resealed(data)):
                (self._scratch / "tpu_0/stream.json").write_bytes(form)
                with_ours(lambda: read_stream(self._root.child("tpu_0")))

        return (self._dataset / "tpu_0/stream.json").read_bytes(), read

    def progress(self) -> tuple[bytes, Callable[[bytes], object]]:
        (self._scratch / "tpu_0/stream.json").write_bytes((self._dataset / "tpu_0/stream.json").read_bytes())
        beat = {"attempt": "a", "host": "h", "phase": "running", "samples": 1, "samples_committed": 1, "tokens": 1}
        beat |= {"shards_written": 1, "shards_committed": 1, "tokens_per_second": 1.5, "retries": 0, "expected": 9}
        beat |= {"started": "2026-01-16T14:32:15Z", "updated": "2026-01-16T14:32:15Z", "version": "0", "log_tail": []}

        def read(data: bytes) -> None:
            (self._scratch / "tpu_0/progress.json").write_bytes(data)
            read_beat(self._root.child("tpu_0"))
            SnapshotReader(self._root).take()  # never an error: one stream's heartbeat stops no monitor

        return json.dumps(beat).encode(), read

    def header(self) -> tuple[bytes, Callable[[bytes], object]]:
        length = int.from_bytes(self._shard[:8], "little")

        def read(data: bytes) -> None:
            for form in (data, self._shard[:8] + data.ljust(length)[:length]):
                with_ours(lambda form=form: parse_shard_header(form, len(self._shard), "shard").notes())  # type: ignore[misc]

        return self._shard[8 : 8 + length], read

    def config(self) -> tuple[bytes, Callable[[bytes], object]]:
        def read(data: bytes) -> None:
            (self._scratch / "config.json").write_bytes(data)
            with_ours(
                lambda: describe("m", self._scratch, LocalSource(self._scratch), {"model.safetensors"}, None).config
            )

        return (self._embedded / "config.json").read_bytes(), read

    def index(self) -> tuple[bytes, Callable[[bytes], object]]:
        return b'{"weight_map": {"a": "b.safetensors"}}', lambda data: with_ours(lambda: read_index(data, "index"))

    def tokenizer(self) -> tuple[bytes, Callable[[bytes], object]]:
        def read(data: bytes) -> None:
            (self._scratch / "tokenizer.json").write_bytes(data)
            with_ours(lambda: load_tokenizer(self._scratch))

        return b'{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}', read

    def tokenizer_config(self) -> tuple[bytes, Callable[[bytes], object]]:
        valid = b'{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}'
        (self._scratch / "tokenizer.json").write_bytes(valid)

        def read(data: bytes) -> None:
            (self._scratch / "tokenizer_config.json").write_bytes(data)
            with_ours(lambda: load_tokenizer(self._scratch))
            (self._scratch / "tokenizer_config.json").unlink()

        return b'{"bos_token": "a", "added_tokens_decoder": {"1": {"content": "b", "special": true}}}', read

    def template(self) -> tuple[bytes, Callable[[bytes], object]]:
        messages = [{"role": "user", "content": "hi"}]

        def read(data: bytes) -> None:
            with_ours(lambda: ChatTemplate(data.decode(errors="replace"), {}).render(messages))

        return b"{% for m in messages %}{{ m.content * 2 }}{{ 1 / 2 }}{% endfor %}", read

    def row(self) -> tuple[bytes, Callable[[bytes], object]]:
        def read(data: bytes) -> None:
            for part in (task_of, chat_of, lambda row, place: text_of(row, "text", place)):
                with_ours(lambda part=part: part(parse_row(data, "row"), "row"))  # type: ignore[misc]

        return b'{"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[1]], "output": [[2]]}]}', read

    def manifest(self) -> tuple[bytes, Callable[[bytes], object]]:
        valid = {"version": 1, "source": "s", "seed": 0, "samples": 1, "streams": [], "rejected": {}, "origin": {}}
        return json.dumps(valid).encode(), lambda data: with_ours(lambda: StreamsManifest.from_json(data, "m"))

    def roll_call(self) -> tuple[bytes, Callable[[bytes], object]]:
        output = b'{"process": 1, "count": 2, "name": "h", "version": "0"}'
        identity = Identity(process=0, count=2, coordinator="127.0.0.1", port=1, source="test", name="n")

        def read(data: bytes) -> None:
            _Roll(identity).enter(_Caller(None, data))  # type: ignore[arg-type]

        return output, read

    def api_answers(self) -> tuple[bytes, Callable[[bytes], object]]:
        def read(data: bytes) -> None:
            try:
                value = json.loads(data)
            except (ValueError, RecursionError):
                return  # the client has refused it before
            for part in (read_node, read_queued, read_operation):
                with_ours(lambda part=part: part(value))  # type: ignore[misc]

        return (
            b'{"name": "projects/p/locations/z/nodes/n", "state": "READY", "createTime": "2026-01-01T00:00:00Z"}',
            read,
        )

    def fleet(self) -> tuple[bytes, Callable[[bytes], object]]:
        machine = NodeRequest("v3-8", "r")
        spec = FleetSpec("f", "p", ("a-b-c",), plan_workers(("a-b-c",), 2), machine, run={"model": "m"})
        return spec.to_json(), lambda data: with_ours(lambda: FleetSpec.from_json(data).to_json())

    def fleet_history(self) -> tuple[bytes, Callable[[bytes], object]]:
        past = {0: WorkerHistory("z", ("z",), Pending("create", "z", 1.0))}
        history = History(past, {"z": ZoneBlock(1.0, "no quota")}, {"u": Bill(0, "z", 1.0, 2.0, 3.0)})
        return history.to_json(), lambda data: with_ours(lambda: History.from_json(data).dollars)

    def fleet_folder(self) -> tuple[bytes, Callable[[bytes], object]]:
        """Leases, orders and reports: all are read by whoever monitors."""
        home = FleetHome(self._root.child("fleet/f"))
        machine = NodeRequest("v3-8", "r")
        spec = FleetSpec("f", "p", ("z",), plan_workers(("z",), 1), machine, deployment="d")
        for name in ("lease", "orders", "workers"):
            (self._scratch / "fleet/f" / name).mkdir(parents=True, exist_ok=True)
        lease = {"who": "w", "token": "t", "renewed": 1.0, "ttl": 9.0, "released": False}
        output = {
            "deployment": "d",
            "time": "now",
            "dollars": 3.0,
            "node": "n",
            "phase": "running",
            "verdict": "finished",
        }

        def read(data: bytes) -> None:
            for key in ("lease/000001.json", "orders/stop.json", "orders/budget.json", "workers/n.json"):
                (self._scratch / "fleet/f" / key).write_bytes(data)
            with_ours(lambda: Lease(home.folder, clock=lambda: 1.0, ttl=1.0).holder())
            with_ours(lambda: home.ordered(spec).policy)
            home._seen.clear()
            home.read_reports()  # never an error: one machine's report stops no monitor

        return json.dumps(
            {**lease, **output, "updated": 1.0, "exit_code": 0, "launches": 1, "error": ""}
        ).encode(), read

    def listings(self) -> tuple[bytes, Callable[[bytes], object]]:
        def read(data: bytes) -> None:
            with_ours(lambda: parse_uploads(data))
            assert from_status(500, data).transient
            assert "\n" not in from_obstore(ValueError(data.decode("latin-1"))).cause

        row = "<Upload><Key>k</Key><UploadId>1</UploadId><Initiated>2026-01-01T00:00:00Z</Initiated></Upload>"
        return f"<ListMultipartUploadsResult>{row}</ListMultipartUploadsResult>".encode(), read


def load_embedded() -> Path:
    from importlib import resources

    return Path(str(resources.files("spile.models") / "embedded"))


def with_ours(call: Callable[[], object]) -> None:
    try:
        call()
    except OURS as error:
        assert "\n" not in str(error)  # noqa: PT017 - any of our errors may come, and each is one line


NAMES = [name for name in vars(Targets) if not name.startswith("_")]
_KINDS = ("nasty", "value", "field", "field", "flip", "cut", "insert")
_PIECES = (b"[", b"}", b"\0", b"9" * 400, b"-", b"1e999", b"\xff", b"Infinity", b"{% for")


def spoilt(dice: Random, valid: bytes) -> bytes:
    """Return the document with random damage."""
    kind = dice.choice(_KINDS)
    if kind == "nasty":
        return dice.choice(NASTY)
    if kind == "value":
        return json.dumps(_value(dice)).encode()
    if kind == "field":
        try:
            document = json.loads(valid)
        except ValueError:
            return bytes(dice.randrange(256) for _ in range(dice.randrange(60)))
        return json.dumps(_changed(dice, document)).encode()
    place = dice.randint(0, len(valid))
    if kind == "cut":
        return valid[:place]
    piece = dice.choice(_PIECES)
    return valid[:place] + piece + valid[place + (len(piece) if kind == "flip" else 0) :]


def _changed(dice: Random, value: Any) -> Any:
    """One place of the document, however deep, with another value there."""
    if isinstance(value, dict) and value and dice.random() < 0.7:
        name = dice.choice(sorted(value))
        return {**value, name: _changed(dice, value[name])}
    if isinstance(value, list) and value and dice.random() < 0.7:
        place = dice.randrange(len(value))
        return [*value[:place], _changed(dice, value[place]), *value[place + 1 :]]
    return _value(dice)


def _value(dice: Random, deep: int = 0) -> Any:
    """Any JSON, and what Python's parser takes for it."""
    kind = dice.randrange(8 if deep < 3 else 6)
    if kind == 6:
        return [_value(dice, deep + 1) for _ in range(dice.randrange(4))]
    if kind == 7:
        return {_text(dice): _value(dice, deep + 1) for _ in range(dice.randrange(4))}
    number = dice.choice((0, -1, 1, dice.randint(-(2**70), 2**70), 10**400, dice.randint(-9, 99)))
    real = dice.choice((0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan"), dice.random()))
    return (None, True, number, number, real, _text(dice))[kind]


def _text(dice: Random) -> str:
    return "".join(chr(dice.choice((dice.randrange(128), 0xE9, 0xD800, 0x1F600))) for _ in range(dice.randrange(8)))


def _fuzzed(name: str, dataset: Path, scratch: Path) -> Callable[[Random], None]:
    valid, read = getattr(Targets(dataset, scratch), name)()
    for data in (valid, *NASTY):
        read(data)
    return lambda dice: read(spoilt(dice, valid))


@pytest.mark.parametrize("name", NAMES)
def test_only_our_errors_come_out(name: str, dataset: Path, tmp_path: Path) -> None:
    """Hypothesis chooses the inputs and shrinks failing ones."""
    one = _fuzzed(name, dataset, tmp_path)
    roll = given(st.randoms(use_true_random=False))
    examples = 2 * settings.default.max_examples
    limits = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    limits(roll(lambda dice: one(dice)))()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_only_our_errors_come_out_of_ten_thousand(name: str, dataset: Path, tmp_path: Path) -> None:
    """Random inputs; the seed reproduces a failing one."""
    one = _fuzzed(name, dataset, tmp_path)
    for number in range(10_000):
        try:
            one(Random(number))
        except BaseException as error:
            error.add_note(f"input {number} of {name}")
            raise


def test_a_right_seal_lets_nonsense_through_to_the_parser() -> None:
    assert unseal(_resealed(b'{"a": 1}'), "x")["a"] == 1


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
        "{{ 'a' * 10000000000 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ '%09999999999d' % 1 }}",
        "{{ 1 / 0 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    ],
)
def test_an_endless_template_is_ended(source: str) -> None:
    with pytest.raises(SpileError, match=r"the model's chat template (refuses|fails on) these messages"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_config_without_end_is_a_models_fault(name: str) -> None:
    """The size is checked before memory is allocated."""
    config = json.loads((load_embedded() / "config.json").read_bytes())
    read_config(config)
    for number in (10**10, 10**400):
        with pytest.raises(SpileError, match=f"config.json's {name}: expected at most"):
            read_config({**config, name: number})
