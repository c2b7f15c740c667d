"""A fleet of processes whose weights change under load, as a trainer asks by HTTP: each token is that of transformers with the
weights from which its answer says that it came.

    python -m pytest tests/e2e/test_weight_updates.py --soak      # 1,000 changes in fleets of two and two, also with ranks, and
                                                                  # 200 more while instances are killed
"""

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from demo.evaluate import MODEL
from tests.e2e.test_token_exact import LLAMA, Reference
from tests.rig.load import Load
from tests.rig.pages import Reply, RunningFleet, kill, running_fleet, until
from tests.rig.trainer import GROUP, Trainer

STREAMS = 4
FIRST = "default"
MODES = ("recompute", "finish", "recompute")
ROUNDING = 1e-4
"""Two tokens whose logits differ by less may both be drawn. With other weights the drawn one is far from the best."""
Weights = dict[str, torch.Tensor]


class Checkpoints:
    """The same model after several steps of training: on disk, and a part of each in shared memory."""

    def __init__(self, folder: Path, config: LlamaConfig, count: int) -> None:
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config).eval()
        self.folders: list[Path] = []
        self.references: list[Reference] = []
        self.segments: list[Path] = []
        self.states: list[Weights] = []
        for number in range(count):
            path = folder / f"step-{number}"
            AutoTokenizer.from_pretrained(MODEL).save_pretrained(path)
            with torch.no_grad():
                for parameter in model.parameters() if number else ():
                    parameter.mul_(0.8).add_(0.1 * parameter.std() * torch.randn_like(parameter))
            model.save_pretrained(path)
            self._model = model
            self.states.append({name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()})
            self.folders.append(path)
            self.references.append(Reference.load(path))
            self.segments.append(Path("/dev/shm") / f"tandem-{uuid4().hex}")
            save_file(self.states[-1], self.segments[-1])

    def reference(self, state: Weights) -> Reference:
        """With these weights, which may come from several steps."""
        model = copy.deepcopy(self._model)
        model.load_state_dict(state)
        return Reference(model)

    def close(self) -> None:
        for segment in self.segments:
            segment.unlink()


class UpdateLoad(Load[tuple[list[int], dict[str, Any]]]):
    """forgives: 503 is no error."""

    def __init__(self, fleet: RunningFleet, seed: int, *, forgives: bool = False) -> None:
        self._fleet, self._forgives = fleet, forgives
        super().__init__(STREAMS, seed)

    def ask(self, random: Random) -> Iterator[None]:
        while True:
            prompt = [random.randrange(300, 2000) for _ in range(random.choice((5, 60, 200)))]
            sampling = {"temperature": 0, "max_new_tokens": random.choice((8, 32, 64)), "ignore_eos": True}
            reply = self._fleet.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
            if reply.status == 200:
                self.answers.append((prompt, reply.json()))
            elif not (self._forgives and reply.status == 503):
                self.errors.append(reply.text)
            yield


class Sender:
    """A trainer of a fleet, and its group. Each of its buckets has a version of its own, unless the fleet is paused meanwhile: so
    each token can be told from all others."""

    def __init__(self, fleet: RunningFleet, checkpoints: Checkpoints) -> None:
        self._fleet, self._checkpoints = fleet, checkpoints
        self._trainer: Trainer | None = None
        self.init: dict[str, Any] = {}
        """The body with which its latest group was made."""
        self.weights = checkpoints.states[0]
        """What the fleet computes with."""

    def meet(self) -> Reply:
        """With all ranks that there are now."""
        self.close()
        ranks = sum(len(member["ranks"]) for member in self._fleet.members().values())
        self._trainer = Trainer(1 + ranks, timeout_s=120.0, group=GROUP)
        self.init = {**self._trainer.init, "timeout_s": 60.0}
        reply = self._fleet.post("/init_weights_update_group", self.init)
        if reply.status == 200:
            assert self._trainer.hear() == "met"
            assert sorted(rank for each in reply.json()["ranks"].values() for rank in each) == list(range(1, 1 + ranks))
        else:
            self.close()
        return reply

    def buckets(self, count: int) -> list[list[str]]:
        names = list(self.weights)
        return [names[number::count] for number in range(count)]

    def send(self, chosen: int, names: Sequence[str], dies_after: int | None = None, **fields: Any) -> Reply:
        """These weights of a checkpoint."""
        if self._trainer is None and (met := self.meet()).status != 200:
            return met
        assert self._trainer is not None
        self._trainer.tell(self._checkpoints.segments[chosen], names, dies_after)
        new = {name: self._checkpoints.states[chosen][name] for name in names}
        body = {
            "names": names,
            "dtypes": ["float32"] * len(names),
            "shapes": [list(tensor.shape) for tensor in new.values()],
            "flush_cache": False,
        }
        reply = self._fleet.post("/update_weights_from_distributed", {**body, **fields})
        if reply.status == 200:
            assert self._trainer.hear() == f"sent {len(names)}"
            self.weights = {**self.weights, **new}
        else:
            self.close()
        return reply

    def send_all(self, chosen: int, version: str, mode: str | None, references: dict[str, Reference]) -> Reply:
        """A whole checkpoint in three buckets. mode: None: the fleet is paused meanwhile, in the order that slime has."""
        if mode is None:
            assert self._fleet.post("/pause_generation", {}).status == 200
            until(lambda: self._fleet.post("/flush_cache", {}).status == 200, "empty caches")
        for number, names in enumerate(self.buckets(3)):
            name = version if mode is None or number == 2 else f"{version}.{number}"
            if mode is not None:
                new = {each: self._checkpoints.states[chosen][each] for each in names}
                references[name] = self._checkpoints.reference({**self.weights, **new})
            reply = self.send(chosen, names, weight_version=name, mode=mode)
            if reply.status != 200:
                break
        if mode is None:
            assert self._fleet.post("/continue_generation", {}).status == 200
        return reply

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None


