"""Rows with LoRA adapters: their answers are those of models whose weights have the adapter in them, in batches of any mix."""

import copy
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from common.config import EngineConfig, ModelConfig
from common.errors import BadRequest, ConfigError, TandemError, Unavailable
from common.executor import Chunk, RowStart, StepPlan, StepResult
from common.ids import Digest
from common.messages.variants import ReadAdapter, WeightsOnDisk
from common.sampling_params import SamplingParams
from engine.lora.adapter_files import Adapter, read_adapter
from engine.lora.adapter_slots import AdapterSlots
from engine.model_runner import ModelRunner
from engine.torch_executor import TorchExecutor
from tests.engine.checkpoints import VOCAB, llama, mixtral, qwen2, qwen3, saved
from tests.engine.driver import Driver
from tests.engine.exact import GREEDY, Answer, answers, assert_exact, heard_answers, recorded_logits, reference_logits, runner
from tests.engine.graph_recorder import RecordedGraphs
from tests.engine.lora_folders import ATTENTION, Lora
from tests.engine.packed import CAN_RECORD, counted_replays, pack_everything
from tests.engine.padded_attention import as_on_a_card
from tests.engine.ranks import least_of, on_ranks, runner_of

NONE, WAIT_S = Digest(""), 60.0
POOLED = SamplingParams(max_new_tokens=1, temperature=0.0, pooling="mean")
PROMPTS = [np.random.default_rng(at).integers(3, VOCAB, length).astype(np.int32) for at, length in enumerate((1, 50, 17, 33, 6))]
LORAS = (
    Lora(1),
    Lora(2, rank=16, alpha=8, is_rslora=True, dtype=torch.bfloat16),
    Lora(3, rank=4, ranks={"q_proj": 9, r"layers\.1\.mlp\.up_proj": 2}, alphas={"down_proj": 3.0}, dtype=torch.float16),
    Lora(4, rank=20, modules=("k_proj", "o_proj", "gate_proj")),
)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama with biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "qwen2": qwen2,
    "qwen3": qwen3,
}


