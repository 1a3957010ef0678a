"""The startup script, run for real by bash, with stand-ins for systemctl, uv and the metadata server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.cloud import CloudTimes
from tests.fakes.cloud_server import FakeCloud

from programs import require
from spile.fleet.cloud_tpu import CloudTpu
from spile.fleet.deploy import publish
from spile.fleet.home import FleetHome, machine_metadata, machine_requirements, pin_machines, sha256, startup_script
from spile.fleet.install import build_wheel
from spile.fleet.provider import NodeRequest
from spile.fleet.spec import FleetSpec, plan_workers

ZONE, NAME = "us-central1-a", "tpu-us-central1-a-0"
UV = """#!/bin/bash
echo "uv $*" >> "$HOME/calls"
if [ "$1" = venv ]; then
  mkdir -p "${@: -1}/bin"
  printf '#!/bin/bash\\nexec {python} "$@"\\n' > "${@: -1}/bin/python"
  chmod +x "${@: -1}/bin/python"
fi
if [ "$1 $2" = "pip install" ] && [ -f "$HOME/broken" ]; then echo "no matching distribution"; exit 1; fi
"""
SYSTEMCTL = '#!/bin/bash\necho "systemctl $*" >> "$HOME/calls"\n'


class Vm:
    """A bare machine: a home, a path with stand-ins, and the script."""

    def __init__(self, folder: Path, extra: dict[str, str]) -> None:
        self.folder = folder
        stubs = folder / "bin"
        stubs.mkdir(parents=True)
        for name, text in (("uv", UV.replace("{python}", sys.executable)), ("systemctl", SYSTEMCTL)):
            (stubs / name).write_text(text)
            (stubs / name).chmod(0o755)
        self.script = folder / "startup-script"
        self.script.write_text(startup_script())
        self.environment = {
            "HOME": str(folder),
            "PATH": f"{stubs}:/usr/bin:/bin",
            "SPILE_HOME": str(folder / "opt"),
            "SPILE_UNIT_DIR": str(folder / "units"),
            "SPILE_EXPECT": "any",
            **extra,
        }

    def boot(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        require("curl")  # the startup script reads the metadata server with it
        environment = {**self.environment, **more}
        return subprocess.run(
            ["/bin/bash", str(self.script), *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


def unbooted(home: str, pin: str) -> dict[str, str]:
    """Return the metadata of a machine that the fake cloud does not boot by itself."""
    return {**machine_metadata(home, pin, NAME), "startup-script": ""}


@pytest.fixture
def home(tmp_path: Path) -> FleetHome:
    home = FleetHome.open(str(tmp_path / "bucket" / "fleet" / "f"))
    fleet = FleetSpec(
        "f", "p", (ZONE,), plan_workers((ZONE,), 1), NodeRequest("v3-8", "r"), run={"output": "x"}, deployment="d1"
    )
    publish(home, fleet, lambda _: None)
    return home


@pytest.fixture
def vm(tmp_path: Path) -> Vm:
    return Vm(tmp_path / "vm", {"GCE_METADATA_HOST": "127.0.0.1:1"})


def test_a_bare_machine_is_bootstrapped_once(home: FleetHome, vm: Vm) -> None:
    words = ("--home", home.folder.url, "--node", NAME, "--zone", ZONE)
    done = vm.boot(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    wheel = home.read_fleet().wheel
    calls = vm.calls()
    assert calls[0].startswith("uv venv --quiet --python 3.12")
    assert calls[1].endswith(f" --require-hashes -r {vm.folder}/opt/requirements.txt")
    assert calls[2].endswith(f" --no-deps {vm.folder}/opt/{wheel}")
    assert calls[3:] == [
        "systemctl daemon-reload",
        "systemctl enable spile-worker.service",
        "systemctl restart spile-worker.service",
    ]
    assert home.read_reports()[NAME].phase == "installing"
    unit = (vm.folder / "units" / "spile-worker.service").read_text()
    assert f"ExecStart=/bin/bash {vm.folder}/opt/launch.sh" in unit
    assert "WantedBy=multi-user.target" in unit
    launch = (vm.folder / "opt" / "launch.sh").read_text()
    assert f'-m spile.fleet.agent --home "{home.folder.url}" --node "{NAME}" --zone "{ZONE}" --host "0"' in launch
    assert vm.boot(*words).returncode == 0
    again = vm.calls()
    assert not any(call.startswith("uv") for call in again), "a second boot installs nothing"
    assert again[-1] == "systemctl start spile-worker.service", "and leaves a running worker alone"
    assert vm.boot(*words, "--force").returncode == 0
    assert any(call.startswith("uv pip install") for call in vm.calls()), "--force installs anew"


def test_a_new_wheel_is_installed(home: FleetHome, vm: Vm) -> None:
    words = ("--home", home.folder.url, "--node", NAME)
    vm.boot(*words)
    vm.calls()
    (vm.folder / "opt" / "installed").write_text("spile-0.0.0.whl\n")
    vm.boot(*words, "--install-only")
    calls = vm.calls()
    assert any("uv pip install" in call for call in calls)
    assert not any("systemctl" in call for call in calls)


def test_a_failed_installation_is_reported_in_the_bucket(home: FleetHome, vm: Vm) -> None:
    (vm.folder / "broken").touch()
    done = vm.boot("--home", home.folder.url, "--node", NAME)
    assert done.returncode == 1
    report = home.read_reports()[NAME]
    assert (report.verdict, report.deployment) == ("crashed", "d1")
    assert "no matching distribution" in report.error


def test_missing_chips_are_reported_in_the_bucket(home: FleetHome, vm: Vm) -> None:
    done = vm.boot("--home", home.folder.url, "--node", NAME, SPILE_EXPECT="tpu", JAX_PLATFORMS="cpu")
    assert done.returncode == 1
    report = home.read_reports()[NAME]
    assert report.verdict == "crashed"
    assert "JAX sees no TPU" in report.error
    assert "sees 1 cpu devices" in report.error


def test_an_old_python_is_refused(home: FleetHome, vm: Vm) -> None:
    old = vm.folder / "old"
    old.write_text('#!/bin/bash\n[ "$1" = --version ] && echo Python 3.10.6 && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = vm.boot("--home", home.folder.url, "--node", NAME, SPILE_PYTHON=str(old))
    assert done.returncode == 1
    assert "expected Python 3.11 or newer, found Python 3.10.6" in done.stdout


def test_no_assignment_and_unknown_flags(vm: Vm) -> None:
    done = vm.boot()
    assert done.returncode == 2
    assert "no assignment: expected the metadata spile-home and spile-node" in done.stderr
    done = vm.boot("--wrong")
    assert (done.returncode, "unknown flag --wrong" in done.stderr) == (2, True)


def test_a_host_without_a_number_is_not_host_0(home: FleetHome, vm: Vm) -> None:
    """Otherwise every host of a slice would report for all."""
    words = ("--home", home.folder.url, "--node", NAME, "--zone", ZONE)
    (vm.folder / "dev" / "vfio").mkdir(parents=True)
    (vm.folder / "dev" / "vfio" / "0").touch()
    chips = {"SPILE_DEVICES": str(vm.folder / "dev"), "SPILE_TRIES": "2"}
    done = vm.boot(*words, **chips)
    assert done.returncode == 1
    assert "does not say which host of its slice this is: expected agent-worker-number, found no answer" in done.stderr
    assert done.stderr.count("curl: ") == 2, "asked again"
    assert (vm.calls(), home.read_reports()) == ([], {})
    assert vm.boot(*words, "--host", "3", **chips).returncode == 0
    assert '--host "3"' in (vm.folder / "opt" / "launch.sh").read_text()


def test_a_metadata_server_that_fails_at_first_is_asked_again(home: FleetHome, vm: Vm, fake: FakeCloud) -> None:
    fake.cloud.create(ZONE, NAME, {"acceleratorType": "v5p-16"})
    (vm.folder / "dev").mkdir()
    (vm.folder / "dev" / "accel0").touch()
    machine = f"/vm/{ZONE}/{NAME}/1"
    attribute = f"{machine}/computeMetadata/v1/instance/attributes/agent-worker-number"
    fake.admin("fault", {"path": attribute, "status": 503, "count": 2})
    server = f"127.0.0.1:{fake.port}{machine}"
    done = vm.boot(
        "--home", home.folder.url, "--node", NAME, SPILE_DEVICES=str(vm.folder / "dev"), GCE_METADATA_HOST=server
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert fake.api.faults[0].count == 0
    assert f'--zone "{ZONE}" --host "1"' in (vm.folder / "opt" / "launch.sh").read_text()


def test_the_assignment_comes_from_the_metadata_server_and_the_wheel_from_gcs(tmp_path: Path, fake: FakeCloud) -> None:
    from tests.fakes.gcs import FakeGcs

    with FakeGcs() as gcs, pytest.MonkeyPatch.context() as patch:
        gcs.add_bucket("b")
        patch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
        home = FleetHome.open("gs://b/fleet/f")
        fleet = FleetSpec(
            "f", "p", (ZONE,), plan_workers((ZONE,), 1), NodeRequest("v3-8", "r"), run={"output": "x"}, deployment="d"
        )
        published = publish(home, fleet, lambda _: None)
        wheel = published.wheel
        metadata = unbooted(home.folder.url, sha256(published.to_json()))
        fake.cloud.create(ZONE, NAME, {"acceleratorType": "v3-8", "metadata": metadata})
        vm = Vm(
            tmp_path / "vm",
            {
                "GCE_METADATA_HOST": f"127.0.0.1:{fake.port}/vm/{ZONE}/{NAME}/0",
                "STORAGE_EMULATOR_HOST": gcs.url,
            },
        )
        done = vm.boot()
        assert done.returncode == 0, done.stdout + done.stderr
        assert home.read_reports()[NAME].phase == "installing"
        assert (vm.folder / "opt" / str(wheel)).read_bytes() == home.folder.get(str(wheel))
        secret = (vm.folder / "opt" / "secret.env").read_text()
        assert secret == f"SPILE_POD_SECRET={metadata['spile-secret']}\n", "what the slice's hosts share"
        assert f'--zone "{ZONE}"' in (vm.folder / "opt" / "launch.sh").read_text()


def test_as_a_machine_runs_it_in_a_namespace_of_its_own(home: FleetHome, vm: Vm) -> None:
    """As root, with nothing in the environment, at the places of a real machine, which are mounts of its own here."""
    unshare = shutil.which("unshare")
    if unshare is None or os.getuid() != 0:
        pytest.skip("needs root and unshare")
    fence = f"""
