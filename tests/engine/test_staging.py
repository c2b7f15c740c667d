"""New weights beside those in use: after the change every answer is transformers' own with the new ones, and before it, or when
they are refused, with the old ones."""

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from common.config import EngineConfig, ModelConfig
from common.errors import BadRequest, ConfigError, MemoryShort, TandemError, Unavailable
from common.host import HostMemory
from common.ids import Digest, Int32Array
from common.messages.variants import WeightsInMemory, WeightsOnDisk, WeightsSource
from engine import checkpoint, model_runner
from engine.checkpoint import TensorCopies, tensor_digest, tensor_digests, weight_files, weights_digest
from engine.model_runner import ModelRunner
from engine.models import staging, weights
from engine.models.registry import load_model
from engine.models.staging import SHARED_MEMORY
from engine.models.weights import Loading
from engine.torch_executor import TorchExecutor
from tests.engine.checkpoints import llama, qwen2, qwen3, qwen3_moe, saved
from tests.engine.driver import Driver
from tests.engine.exact import GREEDY, answers, assert_exact, runner
from tests.engine.models.test_transformers_model import gemma2
from tests.engine.packed import CAN_RECORD, pack_everything
from tests.engine.ranks import least_of, on_ranks, runner_of

PROMPTS: list[Int32Array] = [np.random.default_rng(3).integers(10, 490, length).astype(np.int32) for length in (5, 40, 23)]
WAIT_S = 60.0


def silent(_: str) -> None: ...


def changed(model: PreTrainedModel) -> PreTrainedModel:
    """The same model after some training."""
    torch.manual_seed(99)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7).add_(0.05 * torch.randn_like(parameter) * parameter.abs().mean())
    return model


def digest_of(folder: Path) -> Digest:
    return weights_digest(tensor_digests(weight_files(folder)))


def exchange(made: ModelRunner, source: WeightsSource) -> None:
    made.weights.switch(made.weights.stage(source, silent))


@pytest.fixture
def segment() -> Iterator[Callable[[dict[str, torch.Tensor]], str]]:
    """Puts tensors into shared memory, and returns its name."""
    made: list[Path] = []

    def put(tensors: dict[str, torch.Tensor]) -> str:
        made.append(SHARED_MEMORY / f"tandem-test-{uuid4().hex}")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, made[-1])
        return made[-1].name

    yield put
    for path in made:
        path.unlink()


