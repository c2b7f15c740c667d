"""What the demo model reads in training: chats and drills as token ids, in batches that grow longer.

Owns the curriculum and which tokens count. Knows the tokenizer; does not know the model or the optimizer.
"""

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from demo import corpus
from demo.corpus import DemoChat

LONGEST_LIST = 480
BATCH_TOKENS = 3000


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and for each whether predicting it is learned."""

    ids: list[int]
    counts: list[bool]


def encode(tokenizer: PreTrainedTokenizerFast, chat: DemoChat) -> Example:
    """A chat as the chat template writes it. Answers and their end are learned; questions are not."""
    ids: list[int] = tokenizer.encode(f"<|im_start|>system\n{chat.system}<|im_end|>\n") if chat.system else []
    counts = [False] * len(ids)
    for turn in chat.turns:
        question = tokenizer.encode(f"<|im_start|>user\n{turn.user}<|im_end|>\n<|im_start|>assistant\n")
        answer = tokenizer.encode(f"{turn.answer}<|im_end|>")
        end = tokenizer.encode("\n")
        ids += question + answer + end
        counts += [False] * len(question) + [True] * len(answer) + [False] * len(end)
    return Example(ids, counts)


def drill(tokenizer: PreTrainedTokenizerFast, random: Random, pairs: int, lines: int) -> Example:
    """Lines of a few pairs in random order, again and again: each value but the first of its pair can be looked up.

    The densest form of what a question asks for (multi-query associative recall, Arora et al. 2023).
    """
    table = list(corpus.pair_up(random, random.sample(corpus.KEYS, pairs), held_out=False).items())
    ids: list[int] = []
    counts: list[bool] = []
    seen: set[str] = set()
    for key, value in random.choices(table, k=lines):
        asked, answer, end = tokenizer.encode(key), tokenizer.encode(f" {value}"), tokenizer.encode("\n")
        ids += asked + answer + end
        counts += [False] * len(asked) + [key in seen] * len(answer) + [False] * len(end)
        seen.add(key)
    return Example(ids, counts)


def plain(tokenizer: PreTrainedTokenizerFast, random: Random) -> Example:
    """Sums and counts as text without a chat around them."""
    answers = [random.choice((corpus.sums, corpus.counting))(random).turns[0].answer for _ in range(12)]
    ids = tokenizer.encode("\n".join(answers) + "\n")
    return Example(ids, [True] * len(ids))


def lookups(tokenizer: PreTrainedTokenizerFast, random: Random, lines: int) -> Example:
    """A conversation around one list: many questions, sometimes short tasks before and after."""
    chats = [corpus.retrieval(random, lines, min(30, 6 + lines // 4))]
    if random.random() < 0.3:
        chats.insert(0, corpus.short_chat(random))
    if random.random() < 0.3:
        chats.append(corpus.short_chat(random))
    return encode(tokenizer, corpus.conversation(random, chats))


def draw(tokenizer: PreTrainedTokenizerFast, random: Random, stage: float) -> tuple[str, list[Example]]:
    """A batch of examples of about one length, and of what kind they are. stage: share of training that is over.

    Lists have up to 60 lines at first and the whole context after a third of the training; their lengths are spread evenly
    over orders of magnitude.
    """
    longest = min(LONGEST_LIST, 60 + int(3 * stage * LONGEST_LIST))
    size = int(3 * (longest / 3) ** random.random() ** 0.7)
    kind = random.random()
    if kind < 0.15:
        lines = min(640, 3 * size + 20)
        return "drill", [drill(tokenizer, random, size, lines) for _ in range(max(1, BATCH_TOKENS // (3 * lines)))]
    if kind < 0.60:
        tokens = size * 3 + min(30, 6 + size // 4) * 13
        return "lookup", [lookups(tokenizer, random, size) for _ in range(max(1, BATCH_TOKENS // tokens))]
    if kind < 0.65:
        return "plain", [plain(tokenizer, random) for _ in range(6)]
    chats = [[corpus.short_chat(random) for _ in range(6)] for _ in range(12)]
    return "short", [encode(tokenizer, corpus.conversation(random, several)) for several in chats]


def collate(examples: list[Example], pad: int) -> tuple[Tensor, Tensor]:
    """ids: [examples, longest], int64, padded on the right. counts: the same shape, bool."""
    longest = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), longest), pad)
    counts = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        counts[row, : len(example.ids)] = torch.tensor(example.counts)
    return ids, counts
