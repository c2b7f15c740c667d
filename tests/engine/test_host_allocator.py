"""A step's memory stays with the process: the next step of the same size touches no page that the system must clear."""

import platform
import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource, threading
from engine.model_runner import keep_step_memory

def step():
    held = [b"x" * count for count in (2**26, 2**22, 2**20)]
    return sum(map(len, held))

def steps():
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

faults = []

keep_step_memory()
thread = threading.Thread(target=steps)
thread.start()
thread.join()
print(faults[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is a setting of glibc")
def test_the_second_step_of_a_size_finds_the_memory_of_the_first() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 2**26 // resource.getpagesize() // 4