@pytest.fixture(params=["plain", "packed"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "packed":
        if not CAN_RECORD:
            pytest.skip("there is no C compiler")
        pack_everything(monkeypatch)
    return str(request.param)


@pytest.mark.parametrize(
    ("make", "packing"),
    [*((make, "plain") for make in (qwen3, qwen2, qwen3_moe, gemma2)), *((make, "packed") for make in (llama, qwen3, qwen2))],
    indirect=["packing"],
)
def test_after_a_change_each_answer_is_that_of_the_new_weights(
    make: Callable[[], PreTrainedModel], packing: str, tmp_path: Path
) -> None:
    model = make()
    old, new = saved(model, tmp_path / "old"), tmp_path / "new"
    made = runner(old)
    assert_exact(model, answers(made, PROMPTS, 6, 16))
    changed(model).save_pretrained(new)
    staged = made.weights.stage(WeightsOnDisk(str(new)), silent)
    assert made.weights.digest == digest_of(old) != staged.digest == digest_of(new)
    made.weights.switch(staged)
    assert_exact(model, answers(made, PROMPTS, 6, 16))
    assert made.weights.digest == digest_of(new)


@pytest.mark.parametrize(
    ("make", "packing"),
    [(llama, "plain"), (llama, "packed"), (qwen3, "packed"), (qwen3_moe, "plain")],
    indirect=["packing"],
)
def test_a_part_of_the_weights_replaces_that_part_and_nothing_else(
    make: Callable[[], PreTrainedModel], packing: str, tmp_path: Path, segment: Callable[[dict[str, torch.Tensor]], str]
) -> None:
    """Layers that are merged and packed keep their other parts. The digest is that of a checkpoint with all of it."""
    model = make()
    made = runner(saved(model, tmp_path / "old"))
    names = ("layers.1.self_attn.q_proj.weight", "layers.0.input_layernorm.weight", "layers.1.self_attn.o_proj.weight")
    fresh: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(names):
                parameter.mul_(0.5)
                fresh[name] = parameter.detach().clone()
    model.save_pretrained(tmp_path / "new")
    first, *others = sorted(fresh)
    exchange(made, WeightsInMemory((segment({first: fresh[first]}), segment({name: fresh[name] for name in others}))))
    assert_exact(model, answers(made, PROMPTS, 6, 16))
    assert made.weights.digest == digest_of(tmp_path / "new")


def test_weights_that_do_not_fit_on_their_device_are_made_ready_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Loading(torch.bfloat16, torch.device("cuda", 0), 64)
    fp8 = replace(card, quantization="fp8")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    monkeypatch.setattr(staging, "host_memory_now", lambda: HostMemory(100, 50))
    places = [staging._roomy_device(loading, needed) for loading, needed in ((card, 10), (fp8, 10), (card, 11))]
    assert places == [card.device, card.device, torch.device("cpu")]
    for loading, needed, named in ((card, 51, "of cuda:0 and .* of cpu are free"), (fp8, 11, "of cuda:0 are free")):
        with pytest.raises(MemoryShort, match=named):
            staging._roomy_device(loading, needed)


def test_weights_from_where_layers_may_be_packed_are_taken_over_where_they_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    with monkeypatch.context() as device:
        device.setattr(weights, "float_products", lambda *_: [])
        made = runner(saved(model, tmp_path / "old"))
    changed(model).save_pretrained(tmp_path / "new")
    exchange(made, WeightsOnDisk(str(tmp_path / "new")))
    assert_exact(model, answers(made, PROMPTS, 6, 16))


def test_a_tied_head_is_the_embedding_whether_it_is_given_or_not(
    tmp_path: Path, segment: Callable[[dict[str, torch.Tensor]], str]
) -> None:
    model = qwen3()
    made = runner(saved(model, tmp_path / "old"))
    embedding = model.get_input_embeddings().weight.detach()
    exchange(made, WeightsInMemory((segment({"lm_head.weight": embedding.clone()}),)))
    assert made.weights.digest == digest_of(tmp_path / "old")
    with pytest.raises(BadRequest, match=r"lm_head\.weight differs from the embedding"):
        made.weights.stage(WeightsInMemory((segment({"lm_head.weight": embedding + 1}),)), silent)
    with torch.no_grad():
        embedding.mul_(0.9)
    both = {"lm_head.weight": embedding.clone(), "model.embed_tokens.weight": embedding.clone()}
    exchange(made, WeightsInMemory((segment(both),)))
    assert_exact(model, answers(made, PROMPTS, 6, 16))


def test_shared_memory_that_changes_later_changes_nothing_and_staged_memory_is_given_back(
    tmp_path: Path, segment: Callable[[dict[str, torch.Tensor]], str]
) -> None:
    """Whoever maps it writes without a trace in the file's times."""
    model = llama()
    made = runner(saved(model, tmp_path / "old"))
    name = "model.layers.0.self_attn.q_proj.weight"
    with torch.no_grad():
        parameter = model.get_parameter(name).mul_(0.5)
    shared = segment({name: parameter.detach().clone()})
    staged = made.weights.stage(WeightsInMemory((shared,)), silent)
    held = weakref.ref(staged.take_over)
    content = np.memmap(SHARED_MEMORY / shared, dtype=np.uint8, mode="r+")
    content[-4096:] = 0
    made.weights.switch(staged)
    assert_exact(model, answers(made, PROMPTS, 6, 16))
    assert held() is None
    before = made.weights.digest
    exchange(made, WeightsInMemory((shared,)))
    assert made.weights.digest != before, "it is read again"


def test_a_weight_that_comes_into_shared_memory_while_it_is_read_does_not_count(
    tmp_path: Path, segment: Callable[[dict[str, torch.Tensor]], str]
) -> None:
    model = llama()
    made = runner(saved(model, tmp_path / "old"))
    norm, late = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.o_proj.weight"
    tensors = {name: 2 * model.get_parameter(name).detach() for name in (norm, late)}
    shared = segment({norm: tensors[norm]})

    def rewrite(_: str) -> None:
        save_file(tensors, SHARED_MEMORY / "rewritten")
        (SHARED_MEMORY / shared).write_bytes((SHARED_MEMORY / "rewritten").read_bytes())
        (SHARED_MEMORY / "rewritten").unlink()

    made.weights.switch(made.weights.stage(WeightsInMemory((shared,)), rewrite))
    in_use = torch.tensor(made.weights.read(norm, 10**6))
    known = tensor_digests(weight_files(tmp_path / "old")) | {norm: tensor_digest(in_use)}
    assert made.weights.digest == weights_digest(known)
    assert torch.equal(torch.tensor(made.weights.read(late, 10**6)), tensors[late] / 2)


def one(begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    """A tensor as a header has it."""
    return {"dtype": dtype, "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": one(-8, 0)},
        {"a": one(0, 8), "b": one(4, 12)},
        {"a": one(4, 12)},
        {"a": one(False, 4)},
        {"\ud800": one(0, 4)},
        {"a": one(0, 4, "\ud800")},
    ],
    ids=["before the data", "overlap", "hole", "no number", "half a character", "dtype of half a character"],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: dict[str, dict[str, Any]]) -> None:
    text, file = json.dumps(header).encode(), tmp_path / "lies"
    data = max(0, *(tensor["data_offsets"][1] for tensor in header.values()))
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    with pytest.raises(ConfigError, match="not a safetensors file, or not a whole one"):
        TensorCopies(file)
    with pytest.raises(ConfigError, match="not a safetensors file, or not a whole one"):
        tensor_digests([file])


def test_int8_weights_are_those_of_a_fresh_start_also_where_only_a_part_was_given(
    tmp_path: Path, segment: Callable[[dict[str, torch.Tensor]], str]
) -> None:
    model = llama()
    made = runner(saved(model, tmp_path / "old"), quantization="int8")
    with torch.no_grad():
        part = model.model.layers[1].mlp.up_proj.weight.mul_(0.5).detach().clone()
    exchange(made, WeightsInMemory((segment({"model.layers.1.mlp.up_proj.weight": part}),)))
    model.save_pretrained(tmp_path / "new")
    fresh = runner(tmp_path / "new", quantization="int8")
    for ours, theirs in zip(answers(made, PROMPTS, 6, 16), answers(fresh, PROMPTS, 6, 16), strict=True):
        assert ours.tokens == theirs.tokens
        assert all(torch.equal(*pair) for pair in zip(ours.logits, theirs.logits, strict=True))


def test_each_rank_takes_its_share_and_all_name_the_whole(tmp_path: Path) -> None:
    model = llama()
    old = saved(model, tmp_path / "old")
    changed(model).save_pretrained(tmp_path / "new")
    agree = least_of(2)

    def run(group: object) -> tuple[Digest, list[list[int]]]:
        made = runner_of(old, group, agree)  # type: ignore[arg-type]
        exchange(made, WeightsOnDisk(str(tmp_path / "new")))
        return made.weights.digest, Driver(made.run, made.description).answers(PROMPTS, 6, GREEDY, 16)

    (first, tokens), (second, others) = on_ranks(2, run)
    assert first == second == digest_of(tmp_path / "new") and tokens == others
    assert tokens == [answer.tokens for answer in answers(runner(tmp_path / "new"), PROMPTS, 6, 16)]


def test_what_cannot_be_used_is_refused_by_name_and_the_old_weights_serve_on(
    tmp_path: Path, segment: Callable[[dict[str, torch.Tensor]], str]
) -> None:
    model = llama()
    made = runner(saved(model, tmp_path / "old"))
    other = saved(llama(intermediate_size=128), tmp_path / "other")
    saved(qwen2(hidden_size=96, intermediate_size=160, num_attention_heads=6), tmp_path / "qwen")
    broken = tmp_path / "broken"
    model.save_pretrained(broken)
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-8])
    name, size = "model.layers.0.mlp.down_proj.weight", (96, 160)
    refused: list[tuple[WeightsSource, type[TandemError], str]] = [
        (WeightsOnDisk(str(tmp_path / "nowhere")), BadRequest, "there is no folder"),
        (WeightsOnDisk(str(other)), BadRequest, "intermediate 128, and the model that is served has 160"),
        (WeightsOnDisk(str(tmp_path / "qwen")), BadRequest, "another model: its config.json says architecture Qwen2ForCausalLM"),
        (WeightsOnDisk(str(broken)), BadRequest, "not a whole one"),
        (WeightsInMemory(("no-such-segment",)), BadRequest, "there is no 'no-such-segment'"),
        (WeightsInMemory(("../etc/passwd",)), BadRequest, "there is no"),
        (WeightsInMemory((segment({name: torch.zeros(4, 4)}),)), BadRequest, rf"{name} has the shape \[4, 4\]"),
        (WeightsInMemory((segment({"model.extra": torch.zeros(4)}),)), BadRequest, "has no weight model.extra"),
        (
            WeightsInMemory((segment({name: torch.full(size, torch.nan)}),)),
            BadRequest,
            f"infinite or not numbers in float32: {name}",
        ),
        (WeightsInMemory((segment({name: torch.zeros(size, dtype=torch.int8)}),)), BadRequest, f"the weight {name} is of I8"),
    ]
    for source, kind, message in refused:
        with pytest.raises(kind, match=message):
            made.weights.stage(source, silent)
    assert_exact(model, answers(made, PROMPTS, 6, 16))
    assert made.weights.digest == digest_of(tmp_path / "old")


