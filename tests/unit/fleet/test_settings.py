from __future__ import annotations

from pathlib import Path

import pytest

from spile.errors import UserError
from spile.fleet.cloud_tpu import read_settings


def gcloud_files(folder: Path) -> dict[str, str]:
    (folder / "configurations").mkdir()
    (folder / "active_config").write_text("work\n")
    (folder / "configurations" / "config_work").write_text("[core]\nproject = p1\n[compute]\nzone = us-east1-d\n")
    return {"CLOUDSDK_CONFIG": str(folder)}


def test_gclouds_own_files_are_read(tmp_path: Path) -> None:
    settings = read_settings(environment=gcloud_files(tmp_path))
    assert (settings.project, settings.zone) == ("p1", "us-east1-d")
    assert settings.endpoint == "https://tpu.googleapis.com/"
    assert not settings.anonymous


def test_flag_wins_over_variable_over_file(tmp_path: Path) -> None:
    environment = gcloud_files(tmp_path)
    assert read_settings(environment={**environment, "CLOUDSDK_CORE_PROJECT": "p2"}).project == "p2"
    assert read_settings(environment={**environment, "CLOUDSDK_CORE_PROJECT": "p2"}, project="p3").project == "p3"


def test_a_plain_http_endpoint_never_gets_a_token(tmp_path: Path) -> None:
    settings = read_settings(environment={**gcloud_files(tmp_path), "SPILE_TPU_ENDPOINT": "http://127.0.0.1:5"})
    assert settings.anonymous
    assert settings.endpoint == "http://127.0.0.1:5/"


def test_no_project(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no Google Cloud project\. Pass --project, or run: gcloud config set project"):
        read_settings(environment={"CLOUDSDK_CONFIG": str(tmp_path)})


@pytest.mark.parametrize("project", ["p/../q", "../q", "p q", "p?x=1", "p\n", "p%2f..%2fq"])
def test_a_project_that_would_be_another_path_is_refused(tmp_path: Path, project: str) -> None:
    with pytest.raises(UserError, match=r"--project: expected a project's id"):
        read_settings(environment={"CLOUDSDK_CONFIG": str(tmp_path)}, project=project)
    with pytest.raises(UserError, match=r"--project: expected a project's id"):
        read_settings(environment={"CLOUDSDK_CONFIG": str(tmp_path), "GOOGLE_CLOUD_PROJECT": project})
