from __future__ import annotations

from fleet.ssh.conftest import empty_hosts, hosts, project

__all__ = ["empty_hosts", "hosts", "project"]
