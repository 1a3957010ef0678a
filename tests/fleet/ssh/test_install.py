"""``spile install`` on real sshds, with a stand-in for uv: the version here is the version there, on PATH."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fleet.ssh.loopback import Hosts, finish, spile
from spile.fleet.install import build_wheel

UV = """#!/bin/bash
echo "uv $*" >> "$HOME/calls"
if [ "$1" = venv ]; then
  mkdir -p "${@: -1}/bin"
  printf '#!/bin/bash\\nexec {python} "$@"\\n' > "${@: -1}/bin/python"
  printf '#!/bin/bash\\nexec {python} -m spile.cli.main "$@"\\n' > "${@: -1}/bin/spile"
  chmod +x "${@: -1}/bin/python" "${@: -1}/bin/spile"
fi
if [ "$1 $2" = "pip install" ] && [ -f "$HOME/broken" ]; then echo "no matching distribution"; exit 1; fi
"""


@pytest.fixture
def bare(hosts: Hosts) -> Hosts:
    for host in hosts.hosts:
        (host.home / "bin").mkdir()
        (host.home / "bin" / "uv").write_text(UV.replace("{python}", sys.executable))
        (host.home / "bin" / "uv").chmod(0o755)
        (host.home / ".profile").write_text('export PATH="$HOME/bin:$PATH" SPILE_NO_SYSTEM_LINK=1\n')
    return hosts


def calls(bare: Hosts, number: int) -> list[str]:
    path = bare[number].home / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


@pytest.mark.slow
def test_run_install_puts_this_version_on_path_once(bare: Hosts, project: Path) -> None:
    code, out, err = finish(spile(project, "run", *bare.flags(0, 1), "--install", "--", "which spile; spile --version"))
    assert (code, err) == (0, ""), out
    wheel, _ = build_wheel()
    assert f"{wheel} is on 2 hosts, as spile on PATH" in out
    assert out.count("/.local/bin/spile") == 2
    for number in (0, 1):
        made, needed, installed = calls(bare, number)
        assert made.startswith("uv venv")
        assert needed.endswith(f" --require-hashes -r {bare[number].home}/.spile/requirements.here")
        assert installed.endswith(f" --no-deps {bare[number].home}/.spile/{wheel}")
        listed = (bare[number].home / ".spile" / "requirements.here").read_text()
        assert "jax==" in listed, "what a host without chips needs, by hash"
        assert "libtpu==" not in listed
    code, out, err = finish(spile(project, "install", *bare.flags(0, 1)))
    assert (code, err, calls(bare, 0)) == (0, "", []), "the same version again installs nothing"
    assert (bare[0].home / ".profile").read_text().count("# spile install") == 1
    code, _, _ = finish(spile(project, "install", *bare.flags(0), "--force"))
    assert (code, len(calls(bare, 0))) == (0, 3)
    assert bare.processes() == []


def test_a_host_with_a_gpu_has_hashes_too(bare: Hosts, project: Path) -> None:
    profile = bare[0].home / ".profile"
    profile.write_text(profile.read_text() + "export SPILE_EXTRAS=[cuda]\n")
    code, out, err = finish(spile(project, "install", *bare.flags(0)))
    assert (code, err) == (0, ""), out
    assert "--require-hashes" in calls(bare, 0)[1]
    pins = [line for line in (bare[0].home / ".spile" / "requirements.here").read_text().splitlines() if "==" in line]
    names = [line.partition("==")[0] for line in pins]
    assert {"jax", "jax-cuda13-plugin", "nvidia-cudnn-cu13"} <= set(names)
    assert "libtpu" not in names
    assert len(names) == len(set(names)), "an installer takes no name twice"


@pytest.mark.slow
def test_a_host_that_fails_is_named(bare: Hosts, project: Path) -> None:
    (bare[1].home / "broken").touch()
    code, _, err = finish(spile(project, "install", *bare.flags()))
    assert code == 1
    assert err.startswith("spile: not installed on 1 of 4 hosts: found ")
    assert bare[1].name in err
    assert "the start failed" in err
    assert err.count("\n") == 1
