from __future__ import annotations

from pathlib import Path

import pytest

from backends import cloud_folder, cloud_url, clouds, folder, folder_url, shared_clouds

__all__ = ["cloud_folder", "cloud_url", "clouds", "folder", "folder_url", "shared_clouds"]

_ON_S3_TOO = ("test_race.py", "test_worker_faults.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark crashes on S3 slow, except races and faults: a request to moto takes more CPU time than all else."""
    for item in items:
        crash = item.path.parent == Path(__file__).parent and item.path.name not in _ON_S3_TOO
        if crash and "s3" in getattr(getattr(item, "callspec", None), "params", {}).values():
            item.add_marker("slow")