def test_experts_in_one_tensor_are_refused_unless_all_of_them_are_there(
    tmp_path: Path, segment: Callable[[dict[str, torch.Tensor]], str]
) -> None:
    model = qwen3_moe()
    old = saved(model, tmp_path / "old")
    whole = model.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, old / "model.safetensors")
    made, name = runner(old), "model.layers.0.mlp.experts.gate_up_proj"
    for few in (whole[name][:6], whole[name][:0]):
        with pytest.raises(BadRequest, match="there are 8 experts"):
            made.weights.stage(WeightsInMemory((segment({name: few}),)), silent)
    assert made.weights.stage(WeightsInMemory((segment({name: whole[name]}),)), silent).digest == made.weights.digest


def test_experts_of_random_weights_go_on_with_the_names_that_came_first(
    tmp_path: Path, segment: Callable[[dict[str, torch.Tensor]], str]
) -> None:
    """Else one digest could stand for two sets of weights."""
    model = qwen3_moe()
    made = runner(saved(model, tmp_path / "old"), load_format="dummy")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    exchange(made, WeightsInMemory((segment({name: model.state_dict()[name]}),)))
    other = "model.layers.0.mlp.experts.0.gate_proj.weight"
    with pytest.raises(BadRequest, match=f"experts were given with other names than {other} before"):
        made.weights.stage(WeightsInMemory((segment({other: torch.zeros(48, 64)}),)), silent)
    exchange(made, WeightsInMemory((segment({"model.layers.1.mlp.experts.0.gate_proj.weight": torch.zeros(48, 64)}),)))


