"""`launch bench serve` from its flags to its files, against a server double with known delays."""

import csv
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.main import main
from tests.bench.serve.double import Delays, Double

VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{which}_{name}_ms" for which in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
    *("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors", "latencies", "queue_times"),
}
"""What `vllm bench serve --save-result --save-detailed` writes for these metrics (vllm/benchmarks/serve.py)."""
DELAYS = Delays(ttft_s=0.05, itl_s=0.02, event_tokens=2)


@pytest.fixture
def port() -> Iterator[int]:
    """Of a double in a thread of its own."""
    double, over = Double(DELAYS), threading.Event()
    thread = threading.Thread(target=double.serve, args=(over,))
    thread.start()
    yield double.port
    over.set()
    thread.join()


def test_a_run_reports_the_servers_delays_and_writes_vllms_keys(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, figures, table = (tmp_path / name for name in ("prompts.jsonl", "figures.json", "requests.csv"))
    prompts.write_text('{"prompt": "one"}\n{"prompt": [1, 2], "output_tokens": 3}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", str(prompts), "--custom-output-len", "5", "--num-prompts", "4"]
    files = ["--json", str(figures), "--save-detailed", "--csv", str(table), "--goodput", "ttft:60000", "itl:0"]
    assert main(["bench", "serve", "--port", str(port), *flags, *files, "--header", "X-Secret=hidden"]) == 0
    written = json.loads(figures.read_text())
    assert set(written) >= VLLM_KEYS
    assert written["output_lens"] == [5, 3, 5, 3] and written["request_rate"] == "inf" and written["errors"] == [""] * 4
    assert [len(gaps) for gaps in written["itls"]] == [4, 2, 4, 2]
    assert all(gaps[0] == 0 for gaps in written["itls"]), "two tokens came in the first event"
    assert all(ttft >= DELAYS.ttft_s - 0.002 for ttft in written["ttfts"])
    assert written["good_completed"] == 0, "no gap of two events is 0"
    assert written["generated_texts"][1] == " word word" and "hidden" not in figures.read_text()
    assert [line["output_tokens"] for line in csv.DictReader(table.read_text().splitlines())] == ["5", "3", "5", "3"]
    assert "4 whole, 0 failed" in capsys.readouterr().out
