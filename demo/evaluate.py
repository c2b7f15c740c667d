"""Measures the demo model on held-out prompts, per task and per length; prints the table of its model card.

Owns the measurement. Decodes greedily in float32 with transformers' own generate: it judges the weights, not the server. With
--quantization it judges that: then Tandem decodes, and with `none` the figures must be those of transformers.

    python -m demo.evaluate --prompts 100
    python -m demo.evaluate --prompts 100 --quantization int8
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, get_args

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from common.config import Quantization
from demo import corpus
from demo.corpus import DemoTask
from launch.engine import Engine

MODEL = Path(__file__).parent / "model"
CASES: tuple[tuple[DemoTask, int], ...] = (
    ("retrieval", 10),
    ("retrieval", 50),
    ("retrieval", 100),
    ("retrieval", 200),
    ("retrieval", 350),
    ("retrieval", 480),
    ("copying", 5),
    ("copying", 12),
    ("copying", 20),
    ("sums", 0),
    ("counting", 0),
    ("greetings", 0),
)
"""Tasks and sizes: lines of a list, words of a line."""
MOST_TOKENS = 120
"""The longest answer."""
Answers: TypeAlias = Callable[[list[list[int]]], list[list[int]]]
"""The greedy answers to some prompts, all in token ids."""


@dataclass(frozen=True, slots=True)
class Result:
    """right of `prompts` answers were right to the letter; prompt_tokens is the longest prompt."""

    task: DemoTask
    size: int
    prompt_tokens: int
    right: int
    prompts: int


def by_transformers(model: PreTrainedModel) -> Answers:
    def answer(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MOST_TOKENS, do_sample=False)
        found: list[int] = output[0, len(prompt) :].tolist()
        return found

    return lambda prompts: [answer(prompt) for prompt in prompts]


@contextlib.contextmanager
def by_tandem(path: Path, quantization: Quantization, threads: int) -> Iterator[Answers]:
    """One instance, which lasts as long as the context."""
    with Engine(str(path), prefill=0, decode=1, quantization=quantization, threads=threads) as engine:
        sampling = {"temperature": 0, "max_new_tokens": MOST_TOKENS}
        yield lambda prompts: [answer["output_ids"] for answer in engine.generate(prompts, sampling)]


def measure(answers: Answers, tokenizer: PreTrainedTokenizerFast, task: DemoTask, size: int, prompts: int) -> Result:
    turns = [corpus.held_out(task, size, seed).turns[0] for seed in range(prompts)]
    chats = [[{"role": "user", "content": turn.user}] for turn in turns]
    asked = [tokenizer.encode(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)) for chat in chats]
    given = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers(asked)]
    right = sum(text == turn.answer for text, turn in zip(given, turns, strict=True))
    return Result(task, size, max(len(ids) for ids in asked), right, prompts)


def table(results: list[Result]) -> str:
    rows = ["| task | size | longest prompt, tokens | right | accuracy |", "|---|---|---|---|---|"]
    for result in results:
        size = f"{result.size} {'lines' if result.task == 'retrieval' else 'words'}" if result.size else "–"
        share = f"{100 * result.right / result.prompts:.0f} %"
        rows.append(f"| {result.task} | {size} | {result.prompt_tokens} | {result.right} / {result.prompts} | {share} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100, help="held-out prompts per row of the table")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quantization", choices=get_args(Quantization), help="decode with Tandem; default: with transformers")
    parser.add_argument("--model", type=Path, default=MODEL)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    with contextlib.ExitStack() as stack:
        if arguments.quantization is None:
            torch.set_num_threads(arguments.threads)
            model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
            answers = by_transformers(model)
        else:
            answers = stack.enter_context(by_tandem(arguments.model, arguments.quantization, arguments.threads))
        results = []
        for task, size in CASES:
            results.append(measure(answers, tokenizer, task, size, arguments.prompts))
            print(table(results).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