def test_an_instance_does_not_start_with_weights_that_change_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would name the digest of others."""
    model = llama()
    old = saved(model, tmp_path / "old")
    changed(model).save_pretrained(tmp_path / "new")

    def load(*arguments: Any) -> Any:
        made = load_model(*arguments)
        (tmp_path / "new" / "model.safetensors").replace(old / "model.safetensors")
        return made

    monkeypatch.setattr(model_runner, "load_model", load)
    with pytest.raises(Unavailable, match="changed while they were read"):
        runner(old)


def test_the_executor_computes_with_the_old_weights_until_it_is_told_and_forgets_what_nobody_wants(tmp_path: Path) -> None:
    model, woken = llama(), threading.Event()
    old = saved(model, tmp_path / "old")
    changed(model).save_pretrained(tmp_path / "new")
    config = EngineConfig(device="cpu", page_size=16, kv_memory="8MiB", max_running=8, grammar="off")
    executor = TorchExecutor(ModelConfig(model=str(old)), config, woken.set, silent)

    def staged(source: WeightsSource) -> Digest:
        staging, until_s = executor.stage(source), time.monotonic() + WAIT_S
        while (digest := staging.poll()) is None:
            assert time.monotonic() < until_s
            woken.wait(0.05)
        return digest

    try:
        new = WeightsOnDisk(str(tmp_path / "new"))
        assert executor.weights == executor.description.weights == digest_of(old)
        executor.stage(new)
        executor.drop_staged()
        assert staged(new) == digest_of(tmp_path / "new")
        assert executor.weights == digest_of(old)
        executor.switch()
        assert executor.weights == digest_of(tmp_path / "new")
        with pytest.raises(BadRequest, match="there is no folder"):
            staged(WeightsOnDisk("/no/such/folder"))
    finally:
        executor.close()


def test_a_digest_is_that_of_the_tensors_whatever_files_hold_them_and_a_file_that_changes_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = llama()
    one, many = tmp_path / "one", tmp_path / "many"
    model.save_pretrained(one)
    model.save_pretrained(many, max_shard_size="100KB")
    for file in (*weight_files(one), *weight_files(many)):
        os.utime(file, (0, 0))
    assert len(weight_files(many)) > 2 and digest_of(one) == digest_of(many)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_digests_of", lambda file: pytest.fail("it was read before"))
        assert digest_of(one) == digest_of(many)
    before, file = digest_of(one), one / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert digest_of(one) != before
    (tmp_path / "cache" / "tandem" / "tensor-digests.json").write_text(json.dumps({"broken": 1}))
    assert digest_of(many) == before
