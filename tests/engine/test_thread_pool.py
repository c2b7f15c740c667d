"""A thread that has computed, and computes no more, leaves no OpenMP threads behind that make those of others sleep."""

import subprocess
import sys

import pytest

PROGRAM = """
import os
os.environ["OMP_NUM_THREADS"] = "2"
import torch
from engine.torch_executor import end_own_pool

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
end_own_pool()  # without one
counts = [threads()]
for _ in range(2):
    whole = torch.ones(512, 512)
    assert (whole @ whole)[0, 0] == 512
    counts.append(threads())
    end_own_pool()
    counts.append(threads())
print(*counts)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it counts threads in /proc")
def test_the_threads_end_and_come_back_when_they_are_needed() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    before, *counts = map(int, done.stdout.split())
    assert counts == [before + 1, before] * 2