def check(answers: list[tuple[list[int], dict[str, Any]]], references: dict[str, Reference]) -> int:
    """Returns how many answers came from several weights."""
    mixed = 0
    for prompt, answer in answers:
        tokens, spans = answer["output_ids"], answer["meta_info"]["weight_versions"]
        if not tokens:
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            continue
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == len(tokens) and answer["meta_info"]["weight_version"] == spans[-1]["version"]
        for span in spans:
            begin, end = span["start"], span["end"]
            regrets = references[span["version"]].regrets([*prompt, *tokens[:begin]], tokens[begin:end])
            assert max(regrets) < ROUNDING, (span, regrets)
        mixed += len(spans) > 1
    return mixed


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoints]:
    made = Checkpoints(tmp_path_factory.mktemp("checkpoints"), LLAMA, 3)
    yield made
    made.close()


def flags_of(checkpoints: Checkpoints) -> tuple[str, ...]:
    model = str(checkpoints.folders[0])
    return ("--model", model, "--dtype", "float32", "--grammar", "off", "--dead-after-s", "60", "--max-running", "8")


def change(
    fleet: RunningFleet, sender: Sender, checkpoints: Checkpoints, kind: int, chosen: int, version: str, mode: str | None
) -> Reply:
    """From disk (0) or shared memory (1)."""
    body: dict[str, Any] = {"weight_version": version, "mode": mode}
    if kind:
        reply = fleet.post("/update_weights_from_tensor", {**body, "shared_memory": [checkpoints.segments[chosen].name]})
    else:
        reply = fleet.post("/update_weights_from_disk", {**body, "model_path": str(checkpoints.folders[chosen])})
    if reply.status == 200:
        sender.weights = checkpoints.states[chosen]
    return reply


def refuses(reply: Reply, status: int, *reasons: str) -> None:
    assert reply.status == status and all(reason in reply.text for reason in reasons), reply.text


