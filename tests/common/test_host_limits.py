"""What a process may use: the host's memory and cores, or the limits of a container."""

import mmap
from pathlib import Path

import pytest

from common.host import HostMemory, host_memory_now, own_memory_bytes, processor_quota

KIB = 1024
MEMINFO = "MemTotal: 16000 kB\nMemFree: 10 kB\nMemAvailable: 12000 kB"


HOST = HostMemory(16000 * KIB, 12000 * KIB)
TIGHTEST_GROUP_OF_VERSION_2 = {
    "proc/self/cgroup": "0::/pod/container",
    "cgroup/pod/memory.max": f"{8000 * KIB}",
    "cgroup/pod/memory.current": f"{3000 * KIB}",
    "cgroup/pod/memory.stat": f"anon 5\ninactive_file {600 * KIB}\nactive_file {400 * KIB}",
    "cgroup/pod/container/memory.max": "max",
    "cgroup/pod/cpu.max": "max 100000",
    "cgroup/pod/container/cpu.max": "250000 100000",
}
VERSION_1_IN_A_CONTAINER = {
    "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/",
    "cgroup/memory/memory.limit_in_bytes": f"{4000 * KIB}",
    "cgroup/memory/memory.usage_in_bytes": f"{3000 * KIB}",
    "cgroup/memory/memory.stat": f"active_file 7\ntotal_inactive_file {200 * KIB}\ntotal_active_file {300 * KIB}",
    "cgroup/cpu/cpu.cfs_quota_us": "150000",
    "cgroup/cpu/cpu.cfs_period_us": "100000",
}
VERSION_1_WITHOUT_LIMITS = {
    "proc/self/cgroup": "4:memory:/\n1:cpu:/",
    "cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    "cgroup/cpu/cpu.cfs_quota_us": "-1",
    "cgroup/cpu/cpu.cfs_period_us": "100000",
}


@pytest.mark.parametrize(
    ("files", "memory", "quota"),
    [
        pytest.param({}, HOST, None, id="no control groups: the host is the limit"),
        pytest.param(TIGHTEST_GROUP_OF_VERSION_2, HostMemory(8000 * KIB, 6000 * KIB), 2.5, id="version 2: the tightest group"),
        pytest.param(
            VERSION_1_IN_A_CONTAINER, HostMemory(4000 * KIB, 1500 * KIB), 1.5, id="version 1 in a container: at the root"
        ),
        pytest.param(VERSION_1_WITHOUT_LIMITS, HOST, None, id="version 1 without limits: a huge number and -1"),
    ],
)
def test_the_tightest_group_is_the_limit_and_its_caches_are_free(
    tmp_path: Path, files: dict[str, str], memory: HostMemory, quota: float | None
) -> None:
    for path, text in {"proc/meminfo": MEMINFO, **files}.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert host_memory_now(tmp_path / "proc", tmp_path / "cgroup") == memory
    assert processor_quota(tmp_path / "proc", tmp_path / "cgroup") == quota


def test_a_process_knows_what_it_holds() -> None:
    before = own_memory_bytes()
    with mmap.mmap(-1, 64 * 2**20, mmap.MAP_PRIVATE) as held:  # not from memory that this process has freed and keeps
        held.write(b"x" * len(held))
        assert own_memory_bytes() - before > 0.9 * len(held)
