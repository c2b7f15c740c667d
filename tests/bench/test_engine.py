"""`launch bench engine` on a CPU: a quick run and what it leaves, what it does about tasks that fail, and its planner."""

import json
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from bench.engine.batch import OfflinePlanner
from bench.engine.device import fill_randomly, memory_of
from bench.engine.figures import Ceilings, DecodeStep, EngineOutcome, Figure, HostWork, Prefill, Started, judge
from bench.engine.models import prefill_flop, shape_folder, step_weight_bytes
from bench.engine.offline import run
from bench.engine.plan import Build, EngineBench, MeasureCeilings, MeasureSteps, tasks
from bench.engine.report import markdown
from bench.engine.run import Bench, _reason, _Worker
from bench.engine.sampling import KINDS
from bench.engine.steps import phases
from bench.report import Spread, this_hardware
from common.config import EngineConfig
from common.errors import ConfigError
from common.executor import Plan, StepResult
from common.pages.layout import KVLayout
from common.sampling_params import SamplingParams
from engine.kv_memory import KVMemory
from engine.models.shape import read_served_shape
from engine.toy import ToyExecutor, ToyStep
from tests.engine.driver import Driver

CPU = EngineConfig(device="cpu", max_running=2, kv_memory="1MiB")
SAMPLING = "sampling tiny, vocabulary of 512"
GREEDY = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


