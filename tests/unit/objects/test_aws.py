"""AWS credentials as users have them: the environment, a profile, a process; with botocore and without."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends import Clouds
from spile.errors import StoreError, UserError
from spile.objects import clouds as aws
from spile.objects import open_folder
from spile.objects.clouds import aws_endpoint, aws_keys, aws_region
from spile.objects.retry import RequestFailure
from spile.proof.verification import verify
from world import produce

Home = Callable[..., None]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A machine with no AWS setting but those that the test writes: ``home(config=…, credentials=…)``."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(aws, "_session", None)
    (tmp_path / ".aws").mkdir()

    def write(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / ".aws" / name).write_text(text)

    return write


@pytest.fixture
def no_botocore(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "botocore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botocore", None)


@pytest.fixture
def signers(clouds: Clouds, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The access keys that requests to the S3 server were signed with."""
    seen: set[str] = set()
    answer = clouds.s3.answer

    def noted(request: Any) -> Any:
        signed = re.search(r"Credential=([^/]+)/", request.headers.get("authorization", ""))
        seen.add(signed[1] if signed else "nobody")
        return answer(request)

    monkeypatch.setattr(clouds.s3, "answer", noted)
    return seen


def keys_of(access: str, secret: str, token: str | None = None) -> dict[str, Any]:
    return {"access_key_id": access, "secret_access_key": secret, "token": token}


KEYS = "[work]\naws_access_key_id = profile-id\naws_secret_access_key = profile-key\n"


