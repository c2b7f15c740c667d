"""Chunks under a token budget."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.instance.request import PromptProgress, next_chunks


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), budget=st.integers(1, 50))
def test_every_token_is_planned_once_in_order_within_the_budget(lengths: list[int], budget: int) -> None:
    prompts = [PromptProgress(row, np.arange(length, dtype=np.int32)) for row, length in enumerate(lengths)]
    seen: dict[int, list[int]] = {row: [] for row in range(len(lengths))}
    while chunks := next_chunks(prompts, budget):
        assert sum(len(chunk.token_ids) for chunk in chunks) <= budget
        for chunk in chunks:
            assert chunk.start == len(seen[chunk.row])
            seen[chunk.row] += chunk.token_ids.tolist()
            assert chunk.last == (len(seen[chunk.row]) == lengths[chunk.row])
    assert all(seen[row] == list(range(length)) for row, length in enumerate(lengths))
