"""python -m tests.soak.lookup_peers FOLDER ENGINE=PYTHON...: prompt lookup beside that of other engines, in one run.

FOLDER: the checkpoint of `benchmarks.random_model`. ENGINE: one of `lookup_peer`, PYTHON: the interpreter of an environment that
has it. Each engine serves the same requests greedily, one at a time, with lookup and without, in turn. Tandem is asked over HTTP,
the others in their own process. Run it on an idle machine with 24 GiB.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
from openai import OpenAI

from bench.report import say
from common.drafting import Drafting
from tests.rig.pages import running_fleet

PASSAGE_TOKENS, REPEATS, ANSWER_TOKENS, DRAFTS = 25, 4, 48, Drafting().most
PEER = Path(__file__).with_name("lookup_peer.py")
Ask = Callable[[list[int], int, bool], dict[str, object]]
"""Prompt, tokens of the answer, whether tokens are looked up; what `lookup_peer` answers."""


def tandem(stack: ExitStack, folder: Path, threads: int) -> Ask:
    flags = (f"--model={folder}", "--prefill=0", "--decode=1", "--dtype=float32", "--grammar=off", f"--threads={threads}")
    sizes = "--kv-memory=1GiB", "--context-tokens=1024"
    fleets = {
        lookup: stack.enter_context(running_fleet(*flags, *sizes, *(["--speculative-algorithm=NGRAM"] if lookup else [])))
        for lookup in (False, True)
    }

    def ask(prompt: list[int], tokens: int, lookup: bool) -> dict[str, object]:
        fleet = fleets[lookup]
        client, began_s = OpenAI(base_url=f"{fleet.url}/v1", api_key="none"), time.perf_counter()
        fields = {"ignore_eos": True, "return_token_ids": True, "cache_salt": str(began_s)}  # nobody else keeps prompts here
        reply = client.completions.create(model=folder.name, prompt=prompt, max_tokens=tokens, temperature=0.0, extra_body=fields)
        seconds, usage = time.perf_counter() - began_s, reply.usage
        details = usage.completion_tokens_details if usage else None
        accepted = (details and details.accepted_prediction_tokens) or 0
        drafted = accepted + ((details and details.rejected_prediction_tokens) or 0)
        ids = (reply.choices[0].model_extra or {})["token_ids"]
        return {"tokens": ids, "seconds": seconds, "drafted": drafted, "accepted": accepted}

    return ask


def peer(stack: ExitStack, name: str, python: str, folder: Path, threads: int) -> Ask:
    command = [python, "-P", str(PEER), name, str(folder), str(threads)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert child.stdin is not None and child.stdout is not None
    orders, answers = child.stdin, child.stdout
    stack.callback(child.wait)
    stack.callback(orders.close)
    if not answers.readline():
        raise SystemExit(f"{name} did not start")

    def ask(prompt: list[int], tokens: int, lookup: bool) -> dict[str, object]:
        orders.write(json.dumps({"prompt": prompt, "tokens": tokens, "lookup": lookup}) + "\n")
        told: dict[str, object] = json.loads(answers.readline())
        return told

    return ask


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.lookup_peers", description="Compare prompt lookup.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the checkpoint")
    parser.add_argument("peers", nargs="*", metavar="ENGINE=PYTHON", help="llama.cpp, llama-cpp-python, vllm, transformers")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of each engine")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="each with other prompts")
    parser.add_argument("--prompts", type=int, default=2, metavar="N", help="of a round")
    given = parser.parse_args()
    with ExitStack() as stack:
        asks = {"tandem": tandem(stack, given.folder, given.threads)}
        for name, python in (each.split("=", 1) for each in given.peers):
            asks[name] = peer(stack, name, python, given.folder, given.threads)
            say(f"{name} is there")
        draw = np.random.default_rng(5)
        for ask in asks.values():  # the first request of each pays for what later ones find ready
            for lookup in (False, True, False, True):
                ask(draw.integers(300, 100_000, 100).tolist(), 12, lookup)
        speeds: dict[tuple[str, bool], list[float]] = {(name, lookup): [] for name in asks for lookup in (False, True)}
        for number in range(given.rounds):
            for _ in range(given.prompts):
                measure(asks, draw.integers(300, 100_000, PASSAGE_TOKENS).tolist() * REPEATS, speeds, number)
    for (name, lookup), found in speeds.items():
        ratios = [drafts / plain for drafts, plain in zip(speeds[name, True], speeds[name, False], strict=True)]
        ratio = f", {median(ratios):.2f} times (from {min(ratios):.2f} to {max(ratios):.2f})" if lookup else ""
        say(f"{name:17} {'lookup' if lookup else 'plain':7} {median(found):6.2f} tokens/s behind the first{ratio}")
    return 0


def measure(asks: dict[str, Ask], prompt: list[int], speeds: dict[tuple[str, bool], list[float]], number: int) -> None:
    """One prompt for all engines, with lookup and without. The first token is an answer of its own."""
    expected: object = None
    for name, lookup in list(speeds)[:: 1 if number % 2 == 0 else -1]:
        first, whole = (asks[name](prompt, tokens, lookup) for tokens in (1, ANSWER_TOKENS))
        first_s, whole_s = float(str(first["seconds"])), float(str(whole["seconds"]))
        speeds[name, lookup].append((ANSWER_TOKENS - 1) / (whole_s - first_s))
        tokens = list(map(int, whole["tokens"]))  # type: ignore[call-overload]
        expected = expected or tokens
        same = next((at for at, pair in enumerate(zip(tokens, list(expected), strict=True)) if pair[0] != pair[1]), None)  # type: ignore[call-overload]
        say(
            f"{number} {name:17} {'lookup' if lookup else 'plain':7} whole {ANSWER_TOKENS / whole_s:6.2f} tokens/s, first "
            f"{1000 * first_s:5.0f} ms, behind it {speeds[name, lookup][-1]:6.2f} tokens/s, {whole['accepted']} of "
            f"{whole['drafted']} drafts right, {'the same tokens' if same is None else f'differs from token {same}'}"
        )


if __name__ == "__main__":
    sys.exit(main())
