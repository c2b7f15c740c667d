"""Measures the demo model on held-out prompts, per task and per length; prints the table of its model card.

Owns the measurement. Decodes greedily in float32 with transformers' own generate: it judges the weights, not the server.

    python -m demo.evaluate --prompts 100
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from demo import corpus
from demo.corpus import Task

MODEL = Path(__file__).parent / "model"
CASES: tuple[tuple[Task, int], ...] = (
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


@dataclass(frozen=True, slots=True)
class Result:
    """right of `prompts` answers were right to the letter; prompt_tokens is the longest prompt."""

    task: Task
    size: int
    prompt_tokens: int
    right: int
    prompts: int


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, question: str) -> tuple[str, int]:
    """The greedy answer to a single question, and the prompt's length in tokens."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=120, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True), ids.shape[1]


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, task: Task, size: int, prompts: int) -> Result:
    right, longest = 0, 0
    for seed in range(prompts):
        (turn,) = corpus.held_out(task, size, seed).turns
        given, tokens = answer(model, tokenizer, turn.user)
        right += given == turn.answer
        longest = max(longest, tokens)
    return Result(task, size, longest, right, prompts)


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
    parser.add_argument("--model", type=Path, default=MODEL)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    results = []
    for task, size in CASES:
        results.append(measure(model, tokenizer, task, size, arguments.prompts))
        print(table(results).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