set -e
mount -t tmpfs tmpfs /opt
printf '#!/bin/bash\\necho "systemctl $*" >> /opt/calls\\n' > /opt/systemctl
chmod +x /opt/systemctl
if real="$(command -v systemctl)"; then mount --bind /opt/systemctl "$real"; else cp /opt/systemctl {vm.folder}/bin; fi
cp -a /etc /opt/etc
mount --bind /opt/etc /etc
mkdir -p /etc/systemd/system /opt/dev
touch /opt/dev/accel0
env -i PATH={vm.folder}/bin:/usr/sbin:/usr/bin:/bin SPILE_DEVICES=/opt/dev SPILE_TRIES=1 SPILE_EXPECT=any \\
  bash {vm.script} --home {home.folder.url} --node {NAME} --host 0
cat /opt/spile/launch.sh
stat -c 'folder %n %U %G %a' /opt/spile /opt/spile/worker /opt/spile/fleet.json /opt/dev/accel0
as_worker="setpriv --reuid spile --regid spile --init-groups"
$as_worker touch /opt/spile/worker/mine
$as_worker test -x /opt/spile/venv/bin/python
! $as_worker cat /opt/spile/fleet.json
! $as_worker touch /opt/spile/venv/bin/python
cat /opt/calls /etc/systemd/system/spile-worker.service
ls /opt/spile
"""
    (vm.folder / "bin" / "systemctl").unlink()
    (vm.folder / "bin" / "uv").write_text(UV.replace("{python}", sys.executable).replace("$HOME/calls", "/opt/calls"))
    words = [unshare, "--mount", "--propagation", "private", "/bin/bash", "-c", fence]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if "Operation not permitted" in done.stderr or "permission denied" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "uv venv --quiet --python 3.12 /opt/spile/venv" in done.stdout
    assert "systemctl restart spile-worker.service" in done.stdout
    assert "ExecStart=/bin/bash /opt/spile/launch.sh" in done.stdout
    assert 'Environment="HOME=/root"' in done.stdout, "GCE starts it without a home"
    assert "folder /opt/spile root root 711" in done.stdout
    assert "folder /opt/spile/worker spile spile 700" in done.stdout
    assert "folder /opt/spile/fleet.json root root 600" in done.stdout, "a secret may be in it"
    assert "folder /opt/dev/accel0 root spile 66" in done.stdout, "the worker may use the chips"
    assert "setpriv --reuid spile --regid spile --init-groups env HOME=/opt/spile/worker" in done.stdout
    assert "LimitMEMLOCK=infinity" in done.stdout, "which chips behind vfio need of a user"
    assert {"launch.sh", "installed", "fleet.json", "startup.sh", "venv"} <= set(done.stdout.split())
    assert not Path("/opt/spile").exists(), "outside the namespace nothing changed"


# -- nothing of the bucket but what was deployed -----------------------------------------------------------------------


@pytest.fixture
def pinned(home: FleetHome, vm: Vm, fake: FakeCloud) -> Vm:
    """A machine whose metadata was written by the deploy that filled the bucket."""
    metadata = unbooted(home.folder.url, sha256(home.folder.get("fleet.json")))
    body = {"acceleratorType": "v3-8", "metadata": metadata, "labels": {"spile-fleet": "f"}}
    fake.cloud.create(ZONE, NAME, body)
    vm.environment |= {
        "GCE_METADATA_HOST": f"127.0.0.1:{fake.port}/vm/{ZONE}/{NAME}/0",
        "SPILE_TPU_ENDPOINT": fake.environment()["SPILE_TPU_ENDPOINT"],
        "STORAGE_EMULATOR_HOST": "http://127.0.0.1:9",  # no token travels
        "SPILE_TRIES": "1",
    }
    return vm


@pytest.mark.parametrize("name", ["fleet.json", "startup.sh", "requirements.txt", "the wheel"])
def test_injected_files_in_the_bucket_are_not_run(home: FleetHome, pinned: Vm, name: str) -> None:
    key = str(home.read_fleet().wheel) if name == "the wheel" else name
    home.folder.put(key, home.folder.get(key) + b"\n")
    done = pinned.boot()
    assert done.returncode == 1
    assert f"{home.folder.url}/{key} is not what was deployed: expected" in done.stdout
    assert not [call for call in pinned.calls() if "install" in call or "systemctl" in call]
    assert not (pinned.folder / "opt" / key).exists(), "and it is not left where something would find it"
    report = home.read_reports()[NAME]
    assert (report.verdict, report.deployment) == ("crashed", "d1"), "said to whoever monitors"
    assert "is not what was deployed" in report.error


def test_a_deploy_tells_the_machines_what_they_may_run(home: FleetHome, pinned: Vm, client: CloudTpu) -> None:
    assert pinned.boot().returncode == 0
    first = (pinned.folder / "opt" / "pin").read_text()
    assert first == sha256(home.folder.get("fleet.json"))
    fleet = publish(home, replace(home.read_fleet(), deployment="d2"), lambda _: None)
    assert pinned.boot().returncode == 1, "the bucket alone is not believed"
    assert json.loads((pinned.folder / "opt" / "fleet.json").read_text())["deployment"] == "d1"
    assert pin_machines(client, fleet, home.folder.url) == []
    assert client.node(ZONE, NAME).metadata["spile-node"] == NAME, "the rest of its metadata stays"
    done = pinned.boot()
    assert done.returncode == 0, done.stdout
    assert (pinned.folder / "opt" / "pin").read_text() == sha256(fleet.to_json())
    silent = pinned.boot("--home", home.folder.url, "--node", NAME, GCE_METADATA_HOST="127.0.0.1:1")
    assert silent.returncode == 1, "a machine that was pinned once takes silence for no leave"


def test_a_metadata_server_that_is_behind_the_api(home: FleetHome, pinned: Vm, tmp_path: Path) -> None:
    """A running machine may see old metadata, so the API is asked."""
    fleet = publish(home, replace(home.read_fleet(), deployment="d2"), lambda _: None)
    with FakeCloud(tmp_path / "ahead", times=CloudTimes(0, 0, 0)) as ahead:
        metadata = unbooted(home.folder.url, sha256(fleet.to_json()))
        ahead.cloud.create(ZONE, NAME, {"acceleratorType": "v3-8", "metadata": metadata})
        done = pinned.boot(SPILE_TPU_ENDPOINT=ahead.environment()["SPILE_TPU_ENDPOINT"])
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_requirement_of_a_machine_is_pinned_by_hash() -> None:
    text = machine_requirements().decode()
    assert "://" not in text
    assert " @ " not in text
    blocks = re.findall(r"^\S.*(?:\n {4}.*)*", text, re.MULTILINE)
    names = set()
    for block in blocks:
        assert re.match(r"[a-z0-9.-]+==\S+", block), block
        assert "--hash=sha256:" in block, block
        names.add(block.partition("==")[0])
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"]
    assert {re.split(r"[^\w.-]", each)[0].lower().replace("_", "-") for each in needed} <= names
    assert {"libtpu", "uv"} <= names


# -- the wheel --------------------------------------------------------------------------------------------------------


def test_the_wheel_is_this_code_and_installs(tmp_path: Path) -> None:
    name, data = build_wheel()
    assert (name, data) == build_wheel(), "the same bytes for the same code"
    path = tmp_path / name
    path.write_bytes(data)
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
    assert "spile/fleet/startup.sh" in names
    assert "spile/models/embedded/model.safetensors" in names
    assert not any("__pycache__" in each for each in names)
    target = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(path),
    ]
    done = subprocess.run(pip, capture_output=True, text=True, check=False, env={**os.environ, "PIP_NO_CACHE_DIR": "1"})
    assert done.returncode == 0, done.stderr
    code = "import json, spile, importlib.metadata as m; print(json.dumps([spile.__file__, m.version('spile')]))"
    out = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(target), "PATH": os.environ["PATH"]}, cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    place, version = json.loads(out.stdout)
    assert place.startswith(str(target))
    assert f"spile-{version}-py3-none-any.whl" == name
