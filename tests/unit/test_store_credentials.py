"""Whether a machine has credentials for an object store, judged by the places alone where its library looks for them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kubetune.errors import ConfigError
from kubetune.rundir.mirror import credentials

NO_ROLE = {"AWS_EC2_METADATA_DISABLED": "true", "NO_GCE_CHECK": "true"}
ROLE_ELSEWHERE = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1/role"}


@pytest.mark.parametrize(
    ("address", "variables"),
    [
        ("s3://b/run", {"AWS_ACCESS_KEY_ID": "a"}),
        ("s3://b/run", {"AWS_PROFILE": "work"}),
        ("s3://b/run", ROLE_ELSEWHERE),
        ("s3://b/run", {"FSSPEC_S3_KEY": "a"}),
        ("gs://b/run", {"GOOGLE_APPLICATION_CREDENTIALS": "key.json"}),
        ("gcs://b/run", {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}),
        ("az://b/run", {"AZURE_STORAGE_CONNECTION_STRING": "a"}),
        ("abfss://b/run", {"AZURE_STORAGE_ACCOUNT_NAME": "a"}),
    ],
)
def test_a_variable_is_enough(address: str, variables: dict[str, str], tmp_path: Path) -> None:
    credentials.require_credentials(address, {**NO_ROLE, "HOME": str(tmp_path), **variables})


def test_a_file_of_credentials_is_enough_but_one_of_a_region_is_not(tmp_path: Path) -> None:
    environ = {**NO_ROLE, "HOME": str(tmp_path)}
    (tmp_path / ".aws").mkdir()
    file = tmp_path / ".aws" / "config"
    file.write_text("[default]\nregion = us-east-1\n")
    with pytest.raises(ConfigError, match="no credentials for s3://b/run: set AWS_ACCESS_KEY_ID"):
        credentials.require_credentials("s3://b/run", environ)
    file.write_text("[default]\nsso_session = work\n")
    credentials.require_credentials("s3://b/run", environ)


def test_settings_of_fsspec_may_hold_credentials(tmp_path: Path) -> None:
    environ = {**NO_ROLE, "HOME": str(tmp_path), "FSSPEC_CONFIG_DIR": str(tmp_path)}
    (tmp_path / "conf.json").write_text('{"s3": {"anon": true}}')
    credentials.require_credentials("s3://b/run", environ)


@pytest.mark.parametrize("address", ["s3://b/run", "gs://b/run"])
def test_variables_of_another_store_are_no_credentials(address: str, tmp_path: Path) -> None:
    environ = {**NO_ROLE, "HOME": str(tmp_path), "AZURE_CLIENT_ID": "a", "AWS_REGION": "us-east-1"}
    with pytest.raises(ConfigError, match=f"no credentials for {address}"):
        credentials.require_credentials(address, environ)


def test_a_machine_that_may_have_a_role_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials._may_have_role.cache_clear()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(credentials, "_OF_MACHINES", server.getsockname())
        credentials.require_credentials("az://b/run", {"HOME": str(tmp_path)})
    credentials._may_have_role.cache_clear()
