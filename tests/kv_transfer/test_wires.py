"""Counters and speeds of network devices, read from a tree of files like that of Linux."""

from pathlib import Path

import pytest

from kv_transfer.links import RDMA, TCP, Wire, busiest, bytes_sent, fastest_bytes_per_s

ETH, LO, HCA = Wire(TCP, "eth0"), Wire(TCP, "lo"), Wire(RDMA, "mlx5_0:1")
HEADINGS = "Inter-|   Receive                    |  Transmit\n face |bytes    packets errs ...\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """lo, an Ethernet of 25 Gbit/s, a virtual device, and an InfiniBand port of 400 Gbit/s."""
    columns = "{received} 1 0 0 0 0 0 0 {sent} 2 0 0 0 0 0 0"
    devices = {"lo": 70, "eth0": 500, "veth1": 9}
    lines = [f"{name:>6}: {columns.format(received=1, sent=sent)}\n" for name, sent in devices.items()]
    write(tmp_path / "proc/self/net/dev", HEADINGS + "".join(lines))
    for name, speed in {"lo": "100000", "eth0": "25000", "veth1": "-1"}.items():
        write(tmp_path / "sys/class/net" / name / "speed", f"{speed}\n")
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    write(port / "counters/port_xmit_data", "25\n")
    write(port / "state", "4: ACTIVE\n")
    write(port / "rate", "400 Gb/sec (4X NDR)\n")
    return tmp_path


def test_bytes_sent_are_read_for_each_device(host: Path) -> None:
    assert bytes_sent(host) == {LO: 70, ETH: 500, Wire(TCP, "veth1"): 9, HCA: 100}


def test_the_fastest_wire_to_other_hosts_counts_and_one_that_is_down_does_not(host: Path) -> None:
    assert fastest_bytes_per_s(host) == 50e9
    write(host / "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
    assert fastest_bytes_per_s(host) == 25e9 / 8
    write(host / "sys/class/net/eth0/speed", "-1\n")
    assert fastest_bytes_per_s(host) is None


def test_a_host_without_counters_has_no_wires(tmp_path: Path) -> None:
    assert bytes_sent(tmp_path) == {} and fastest_bytes_per_s(tmp_path) is None


@pytest.mark.parametrize(
    ("sent", "carrier"),
    [
        ({LO: 5, ETH: 1}, None),
        ({LO: 1000, ETH: 7}, LO),
        ({LO: 1000, ETH: 1100}, ETH),
        ({HCA: 1000, ETH: 5000}, HCA),
        ({HCA: 10, ETH: 1200}, ETH),
        ({}, None),
    ],
    ids=["memory", "loopback", "the most", "RDMA before TCP", "an idle HCA", "nothing is counted"],
)
def test_the_wire_that_sent_as_many_bytes_carried_the_push(sent: dict[Wire, int], carrier: Wire | None) -> None:
    before = dict.fromkeys(sent, 10**12)
    after = {wire: before[wire] + more for wire, more in sent.items()}
    assert busiest(before, after, pushed_bytes=1000) == carrier


def test_the_counters_of_this_host_can_be_read() -> None:
    assert all(sent >= 0 for sent in bytes_sent().values())
