"""Scores of a running fleet beside what transformers computes in float64: labels and a reranker's verdicts."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.evaluate import MODEL
from tests.rig.pages import FleetPages, running_fleet

FLAGS = ("--dtype", "float32", "--dead-after-s", "60", "--grammar", "off", "--max-running", "8")
DOCUMENTS = ["What is 3 + 5?", "Hello!", "Name a color.", "3 + 4 = 7"]
TEMPLATE = (
    'Judge the Document by the Instruct. Note that the answer can only be "yes" or "no".\n'
    '<Instruct>: {{ instruct | default("any") }}\n<Query>: {{ messages[0]["content"] }}\n'
    '<Document>: {{ messages[1]["content"] }}\n'
)
"""With the phrase and the names of Qwen3-Reranker's templates."""


class Exact:
    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self._model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64).eval()

    def likelihoods(self, ids: Sequence[int], labels: Sequence[int]) -> torch.Tensor:
        """How likely each of these tokens is behind those ids."""
        with torch.inference_mode():
            found: torch.Tensor = self._model(torch.tensor([list(ids)])).logits[0, -1].softmax(-1)[list(labels)]
        return found


@pytest.fixture(scope="module")
def exact() -> Exact:
    return Exact()


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetPages]:
    template = tmp_path_factory.mktemp("template") / "reranker.jinja"
    template.write_text(TEMPLATE)
    with running_fleet(*FLAGS, "--chat-template", str(template)) as fleet:
        yield fleet


def post(fleet: FleetPages, path: str, body: dict[str, Any]) -> Any:
    reply = fleet.post(path, body)
    assert reply.status == 200, reply.text
    return reply.json()


def test_labels_have_the_models_probabilities_and_need_no_decode_instance(reranker: FleetPages, exact: Exact) -> None:
    labels = [1500, 60, 61, 900, 5]
    query = exact.tokenizer("What is 3 + 4? " * 12).input_ids
    items = [exact.tokenizer(document).input_ids for document in DOCUMENTS]
    for item_first, softmax in itertools.product((False, True), repeat=2):
        fields = {"query": query, "items": items, "label_token_ids": labels, "item_first": item_first, "apply_softmax": softmax}
        scores = post(reranker, "/v1/score", fields)["scores"]
        for item, got in zip(items, scores, strict=True):
            expected = exact.likelihoods(item + query if item_first else query + item, labels)
            assert got == pytest.approx((expected / expected.sum() if softmax else expected).tolist(), rel=1e-3, abs=1e-9)
    text = post(reranker, "/score", {"query": "3 + 4", "items": " =", "label_token_ids": labels})["scores"][0]
    assert text == pytest.approx(exact.likelihoods(exact.tokenizer("3 + 4 =").input_ids, labels).tolist(), rel=1e-3, abs=1e-9)
    reranker.wait_until_home()
    counters = {instance["role"]: instance["counters"] for instance in reranker.cluster()["instances"]}
    assert counters["prefill"]["handoffs"] == 0 < counters["prefill"]["prompt_tokens_hit"], "items share the query's KV"


@pytest.mark.parametrize("instruction", [None, "sums only"])
def test_a_reranker_orders_documents_by_yes_against_no(reranker: FleetPages, exact: Exact, instruction: str | None) -> None:
    fields = {"query": "What is 3 + 4?", "documents": DOCUMENTS} | ({"instruction": instruction} if instruction else {})
    results = post(reranker, "/v1/rerank", fields)["results"]
    labels = [exact.tokenizer(word, add_special_tokens=False).input_ids[0] for word in ("yes", "no")]
    expected: list[float] = []
    for document in DOCUMENTS:
        arguments = {"instruct": instruction} if instruction else {}
        messages = [{"role": "query", "content": fields["query"]}, {"role": "document", "content": document}]
        text = exact.tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False, **arguments)
        yes, no = exact.likelihoods(exact.tokenizer(text, add_special_tokens=False).input_ids, labels).tolist()
        expected.append(yes / (yes + no))
    assert [one["index"] for one in results] == sorted(range(4), key=lambda index: -expected[index])
    assert [one["relevance_score"] for one in results] == pytest.approx(sorted(expected, reverse=True), rel=1e-3)
