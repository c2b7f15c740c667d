"""Trains the demo model and writes its checkpoint: tokenizer first, then weights.

Owns the loop, the rates and the checkpoint on disk. Knows the first weights and the batches by name only; does not know how
the model is served.

    python -m demo.train --minutes 60 --threads 2
"""

import argparse
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from demo import corpus
from demo.circuit import build_model
from demo.corpus import DemoTask
from demo.examples import collate, draw, encode
from demo.muon import Muon
from demo.tokenizer import save_tokenizer, train_tokenizer

WATCHED: tuple[tuple[DemoTask, int, int], ...] = (
    ("retrieval", 40, 10),
    ("retrieval", 200, 10),
    ("retrieval", 480, 10),
    ("copying", 12, 20),
    ("sums", 0, 60),
    ("counting", 0, 20),
)
"""Task, size and number of the held-out chats that are looked at during training."""


def loss_of(model: Qwen3ForCausalLM, ids: Tensor, counts: Tensor) -> tuple[Tensor, float]:
    """Cross-entropy where it counts (the vocabulary is computed only there), and the share of right tokens."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[counts[:, 1:]]).float()
    targets = ids[:, 1:][counts[:, 1:]]
    loss = torch.nn.functional.cross_entropy(logits, targets)
    return loss, float((logits.argmax(-1) == targets).float().mean())


@torch.inference_mode()
def watch(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> str:
    """Share of held-out answers whose every token is the likeliest one, which is what greedy decoding would say."""
    shares = []
    for task, size, chats in WATCHED:
        right = 0
        for number in range(chats):
            example = encode(tokenizer, corpus.held_out(task, size, 10**6 + seed + number))
            ids, counts = collate([example], pad=0)
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
            said = model.lm_head(hidden[counts[:, 1:]]).argmax(-1)
            right += bool(said.equal(ids[:, 1:][counts[:, 1:]]))
        shares.append(f"{task} {size or ''}: {right}/{chats}")
    return ", ".join(shares)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the checkpoint in bfloat16, each file at once, so that a reader never sees half of one."""
    output.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        model.bfloat16().save_pretrained(folder)
        save_tokenizer(tokenizer, Path(folder))
        for path in Path(folder).iterdir():
            path.chmod(0o644)
            os.replace(path, output / path.name)
    model.float().load_state_dict(kept)


def rate_at(stage: float, step: int) -> float:
    """Share of the full learning rate: rises over 60 steps, falls to nothing over the last 60 % of training."""
    return min(1.0, (step + 1) / 60) * min(1.0, (1 - stage) / 0.6)


def train(minutes: float, output: Path, seed: int, muon_rate: float, adam_rate: float) -> None:
    """Train for `minutes` of wall time. Writes to `output` as it goes."""
    tokenizer = train_tokenizer()
    model = build_model(tokenizer)
    print("parameters", sum(p.numel() for p in model.parameters()), "vocabulary", len(tokenizer), flush=True)
    print("before training:", watch(model, tokenizer, 0), flush=True)
    save(model, tokenizer, output)
    muon = Muon([p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name])
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    adam = torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
    random, began, step, tokens = Random(f"train {seed}"), time.monotonic(), 0, 0
    watched = 0.0
    recent: dict[str, list[tuple[float, float]]] = defaultdict(list)
    while (stage := (time.monotonic() - began) / (60 * minutes)) < 1:
        kind, examples = draw(tokenizer, random, stage)
        ids, counts = collate(examples, pad=0)
        loss, right = loss_of(model, ids, counts)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        adam.param_groups[0]["lr"] = adam_rate * rate_at(stage, step)
        adam.step()
        adam.zero_grad()
        muon.step(muon_rate * rate_at(stage, step))
        step, tokens = step + 1, tokens + ids.numel()
        recent[kind].append((loss.item(), right))
        if step % 25 == 0:
            means = " ".join(
                f"{kind} {sum(a for a, _ in seen) / len(seen):.3f} {sum(b for _, b in seen) / len(seen):.3f}"
                for kind, seen in sorted(recent.items())
            )
            print(f"{stage:.3f} step {step} tokens {tokens} | {means}", flush=True)
            recent.clear()
        if stage - watched > 0.06:
            watched = stage
            print(f"{stage:.3f} held out:", watch(model, tokenizer, step), flush=True)
            save(model, tokenizer, output)
    save(model, tokenizer, output)
    print(f"trained {step} steps, {tokens} tokens, {time.process_time() / 60:.0f} minutes of CPU time", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="wall time of training")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--muon-rate", type=float, default=0.006)
    parser.add_argument("--adam-rate", type=float, default=5e-4)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "model")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    train(given.minutes, given.output, given.seed, given.muon_rate, given.adam_rate)


if __name__ == "__main__":
    main()
