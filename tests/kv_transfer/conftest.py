"""Failed assertions of the contract are explained like those of a test file. Owns no fixture."""

import pytest

pytest.register_assert_rewrite("tests.kv_transfer.contract", "tests.kv_transfer.agents")