def test_a_quick_run_checks_measures_prints_and_writes_what_was_asked_for(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "launch.main",
        "bench",
        "engine",
        "--quick",
        "--device=cpu",
        "--only=host,sampling,checks,steps,floor,offline",
    ]
    done = subprocess.run([*command, f"--json={figures}"], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(figures.read_text())
    assert outcome["command"].startswith("launch bench engine --quick --only=host,sampling,checks,steps,floor,offline")
    assert outcome["hardware"]["libraries"]["torch"] == torch.__version__
    assert [(run["label"], run["failure"]) for run in outcome["runs"]] == [
        (label, "")
        for label in (
            "ceilings",
            "host",
            SAMPLING,
            "check operations",
            "check answers",
            "steps tiny",
            "floor tiny",
            "offline tiny",
        )
    ]
    by_type: dict[str, list[dict[str, object]]] = {}
    for figure in outcome["figures"]:
        by_type.setdefault(figure["type"], []).append(figure)
    (ceilings,) = by_type["Ceilings"]
    assert ceilings["device"] == "cpu" and ceilings["matmul"] == "512^3 float32"
    steps = {(step["batch"], step["context"]): step for step in by_type["DecodeStep"]}
    assert steps.keys() == {(1, 32), (1, 96), (4, 32), (4, 96)}
    for step in steps.values():
        assert step["skipped"] == "" and step["step_ms"]["median"] > 0 and step["launch_ms"]["least"] > 0  # type: ignore[index]
    floors = {(floor["step"], floor["rows"], floor["context"]) for floor in by_type["Floor"] if floor["skipped"] == ""}
    assert floors == {("decode", *which) for which in steps} | {("prefill", 1, 32), ("prefill", 1, 96)}
    for floor in by_type["Floor"]:
        assert all(floor[part]["least"] > 0 for part in ("step_ms", "products_ms", "attention_ms", "ratio"))  # type: ignore[index]
    assert [fill["chunk_tokens"] for fill in by_type["Prefill"]] == [32, 96]
    (started,) = by_type["Started"]
    assert started["dtype"] == "float32" and started["pool_bytes"] > 0 and "making random" in started["phases"]  # type: ignore[operator]
    assert [run["steps_in_flight"] for run in by_type["Offline"]] == [2, 1]
    assert all(
        run["sequences"] == 6 and run["answer_tokens"] == by_type["Offline"][0]["answer_tokens"] for run in by_type["Offline"]
    )
    (host,) = by_type["HostWork"]
    assert host["rows"] == 256 and host["graphs"] is False and host["launch_ms"]["median"] > 0  # type: ignore[index]
    sampled = {step["asked"]: step for step in by_type["SampledStep"]}
    assert sampled.keys() == KINDS.keys() and sampled["nothing"]["ratio"] == 1
    assert all(step["rows"] == 4 and step["vocab_size"] == 512 and step["ratio"] > 0 for step in sampled.values())  # type: ignore[operator]
    assert all(check["met"] is not False for check in by_type["Check"]), by_type["Check"]
    assert {tokens["total"] for tokens in by_type["Agreement"]} == {20, 32}, "the filled batch has five rows"
    assert "Decode steps:" in done.stdout and done.stdout.index("What ran:") < done.stdout.index("Decode steps:")
    assert "not measured: Llama-3-8B: a decode step of 32 rows and 2048 tokens" in done.stdout


def test_what_a_task_found_before_it_failed_is_kept_and_the_next_task_is_done() -> None:
    """No prompt can be computed in chunks of no token."""
    steps = MeasureSteps(
        engine=CPU, is_quick=True, model="tiny", batches=(1,), contexts=(32,), prompt_tokens=32, chunks=(32, 0), rounds=2
    )
    with closing(Bench(time.monotonic() + 200)) as bench:
        bench.one_by_one([steps, MeasureCeilings(engine=CPU, is_quick=True)])
    failed, done = bench.runs
    assert failed.failure.startswith("ValueError: ") and "Traceback" in failed.account and done.failure == ""
    assert [type(figure) for figure in bench.figures] == [Started, Prefill, Ceilings]


def test_a_task_for_which_no_time_is_left_is_not_begun() -> None:
    with closing(Bench(time.monotonic() + 1)) as bench:
        bench.at_once([Build(engine=CPU, is_quick=True, model="tiny")])
    (run,) = bench.runs
    assert run.failure == "no time was left (--budget-s)" and not bench.figures


def test_a_worker_that_does_not_answer_is_given_up_at_its_time() -> None:
    with closing(_Worker()) as worker, pytest.raises(TimeoutError, match="it was at: its first step"):
        list(worker.figures(MeasureCeilings(engine=CPU, is_quick=True), time.monotonic()))


def test_the_reason_of_a_failure_is_its_error_and_not_the_advice_behind_it() -> None:
    account = "exit status 1\n  last lines:\n    Traceback (most recent call last):\n      File x\n    "
    error = "torch.AcceleratorError: CUDA error: misaligned address"
    assert _reason(f"{account}{error}\n    CUDA errors come late: use A=1\n    Compile with B") == error
    assert _reason(account + "killed") == "killed" and _reason("") == ""


# --- plans -------------------------------------------------------------------------------------------------------------------


class Recording(ToyExecutor):
    """Keeps what it computed."""

    def __init__(self, total_pages: int, max_rows: int) -> None:
        super().__init__(total_pages, max_rows)
        self.results: list[StepResult] = []

    def launch(self, plan: Plan) -> ToyStep:
        handle = super().launch(plan)
        assert handle.result is not None
        self.results.append(handle.result)
        return handle


@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_sequences_that_share_a_batch_answer_as_each_would_alone(in_flight: int, rows: int) -> None:
    """On an engine whose next token depends on every byte of its KV, with less memory than all sequences need at once."""
    prompts, answers = np.array([1, 8, 9, 40, 17, 3, 25]), np.array([20, 1, 8, 30, 2, 16, 9])
    executor = Recording(24, rows)
    planner = OfflinePlanner(executor.description, 16, prompts, answers)
    steps, tokens = run(executor, planner, in_flight, threading.Event())
    assert tokens == answers.sum() and steps == len(executor.results) < tokens
    found: list[list[int]] = []
    of_row: dict[int, list[int]] = {}
    for result in executor.results:
        for start in result.plan.starts:  # sequences start in their order
            of_row[start.row] = []
            found.append(of_row[start.row])
        for row, token in zip(result.plan.sampled_rows.tolist(), result.tokens.tolist(), strict=True):
            of_row[row].append(token)
    for prompt, count, answer in zip(planner.prompts, answers.tolist(), found, strict=True):
        alone = Recording(24, 1)

        def compute(plan: Plan, alone: Recording = alone) -> StepResult:
            alone.launch(plan)
            return alone.results[-1]

        assert [answer] == Driver(compute, alone.description).answers([prompt], count, GREEDY)


@pytest.mark.parametrize(
    ("name", "parameters"), [("Qwen3-0.6B", 596_049_920), ("Llama-3-8B", 8_030_261_248), ("Qwen3-14B", 14_768_307_200)]
)
def test_the_shapes_are_those_of_the_real_models_and_their_weights_are_counted(name: str, parameters: int) -> None:
    """Against the parameters that the models' pages name, as transformers makes them. Embeddings that are not the output head are
    not read by a decode step, and norms are left out."""
    with shape_folder(name) as model, torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model.model))
        shape = read_served_shape(Path(model.model))
    assert sum(parameter.numel() for parameter in made.parameters()) == parameters
    matrices = sum(parameter.numel() for parameter in made.parameters() if parameter.ndim == 2)
    embedding = 0 if made.config.tie_word_embeddings else made.get_input_embeddings().weight.numel()
    assert step_weight_bytes(shape, 2, EngineConfig()) == 2 * (matrices - embedding)


def test_the_operations_of_a_prompt_are_those_that_torch_counts() -> None:
    """torch counts every pair of tokens in attention, seen or not, and for every token what only the last one needs: the last
    layer behind its attention, and the output head."""
    with shape_folder("tiny") as model:
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
def test_a_pool_is_filled_with_random_numbers_where_it_lies(dtype: str) -> None:
    memory = KVMemory(KVLayout(layers=2, kv_heads=1, head_dim=64, page_size=4, dtype=dtype), 7, torch.device("cpu"))  # type: ignore[arg-type]
    fill_randomly(memory.region, memory.pool.dtype)
    wide = memory.pool.float()
    assert memory_of(memory.region).data_ptr() == memory.region.address
    assert 0.9 < float(wide.std()) < 1.1 and bool(wide.isfinite().all()) and float((wide == 0).float().mean()) < 0.01


