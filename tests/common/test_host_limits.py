"""What a process may use: the host's memory and cores, or the limits of a container."""

import mmap
from pathlib import Path

import pytest

from common.host_limits import HostMemory, host_memory_now, own_memory_bytes, processor_quota

KIB = 1024
MEMINFO = "MemTotal: 16000 kB\nMemFree: 10 kB\nMemAvailable: 12000 kB\n"


class Host:
    """The files of a host: /proc, and its control groups."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.write("proc/meminfo", MEMINFO, root)
        self._root = root

    def write(self, path: str, text: str, root: Path | None = None) -> None:
        file = (root or self._root) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def memory(self) -> HostMemory:
        return host_memory_now(self.proc, self.cgroups)

    def quota(self) -> float | None:
        return processor_quota(self.proc, self.cgroups)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_without_control_groups_the_host_is_the_limit(host: Host) -> None:
    assert host.memory() == HostMemory(16000 * KIB, 12000 * KIB)
    assert host.quota() is None


def test_the_tightest_group_of_version_2_counts_and_its_caches_are_free(host: Host) -> None:
    host.write("proc/self/cgroup", "0::/pod/container\n")
    host.write("cgroup/pod/memory.max", f"{8000 * KIB}\n")
    host.write("cgroup/pod/memory.current", f"{3000 * KIB}\n")
    host.write("cgroup/pod/memory.stat", f"anon 5\ninactive_file {600 * KIB}\nactive_file {400 * KIB}\n")
    host.write("cgroup/pod/container/memory.max", "max\n")
    host.write("cgroup/pod/cpu.max", "max 100000\n")
    host.write("cgroup/pod/container/cpu.max", "250000 100000\n")
    assert host.memory() == HostMemory(8000 * KIB, 6000 * KIB)
    assert host.quota() == 2.5


def test_version_1_in_a_container_has_its_limits_at_the_root(host: Host) -> None:
    host.write("proc/self/cgroup", "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n")
    host.write("cgroup/memory/memory.limit_in_bytes", f"{4000 * KIB}\n")
    host.write("cgroup/memory/memory.usage_in_bytes", f"{3000 * KIB}\n")
    host.write("cgroup/memory/memory.stat", f"active_file 7\ntotal_inactive_file {200 * KIB}\ntotal_active_file {300 * KIB}\n")
    host.write("cgroup/cpu/cpu.cfs_quota_us", "150000\n")
    host.write("cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert host.memory() == HostMemory(4000 * KIB, 1500 * KIB)
    assert host.quota() == 1.5


def test_version_1_without_limits_says_so_with_a_huge_number_and_minus_1(host: Host) -> None:
    host.write("proc/self/cgroup", "4:memory:/\n1:cpu:/\n")
    host.write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    host.write("cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    host.write("cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert host.memory() == HostMemory(16000 * KIB, 12000 * KIB)
    assert host.quota() is None


def test_a_process_knows_what_it_holds() -> None:
    before = own_memory_bytes()
    with mmap.mmap(-1, 64 * 2**20, mmap.MAP_PRIVATE) as held:  # not from memory that this process has freed and keeps
        held.write(b"x" * len(held))
        assert own_memory_bytes() - before > 0.9 * len(held)
