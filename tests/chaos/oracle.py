"""The oracle: what an answer must be, computed with transformers and a sampler of its own, apart from everything that is served.

Owns the judgement of tokens. Knows the model and the noise's definition: Gumbel noise by (seed, position, token), where each of
them goes through lowbias32. Does not know how an answer came about.

A token is right when its score, logit / temperature + noise (greedy: the logit), is the best of all. Chunks, batches and resumes
round differently, so where two scores are nearly equal either token may win, and all that follows it differs. Such an answer is
still right, token by token, given its own beginning; one that was computed from a wrong page is not.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.chaos.workload import Request

NEAR = 1e-3
"""Scores that differ by less may be in either order: far above what rounding does, far below what differs between answers."""

Scores = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]


class Oracle:
    def __init__(self, model: Path) -> None:
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def losses(self, request: Request, choice: int, token_ids: Sequence[int]) -> Scores:
        """For each token of the answer how far its score is below the best one."""
        begin = len(request.prompt)
        ids = torch.tensor([[*request.prompt, *token_ids]])
        with torch.inference_mode():
            scores = self._model(ids).logits[0, begin - 1 : -1].double().numpy()
        if not request.is_greedy:
            positions = np.arange(begin, begin + len(token_ids))
            scores = scores / request.temperature + gumbel(request.seed + choice, positions, scores.shape[1])
        chosen: Scores = scores.max(axis=1) - scores[np.arange(len(token_ids)), list(token_ids)]
        return chosen


def gumbel(seed: int, positions: npt.NDArray[np.int64], vocab: int) -> Scores:
    """[positions, vocab]"""
    low, high = np.array([seed % 2**32], np.uint64), np.array([(seed >> 32) % 2**32], np.uint64)
    of_seed = _lowbias32((_lowbias32(low) ^ (_lowbias32(high) * np.uint64(3))) & np.uint64(0xFFFFFFFF))
    of_position = _lowbias32(of_seed ^ _lowbias32(positions.astype(np.uint64)))
    bits = _lowbias32(_lowbias32(np.arange(vocab, dtype=np.uint64))[None, :] ^ of_position[:, None])
    noise: Scores = -np.log(-np.log((bits + 0.5) / 2.0**32))
    return noise


def _lowbias32(x: Words) -> Words:
    """https://nullprogram.com/blog/2018/07/31/, of x + 0x9E3779B9."""
    mask = np.uint64(0xFFFFFFFF)
    x = (x + np.uint64(0x9E3779B9)) & mask
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & mask
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & mask
    mixed: Words = x ^ (x >> np.uint64(16))
    return mixed