def test_phases_are_named_by_their_first_words_and_last_until_the_next() -> None:
    said = [
        (11.0, "loading weights: 0.00 of 4 GB"),
        (12.0, "loading weights: 2.00 of 4 GB"),
        (14.0, "making 7 KV pages of 3 bytes"),
    ]
    assert phases(said, 10.0, 15.5) == {"before": 1.0, "loading weights": 3.0, "making KV": 1.5}


# --- goals and flags -----------------------------------------------------------------------------------------------------------


def spread(value: float) -> Spread:
    return Spread.of([value])


def test_goals_are_shares_of_what_the_device_did_in_the_same_run() -> None:
    """3 GB in 2 ms, where a copy takes 1 ms for as much; 40 TFLOP in 0.1 s, where a product makes 500 a second."""
    ceilings = Ceilings(device="cuda:0", copy_gb_per_s=spread(3000), matmul="8192^3", matmul_tflop_per_s=spread(500))
    step = DecodeStep(
        model="Llama-3-8B",
        batch=32,
        context=2048,
        step_ms=spread(2),
        device_ms=spread(1.5),
        launch_ms=spread(1),
        read_bytes=3 * 10**9,
    )
    fill = Prefill(model="Llama-3-8B", tokens=8192, chunk_tokens=2048, seconds=spread(0.1), flop=40e12)
    host = HostWork(device="cuda:0", rows=256, graphs=True, attention="", launch_ms=spread(0.6))
    assert step.memory_share(ceilings) == pytest.approx(0.5) and step.gap_share == pytest.approx(0.25)
    too_large = DecodeStep(model="Llama-3-8B", batch=256, context=8192, skipped="needs 275.1 GB of KV, there are 50.2")
    figures: list[Figure] = [ceilings, step, too_large, fill, host]
    goals = judge(figures)
    outcome = EngineOutcome(
        command="", hardware=this_hardware(), goals=goals, device="cuda:0", seconds=1.0, runs=[], figures=figures
    )
    lines = {line for line in markdown(outcome).splitlines() if "Llama-3-8B |" in line}
    assert lines == {
        "| Llama-3-8B | 2048 | 32 | 2.00 (2.00 … 2.00) | 1.50 | 1.00 | 25% | 1500 | 50.0% |",
        "| Llama-3-8B | 8192 | 256 | – | – | – | – | – | not measured: needs 275.1 GB of KV, there are 50.2 |",
        "| Llama-3-8B | 8192 | 2048 | 100.0 (100.0 … 100.0) | 81920 | 400 | 80.0% |",
    }
    assert [(goal.met, goal.figure) for goal in goals] == [(False, "50.0 %"), (True, "80.0 %"), (False, "0.600 ms")]
    assert [goal.met for goal in judge([])] == [None] * 3


def test_tasks_come_in_the_order_of_their_sections_and_graphs_are_left_out_where_there_are_none() -> None:
    labels = [task.label for task in tasks(EngineBench(only="push,offline", models="tiny"), EngineConfig(), False, True)]
    assert labels == ["ceilings", "offline Qwen3-0.6B", "offline Qwen3-0.6B, graphs off", "push"]
    on_cpu = [task.label for task in tasks(EngineBench(only="offline,build"), EngineConfig(), False, False)]
    assert on_cpu == ["ceilings", "offline Qwen3-0.6B"]


def test_a_quick_run_on_cpu_leaves_out_fleets_that_show_nothing_new_unless_they_are_asked_for() -> None:
    def fleets(only: str, is_quick: bool, on_cuda: bool) -> list[str]:
        found = [task.label for task in tasks(EngineBench(only=only), EngineConfig(), is_quick, on_cuda)]
        return [label for label in found if label.split()[0] in ("ring", "push", "exposed")]

    every = ["ring float32", "ring bfloat16", "push", "exposed"]
    assert fleets("", is_quick=True, on_cuda=False) == ["ring float32", "push"]
    assert fleets("", is_quick=False, on_cuda=False) == fleets("", is_quick=True, on_cuda=True) == every
    assert fleets("ring,push,exposed", is_quick=True, on_cuda=False) == every


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"models": "GPT-5"}, "--models"),
        ({"offline_models": ""}, "--offline-models"),
        ({"only": "steps,lunch"}, "--only"),
        ({"batches": "1,x"}, "--batches"),
        ({"contexts": "0"}, "--contexts"),
        ({"sequence_tokens": "5"}, "--sequence-tokens"),
        ({"rounds": 1}, "--rounds"),
        ({"budget_s": 0.0}, "--budget-s"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_its_flag(flags: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineBench(**flags)  # type: ignore[arg-type]
