"""What a decode step costs its scheduler and its messages, whatever computes it: `python -m tests.decode.step_cost`.

Owns a decode scheduler with a full batch. Each row gets a token per step and a page every few steps; the tokens are encoded as
they are sent.
"""

import sys
import time
from dataclasses import replace

import msgspec
import numpy as np

from common.executor import StepResult
from common.ids import ROUTER
from common.instance.ports import RouterJoined, Send
from decode.scheduler import DecodeScheduler
from tests.builders import LAYOUT, engine, instance, limits
from tests.schedulers import generate

ROWS, STEPS, PROMPT = 256, 300, 33


def measured(rows: int = ROWS) -> np.ndarray:
    """Processor seconds of each step: deciding it, taking in its tokens, and encoding them. [steps] float64."""
    context = PROMPT + STEPS + 1
    layout = msgspec.structs.replace(LAYOUT, page_size=16)
    description = replace(engine(rows * layout.pages_for(context), rows, context), layout=layout)
    encoder = msgspec.msgpack.Encoder()
    made = DecodeScheduler(instance("d", "decode"), description, limits(chunk_tokens=PROMPT * rows, max_waiting=rows), None)
    made.handle(RouterJoined(ROUTER, 1), 0.0)
    for row in range(rows):
        made.receive(ROUTER, generate(f"r{row}", PROMPT - row % 16, STEPS + 1), 0.0)
    times, random = [], np.random.default_rng(0)
    for step in range(STEPS):
        begin = time.thread_time()
        plan = made.decide(float(step)).plan
        decided = time.thread_time()
        assert plan is not None
        tokens = random.integers(10, 100, len(plan.sampled_rows)).astype(np.int32)
        again = time.thread_time()
        for action in made.step_done(StepResult(plan, tokens), float(step)):
            assert isinstance(action, Send)
            encoder.encode(action.message)
        times.append(time.thread_time() - again + decided - begin)
    return np.array(times[1:])


if __name__ == "__main__":
    took = measured() * 1e6
    sys.stdout.write(f"{ROWS} rows: median {np.median(took):.0f} us a step, 99 % below {np.quantile(took, 0.99):.0f} us\n")
