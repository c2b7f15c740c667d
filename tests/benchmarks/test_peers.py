"""A model of random weights, with requests for it, which other engines read too."""

import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.random_model import write_checkpoint, write_requests


def test_engines_that_read_the_checkpoint_get_a_text_for_each_id_and_requests_of_its_vocabulary(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.vocab_size == 512 and len({tokenizer.decode([token]) for token in range(256, 512)}) == 256
    write_requests(tmp_path / "requests.jsonl", "tiny", 5)
    requests = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(requests) == 5 and all(max(each["prompt"]) < 512 and 64 <= each["output_tokens"] <= 128 for each in requests)
