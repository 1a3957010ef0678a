"""A metadata server that is slow, hangs, fails or is absent: a host of a slice is never taken for a single host."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ports import free_port
from spile.errors import PodError
from spile.run.pod.identity import MetadataTimeouts, NoMetadata, find_identity, gce_metadata

FOUR = "10.0.0.2,10.0.0.3,10.0.0.4,10.0.0.5"
SLICE = {"agent-worker-number": "1", "worker-network-endpoints": FOUR}
SHORT = MetadataTimeouts(3, 0.1)
SURE = MetadataTimeouts(3.5, 3)
"""Long enough for an answer that is given, on a busy machine too; the last of four tries has 1.75 s."""

Trouble = Callable[["Server", int], int]
"""What happens to the request of this number: a status, or 0 to let it be answered."""


class Server:
    """A metadata server with a given fault."""

    def __init__(self, known: dict[str, str], trouble: Trouble) -> None:
        self.known, self.trouble = known, trouble
        self.asked: list[str] = []
        self.over = threading.Event()
        self.address = ""


@contextmanager
def serving(known: dict[str, str], trouble: Trouble = lambda *_: 0) -> Iterator[Server]:
    state = Server(known, trouble)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            key = self.path.rpartition("/")[2]
            state.asked.append(key)
            status = state.trouble(state, len(state.asked))
            value = state.known.get(key)
            if self.headers.get("Metadata-Flavor") != "Google":
                status = 403
            try:
                self.send_response(status or (200 if value is not None else 404))
                self.end_headers()
                self.wfile.write((value or "").encode())
            except OSError:  # the one who asked has gone
                return

        def log_message(self, *args: object) -> None:
            pass

    class Quiet(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: object) -> None:
            pass

    with Quiet(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        state.address = f"127.0.0.1:{server.server_address[1]}"
        try:
            yield state
        finally:
            state.over.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def chips(tmp_path: Path) -> Path:
    """``/dev`` of a TPU VM."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "accel0").touch()
    return tmp_path / "dev"


def hang(server: Server, _number: int) -> int:
    server.over.wait()
    return 0


def test_a_metadata_server(chips: Path) -> None:
    with serving(SLICE) as server:
        read = gce_metadata({"GCE_METADATA_IP": server.address}, devices=chips)
        assert read is not None
        assert read("nothing") is None
        identity = find_identity({}, metadata=read)
        assert (identity.process, identity.count) == (1, 4)


def test_no_google_vm_no_question(tmp_path: Path) -> None:
    product = tmp_path / "product_name"
    assert gce_metadata({}, product=product) is None
    product.write_text("Standard PC\n")
    assert gce_metadata({}, product=product) is None
    product.write_text("Google Compute Engine\n")
    assert gce_metadata({}, product=product) is not None


def test_a_vm_of_another_kind_is_one_host(chips: Path) -> None:
    """It answers, and has no such attribute: asked once each."""
    with serving({}) as server:
        read = gce_metadata({"GCE_METADATA_IP": server.address}, devices=chips)
        assert find_identity({}, metadata=read).count == 1
        assert server.asked == ["agent-worker-number", "worker-network-endpoints"]


@pytest.mark.parametrize("chip", ["accel0", "vfio/3"])
def test_a_silent_one_on_a_slice_is_an_error(tmp_path: Path, chip: str) -> None:
    (tmp_path / chip).parent.mkdir(exist_ok=True)
    (tmp_path / chip).touch()
    with serving(SLICE, hang) as server:
        read = gce_metadata({"GCE_METADATA_IP": server.address}, devices=tmp_path, timeouts=SHORT)
        with pytest.raises(NoMetadata) as caught:
            find_identity({}, metadata=read)
        assert len(server.asked) > 1, "asked again"
    line = str(caught.value)
    assert line.startswith("this TPU VM's metadata server does not say which host of which slice this is (")
    assert "expected an answer to agent-worker-number, found no answer within" in line
    assert "give --process-id, --num-processes and --coordinator-address" in line
    assert "\n" not in line
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("status", "asked"), [(500, "more"), (503, "more"), (429, "more"), (403, "once")]
)  # A refused request is not repeated.
def test_one_that_only_fails_is_an_error_that_says_so(chips: Path, status: int, asked: str) -> None:
    with serving(SLICE, lambda *_: status) as server:
        read = gce_metadata({"GCE_METADATA_IP": server.address}, devices=chips, timeouts=SURE)
        with pytest.raises(NoMetadata, match=rf"found status {status}\. Run it again."):
            find_identity({}, metadata=read)
        assert (len(server.asked) > 1) == (asked == "more")