@pytest.mark.parametrize("lora", LORAS, ids=lambda lora: f"rank {lora.rank}")
def test_the_models_that_answers_are_compared_with_are_those_that_peft_merges(lora: Lora, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the package peft")
    model = llama()
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(model), str(lora.saved(model, tmp_path))).merge_and_unload()
    for (name, ours), (_, merged) in zip(lora.merged(model).named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(ours, merged, atol=1e-6, rtol=0, msg=name)


@pytest.fixture(params=["plain", "packed"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether every layer's weights are packed for the product in C."""
    if request.param == "packed":
        if not CAN_RECORD:
            pytest.skip("there is no C compiler")
        pack_everything(monkeypatch)
    return str(request.param)


def adapted(model: PreTrainedModel, path: Path, loras: Sequence[Lora], **changes: object) -> tuple[ModelRunner, list[Digest]]:
    """A runner of the model, and the digests of its adapters."""
    fields: dict[str, object] = {"max_loaded_loras": len(loras), "max_lora_rank": 32, "dtype": "float32"}
    made = runner(saved(model, path / "model"), lambda text: None, **(fields | changes))
    return made, [hold(made, lora.saved(model, path / str(lora.seed))) for lora in loras]


def hold(made: ModelRunner, folder: Path) -> Digest:
    return made.adapters.hold(made.adapters.read(folder))


def assert_merged(model: PreTrainedModel, loras: Sequence[Lora | None], given: Sequence[Answer]) -> None:
    """Each answer is that of the model with its adapter, and not of the model alone."""
    for lora, answer in zip(loras, given, strict=True):
        assert_exact(model if lora is None else lora.merged(model), [answer])
        if lora is not None:
            alone = reference_logits(model, answer)
            assert (torch.stack(answer.logits) - alone).abs().max() > 0.1 * alone.abs().max()


@pytest.mark.parametrize(
    ("name", "packing"),
    [("llama with biases", "plain"), ("llama with biases", "packed"), ("qwen2", "packed"), ("qwen3", "plain")],
    indirect=["packing"],
)
def test_a_batch_of_several_adapters_and_none_answers_as_the_merged_models(tmp_path: Path, name: str, packing: str) -> None:
    """In chunks beside decode rows, and in decode steps of any mix."""
    model = MODELS[name]()
    made, digests = adapted(model, tmp_path, LORAS[:3])
    given = answers(made, PROMPTS, 5, 20, [digests[0], NONE, digests[1], digests[0], digests[2]])
    assert_merged(model, [LORAS[0], None, LORAS[1], LORAS[0], LORAS[2]], given)


def test_adapters_of_some_layers_and_of_attention_beside_experts_are_computed(tmp_path: Path) -> None:
    model = mixtral()
    lora = Lora(7, modules=ATTENTION)
    made, (digest,) = adapted(model, tmp_path / "experts", [lora])
    assert_merged(model, [lora, None], answers(made, PROMPTS[:2], 3, 20, [digest, NONE]))
    dense = llama()
    made, (digest,) = adapted(dense, tmp_path / "some", [LORAS[3]])
    assert_merged(dense, [LORAS[3]], answers(made, PROMPTS[1:2], 3, 20, [digest]))


def test_embeddings_of_all_tokens_and_log_probabilities_of_prompts_come_from_the_adapted_model(tmp_path: Path) -> None:
    """The last layer then computes all tokens of a chunk, and not the sampled ones alone."""
    model = qwen3()
    made, (digest,) = adapted(model, tmp_path, LORAS[:1])
    prompt, pages = PROMPTS[1], np.arange(8, dtype=np.int32)
    start = RowStart(0, pages, POOLED, token_ids=prompt, adapter=digest)
    result = made.run(StepPlan(0, starts=(start,), chunks=(Chunk(0, 0, prompt, last=True),)))
    with torch.inference_mode():
        hidden = LORAS[0].merged(model).model(torch.from_numpy(prompt.astype(np.int64))[None]).last_hidden_state[0]
    found = np.frombuffer(result.embeddings[0], dtype="<f4")
    assert np.allclose(found, hidden.mean(0).numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not CAN_RECORD, reason="there is no C compiler")
def test_steps_are_replayed_and_those_without_adapters_are_bit_by_bit_those_of_an_instance_without_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_everything(monkeypatch)
    model = qwen3()
    made, (digest,) = adapted(model, tmp_path, LORAS[:1], graphs="on", max_running=4)
    plain = runner(tmp_path / "model", graphs="on", max_running=4, dtype="float32")
    with counted_replays() as replays:
        given, expected = (answers(each, PROMPTS[:3], 6, 60) for each in (made, plain))
        assert len(replays) == 2 * 5
        for one, other in zip(given, expected, strict=True):
            assert one.tokens == other.tokens and all(map(torch.equal, one.logits, other.logits))
        assert_merged(model, [LORAS[0], None, None], answers(made, PROMPTS[:3], 6, 60, [digest, NONE, NONE]))
        assert len(replays) == 3 * 5, "rows with an adapter and without, in one replay"
        assert_merged(model, [None, LORAS[0], LORAS[0]], answers(made, PROMPTS[:3], 6, 60, [NONE, digest, digest]))
        again = answers(made, PROMPTS[:3], 6, 60)
        assert len(replays) == 5 * 5 and [one.tokens for one in again] == [one.tokens for one in expected]


def test_int8_layers_get_the_deltas_in_float(tmp_path: Path) -> None:
    """The logits differ from the exact ones no more than without adapters."""
    model = llama(hidden_size=128, intermediate_size=256, num_attention_heads=8)
    made, (digest,) = adapted(model, tmp_path, LORAS[:1], quantization="int8")

    def error(reference: PreTrainedModel, adapter: Digest) -> float:
        (answer,) = answers(made, PROMPTS[1:2], 4, 20, [adapter])
        exact = reference_logits(reference, answer)
        return float(((torch.stack(answer.logits) - exact).norm() / exact.norm()).item())

    alone, with_adapter = error(model, NONE), error(LORAS[0].merged(model), digest)
    assert 0 < with_adapter < 1.5 * alone < 0.3
    assert error(model, digest) > 3 * with_adapter


@pytest.mark.parametrize("make", [llama, lambda: qwen3(num_key_value_heads=1)], ids=["llama", "one KV head"])
def test_two_ranks_answer_as_the_merged_model(tmp_path: Path, make: Callable[[], PreTrainedModel]) -> None:
    model, agree, loras = make(), least_of(2), [LORAS[0], None, LORAS[2]]
    path = saved(model, tmp_path / "model")
    folders = [lora.saved(model, tmp_path / str(lora.seed)) for lora in (LORAS[0], LORAS[2])]
    heard: dict[int, list[Tensor]] = {}

    def run(group: Any) -> list[Answer]:
        heard[threading.get_ident()] = []
        made = runner_of(path, group, agree, max_loaded_loras=2, dtype="float32")
        first, second = (hold(made, folder) for folder in folders)
        return heard_answers(made, PROMPTS[:3], 4, 24, heard[threading.get_ident()], [first, NONE, second])

    with recorded_logits(lambda: heard[threading.get_ident()]):
        for given in on_ranks(2, run):
            assert_merged(model, loras, given)


def test_a_graph_computes_the_adapters_of_any_later_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured once for each size, with adapters and without: it reads which rows have which from tensors that stay."""
    model, captured = qwen3(), list[int]()

    class Graphs(RecordedGraphs):
        def capture(self, run: Callable[[], None]) -> Callable[[], None]:
            captured.append(0)
            at, replay = len(captured) - 1, super().capture(run)

            def counted() -> None:
                captured[at] += 1
                replay()

            return counted

    as_on_a_card(monkeypatch, Graphs())
    loras = LORAS[:3]
    made, digests = adapted(model, tmp_path, loras, max_running=8, graph_sizes="2,8")
    assert len(captured) == 4
    for order in ([0, None, 1, 2, 0], [None, None, 2], [1], [None, None], [None] * 4):
        adapters = [NONE if at is None else digests[at] for at in order]
        driver = Driver(made.run, made.description, adapters=adapters)
        given = driver.answers(PROMPTS[: len(order)], 4, GREEDY, chunk_tokens=60)
        for at, prompt, tokens in zip(order, PROMPTS, given, strict=False):
            assert_exact_tokens(model if at is None else loras[at].merged(model), prompt, tokens)
    assert all(captured)


# --- holding more than a step computes with ------------------------------------------------------------------------------------


def test_more_adapters_than_slots_take_turns_and_each_answers_as_its_merged_model(tmp_path: Path, packing: str) -> None:
    """With two slots. What a larger adapter has left in a slot would be seen in the answers of a smaller one."""
    model = llama()
    loras = (LORAS[3], LORAS[0], LORAS[1], LORAS[2])
    made, digests = adapted(model, tmp_path, loras, max_loras_per_batch=2)
    for first, second in ((0, 1), (2, 3), (1, 2), (0, 3), (3, 0)):
        given = answers(made, PROMPTS[1:4], 3, 20, [digests[first], NONE, digests[second]])
        assert_merged(model, [loras[first], None, loras[second]], given)


def test_the_adapter_that_was_needed_last_the_longest_ago_gives_up_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, original = list[Digest](), AdapterSlots._write

    def write(self: AdapterSlots, slot: int, adapter: Any) -> None:
        written.append(adapter.digest)
        original(self, slot, adapter)

    monkeypatch.setattr(AdapterSlots, "_write", write)
    made, (a, b, c, d) = adapted(llama(num_hidden_layers=1), tmp_path, LORAS, max_loras_per_batch=3)
    for wanted, copied in (([a, b], [a, b]), ([c], [c]), ([a], []), ([d, c], [d]), ([b, a], [b]), ([d, c], [d])):
        written.clear()
        slots = made.adapters.take(wanted)
        assert list(slots) == wanted and len(set(slots.values())) == len(wanted)
        assert written == copied


def test_rows_whose_adapter_is_not_held_or_has_no_slot_left_fail_until_they_start_anew(tmp_path: Path) -> None:
    """A row that has lost its adapter in one step has KV of the model alone, so it fails in the steps that follow too, also where
    there is a slot again."""
    model = llama()
    made, (first, second) = adapted(model, tmp_path, LORAS[:2], max_loras_per_batch=1)
    pages = np.arange(16, dtype=np.int32).reshape(4, 4)
    named = (NONE, first, second, Digest("no such one"))
    starts = tuple(RowStart(row, pages[row], GREEDY, adapter=each) for row, each in enumerate(named))
    tokens = [list[int]() for _ in named]

    def step(rows: list[int], begins: tuple[RowStart, ...] = ()) -> dict[int, TandemError]:
        chunks = tuple(Chunk(start.row, 0, PROMPTS[2], last=True) for start in begins)
        decoded = [] if begins else rows
        result = made.run(StepPlan(0, begins, chunks, np.array(decoded, dtype=np.int32)))
        for row, token in zip(rows, result.tokens.tolist(), strict=True):
            tokens[row].append(token)
        return dict(result.failed)

    failed = step([0, 1, 2, 3], starts)
    assert list(failed) == [2, 3] and all(isinstance(each, Unavailable) for each in failed.values())
    assert second in str(failed[2]) and "no such one" in str(failed[3])
    assert list(step([0, 2])) == [2], "there is a slot for it now, but its KV is of the model alone"
    assert not step([0, 1])
    assert_exact_tokens(model, PROMPTS[2], tokens[0])
    assert_exact_tokens(LORAS[0].merged(model), PROMPTS[2], tokens[1])
    tokens[2].clear()
    assert not step([2], starts[2:3]) and not step([2])
    assert_exact_tokens(LORAS[1].merged(model), PROMPTS[2], tokens[2])
    made.adapters.free(second)
    made.adapters.free(second)
    assert list(step([2])) == [2], "it is held no more, although it is still in its slot"
    plain = runner(tmp_path / "model")
    chunks = (Chunk(0, 0, PROMPTS[2], last=True), Chunk(1, 0, PROMPTS[2], last=True))
    assert list(plain.run(StepPlan(0, starts[:2], chunks)).failed) == [1]


def test_as_many_are_held_as_may_be_and_one_that_is_freed_gives_its_place_to_another(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=1)
    made, (first, second) = adapted(model, tmp_path, LORAS[:2])
    third = made.adapters.read(LORAS[2].saved(model, tmp_path / "third"))
    with pytest.raises(Unavailable, match=r"holds 2 LoRA adapters: .* --max-loaded-loras"):
        made.adapters.hold(third)
    assert hold(made, tmp_path / str(LORAS[0].seed)) == first, "it is held already"
    made.adapters.free(second)
    assert made.adapters.hold(third) == third.digest
    with pytest.raises(ConfigError, match="no room for LoRA adapters: start it with --max-loaded-loras"):
        runner(tmp_path / "model").adapters.read(tmp_path / str(LORAS[0].seed))


def test_the_executor_reads_adapters_beside_its_steps_and_forgets_those_that_are_freed(tmp_path: Path) -> None:
    """While the first one is read, which waits here, a step goes by."""
    model, woken = llama(), threading.Event()
    folder = LORAS[0].saved(model, tmp_path / "lora")
    fields: Any = {"device": "cpu", "kv_memory": "8MiB", "max_running": 8, "grammar": "off", "max_loaded_loras": 1}
    command = ModelConfig(model=str(saved(model, tmp_path / "model")))
    executor = TorchExecutor(command, EngineConfig(**fields), woken.set, lambda text: None)

    def awaited(work: Any) -> Any:
        while (result := work.poll()) is None:
            assert woken.wait(WAIT_S), "nobody woke the loop"
            woken.clear()
        return result

    def run(plan: StepPlan) -> StepResult:
        result: StepResult = awaited(executor.launch(plan))
        return result

    def tokens(digest: Digest) -> list[int]:
        return Driver(run, executor.description, adapters=[digest]).answers([PROMPTS[2]], 3, GREEDY)[0]

    goes_on, read = threading.Event(), executor._runner.adapters.read

    def read_late(folder: Path) -> Adapter:
        assert goes_on.wait(WAIT_S)
        return read(folder)

    try:
        assert (executor.description.max_adapters, executor.description.adapters_per_batch) == (1, 1)
        with mock.patch.object(executor._runner.adapters, "read", read_late):
            work = executor.perform(ReadAdapter(str(folder)))
            assert_exact_tokens(model, PROMPTS[2], tokens(NONE))
            assert work.poll() is None
            goes_on.set()
            digest = awaited(work)
        assert_exact_tokens(LORAS[0].merged(model), PROMPTS[2], tokens(digest))
        with pytest.raises(BadRequest, match=r"has no adapter_config\.json"):
            awaited(executor.perform(ReadAdapter(str(tmp_path))))
        other = ReadAdapter(str(LORAS[1].saved(model, tmp_path / "other")))
        with pytest.raises(Unavailable, match="holds 1 LoRA adapters"):
            awaited(executor.perform(other))
        executor.free_adapter(digest)
        executor.free_adapter(digest)
        assert_exact_tokens(LORAS[1].merged(model), PROMPTS[2], tokens(awaited(executor.perform(other))))
    finally:
        executor.close()


def test_a_folder_that_changes_after_it_was_read_changes_nothing(tmp_path: Path) -> None:
    model = llama()
    made, (digest,) = adapted(model, tmp_path, LORAS[:1], max_loaded_loras=2)
    other = LORAS[3].saved(model, tmp_path / str(LORAS[0].seed))
    file = other / "adapter_model.safetensors"
    with file.open("r+b") as opened:
        opened.write(b"\x77" * file.stat().st_size)
    assert_merged(model, LORAS[:1], answers(made, PROMPTS[1:2], 3, 20, [digest]))


@pytest.mark.parametrize(
    ("packing", "quantization"), [("plain", "none"), ("packed", "none"), ("plain", "int8")], indirect=["packing"]
)
def test_after_a_change_of_weights_adapters_are_added_to_the_new_ones(tmp_path: Path, packing: str, quantization: str) -> None:
    """With adapters that were in slots before, and one that comes into a slot behind the change."""
    model = llama(hidden_size=128, intermediate_size=256, num_attention_heads=8)
    new = copy.deepcopy(model)
    with torch.no_grad():
        for weight in new.parameters():
            weight.copy_(weight.roll(1, 0) * 1.1 if weight.ndim == 2 else weight * 0.9)
    made, digests = adapted(model, tmp_path, LORAS[:2], max_loras_per_batch=1, quantization=quantization)
    answers(made, PROMPTS[1:3], 2, 20, [digests[0], NONE])
    made.weights.switch(made.weights.stage(WeightsOnDisk(str(saved(new, tmp_path / "new"))), lambda _: None))
    for lora, digest in zip(LORAS, digests, strict=False):
        given = answers(made, PROMPTS[1:3], 4, 20, [digest, NONE])
        if quantization == "none":
            assert_merged(new, [lora, None], given)
            continue
        for answer, reference in zip(given, (lora.merged(new), new), strict=True):
            found, right, wrong = (torch.stack(answer.logits), *(reference_logits(each, answer) for each in (reference, model)))
            assert (found - right).norm() < 0.3 * min(right.norm(), (found - wrong).norm())


def assert_exact_tokens(model: PreTrainedModel, prompt: Any, tokens: list[int]) -> None:
    assert reference_logits(model, Answer(prompt, tokens)).argmax(-1).tolist() == tokens


def test_a_digest_is_of_the_bytes_and_of_the_scaling_alone(tmp_path: Path) -> None:
    model = qwen2(num_hidden_layers=1)
    made, (digest,) = adapted(model, tmp_path, [LORAS[0]], max_loaded_loras=8)
    assert len(digest) == 32
    assert hold(made, LORAS[0].saved(model, tmp_path / "copy", revision="main", lora_dropout=0.0)) == digest
    others = [replace(LORAS[0], alpha=17.0), replace(LORAS[0], seed=9), replace(LORAS[0], dtype=torch.float16)]
    found = {hold(made, other.saved(model, tmp_path / f"other {at}")) for at, other in enumerate(others)}
    assert len(found | {digest}) == 4
    patterns = {"up_proj": 1.0, r".*mlp\.up_proj": 64.0}
    orders = patterns, dict(reversed(patterns.items()))  # the first that matches counts
    of_orders = {
        hold(made, LORAS[0].saved(model, tmp_path / f"order {at}", alpha_pattern=each)) for at, each in enumerate(orders)
    }
    assert len(of_orders) == 2


# --- refusals ------------------------------------------------------------------------------------------------------------------

FIELDS: dict[str, tuple[object, str]] = {
    "use_dora": (True, "use_dora must be left out: .*DoRA"),
    "bias": ("lora_only", "bias must be none: .*merge"),
    "modules_to_save": (["lm_head"], "modules_to_save must be left out: merge"),
    "peft_type": ("IA3", "peft_type must be LORA; it is IA3"),
    "r": (33, "r is 33, and --max-lora-rank 32: give more"),
    "rank_pattern": ({"q_proj": 300}, "rank_pattern is 300, .*the most is 256"),
    "alpha_pattern": ({"(?i)Q_PROJ": 1.0}, "cannot find out which modules .* no regular expressions"),
    "lora_alpha": ("high", "lora_alpha must be a number"),
    "use_rslora": ("yes", "use_rslora must be true or false"),
    "target_modules": (["q_proj", "lm_head"], "target_modules must be among .*: lm_head is none"),
    "layers_to_transform": ("all", "layers_to_transform must be a list"),
    "init_lora_weights": ("pissa_niter_4", "init_lora_weights must be .*base weights"),
    "target_parameters": (["experts.gate_up_proj"], "target_parameters must be left out: .*experts"),
    "layer_replication": ([[0, 2]], "layer_replication must be left out"),
    "exclude_modules": (["q_proj"], "exclude_modules must be left out"),
    "lora_bias": (True, "lora_bias must be left out"),
}


@pytest.fixture(scope="module")
def loading(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, AdapterSlots]:
    """The slots of a small model."""
    model = llama()
    made, _ = adapted(model, tmp_path_factory.mktemp("refused"), [], max_loaded_loras=1)
    return model, made.adapters


@pytest.mark.parametrize("field", FIELDS)
def test_an_adapter_that_cannot_be_computed_is_refused_by_its_field(
    tmp_path: Path, loading: tuple[PreTrainedModel, AdapterSlots], field: str
) -> None:
    model, slots = loading
    value, message = FIELDS[field]
    path = LORAS[0].saved(model, tmp_path, **{field: value})
    with pytest.raises(ConfigError, match=rf"adapter_config\.json: {message}"):
        read_adapter(path, slots.targets, 32)


def test_a_pattern_that_takes_for_ever_is_refused(
    tmp_path: Path, loading: tuple[PreTrainedModel, AdapterSlots], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.lora.adapter_files._MATCH_S", 0.5)
    model, slots = loading
    path = LORAS[0].saved(model, tmp_path, alpha_pattern={"(.|..)+(?<=!)": 1.0})
    with pytest.raises(ConfigError, match=r"adapter_config\.json: cannot find out which modules .* more than 0.5 s"):
        read_adapter(path, slots.targets, 32)


def rename(old: str, new: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name.replace(old, new): tensors.pop(name) for name in list(tensors)})


Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda tensors: tensors.pop(Q), rf"lacks {Q}, which target_modules"),
    "unknown": (rename("layers.1.self_attn.v", "layers.2.self_attn.v"), "unknown tensor .*layers.2.*no such linear layer"),
    "not named": (rename("q_proj", "k_proj"), "lacks .*q_proj"),
    "expert": (rename("mlp.gate_proj", "mlp.experts.0.gate_proj"), "unknown tensor .*: experts cannot have adapters"),
    "head": (
        rename("model.layers.1.self_attn.q_proj", "lm_head"),
        "unknown tensor .*lm_head.*: the embedding and the output head",
    ),
    "other base": (lambda tensors: tensors.update({Q: tensors[Q][:, :-1].contiguous()}), r"has the shape \[8, 95\], .*\[8, 96\]"),
    "rank": (lambda tensors: tensors.update({Q: tensors[Q][:-1].contiguous()}), r"has the shape \[7, 96\]"),
    "infinite": (lambda tensors: tensors[Q].fill_(torch.inf), "is infinite or not a number"),
    "whole numbers": (lambda tensors: tensors.update({Q: tensors[Q].int()}), "is of torch.int32"),
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_are_not_the_adapters_are_refused_by_their_names(
    tmp_path: Path, loading: tuple[PreTrainedModel, AdapterSlots], what: str
) -> None:
    model, slots = loading
    change, message = TENSORS[what]
    path = LORAS[0].saved(model, tmp_path)
    tensors = load_file(path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=message):
        read_adapter(path, slots.targets, 32)


def test_all_linear_and_some_layers_name_the_modules_that_must_be_there(
    tmp_path: Path, loading: tuple[PreTrainedModel, AdapterSlots]
) -> None:
    model, slots = loading
    path = LORAS[0].saved(model, tmp_path, target_modules="all-linear")
    assert set(read_adapter(path, slots.targets, 32).factors) == set(slots.targets)
    path = LORAS[0].saved(model, tmp_path, layers_to_transform=[1])
    with pytest.raises(ConfigError, match=r"unknown tensor .*layers\.0.*: target_modules .* does not name it"):
        read_adapter(path, slots.targets, 32)
    tensors = {name: tensor for name, tensor in load_file(path / "adapter_model.safetensors").items() if ".layers.1." in name}
    save_file(tensors, path / "adapter_model.safetensors")
    assert len(read_adapter(path, slots.targets, 32).factors) == len(slots.targets) // 2


def test_folders_that_hold_no_adapter_say_what_they_lack(tmp_path: Path, loading: tuple[PreTrainedModel, AdapterSlots]) -> None:
    model, slots = loading
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path, slots.targets, 32)
    path = LORAS[0].saved(model, tmp_path)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors, and other files are not read"):
        read_adapter(path, slots.targets, 32)
    (path / "adapter_model.safetensors").write_bytes(b"\x08" + 20 * b"\x00")
    with pytest.raises(ConfigError, match="not a safetensors file"):
        read_adapter(path, slots.targets, 32)
    (path / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        read_adapter(path, slots.targets, 32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora": "a"}, "--lora must be name=folder pairs"),
        ({"max_lora_rank": 8}, "--max-lora-rank has no effect without"),
        ({"max_loras_per_batch": 2}, "--max-loras-per-batch has no effect without"),
        ({"max_loaded_loras": 9, "max_loras_per_batch": 10}, "--max-loras-per-batch must be between 1 and 9"),
        ({"max_loaded_loras": 1, "max_lora_rank": 257}, "--max-lora-rank must be between 1 and 256"),
        ({"max_loaded_loras": 1, "lora": "a"}, "--lora must be name=folder pairs"),
        ({"max_loaded_loras": 3, "lora": "a=b,a=c"}, "--lora must be name=folder pairs .* each name once"),
        ({"max_loaded_loras": 1, "lora": "a=b,c=d"}, "--lora must be at most --max-loaded-loras 1"),
        ({"max_loaded_loras": 1, "quantization": "fp8"}, "--quantization must be none or int8 with LoRA adapters"),
        ({"max_loaded_loras": 1, "max_lora_rank": 8, "executor": "timed"}, "--max-lora-rank has no effect with --executor timed"),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**fields)


def test_without_a_number_of_places_an_instance_has_one_for_each_adapter_of_its_start() -> None:
    engine = EngineConfig(lora="a=b,c=d", max_lora_rank=8)
    assert (engine.lora_places, engine.lora_slots) == (2, 2)
    assert EngineConfig(lora="a=b,c=d", max_loras_per_batch=1).lora_slots == 1
    assert EngineConfig(lora="a=b", max_loaded_loras=4).lora_places == 4


def test_a_model_of_transformers_implementation_cannot_have_adapters() -> None:
    slots, shape = AdapterSlots(1, 1, 8), SimpleNamespace(architecture="Gemma3ForCausalLM")
    attach: Any = partial(slots.attach, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="LoRA is not supported for Gemma3ForCausalLM"):
        attach(object(), shape, object())
