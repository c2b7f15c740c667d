"""Who may talk to whom: the cluster key that all processes of a fleet have, the API keys and the control key of the router's HTTP
side, the certificate that the router shows, and the rules about addresses without keys.

Owns their files, and what is derived from the cluster key. API keys are kept as digests only; no key is ever in a `repr`, an
error, a log or a command line, which name the files. Opens no socket. Does not know HTTP.

A file of API keys has one key in each line, behind its name. Lines that begin with # are comments:

    alice 5f1c0e2ab9d34c6e8f7a
    build-farm 83d0a6c1f2e94b57ad10
"""

import hashlib
import os
import re
import secrets
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path

from common.addresses import OWNER_CHARS, host_of, is_loopback
from common.config import AccessConfig, SecurityConfig
from common.errors import ConfigError, needs_file

# --- the cluster key ---------------------------------------------------------------------------------------------------------

KEY_BYTES = 32
MOST_KEY_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """Secret keys of Curve25519, 32 bytes each, derived from the cluster key: one for inboxes, one for those who send.

    Two keys, so that nothing an inbox says can be reflected as the word of a sender.
    """

    inbox: bytes = field(repr=False)
    sender: bytes = field(repr=False)


def derive(secret: bytes) -> ClusterKey:
    """From the 32 bytes of a key file."""
    inbox, sender = (
        hashlib.blake2b(secret, digest_size=KEY_BYTES, person=use).digest() for use in (b"tandem inbox", b"tandem sender")
    )
    return ClusterKey(inbox, sender)


@dataclass(frozen=True, slots=True)
class Trust:
    """Whom a process lets in, and where it may listen and connect."""

    key: ClusterKey | None = None
    """None speaks plain ZeroMQ."""
    insecure: bool = False
    """Without a key, addresses beyond loopback are allowed all the same."""

    def check(self, address: str) -> str:
        """Returns tcp://host:port if this process may listen or connect there. Raises ConfigError. Looks up no name."""
        if self.key is None and not self.insecure and not is_loopback(address):
            raise ConfigError(
                f"{address} is beyond this host, where anybody could talk to the fleet: make a key with `launch key FILE` and "
                "give it to every process of the fleet with --cluster-key FILE, or, on a network where you trust everybody, "
                "say --insecure"
            )
        return address


LOOPBACK_ONLY = Trust()


def read_trust(config: SecurityConfig) -> Trust:
    """Reads the key's file. Raises ConfigError, which never shows what the file holds."""
    key = read_key(config.cluster_key) if config.cluster_key else None
    return Trust(key, config.insecure == "on")


def write_key(path: str) -> None:
    """Make a key in a new file that only its owner can read. Raises ConfigError when the file is there already."""
    with needs_file(f"cannot make the key file {path}"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(KEY_BYTES) + "\n")


def read_private_file(path: str, flag: str, most_bytes: int) -> bytes:
    """What a file holds that only its owner may read. Raises ConfigError that names the flag."""
    with needs_file(f"{flag}: cannot read {path}"), open(path, "rb") as file:
        status = os.fstat(file.fileno())
        content = file.read(most_bytes + 1)
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"{flag}: others can read {path}: run chmod 600 {path}, or make a new key if somebody has read it")
    if len(content) > most_bytes:
        raise ConfigError(f"{flag}: {path} is longer than {most_bytes} bytes: it is not the file that is meant")
    return content


def read_key(path: str) -> ClusterKey:
    """Raises ConfigError."""
    text = read_private_file(path, "--cluster-key", MOST_KEY_FILE_BYTES)
    try:
        secret = bytes.fromhex(text.decode())
    except ValueError:
        secret = b""
    if len(secret) != KEY_BYTES:
        raise ConfigError(f"--cluster-key: {path} is no key file: make one with `launch key FILE`")
    return derive(secret)


# --- the router's HTTP side --------------------------------------------------------------------------------------------------

MOST_KEYS = 1_000
"""Names of keys are labels of metrics, so there may be only so many."""
MOST_BYTES = 1024 * 1024
DIGEST_BYTES, SLOT_BYTES = 32, 8
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{OWNER_CHARS}}}")
_KEY = re.compile(r"[!-~]{16,512}")
_KEY_RULE = "16 to 512 visible ASCII characters"