def test_a_profile_with_its_own_region_and_server(
    clouds: Clouds, home: Home, signers: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home(credentials=KEYS, config=f"[profile work]\nregion = eu-west-1\nendpoint_url = {clouds.s3.url}\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert aws_region() == "eu-west-1"
    folder = open_folder(f"s3://bucket/{tmp_path.name}-profile")
    produce(folder, 12)
    assert verify(folder).ok
    assert signers == {"profile-id"}


def test_a_profile_whose_keys_a_process_gives(
    clouds: Clouds, home: Home, signers: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = {"Version": 1, "AccessKeyId": "process-id", "SecretAccessKey": "k", "SessionToken": "t"}
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    home(config=f"[profile work]\ncredential_process = cat {tmp_path}/keys.json\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("AWS_ENDPOINT_URL", clouds.s3.url)
    assert aws_keys() == keys_of("process-id", "k", "t")
    folder = open_folder(f"s3://bucket/{tmp_path.name}-process")
    produce(folder, 12)
    assert verify(folder).ok
    assert signers == {"process-id"}


def test_the_default_profile_and_the_environment_before_it(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home(credentials=KEYS.replace("work", "default"))
    assert aws_keys() == keys_of("profile-id", "profile-key")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    assert aws_keys() == keys_of("id", "key")


def test_which_server(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home(
        config="[default]\nservices = mine\nendpoint_url = http://all\n"
        "[profile plain]\nendpoint_url = http://all\n[services mine]\ns3 =\n  endpoint_url = http://own\n"
    )
    assert aws_endpoint() == "http://own"
    monkeypatch.setenv("AWS_PROFILE", "plain")
    monkeypatch.setattr(aws, "_session", None)
    assert aws_endpoint() == "http://all"
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert aws_endpoint() is None
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://any")
    assert aws_endpoint() == "http://any"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3")
    assert aws_endpoint() == "http://s3"


EXPECTED = "expected a profile or a role that works, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, found"
FAILS = "[profile work]\ncredential_process = sh -c 'echo hush-hush >&2; exit 3'\n"
SSO = "[profile work]\nsso_start_url = https://x\nsso_region = us-east-1\nsso_account_id = 1\nsso_role_name = r\n"


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ("[profile other]\n", "no such profile. Set AWS_PROFILE to one of: aws configure list-profiles"),
        ("[profile work]\naws_access_key_id = hush-hush\n", "half of a key. Run: aws configure"),
        (FAILS, "a source of keys that failed. Check with: aws sts get-caller-identity"),
        (SSO, "an SSO session that has ended. Run: aws sso login"),
        ("[profile work\n", "a config file that cannot be read. Correct ~/.aws/config."),
    ],
)
def test_a_profile_that_does_not_work_is_one_line(
    home: Home, monkeypatch: pytest.MonkeyPatch, config: str, found: str
) -> None:
    home(config=config)
    monkeypatch.setenv("AWS_PROFILE", "work")
    with pytest.raises(UserError) as refused:
        aws_keys()
    assert str(refused.value) == f"no AWS credentials from the profile work: {EXPECTED} {found}"
    with pytest.raises(UserError, match="no AWS credentials from the profile work"):
        open_folder("s3://bucket/x").get("y")


def test_a_server_of_keys_that_does_not_answer_is_asked_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.exceptions import EndpointConnectionError

    class Session:
        def get_credentials(self) -> None:
            raise EndpointConnectionError(endpoint_url="http://127.0.0.1:1")

    monkeypatch.setattr(aws, "_session", Session())
    with pytest.raises(RequestFailure) as trouble:
        aws_keys()
    assert trouble.value.transient
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.05")
    with pytest.raises(StoreError, match="cannot read s3://b/x: found the credentials could not be refreshed"):
        open_folder("s3://b").get("x")


def test_keys_that_worked_and_cannot_be_renewed_are_no_mistake_of_the_users(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused at the first request it is exit code 2; after an hour's work it is tried again, and is exit code 1."""
    from botocore.credentials import ReadOnlyCredentials
    from botocore.exceptions import CredentialRetrievalError

    class Session:
        broken = True

        def get_credentials(self) -> Session:
            return self

        def get_frozen_credentials(self) -> ReadOnlyCredentials:
            if self.broken:
                raise CredentialRetrievalError(provider="process", error_msg="sesame")
            return ReadOnlyCredentials("AKIA", "secret", None)

    session = Session()
    monkeypatch.setattr(aws, "_session", session)
    monkeypatch.setattr(aws, "_session_with_keys", None)
    with pytest.raises(UserError, match="a source of keys that failed"):
        aws_keys()
    session.broken = False
    assert aws_keys()["access_key_id"] == "AKIA"
    session.broken = True
    with pytest.raises(RequestFailure) as trouble:
        aws_keys()
    assert trouble.value.transient
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.05")
    with pytest.raises(StoreError, match="the credentials could not be refreshed") as ended:
        open_folder("s3://b").get("x")
    assert ended.value.exit_code == 1
    assert "sesame" not in str(ended.value)


def test_missing_credentials_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for verb in (lambda f: f.get("x"), lambda f: f.info("x"), lambda f: f.put("x", b"")):
        with pytest.raises(UserError, match=r"no AWS credentials: expected a profile.*Run: aws configure"):
            verb(open_folder("s3://b"))


NO_BOTOCORE = (
    "no AWS credentials: expected AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, found neither. "
    "Set both, or install botocore for profiles, SSO and roles: pip install 'spile[s3]'"
)


@pytest.mark.usefixtures("no_botocore")
def test_without_botocore_the_error_names_what_to_install(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home(credentials=KEYS)
    monkeypatch.setenv("AWS_PROFILE", "work")
    with pytest.raises(UserError) as refused:
        aws_keys()
    assert str(refused.value) == NO_BOTOCORE
    assert aws_region() is None
    assert aws_endpoint() is None


def without_botocore(*words: str) -> subprocess.CompletedProcess[str]:
    """A command in a process that cannot import botocore."""
    code = "import sys; sys.modules['botocore'] = None; from spile.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_program_without_botocore(
    clouds: Clouds, home: Home, signers: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = f"s3://bucket/{tmp_path.name}-keys"
    home(credentials=KEYS)
    monkeypatch.setenv("AWS_ENDPOINT_URL", clouds.s3.url)
    monkeypatch.setenv("AWS_PROFILE", "work")
    produce(open_folder(url), 12)
    refused = without_botocore("verify", url)
    assert (refused.returncode, refused.stderr) == (2, f"spile: {NO_BOTOCORE}\n")
    signers.clear()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "env-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "env-key")
    done = without_botocore("verify", url)
    assert done.returncode == 0, done.stderr
    assert "✓ proven" in done.stdout
    assert signers == {"env-id"}
    done = without_botocore("verify", url, "--gc")
    assert done.returncode == 0, done.stderr
    assert "unfinished uploads in s3://bucket are not listed, because botocore is not installed" in done.stderr
    assert signers == {"env-id"}
