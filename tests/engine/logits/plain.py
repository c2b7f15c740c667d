"""What the sampling parameters do to the logits of one token, written from their definitions, as loops in float64.

Owns no state: everything follows from the prompt and the answer so far.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.sampling_params import SamplingParams

Logits = NDArray[np.float64]


def processed(
    logits: Logits, prompt: Sequence[int], answer: Sequence[int], sampling: SamplingParams, eos_token_ids: Sequence[int]
) -> Logits:
    """The logits of the token behind prompt and answer, [vocab]. The repetition penalty is that of transformers'
    RepetitionPenaltyLogitsProcessor; the others are as vLLM's sampling parameters and OpenAI's reference describe them."""
    out = logits.copy()
    for token in {*prompt, *answer}:
        penalty = sampling.repetition_penalty
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token in set(answer):
        out[token] -= sampling.frequency_penalty * list(answer).count(token) + sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        out[token] += bias
    if len(answer) < sampling.min_tokens:
        for token in (*eos_token_ids, *sampling.stop_token_ids):
            out[token] = -np.inf
    for *before, last in sampling.bad_words:
        if list(answer[len(answer) - len(before) :]) == before and len(answer) >= len(before):
            out[last] = -np.inf
    return out


def log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
