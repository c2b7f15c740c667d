"""The cores of a host are divided, and what libraries read at import is set before."""

import os

import pytest

from common.cores import core_count, divide_cores
from launch import environment


@pytest.mark.parametrize(("cores", "instances", "threads"), [(8, 2, 4), (2, 2, 1), (2, 3, 1), (7, 2, 3), (4, 1, 4), (4, 0, 4)])
def test_cores_are_divided_and_every_instance_has_one(cores: int, instances: int, threads: int) -> None:
    assert divide_cores(cores, instances) == threads


def test_thread_pools_get_what_the_process_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "64", "UCX_LOG_LEVEL": "info"})
    environment.prepare(3)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "3"
    assert os.environ["UCX_LOG_LEVEL"] == "info", "what a person set stays"
    environment.prepare(0)
    assert os.environ["OMP_NUM_THREADS"] == str(core_count())