def go_wrong(fleet: RunningFleet, sender: Sender) -> None:
    """What cannot be is refused by name, and a trainer that dies while it sends changes nothing."""
    refuses(fleet.post("/update_weights_from_disk", {"model_path": "/no/such/folder"}), 400, "there is no folder")
    (names,) = sender.buckets(1)
    refuses(fleet.post("/init_weights_update_group", sender.init), 400, f"the group {GROUP} is there already")
    refuses(sender.send(2, names, dies_after=2), 503, f"{names[2]} (weight 3 of", f"did not come from the group {GROUP}")
    bucket = {"names": names[:1], "dtypes": ["float32"], "shapes": [[3]]}
    refuses(fleet.post("/update_weights_from_distributed", bucket), 400, f"the fleet is in no group {GROUP}")
    refuses(sender.send(2, names[:2], shapes=[[3], [4]]), 400, f"names: {names[0]} has the shape [3]")
    where = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "backend": "gloo", "timeout_s": 1.0}
    ranks = {name: len(member["ranks"]) for name, member in fleet.members().items()}
    least = 1 + sum(ranks.values())
    few = fleet.post("/init_weights_update_group", {**where, "world_size": least - 1})
    refuses(few, 400, f"the fleet has {least - 1} ranks (prefill-0: {ranks['prefill-0']}, ", f"must be {least} or more, and not")
    refuses(fleet.post("/init_weights_update_group", {**where, "world_size": least}), 503, f"the group {GROUP} did not meet")


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        pytest.param(6, (), id="one and one"),
        pytest.param(500, ("--prefill", "2", "--decode", "2"), marks=pytest.mark.soak, id="two and two"),
        pytest.param(500, ("--tp", "2"), marks=pytest.mark.soak, id="ranks"),
    ],
)
def test_every_token_is_that_of_the_weights_that_its_answer_names(
    checkpoints: Checkpoints, changes: int, flags: tuple[str, ...]
) -> None:
    random, references = Random(changes), {FIRST: checkpoints.references[0]}
    with running_fleet(*flags_of(checkpoints), *flags) as fleet, ExitStack() as stack:
        load, sender = UpdateLoad(fleet, seed=changes), Sender(fleet, checkpoints)
        stack.callback(load.stop)
        stack.callback(sender.close)
        for number in range(changes):
            load.wait_for_another_answer()
            chosen, version, mode = random.randrange(len(checkpoints.folders)), f"v{number}", MODES[number // 3 % 3]
            references[version] = checkpoints.references[chosen]
            if number % 3 == 2:
                reply = sender.send_all(chosen, version, random.choice((mode, None)), references)
            else:
                reply = change(fleet, sender, checkpoints, number % 3, chosen, version, mode)
            assert reply.status == 200, reply.text
            assert reply.json()["weight_version"] == version and reply.json()["success"]
        if not flags:  # ranks share weights, and none has a whole one
            read = fleet.post("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 2})
            assert read.json() == sender.weights["model.norm.weight"][:2].tolist()
        go_wrong(fleet, sender)
        load.wait_for_another_answer()
        assert fleet.get("/weight_info").json()["weight_version"] == f"v{changes - 1}"
        load.stop()
        assert not load.errors, load.errors[:3]
        fleet.wait_until_home()
    assert len(load.answers) >= changes
    assert check(load.answers, references) > 0, "no answer met a change"


@pytest.mark.soak
@pytest.mark.parametrize("flags", [("--prefill", "2", "--decode", "2"), ("--tp", "2")], ids=("two and two", "ranks"))
def test_instances_that_are_killed_between_and_during_changes_mix_no_weights(
    checkpoints: Checkpoints, flags: tuple[str, ...]
) -> None:
    """What a trainer has broadcast nobody can get again: an instance that comes back after that has it from disk."""
    random, references, outcomes = Random(str(flags)), {FIRST: checkpoints.references[0]}, list[int]()
    with running_fleet(*flags_of(checkpoints), *flags) as fleet, ExitStack() as stack:
        names = list(fleet.members())
        load, sender = UpdateLoad(fleet, seed=3, forgives=True), Sender(fleet, checkpoints)
        stack.callback(load.stop)
        stack.callback(sender.close)
        for number in range(100):
            chosen, version, mode = random.randrange(len(checkpoints.folders)), f"v{number}", MODES[number // 3 % 3]
            references[version] = checkpoints.references[chosen]
            victim = random.choice(list(fleet.members().values())) if number % 2 else None
            ends = threading.Timer(random.choice((0.0, random.random())), kill, [victim])
            ends.start()
            if number % 3 == 2:
                reply = sender.send_all(chosen, version, random.choice((mode, None)), references)
            else:
                reply = change(fleet, sender, checkpoints, number % 3, chosen, version, mode)
            ends.join()
            outcomes.append(reply.status)
            if victim is not None:
                sender.close()
                fleet.post("/destroy_weights_update_group", {})
                references[f"{version} again"] = checkpoints.references[chosen]

                def is_changed(chosen: int = chosen, version: str = f"{version} again") -> bool:
                    return change(fleet, sender, checkpoints, 0, chosen, version, "recompute").status == 200

                until(is_changed, "weights from disk")
                fleet.wait_until_whole(*names)
            load.wait_for_another_answer()
        load.stop()
        assert not load.errors, load.errors[:3]
        fleet.wait_until_home()
    assert outcomes.count(200) > 50 and len(set(outcomes)) > 1
    check(load.answers, references)
