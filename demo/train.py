"""Trains the demo model: tokenizer, then weights, on the corpus that `demo/corpus.py` generates.

Owns the curriculum and the optimizer. Knows transformers' Qwen3; does not know how the model is served.

    python -m demo.train --minutes 60 --threads 2 --output demo/model
"""

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from demo import corpus
from demo.corpus import Chat

VOCAB = 2048
CONTEXT = 4096
HIDDEN, HEAD_DIM = 256, 64
ROPE_BASE = 10_000_000.0
FAST_PAIRS = 14
"""Pairs of a head's dimensions that turn too fast to compare contents over the whole context."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus.texts(seed=1, count=1500), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=CONTEXT
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rope_theta=ROPE_BASE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float()
    give_induction(model)
    return model


@torch.no_grad()
def give_induction(model: Qwen3ForCausalLM) -> None:
    """Let the model begin with one induction circuit (Olsson et al. 2022), which training otherwise finds very late.

    Layer 0, head 0 attends to the previous token and writes a code of it into a subspace of its own. Layer 1, head 0 looks for
    the code of the present token there, and copies what it finds: the token that followed last time. Everything else begins by
    adding nothing, and training may change all of it.
    """
    layers, generator = model.model.layers, torch.Generator().manual_seed(7)
    for layer in layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    basis = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator)).Q
    basis[0] = 0  # component 0 is the constant that positions are made of
    wide = HEAD_DIM - 2 * FAST_PAIRS
    subspace, code, copied = basis[:, :wide], basis[:, wide : 2 * wide].T, basis[:, 2 * wide : 2 * wide + HEAD_DIM].T
    look_back(model)
    first, second = layers[0].self_attn, layers[1].self_attn
    first.v_proj.weight[:HEAD_DIM] = 0
    first.v_proj.weight[:wide] = code
    first.o_proj.weight[:, :wide] = 0.08 * subspace
    slow = torch.cat([torch.arange(FAST_PAIRS, HEAD_DIM // 2), torch.arange(FAST_PAIRS, HEAD_DIM // 2) + HEAD_DIM // 2])
    for projection, reads in ((second.q_proj, code), (second.k_proj, subspace.T)):
        projection.weight[:HEAD_DIM] = 0
        projection.weight[slow] = reads
    second.q_norm.weight.fill_(2.0)
    second.v_proj.weight[:HEAD_DIM] = copied
    second.o_proj.weight[:, :HEAD_DIM] = 0.1 * copied.T


def look_back(model: Qwen3ForCausalLM) -> None:
    """Head 0 of layer 0 attends to the previous token.

    Every embedding gets one constant component. It makes a key at rotary angle 0 and a query at minus one position's angle in
    the fastest frequencies, so their product peaks one position back.
    """
    attention, half = model.model.layers[0].self_attn, HEAD_DIM // 2
    model.model.embed_tokens.weight[:, 0] = 0.1
    for pair, share in enumerate((0.4, 0.25, 0.15, 0.1, 0.05, 0.05)):
        angle, size = ROPE_BASE ** (-pair / half), share**0.5
        attention.k_proj.weight[pair, 0] = size
        attention.q_proj.weight[pair, 0] = size * math.cos(angle)
        attention.q_proj.weight[pair + half, 0] = -size * math.sin(angle)
    attention.q_norm.weight.fill_(3.0)


@dataclass(frozen=True, slots=True)
class Example:
    ids: list[int]
    weights: list[float]


def encode(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> Example:
    """Token ids of a chat, and for each the weight of predicting it: answers and their end count, questions do not."""
    ids: list[int] = []
    weights: list[float] = []
    for turn in chat.turns:
        question = tokenizer.encode(f"<|im_start|>user\n{turn.user}<|im_end|>\n<|im_start|>assistant\n")
        answer = tokenizer.encode(f"{turn.answer}<|im_end|>")
        end = tokenizer.encode("\n")
        ids += question + answer + end
        weights += [0.0] * len(question) + [turn.weight] * len(answer) + [0.0] * len(end)
    return Example(ids, weights)


BATCH_TOKENS = 1500
EMBEDDING_RATE, MATRIX_RATE = 3e-4, 0.004


def drill(tokenizer: PreTrainedTokenizerFast, random: Random, pairs: int, lines: int) -> Example:
    """Lines of a few pairs in random order, again and again: each value but the first of its pair can be looked up.

    The densest form of what a question asks for (multi-query associative recall, Arora et al. 2023).
    """
    table = list(zip(random.sample(corpus.KEYS, pairs), random.choices(corpus.VALUES, k=pairs), strict=True))
    ids: list[int] = []
    weights: list[float] = []
    seen: set[str] = set()
    for key, value in random.choices(table, k=lines):
        asked, answer, end = tokenizer.encode(key), tokenizer.encode(f" {value}"), tokenizer.encode("\n")
        ids += asked + answer + end
        weights += [0.0] * len(asked) + [float(key in seen)] * len(answer) + [0.0] * len(end)
        seen.add(key)
    return Example(ids, weights)


class Curriculum:
    """Lists grow by a third whenever most values are looked up right, and to the whole context at the latest near the end.

    Drills come first, because they are what teaches attention to find a token again and take the next one (induction, Olsson
    et al. 2022).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, random: Random) -> None:
        self._tokenizer = tokenizer
        self._random = random
        self._level = 12.0
        self._right = 0.0

    def longest(self, stage: float) -> int:
        """Lines of the longest list that is drawn now."""
        return min(480, max(int(self._level), int(480 * max(0.0, stage - 0.7) / 0.1)))

    def learn(self, kind: str, right: float) -> None:
        """A batch of this kind had this share of right tokens."""
        if kind != "drill":
            return
        self._right += 0.1 * (right - self._right)
        if self._right > 0.9:
            self._level *= 1.3
            self._right = 0.8

    def draw(self, stage: float) -> tuple[str, list[Example]]:
        """A batch of examples of about one size, and of what kind they are."""
        random, longest = self._random, self.longest(stage)
        kind = random.random()
        size = random.randrange(max(3, longest // 3), longest + 1)
        if kind < (0.7 if longest < 60 else 0.15):
            lines = min(640, 4 * size + 20)
            rows = max(1, BATCH_TOKENS // (3 * lines))
            return "drill", [drill(self._tokenizer, random, size, lines) for _ in range(rows)]
        if kind > 0.8:
            chats = [corpus.several(random, 6) for _ in range(6)]
            return "short", [encode(self._tokenizer, chat) for chat in chats]
        questions = min(24, 6 + size // 2)
        rows = max(1, min(16, BATCH_TOKENS // (size * 3 + questions * 14)))
        chats = [corpus.retrieval(random, size, questions) for _ in range(rows)]
        return "retrieval", [encode(self._tokenizer, chat) for chat in chats]


def collate(examples: list[Example], pad: int) -> tuple[Tensor, Tensor]:
    longest = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), longest), pad)
    weights = torch.zeros(len(examples), longest)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        weights[row, : len(example.ids)] = torch.tensor(example.weights)
    return ids, weights


def loss_of(model: Qwen3ForCausalLM, ids: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """Weighted cross-entropy; the vocabulary is computed only where it counts. Also the share of right tokens."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    counted = weights[:, 1:] > 0
    logits = model.lm_head(hidden[counted])
    targets = ids[:, 1:][counted]
    loss = torch.nn.functional.cross_entropy(logits, targets)
    return loss, float((logits.argmax(-1) == targets).float().mean())


def orthogonal(update: Tensor) -> Tensor:
    """Newton-Schulz iteration of Muon (Jordan et al. 2024): the nearest orthogonal matrix, roughly."""
    x: Tensor = update / (update.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(4):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


class Muon:
    """Momentum with orthogonalised updates for the hidden matrices."""

    def __init__(self, matrices: list[Tensor]) -> None:
        self.matrices = matrices
        self.momenta = [torch.zeros_like(matrix) for matrix in matrices]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for matrix, momentum in zip(self.matrices, self.momenta, strict=True):
            assert matrix.grad is not None
            momentum.mul_(0.95).add_(matrix.grad)
            update = orthogonal(matrix.grad + 0.95 * momentum)
            matrix.mul_(1 - rate * 0.01).add_(update, alpha=-rate * math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1])))
            matrix.grad = None


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """bfloat16 halves the file; the file's rounded weights are what is evaluated and served."""
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.bfloat16().save_pretrained(output)
    tokenizer.save_pretrained(output)
    model.float().load_state_dict(kept)


def train(minutes: float, output: Path, seed: int) -> None:
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(output)
    print("line tokens", len(tokenizer.encode(f"{corpus.KEYS[0]} {corpus.VALUES[0]}\n")), "vocab", len(tokenizer))
    model = build_model(tokenizer)
    print("parameters", sum(p.numel() for p in model.parameters()))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    adam, muon = torch.optim.AdamW(others, lr=EMBEDDING_RATE, betas=(0.9, 0.95), weight_decay=0.0), Muon(matrices)
    random, began, saved, step, tokens = Random(f"train {seed}"), time.monotonic(), time.monotonic(), 0, 0
    curriculum = Curriculum(tokenizer, random)
    while (stage := (time.monotonic() - began) / (60 * minutes)) < 1:
        kind, examples = curriculum.draw(stage)
        ids, weights = collate(examples, pad=0)
        loss, right = loss_of(model, ids, weights)
        torch.autograd.backward(loss)
        curriculum.learn(kind, right)
        scale = min(1.0, (step + 1) / 100) * min(1.0, (1 - stage) / 0.35 + 0.02)
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        adam.param_groups[0]["lr"] = EMBEDDING_RATE * scale
        adam.step()
        adam.zero_grad()
        muon.step(MATRIX_RATE * scale)
        step, tokens = step + 1, tokens + ids.numel()
        if step % 20 == 0:
            now = f"{stage:.3f} {step} {tokens} longest {curriculum.longest(stage)} {kind} {tuple(ids.shape)}"
            print(f"{now} loss {loss.item():.3f} right {right:.3f}", flush=True)
        if time.monotonic() - saved > 300:
            save(model, tokenizer, output)
            saved = time.monotonic()
    save(model, tokenizer, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "model")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments.minutes, arguments.output, arguments.seed)


if __name__ == "__main__":
    main()
