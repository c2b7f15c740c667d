"""`launch local --executor timed`: everything but the model."""

import json

import httpx

from tests.fleet_pages import running_fleet

TOKENS = 20


def test_a_fleet_without_a_model_streams_an_answer_whose_prompt_was_pushed_page_by_page() -> None:
    flags = ("--executor", "timed", "--step-cost", "0.002,0,0", "--kv-memory", "16MiB", "--verify-pages")
    with running_fleet(*flags) as fleet:
        body = {"model": "demo", "prompt": "falcon " * 100, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        with httpx.Client(base_url=fleet.url, timeout=60) as client:
            lines = [line.removeprefix("data: ") for line in client.post("/v1/completions", json=body).text.splitlines()]
        events = [json.loads(line)["choices"][0] for line in lines if line.startswith("{")]
        text = "".join(event["text"] for event in events)
        assert len(text.split()) == TOKENS and text.replace(" ", "").isalpha()
        assert events[-1]["finish_reason"] == "length"
        decode = next(i for i in fleet.wait_until_home()["instances"] if i["role"] == "decode")
        assert decode["counters"]["pages_received"] >= 100 // 16 and not decode["counters"]["pages_corrupt"]