class KeyRing:
    """Some keys with their names.

    A presented key is looked up by a digest that a secret of this object goes into. Nobody else can compute it, so how long the
    look-up takes says nothing about any key. The rest of the digest is compared in constant time.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._secret = secrets.token_bytes(DIGEST_BYTES)
        self._nobody = (secrets.token_bytes(DIGEST_BYTES), "")
        self.replace(names)

    def replace(self, names: Mapping[str, str]) -> None:
        """From now on only these keys are known. names: by key."""
        digests = [(self._digest(key.encode()), name) for key, name in names.items()]
        self._known = {digest[:SLOT_BYTES]: (digest, name) for digest, name in digests}

    def name_of(self, key: bytes) -> str | None:
        """None for a key that is not here."""
        digest = self._digest(key)
        known, name = self._known.get(digest[:SLOT_BYTES], self._nobody)
        return name if compare_digest(known, digest) else None

    def names(self) -> set[str]:
        return {name for _, name in self._known.values()}

    def _digest(self, key: bytes) -> bytes:
        return blake2b(key, digest_size=DIGEST_BYTES, key=self._secret).digest()


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use the HTTP side, and how."""

    api_keys: KeyRing | None = None
    """None lets everybody in."""
    control_key: KeyRing | None = None
    """None lets everybody in."""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    """None for plain HTTP."""
    origins: tuple[str, ...] = ()
    """Where web pages may be from; "*": from anywhere."""
    pem: tuple[bytes, bytes] | None = field(default=None, repr=False)
    """The private key and the certificate of `tls`, for servers that do TLS themselves."""


OPEN = Access()


def read_access(config: AccessConfig) -> Access:
    """Reads all files. Raises ConfigError, which never shows what they hold."""
    api_keys, control_key = (KeyRing(names) if names else None for names in _read_keys(config))
    tls = _read_certificate(config.tls_cert, config.tls_key) if config.tls_cert else None
    pem = (Path(config.tls_key).read_bytes(), Path(config.tls_cert).read_bytes()) if config.tls_cert else None
    return Access(api_keys, control_key, tls, config.allow_origin, pem)


def read_again(access: Access, config: AccessConfig) -> None:
    """Take in both files of keys as they are now. Raises ConfigError; then nothing changes."""
    for ring, names in zip((access.api_keys, access.control_key), _read_keys(config), strict=True):
        if ring is not None:
            ring.replace(names)


def _read_keys(config: AccessConfig) -> tuple[dict[str, str], dict[str, str]]:
    """The names of the API keys and of the control key, by key; none where no file is named. Raises ConfigError."""
    control_key = read_control_key(config.control_key)
    return read_api_keys(config.api_keys) if config.api_keys else {}, {control_key: "control"} if control_key else {}


def require_guarded(config: AccessConfig, address: str, *, insecure: bool) -> None:
    """Raises ConfigError unless HTTP may be served at tcp://host:port."""
    if not config.api_keys and not insecure and not is_loopback(address):
        host = host_of(address)
        raise ConfigError(
            f"--host {host} is beyond this host, where anybody could use the HTTP API: give --api-keys FILE (a line `NAME KEY` "
            "for each client) and --control-key FILE (made by `launch key FILE`), or, on a network where you trust everybody, "
            "say --insecure"
        )


def read_api_keys(path: str) -> dict[str, str]:
    """Names by key. Raises ConfigError."""
    names: dict[str, str] = {}
    for number, line in enumerate(_text(path, "--api-keys").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"--api-keys: line {number} of {path}"
        if len(words) != 2:
            raise ConfigError(f"{where} must be a name and a key with a space between them")
        name, key = words
        if _NAME.fullmatch(name) is None:
            raise ConfigError(f"{where} begins with no name of a key: write up to {OWNER_CHARS} letters, digits and . _ -")
        if _KEY.fullmatch(key) is None:
            raise ConfigError(f"{where}: the key must have {_KEY_RULE}; `openssl rand -hex 24` makes one")
        if name in names.values() or key in names:
            raise ConfigError(f"{where} has a name or a key that an earlier line has: each client needs its own")
        names[key] = name
    if not 1 <= len(names) <= MOST_KEYS:
        raise ConfigError(f"--api-keys: {path} has {len(names)} keys: write 1 to {MOST_KEYS}, one in each line, behind its name")
    return names


def read_control_key(path: str) -> str:
    """What the file holds, without white space around it; "" where none is named. Raises ConfigError."""
    if not path:
        return ""
    key = _text(path, "--control-key").strip()
    if _KEY.fullmatch(key) is None:
        raise ConfigError(f"--control-key: {path} must hold one key of {_KEY_RULE}: make it with `launch key FILE`")
    return key


def _text(path: str, flag: str) -> str:
    content = read_private_file(path, flag, MOST_BYTES)
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{flag}: {path} has characters beyond ASCII") from None


def _read_certificate(cert: str, key: str) -> ssl.SSLContext:
    """For a server of TLS 1.2 and later. Raises ConfigError."""
    for flag, path in (("--tls-cert", cert), ("--tls-key", key)):
        with needs_file(f"{flag}: cannot read {path}"), open(path, "rb"):
            pass
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # a key with a password fails, where OpenSSL would ask for it
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"--tls-key: {key} is not the key of the certificate in {cert}") from error
        raise ConfigError(
            f"--tls-cert and --tls-key: {cert} must hold a certificate (and its chain), {key} its key without a password, "
            f"both as PEM: {error.reason or error}"
        ) from error
    return context
