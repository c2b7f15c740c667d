"""Transformers on a CPU. Runs in its environment: `transformers_driver.py FOLDER generate|continuous THREADS KV_TOKENS`.

Owns the two ways in which people use it for many requests: `generate` with one padded batch, and continuous batching.
"""

import sys
from typing import Any

import talk
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

POLL_S = 1.0
BLOCK, BATCH = 32, 512
"""Tokens of a block of KV, and most of a step. Its default block, 256, would need twice the memory for the same requests."""


class Arrivals:
    """A streamer for `generate`: tells of each token of a padded batch, but not of those behind the end of an answer."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.step = -1

    def put(self, value: Any) -> None:
        """First the prompts, then the next token of each row."""
        if self.step >= 0:
            talk.arrived(at for at, length in enumerate(self.lengths) if self.step < length)
        self.step += 1

    def end(self) -> None:
        pass


def padded(model: Any, requests: list[dict[str, Any]]) -> None:
    """All prompts in one batch, with padding on the left; it runs to the end of the longest answer."""
    longest = max(len(each["prompt"]) for each in requests)
    ids = torch.zeros(len(requests), longest, dtype=torch.long)
    mask = torch.zeros(len(requests), longest, dtype=torch.long)
    for at, each in enumerate(requests):
        ids[at, longest - len(each["prompt"]) :] = torch.tensor(each["prompt"])
        mask[at, longest - len(each["prompt"]) :] = 1
    lengths = [each["answer_tokens"] for each in requests]
    config = GenerationConfig(do_sample=False, max_new_tokens=max(lengths), eos_token_id=None, pad_token_id=0)
    model.generate(input_ids=ids, attention_mask=mask, generation_config=config, streamer=Arrivals(lengths))


def continuous(manager: Any, requests: list[dict[str, Any]], load: int) -> None:
    """All requests at once; the manager's thread batches them."""
    counted = [0] * len(requests)
    for at, each in enumerate(requests):
        manager.add_request(each["prompt"], f"{load}-{at}", max_new_tokens=each["answer_tokens"], streaming=True)
    while any(count < each["answer_tokens"] for count, each in zip(counted, requests, strict=True)):
        result = manager.get_result(timeout=POLL_S)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("continuous batching has stopped")
            continue
        if result.error:
            raise RuntimeError(result.error)
        at = int(result.request_id.partition("-")[2])
        new = len(result.generated_tokens) - counted[at]
        counted[at] += new
        if new:
            talk.arrived([at] * new)


def main(folder: str, mode: str, threads: str, kv_tokens: str) -> None:
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    if mode == "generate":
        for requests in talk.requests_of_each_load():
            padded(model, requests)
        return
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Without these numbers it would take nearly all memory of the machine.
    room = ContinuousBatchingConfig(
        block_size=BLOCK, num_blocks=int(kv_tokens) // BLOCK, max_batch_tokens=BATCH, allow_block_sharing=False
    )
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=room)
    manager.start()
    for load, requests in enumerate(talk.requests_of_each_load()):
        continuous(manager, requests, load)


if __name__ == "__main__":
    main(*sys.argv[1:])
