"""python -m tests.soak.draft_model FOLDER: what a draft model brings, and whether it agrees in the ring as often as colocated.

Makes two models in the folder: one in the shape of Qwen3-0.6B's layers with random weights, in which all layers but the first two
add little, and one of those two layers; with --head it trains an EAGLE-3 head for the demo model instead. Four fleets stand
beside each other, a ring and a colocated instance, each with the draft model and without, and get the same requests in turn. Run
it on an idle machine with 16 GiB. Exit status 1: a token differs.
"""

import argparse
import copy
import json
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
import torch
from openai import OpenAI
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from bench.report import say
from demo import corpus
from tests.rig.pages import RunningFleet, running_fleet
from tests.soak.draft_head import train

DEMO = Path("demo/model")
LAYERS, DRAFT_LAYERS, ADDS = 28, 2, 0.1
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS, DRAFTS = 5, 100, 48, 6
COMMON = ("--dtype=float32", "--grammar=off", "--threads=1", "--kv-memory=1GiB", "--context-tokens=1024")


def write_models(folder: Path) -> tuple[Path, Path]:
    """The served model and the draft model, with the demo model's tokenizer."""
    tokenizer = [path for path in DEMO.iterdir() if "token" in path.name or path.suffix == ".jinja"]
    vocab = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=1024, intermediate_size=3072, num_hidden_layers=LAYERS, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=4096, eos_token_id=0,
    )  # fmt: skip
    served = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in served.model.layers[DRAFT_LAYERS:]:
            layer.self_attn.o_proj.weight *= ADDS
            layer.mlp.down_proj.weight *= ADDS
    draft = copy.deepcopy(served)
    draft.model.layers = draft.model.layers[:DRAFT_LAYERS]
    draft.config.num_hidden_layers, draft.config.layer_types = DRAFT_LAYERS, draft.config.layer_types[:DRAFT_LAYERS]
    paths = folder / "served", folder / "draft"
    for model, path in zip((served, draft), paths, strict=True):
        model.save_pretrained(path)
        for file in tokenizer:
            shutil.copy(file, path / file.name)
    return paths


def chats(seed: int) -> list[list[int]]:
    """Prompts whose answers the head foresees: the demo model counts."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    asked = [corpus.held_out("counting", 0, 100 * seed + number).turns[0].user for number in range(PROMPTS)]
    return [tokenizer.encode(f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n") for each in asked]


def serve(fleet: RunningFleet, name: str, prompts: list[list[int]], temperature: float) -> list[list[int]]:
    """The answers, one at a time; says how fast they came."""
    client, model = OpenAI(base_url=f"{fleet.url}/v1", api_key="none"), fleet.get("/v1/models").json()["data"][0]["id"]
    answers, firsts, right, wrong, began_s = list[list[int]](), list[float](), 0, 0, time.perf_counter()
    for prompt in prompts:
        asked_s, first_s, answer = time.perf_counter(), 0.0, list[int]()
        stream = client.completions.create(
            model=model, prompt=prompt, max_tokens=ANSWER_TOKENS, temperature=temperature, seed=5, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        for event in stream:
            ids = [token for choice in event.choices for token in (choice.model_extra or {}).get("token_ids") or ()]
            first_s = first_s or (time.perf_counter() if ids else 0.0)
            answer += ids
            details = event.usage and event.usage.completion_tokens_details
            right += (details and details.accepted_prediction_tokens) or 0
            wrong += (details and details.rejected_prediction_tokens) or 0
        answers.append(answer)
        firsts.append(first_s - asked_s)
    speed = sum(map(len, answers)) / (time.perf_counter() - began_s)
    share = f", {right} of {right + wrong} drafts right: {right / (right + wrong):.3f}" if right else ""
    say(f"{name:17} temperature {temperature}: {speed:6.2f} tokens/s, first token {1000 * median(firsts):6.1f} ms{share}")
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.draft_model", description="Measure a draft model on CPU.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="gets the models: 2 GB")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="with other prompts each")
    parser.add_argument("--head", action="store_true", help="the demo model with an EAGLE-3 head, trained here in ten minutes")
    given = parser.parse_args()
    served, draft = (DEMO, train(DEMO, given.folder / "head")) if given.head else write_models(given.folder)
    method = "eagle3" if given.head else "draft_model"
    config = {"method": method, "model": str(draft), "num_speculative_tokens": DRAFTS}
    drafts = f"--speculative-config={json.dumps(config)}"
    sizes = {"ring": ("--prefill=1", "--decode=1"), "colocated": ("--prefill=0", "--decode=1")}
    with ExitStack() as stack:
        fleets = {
            f"{name}{', drafts' if flags else ''}": stack.enter_context(
                running_fleet(f"--model={served}", *size, *flags, *COMMON)
            )
            for name, size in sizes.items()
            for flags in ((), (drafts,))
        }
        draw, differ = np.random.default_rng(3), 0
        for number in range(given.rounds):
            prompts = chats(number) if given.head else draw.integers(300, 2600, (PROMPTS, PROMPT_TOKENS)).tolist()
            for temperature in (1.0, 0.0):
                expected, *others = (serve(fleet, name, prompts, temperature) for name, fleet in fleets.items())
                differ += sum(answers != expected for answers in others)
    say(f"{differ} of all answers differ" if differ else "all answers are the same")
    return differ > 0


if __name__ == "__main__":
    sys.exit(main())
