"""The cluster key's file, and which addresses are allowed without one."""

import os
import stat
from pathlib import Path

import pytest

from common.config import SecurityConfig
from common.errors import ConfigError
from common.trust import LOOPBACK_ONLY, Trust, derive, read_key, read_trust, write_key


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    write_key(str(path))
    return path


def test_a_new_key_can_be_read_by_its_owner_only_and_each_is_another(key_file: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    write_key(str(tmp_path / "other"))
    assert read_key(str(key_file)) == read_key(str(key_file)) != read_key(str(tmp_path / "other"))


def test_a_key_that_exists_is_never_overwritten(key_file: Path) -> None:
    before = key_file.read_bytes()
    with pytest.raises(ConfigError, match="File exists"):
        write_key(str(key_file))
    assert key_file.read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_that_others_can_read_or_change_is_refused_and_the_fix_is_named(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_trust(SecurityConfig(cluster_key=str(key_file)))


@pytest.mark.parametrize("content", [b"", b"ab" * 31, b"ab" * 33, b"zz" * 32, b"\xff" * 64])
def test_a_file_that_holds_no_key_is_refused_and_not_shown(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no key file: make one with `launch key FILE`") as refused:
        read_key(str(path))
    assert "ab" * 31 not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--cluster-key: cannot read {tmp_path}/nothing: No such file"):
        read_key(f"{tmp_path}/nothing")


def test_no_key_is_shown_where_the_objects_that_hold_it_are(key_file: Path) -> None:
    trust = read_trust(SecurityConfig(cluster_key=str(key_file)))
    assert trust.key is not None
    for secret in (trust.key.inbox, trust.key.sender):
        assert repr(secret) not in repr(trust) and secret.hex() not in repr(trust)
    assert trust.key.inbox != trust.key.sender


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://127.1.2.3:1", "tcp://localhost:1"])
def test_loopback_needs_no_key(address: str) -> None:
    assert LOOPBACK_ONLY.check(address) == address


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "tcp://localhost.example.org:1", "tcp://127.evil:1"])
def test_other_addresses_need_a_key_or_insecure_and_the_error_names_both(address: str) -> None:
    with pytest.raises(ConfigError, match=r"launch key FILE.*--cluster-key FILE.*--insecure"):
        LOOPBACK_ONLY.check(address)
    assert Trust(derive(os.urandom(32))).check(address) == Trust(insecure=True).check(address) == address
