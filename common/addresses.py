"""Addresses of this host, and names: where a process binds, how others reach it, and how instances and routers may be called.

Owns the translation and the rule of names. Opens no connection. Imports nothing heavy, so a flag can be checked before anything
is loaded.
"""

import ipaddress
import re
import secrets
import socket

from common.errors import ConfigError

ROUTER_NAME = "router"
TAKEN_NAME = re.compile(rf"{ROUTER_NAME}([-.@].*)?|detokenizer")
"""Lives of routers, their detokenizers, and what an instance calls the router at an address."""
INSTANCE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def new_router_name() -> str:
    """The name of one life of a router. No other life of any router has it."""
    return f"{ROUTER_NAME}-{secrets.token_hex(8)}"


def check_instance_id(name: str) -> str:
    """Returns the name if an instance may have it. Raises ConfigError."""
    if INSTANCE_NAME.fullmatch(name) is None or TAKEN_NAME.fullmatch(name) is not None:
        rule = "1 to 64 letters, digits, '.', '_' or '-', and not router, router-…, router.… or detokenizer"
        raise ConfigError(f"an instance's name must be {rule}; it is {name[:80]!r}")
    return name


OWNER_CHARS = 64
"""Most characters of the name of an API key."""


ANY = "0.0.0.0"
LOOPBACK = "127.0.0.1"
_ADDRESS = re.compile(r"tcp://(?P<host>[A-Za-z0-9._-]+):(?P<port>\d{1,5})")


def bind_address(host: str, flag: str) -> str:
    """The IPv4 address of a host name: ZeroMQ binds to numbers only. Raises ConfigError that names the flag."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"{flag} {host!r} is no address or name of this host: {error}") from error


def check_address(address: str) -> str:
    """Returns the address if it has the form tcp://host:port. Raises ConfigError."""
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(f"{address!r} is not an address: write tcp://host:port (IPv4 or a host name)")
    return address


def check_leader(leader: str, host: str) -> None:
    """Whether --leader is an address of rank 0 that a rank with this --host can reach, or listen at. Raises ConfigError."""
    check_address(leader)
    if host_of(leader) == ANY or port_of(leader) == 0:
        raise ConfigError(f"--leader must be the address of rank 0 as other ranks reach it, with a port; it is {leader}")
    if is_loopback(f"tcp://{host}:0") and not is_loopback(leader):
        raise ConfigError(f"--host: give the address of this host as other ranks reach it: --leader {leader} is beyond {host}")


def is_loopback(address: str) -> bool:
    """Whether tcp://host:port stays on this host. No name is looked up: of names, only localhost counts."""
    host = host_of(address)
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def on_one_host(one: str, other: str) -> bool:
    """Whether two addresses tcp://host:port surely belong to one host: the same number, or both on the loopback interface. No
    name is looked up, for names move."""
    if is_loopback(one) and is_loopback(other):
        return True
    try:
        return ipaddress.ip_address(host_of(one)) == ipaddress.ip_address(host_of(other))
    except ValueError:
        return False


def reachable(address: str, host: str) -> str:
    """An address as it is told to others: one that was bound on every interface names none, and gets `host` instead."""
    return address.replace(f"//{ANY}:", f"//{host}:")


def among_ranks(host: str, leader: str) -> str:
    """Where a rank of an instance that listens on `host` is reached by the others. leader: where rank 0 listens. Ranks of one
    host need no interface."""
    if is_loopback(leader):
        return LOOPBACK
    return host_for_peers() if host == ANY else host


def host_of(address: str) -> str:
    """The host of an address tcp://host:port."""
    return address.removeprefix("tcp://").rsplit(":", 1)[0]


def port_of(address: str) -> int:
    """The port of an address that ends in it, whatever its scheme."""
    return int(address.rsplit(":", 1)[1])


def free_port(host: str = "") -> int:
    """A port that nobody listens at now, on this address or on all."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def host_for_peers() -> str:
    """This host's address on the interface of its default route; the loopback address where there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent, the kernel only chooses a route
        except OSError:
            return LOOPBACK
        address: str = probe.getsockname()[0]
        return address


def require_free(host: str, port: int, flag: str = "--port") -> None:
    """flag: says the port. Raises ConfigError when somebody listens there: processes that share a port may join any other's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind_address(host, "--host"), port))
        except OSError as error:
            where = f"{host}:{port}: {error.strerror}"
            raise ConfigError(f"cannot listen on {where}. Choose another {flag}, or 0") from error
