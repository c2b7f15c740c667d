"""The contract of an engine on the CPU. Cards run it in tests/gpu/test_engine.py."""

from tests.engine.device_contract import EngineContract


class TestEngineOnCpu(EngineContract):
    device = "cpu"
