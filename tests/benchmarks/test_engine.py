"""`launch bench engine` on a CPU: its rehearsal, tasks that fail, its goals, and what it says of predictions."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from bench.report import Spread, markdown_table
from benchmarks.engine import EngineBench, EngineTask, Section, TaskFailed, figures_of, run_task, tasks
from benchmarks.engine_figures import (
    PREDICTIONS,
    TABLES,
    Ceilings,
    Check,
    DecodeStep,
    Figure,
    Predictions,
    Prefill,
    Started,
    TaskRun,
    compare,
    copy_share,
    first_looks,
    judge,
    product_share,
    tables,
)
from benchmarks.engine_tasks import (
    checkpoint,
    fill_randomly,
    prefill_flop,
    step_weight_bytes,
)
from common.config import EngineConfig
from common.pages.layout import KVLayout
from engine.kv_memory import KVMemory
from engine.models.served_shape import read_served_shape
from tests.rig.forks import run_module

CPU = EngineConfig(device="cpu", max_running=2, kv_memory="1MiB")


def test_the_first_hour_is_rehearsed_on_a_cpu_and_leaves_a_file_and_a_page_with_every_part(tmp_path: Path) -> None:
    figures, page = tmp_path / "figures.json", tmp_path / "page.md"
    flags = ["--quick", "--device=cpu", "--threads=1", f"--json={figures}", f"--page={page}"]
    done = run_module("launch.main", "bench", "engine", *flags)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(figures.read_text())
    assert outcome["command"].startswith("launch bench engine --quick")
    assert outcome["hardware"]["libraries"]["torch"] == torch.__version__
    labels = ["environment", "ceilings", "checks", "steps tiny", "eager tiny", "offline", "pushes"]
    assert [(run["label"], run["failure"]) for run in outcome["runs"]] == [(label, "") for label in labels]
    text = page.read_text()
    titles = [kind.title for kind in TABLES] + ["What ran", "Predicted for one H100 and measured, ms", "What to look at first"]
    assert all(f"### {title}" in text for title in titles)
    assert {figure["type"] for figure in outcome["figures"]} == {"Ceilings", *(kind.__name__ for kind in TABLES)}
    checks = [figure for figure in outcome["figures"] if figure["type"] == "Check"]
    assert len(checks) == 3 and all(check["passed"] > 0 and check["failed"] == check["skipped"] == 0 for check in checks)
    predicted = {each["what"]: each for each in outcome["compared"]}
    assert predicted["tiny decode, 4 rows of 96"]["predicted_ms"] > 0 and "tiny decode, 4 rows of 96: products" in predicted
    assert "tiny prefill of 96 tokens" in predicted and outcome["looks"]
    by_type: dict[str, list[dict[str, Any]]] = {}
    for figure in outcome["figures"]:
        by_type.setdefault(figure["type"], []).append(figure)
    (ceilings,) = by_type["Ceilings"]
    assert ceilings["device"] == "cpu" and ceilings["matmul"] == "512^3 float32"
    steps = {(step["batch"], step["context"], step["graphs"]): step for step in by_type["DecodeStep"]}
    assert steps.keys() == {(rows, context, graphs) for rows in (1, 4) for context in (32, 96) for graphs in ("on", "off")}
    for step in steps.values():
        assert step["step_ms"]["median"] > 0 and step["launch_ms"]["least"] > 0
    assert [fill["chunk_tokens"] for fill in by_type["Prefill"]] == [32, 96]
    started, _ = by_type["Started"]
    assert started["dtype"] == "float32" and started["pool_bytes"] > 0 and started["seconds"] > 0
    assert "Decode steps:" in done.stdout and done.stdout.index("What ran:") < done.stdout.index("Decode steps:")
    assert "not measured: Llama-3-8B: a decode step of 32 rows and 2048 tokens" in done.stdout


TINY = EngineBench(models="tiny")


def task(section: Section, bench: EngineBench = TINY) -> EngineTask:
    return next(task for task in tasks(bench, CPU, is_quick=True) if task.section == section)


def test_what_a_task_found_before_it_failed_is_kept_and_the_next_task_is_done() -> None:
    """Its engine has two rows."""
    bench = EngineBench(models="tiny", batches="1,4", contexts="64", prompt_tokens=32, prompt_chunks="32", rounds=2)
    found: list[Figure] = []
    until = time.monotonic() + 200
    failed = run_task(replace(task("steps", bench), engine=CPU), until, found)
    done = run_task(task("ceilings"), until, found)
    assert failed.failure.startswith("IndexError: ") and done.failure == ""
    assert [type(figure) for figure in found] == [Started, Prefill, DecodeStep, Ceilings]


def test_a_task_for_which_no_time_is_left_is_not_begun() -> None:
    found: list[Figure] = []
    run = run_task(task("ceilings"), time.monotonic() + 1, found)
    assert run.failure == "no time was left (--budget-s)" and not found


def test_a_worker_that_does_not_answer_is_given_up_at_its_time() -> None:
    with pytest.raises(TaskFailed, match="it took too long"):
        list(figures_of(task("ceilings"), time.monotonic()))


# --- counts ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen3-0.6B", 596_049_920),
        ("Llama-3-8B", 8_030_261_248),
        ("Qwen3-14B", 14_768_307_200),
        ("Qwen3-30B-A3B", 30_532_122_624),
    ],
)
def test_the_shapes_are_those_of_the_real_models_and_their_weights_are_counted(name: str, parameters: int) -> None:
    """Against the parameters that the models' pages name, as transformers makes them. Embeddings that are not the output head are
    not read by a decode step, and norms are left out. A thousand rows need every expert, and one those that it chooses."""
    with checkpoint(name, CPU) as (model, _), torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model.model))
        shape = read_served_shape(Path(model.model))
    assert sum(parameter.numel() for parameter in made.parameters()) == parameters
    matrices = sum(parameter.numel() for parameter in made.parameters() if parameter.ndim >= 2)
    embedding = 0 if made.config.tie_word_embeddings else made.get_input_embeddings().weight.numel()
    assert step_weight_bytes(shape, 2, EngineConfig(), rows=1000) == 2 * (matrices - embedding)
    if name == "Qwen3-30B-A3B":
        chosen = matrices - embedding - made.config.num_hidden_layers * 3 * 2048 * 768 * (128 - 8)
        assert step_weight_bytes(shape, 2, EngineConfig()) == 2 * chosen


def test_the_operations_of_a_prompt_are_those_that_torch_counts() -> None:
    """torch counts every pair of tokens in attention, seen or not, and for every token what only the last one needs: the last
    layer behind its attention, and the output head."""
    with checkpoint("tiny", CPU) as (model, _):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model.model), attn_implementation="eager")
        shape = read_served_shape(Path(model.model))
    tokens = 50
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        made(torch.zeros(1, tokens, dtype=torch.int64))
    head = 2 * shape.vocab_size * shape.hidden * (tokens - 1)
    unseen = 4 * shape.heads * shape.head_dim * shape.layers * (tokens * (tokens - 1) / 2)
    layer = made.model.layers[-1]
    late = [layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
    unused = 2 * sum(product.weight.numel() for product in late) * (tokens - 1)
    assert prefill_flop(shape, tokens) == pytest.approx(counter.get_total_flops() - head - unseen - unused, rel=0.01)


# --- the device --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_a_pool_is_filled_with_random_numbers(dtype: str) -> None:
    memory = KVMemory(KVLayout(layers=2, kv_heads=1, head_dim=64, page_size=4, dtype=dtype), 7, torch.device("cpu"))  # type: ignore[arg-type]
    fill_randomly(memory.pool)
    wide = memory.pool.float()
    assert 0.9 < float(wide.std()) < 1.1 and bool(wide.isfinite().all()) and float((wide == 0).float().mean()) < 0.01


# --- goals and flags -----------------------------------------------------------------------------------------------------------


def spread(value: float) -> Spread:
    return Spread.of([value])


def decode(step_ms: float, ceilings: Ceilings, groups_ms: dict[str, float]) -> DecodeStep:
    """3 GB in so many ms."""
    return DecodeStep(
        model="Llama-3-8B",
        batch=32,
        context=2048,
        graphs="on",
        step_ms=spread(step_ms),
        device_ms=spread(0.75 * step_ms),
        launch_ms=spread(1),
        idle=0.25,
        read_bytes=3 * 10**9,
        share=copy_share(ceilings, 3e9, step_ms / 1e3),
        groups_ms=groups_ms,
    )


CEILINGS = Ceilings(device="cuda:0", copy_gb_per_s=spread(3000), matmul="8192^3", matmul_tflop_per_s=spread(500))


def test_goals_are_shares_of_what_the_device_did_in_the_same_run() -> None:
    """3 GB in 2 ms, where a copy takes 1 ms for as much; 40 TFLOP in 0.1 s, where a product makes 500 a second."""
    step = decode(2, CEILINGS, {})
    fill = Prefill(
        model="Llama-3-8B",
        tokens=8192,
        chunk_tokens=2048,
        seconds=spread(0.1),
        tokens_per_s=81920,
        flop=40e12,
        share=product_share(CEILINGS, 40e12, 0.1),
    )
    assert copy_share(None, 1, 1) is None and product_share(None, 1, 1) is None
    figures: list[Figure] = [CEILINGS, step, fill]
    goals = list(judge(figures))
    text = "\n".join(markdown_table(table) for _, table in tables(figures))
    lines = {line for line in text.splitlines() if "Llama-3-8B |" in line}
    assert lines == {
        "| Llama-3-8B | 2048 | 32 | on | 2.00 | 1.50 | 1.00 | 25% | 3.00 | 50.0% |",
        "| Llama-3-8B | 8192 | 2048 | 100.0 | 81920 | 40 | 80.0% |",
    }
    assert [(goal.met, goal.figure) for goal in goals] == [(False, "50.0%"), (True, "80.0%")]
    assert [goal.met for goal in judge([])] == [None] * 2


def test_a_prediction_is_confirmed_within_a_tenth_and_what_loses_most_is_looked_at_first() -> None:
    predictions = msgspec.json.decode(PREDICTIONS.read_bytes(), type=Predictions)
    (guess,) = (
        each
        for each in predictions.steps
        if (each.name, each.kind, each.rows, each.context) == ("Llama-3-8B", "decode", 32, 2048)
    )
    of_groups = guess.groups_ms["H200"]
    groups_ms = of_groups | {"attention": 1.5 * of_groups["attention"], "products": 1.09 * of_groups["products"]}
    figures: list[Figure] = [CEILINGS, decode(guess.ms("H200") + 1.5, CEILINGS, groups_ms)]
    compared = {each.what: each for each in compare(figures, predictions, "H200", "none")}
    what = "Llama-3-8B decode, 32 rows of 2048"
    assert compared[what].verdict == compared[f"{what}: attention"].verdict == "refuted"
    assert compared[f"{what}: products"].verdict == compared[f"{what}: gaps"].verdict == "confirmed"
    assert not list(compare(figures, predictions, "H200", "int8")), "other products have other predictions"
    failed = Check(name="the kernels' contract", passed=9, skipped=0, failed=1, first="test_norms")
    runs = [TaskRun(label="offline", seconds=1, failure="it took too long and was stopped")]
    looks = list(first_looks([*figures, failed], runs, list(compared.values())))
    assert looks[0].startswith("1 of the kernels' contract fail, the first is test_norms")
    assert looks[1].startswith("offline did not come to its end: it took too long")
    assert looks[2].startswith(f"{what} takes {compared[what].ratio:.2f} times") and looks[3].startswith(
        f"{what}: attention takes 1.50 times"
    )
    assert "idle for 25%" in looks[4] and len(looks) == 5


def test_tasks_come_in_the_order_of_their_sections() -> None:
    bench = EngineBench(only="pushes,steps", models="tiny")
    assert [task.label for task in tasks(bench, EngineConfig(), is_quick=False)] == ["ceilings", "steps tiny", "pushes"]
