"""Whom a process trusts: the cluster key that all processes of a fleet have, and the rule about addresses without one.

Owns the key's file and what is derived from the key. Opens no socket. The key itself never leaves this module: it is not in a
`repr`, a message, a log or a command line, which names the file.
"""

import hashlib
import os
import secrets
import stat
from dataclasses import dataclass, field

from common.addresses import is_loopback
from common.config import SecurityConfig
from common.errors import ConfigError, needs_file

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
