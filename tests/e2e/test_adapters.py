"""A fleet of processes whose LoRA adapters change under load: each token is that of transformers with the model in which the
adapter is merged that its answer names.

    python -m pytest tests/e2e/test_adapters.py --soak      # 100 adapters, 400 changes, two and two instances, also with ranks
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.evaluate import MODEL
from tests.e2e.test_token_exact import LLAMA, Reference
from tests.engine.lora_folders import ATTENTION, EVERY, Lora
from tests.rig.load import Load
from tests.rig.pages import RunningFleet, running_fleet

STREAMS, PLACES, NAMES = 6, 8, 12
BASE = "base"
REFUSALS = "was unloaded", "load it again"
"""What a request hears whose adapter has just been unloaded, or is read again from a folder that was just written anew."""


class Adapters:
    """A base model, and folders of adapters of it."""

    def __init__(self, folder: Path, count: int) -> None:
        torch.manual_seed(11)
        self.base = folder / BASE
        self.model = AutoModelForCausalLM.from_config(LLAMA).eval()
        AutoTokenizer.from_pretrained(MODEL).save_pretrained(self.base)
        self.model.save_pretrained(self.base)
        self._loras = [
            Lora(seed=n, rank=(2, 4, 8, 16)[n % 4], modules=ATTENTION if n % 3 == 0 else EVERY, is_rslora=n % 5 == 0)
            for n in range(count)
        ]
        self.folders = [lora.saved(self.model, folder / f"adapter-{n}") for n, lora in enumerate(self._loras)]
        self._references: dict[int, Reference] = {}

    def reference(self, number: int) -> Reference:
        """What transformers answers with this adapter; -1: with the base model alone."""
        if number not in self._references:
            merged = self.model if number < 0 else self._loras[number].merged(self.model)
            self._references[number] = Reference(merged)
        return self._references[number]


class AdapterLoad(Load[tuple[list[int], str, dict[str, Any]]]):
    """Each request is for one of the names that are there or for the base model. names: those that may be asked for."""

    def __init__(self, fleet: RunningFleet, seed: int) -> None:
        self._fleet = fleet
        self.names: list[str] = []
        super().__init__(STREAMS, seed)

    def ask(self, random: Random) -> Iterator[None]:
        shared = [random.randrange(300, 2000) for _ in range(40)]
        while True:
            prompt = [*shared, *(random.randrange(300, 2000) for _ in range(random.choice((1, 30))))]
            sampling = {"temperature": 0, "max_new_tokens": random.choice((4, 16, 48)), "ignore_eos": True}
            name = random.choice([*self.names, ""])
            reply = self._fleet.post("/generate", {"input_ids": prompt, "sampling_params": sampling, "lora_path": name or None})
            if reply.status == 200:
                self.answers.append((prompt, name, reply.json()))
            elif not ((reply.status == 404 and "lora_path" in reply.text) or any(each in reply.text for each in REFUSALS)):
                self.errors.append(reply.text)
            yield


def check(answers: list[tuple[list[int], str, dict[str, Any]]], numbers: dict[str, int], adapters: Adapters) -> int:
    """numbers: of the adapter with each digest. Returns how many answers came from several adapters."""
    mixed = 0
    for prompt, name, answer in answers:
        tokens, spans = answer["output_ids"], answer["meta_info"]["weight_versions"]
        assert tokens and spans[-1]["end"] == len(tokens)
        for span in spans:
            begin, end, digest = span["start"], span["end"], span["version"].partition("+")[2]
            assert bool(digest) == bool(name)
            reference = adapters.reference(numbers[digest] if digest else -1)
            assert tokens[begin:end] == reference.greedy([*prompt, *tokens[:begin]], tokens[begin:end]), (name, span)
        mixed += len(spans) > 1
    return mixed


class Changes:
    """Loads, replaces and unloads adapters at random. numbers: see `check`."""

    def __init__(self, fleet: RunningFleet, adapters: Adapters, random: Random, shared: Path) -> None:
        self._fleet, self._adapters, self._random, self._shared = fleet, adapters, random, shared
        self.loaded: dict[str, int] = {}
        self.numbers: dict[str, int] = {}

    def change(self, load: AdapterLoad, turn: int) -> None:
        random, name = self._random, f"n{self._random.randrange(NAMES)}"
        if name in self.loaded and random.random() < 0.3:
            load.names = [each for each in load.names if each != name]
            assert self._fleet.post("/unload_lora_adapter", {"lora_name": name}).status == 200
            del self.loaded[name]
            return
        number = random.randrange(len(self._adapters.folders))
        path = self._adapters.folders[number]
        if turn % 4 == 0:  # as a trainer that writes one folder again and again
            path = Path(shutil.copytree(path, self._shared / name, dirs_exist_ok=True))
        body: dict[str, Any] = {"lora_name": name, "lora_path": str(path)}
        if name in self.loaded:
            body |= {"load_inplace": True, "mode": ("finish", "recompute")[turn % 2]}
        reply = self._fleet.post("/load_lora_adapter", body)
        assert reply.status == 200, reply.text
        self.loaded[name] = number
        cards = {card["id"]: card for card in self._fleet.get("/v1/models").json()["data"]}
        self.numbers[cards[name]["digest"]] = number
        load.names = sorted(self.loaded)


@pytest.mark.parametrize(
    ("count", "changes", "flags"),
    [
        pytest.param(6, 20, (), id="one and one"),
        pytest.param(100, 400, ("--prefill", "2", "--decode", "2"), marks=pytest.mark.soak, id="two and two"),
        pytest.param(100, 400, ("--tp", "2"), marks=pytest.mark.soak, id="ranks"),
    ],
)
def test_every_token_is_that_of_the_adapter_that_its_answer_names(
    tmp_path: Path, count: int, changes: int, flags: tuple[str, ...]
) -> None:
    adapters = Adapters(tmp_path, count)
    common = (
        "--model",
        str(adapters.base),
        "--dtype",
        "float32",
        "--grammar",
        "off",
        "--dead-after-s",
        "60",
        "--max-running",
        "8",
    )
    places = ("--max-loaded-loras", str(PLACES), "--max-loras-per-batch", "3", "--lora", f"first={adapters.folders[0]}")
    with running_fleet(*common, *places, *flags) as fleet, ExitStack() as stack:
        load = AdapterLoad(fleet, seed=changes)
        stack.callback(load.stop)
        cards = {card["id"]: card for card in fleet.get("/v1/models").json()["data"]}
        assert (
            cards["first"]["root"] == str(adapters.folders[0])
            and cards["first"]["parent"] == fleet.get("/v1/models").json()["data"][0]["id"]
        )
        made = Changes(fleet, adapters, Random(changes), tmp_path / "shared")
        made.numbers[cards["first"]["digest"]] = 0
        load.names = ["first"]
        made.loaded["first"] = 0
        for turn in range(changes):
            load.wait_for_another_answer()
            made.change(load, turn)
        refused = fleet.post("/load_lora_adapter", {"lora_name": "no", "lora_path": "/no/such/folder"})
        assert refused.status == 400 and "/no/such/folder" in refused.text
        load.stop()
        assert not load.errors, load.errors[:3]
        fleet.wait_until_home()
    assert sum(bool(name) for _, name, _ in load.answers) >= changes // 2
    check(load.answers, made.numbers, adapters)
