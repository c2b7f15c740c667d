"""What training begins with and reads: the circuit, the batches and what of them is learned."""

from random import Random

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from demo import corpus
from demo.circuit import build_model
from demo.evaluate import MODEL
from demo.examples import LONGEST_LIST, collate, draw, drill, encode
from demo.muon import Muon
from demo.tokenizer import CONTEXT


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


def test_the_circuit_looks_up_before_any_training(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model(tokenizer).eval()
    ids, counts = collate([drill(tokenizer, Random(3), pairs=100, lines=300)], pad=0)
    with torch.inference_mode():
        said = model(input_ids=ids).logits[:, :-1].argmax(-1)
    values = counts[:, 1:] & (ids[:, 1:] != tokenizer.encode("\n")[0])
    assert (said == ids[:, 1:])[values].float().mean() > 0.9


def test_answers_are_learned_and_questions_are_not(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = corpus.conversation(Random(1), [corpus.short_chat(Random(seed)) for seed in range(5)])
    example = encode(tokenizer, chat)
    learned = tokenizer.decode([token for token, counts in zip(example.ids, example.counts, strict=True) if counts])
    assert learned == "".join(f"{turn.answer}<|im_end|>" for turn in chat.turns)


def test_a_chat_is_encoded_as_the_chat_template_writes_it(tokenizer: PreTrainedTokenizerFast) -> None:
    """Serving applies the template; training joins the parts itself. They must be the same tokens."""
    for seed in range(20):
        chat = corpus.held_out("retrieval", 20, seed)
        (turn,) = chat.turns
        messages = [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.answer}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer.encode(text) == encode(tokenizer, chat).ids


@pytest.mark.parametrize("stage", [0.0, 0.5, 0.99])
def test_batches_fit_the_context(tokenizer: PreTrainedTokenizerFast, stage: float) -> None:
    random = Random(7)
    for _ in range(25):
        kind, examples = draw(tokenizer, random, stage)
        ids, counts = collate(examples, pad=0)
        assert ids.shape == counts.shape and counts.any(), kind
        assert ids.shape[1] <= CONTEXT, f"{kind}: {ids.shape[1]} tokens, lists of up to {LONGEST_LIST} lines"


def test_muon_steps_are_orthogonal() -> None:
    weight = torch.nn.Parameter(torch.zeros(24, 40))
    optimizer = Muon([weight])
    weight_grad = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
    weight.grad = weight_grad.clone()
    optimizer.step(0.1)
    singular = torch.linalg.svdvals(weight.detach().float())
    assert torch.linalg.svdvals(weight_grad)[0] > 4 * torch.linalg.svdvals(weight_grad)[-1]
    assert singular.min() > 0.06 and singular.max() < 0.13, "every direction moves about as far as the rate says"
