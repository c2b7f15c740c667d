"""The files of API keys, of the control key and of the certificate: what is read, what is refused, and that none is shown."""

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

from common.access import KeyRing, read_access, read_again, read_api_keys, read_control_key, require_guarded, write_key
from common.config import AccessConfig
from common.errors import ConfigError

ALICE, BOB = "a" * 20, "b" * 20


def private(path: Path, text: str) -> str:
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def test_each_line_is_a_name_and_a_key_and_comments_are_not_read(tmp_path: Path) -> None:
    path = private(tmp_path / "keys", f"# clients\n\nalice {ALICE}\n  build-farm.2\t{BOB}  \n")
    assert read_api_keys(path) == {ALICE: "alice", BOB: "build-farm.2"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "has 0 keys"),
        (f"{ALICE}\n", "line 1 .* a name and a key"),
        (f"alice {ALICE} {BOB}\n", "line 1"),
        (f"# x\nal/ice {ALICE}\n", "line 2 .* no name"),
        ("alice short\n", "16 to 512 visible"),
        (f"alice {ALICE}\nalice {BOB}\n", "line 2 .* earlier line"),
        (f"alice {ALICE}\nbob {ALICE}\n", "line 2 .* earlier line"),
        (f"alice {ALICE}é\n", "ASCII"),
    ],
)
def test_a_line_that_is_wrong_is_named_and_no_key_is_shown(tmp_path: Path, text: str, what: str) -> None:
    path = private(tmp_path / "keys", text)
    with pytest.raises(ConfigError, match=f"--api-keys: .*{what}") as refused:
        read_api_keys(path)
    assert ALICE not in str(refused.value) and "short" not in str(refused.value)


def test_files_that_others_can_read_are_refused_by_their_flag(tmp_path: Path) -> None:
    path = private(tmp_path / "keys", f"alice {ALICE}\n")
    Path(path).chmod(0o640)
    for read, flag in ((read_api_keys, "--api-keys"), (read_control_key, "--control-key")):
        with pytest.raises(ConfigError, match=f"{flag}: others can read .* chmod 600"):
            read(path)


def test_a_ring_knows_its_keys_and_no_other_and_holds_none_of_them() -> None:
    ring = KeyRing({ALICE: "alice", BOB: "bob"})
    assert [ring.name_of(key.encode()) for key in (ALICE, BOB, ALICE[:-1], f"{BOB}b", "")] == ["alice", "bob", None, None, None]
    held = repr(vars(ring))
    for key in (ALICE, BOB):
        digests = (hashlib.sha256(key.encode()).digest(), hashlib.blake2b(key.encode(), digest_size=32).digest())
        assert key not in held and not any(repr(digest) in held for digest in digests)


def test_keys_are_taken_in_again_and_a_file_that_became_bad_changes_nothing(tmp_path: Path) -> None:
    control = str(tmp_path / "control")
    write_key(control)
    config = AccessConfig(api_keys=private(tmp_path / "keys", f"alice {ALICE}\n"), control_key=control)
    access = read_access(config)
    assert access.api_keys is not None and access.control_key is not None
    private(tmp_path / "keys", f"bob {BOB}\n")
    read_again(access, config)
    assert (access.api_keys.name_of(ALICE.encode()), access.api_keys.name_of(BOB.encode())) == (None, "bob")
    private(tmp_path / "keys", "nonsense\n")
    with pytest.raises(ConfigError):
        read_again(access, config)
    assert access.api_keys.name_of(BOB.encode()) == "bob"
    assert access.control_key.name_of(Path(control).read_bytes().strip()) == "control"
    assert ALICE not in repr(access) and BOB not in repr(access)


@pytest.mark.parametrize(("fields", "flag"), [
    ({"api_keys": "x"}, "--control-key must be given with --api-keys"),
    ({"tls_cert": "x"}, "--tls-key must be given with --tls-cert"),
    ({"tls_key": "x"}, "--tls-cert must be given with --tls-key"),
])  # fmt: skip
def test_what_belongs_together_is_asked_for(fields: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        AccessConfig(**fields)


def test_http_beyond_loopback_needs_api_keys_or_insecure_and_the_error_names_both() -> None:
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0 .*--api-keys FILE.*--control-key FILE.*--insecure"):
        require_guarded(AccessConfig(), "tcp://0.0.0.0:0", insecure=False)
    require_guarded(AccessConfig(), "tcp://127.0.0.1:0", insecure=False)
    require_guarded(AccessConfig(), "tcp://0.0.0.0:0", insecure=True)
    require_guarded(AccessConfig(api_keys="x", control_key="y"), "tcp://0.0.0.0:0", insecure=False)


def test_a_certificate_that_cannot_be_used_is_refused_by_the_flag_of_what_is_wrong(tmp_path: Path) -> None:
    cert, key, other, locked = (str(tmp_path / name) for name in ("cert", "key", "other", "locked"))
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=x"]
    subprocess.run([*new, "-nodes", "-keyout", key, "-out", cert], check=True, capture_output=True)
    curve = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subprocess.run([*curve, "-out", other], check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:xyzw", "-out", locked], check=True)
    assert read_access(AccessConfig(tls_cert=cert, tls_key=key)).tls is not None
    for of_cert, of_key, message in (
        (f"{tmp_path}/none", key, "--tls-cert: cannot read .*none: No such file"),
        (cert, f"{tmp_path}/none", "--tls-key: cannot read .*none: No such file"),
        (cert, other, "--tls-key: .*other is not the key of the certificate"),
        (cert, locked, "--tls-cert and --tls-key: .* without a password"),
        (key, key, "--tls-cert and --tls-key: .* must hold a certificate"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_access(AccessConfig(tls_cert=of_cert, tls_key=of_key))


@pytest.mark.parametrize(
    "origin", ["https://chat.example.com/", "HTTPS://a.example", "chat.example.com", "null", "https://*.example.com", "*"]
)
def test_an_origin_that_no_browser_sends_is_refused_and_so_is_every_origin_without_keys(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allow-origin must be"):
        AccessConfig(allow_origin=("https://a.example:8443", origin))
    assert read_access(AccessConfig(allow_origin=("http://[::1]:80", "tauri://localhost"))).origins[1] == "tauri://localhost"
    AccessConfig(api_keys="x", control_key="y", allow_origin=("*",))