def test_one_that_is_not_there_is_an_error_on_a_tpu_vm_only(chips: Path, tmp_path: Path) -> None:
    nobody = {"GCE_METADATA_IP": f"127.0.0.1:{free_port()}"}
    with pytest.raises(NoMetadata, match="found connection refused"):
        find_identity({}, metadata=gce_metadata(nobody, devices=chips, timeouts=SURE))
    without = gce_metadata(nobody, devices=tmp_path / "none", timeouts=SHORT)
    assert find_identity({}, metadata=without).count == 1


def test_a_slow_start_is_waited_for(chips: Path) -> None:
    """Two failures, a silence, then answers."""

    def late(server: Server, number: int) -> int:
        return 503 if number < 3 else hang(server, number) if number == 3 else 0

    with serving(SLICE, late) as server:
        read = gce_metadata({"GCE_METADATA_IP": server.address}, devices=chips, timeouts=MetadataTimeouts(30, 0.2))
        identity = find_identity({}, metadata=read)
        assert (identity.process, identity.count) == (1, 4)
        assert server.asked[:4] == ["agent-worker-number"] * 4


def test_silence_about_the_slices_is_no_single_slice(chips: Path) -> None:
    with serving(SLICE, lambda server, _: 500 * (server.asked[-1] == "tpu-env")) as server:
        read = gce_metadata({"GCE_METADATA_IP": server.address}, devices=chips, timeouts=SURE)
        with pytest.raises(NoMetadata, match="expected an answer to tpu-env, found status 500"):
            find_identity({}, metadata=read)


@pytest.mark.parametrize(("key", "has"), [("agent-worker-number", "first"), ("worker-network-endpoints", "second")])
def test_half_of_it_is_an_error(chips: Path, key: str, has: str) -> None:
    with serving({key: SLICE[key]}) as server:
        read = gce_metadata({"GCE_METADATA_IP": server.address}, devices=chips)
        with pytest.raises(PodError, match=rf"found only the {has}\. Wait until the TPU is READY"):
            find_identity({}, metadata=read)


def silent(key: str) -> str | None:
    raise NoMetadata(f"no answer to {key}")


def test_with_all_flags_no_metadata_server_is_asked() -> None:
    identity = find_identity({}, process_id=3, num_processes=4, coordinator_address="a", metadata=silent)
    assert (identity.process, identity.count) == (3, 4)
    assert find_identity({}, num_processes=1, metadata=silent).count == 1
    assert find_identity({"TPU_SKIP_MDS_QUERY": "1"}, metadata=silent).count == 1


def test_variables_that_name_the_hosts_do_where_the_server_is_silent() -> None:
    """Those of an earlier launch would be found out by the roll call; a host alone never would."""
    named = {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": FOUR}
    assert find_identity(named, metadata=silent).process == 2
    task = find_identity({"CLOUD_TPU_TASK_ID": "5"}, hosts=16, coordinator_address="a", metadata=silent)
    assert (task.process, task.count) == (5, 16)


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}, {}),
        ({"CLOUD_TPU_TASK_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}, {}),
        ({"TPU_WORKER_ID": "5"}, {}),
        ({}, {"hosts": 16}),
        ({}, {"hosts": 1}),
        ({}, {"num_processes": 4}),
    ],
)
def test_nothing_less_does(variables: dict[str, str], flags: dict[str, int]) -> None:
    with pytest.raises(NoMetadata):
        find_identity(variables, metadata=silent, **flags)  # type: ignore[arg-type]
