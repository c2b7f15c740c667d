"""The demo model: its corpus, its checkpoint, and its training."""

import re
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from demo import corpus
from demo.circuit import build_model
from demo.corpus import TASKS, DemoChat, DemoTask
from demo.evaluate import MODEL, by_transformers, measure
from demo.examples import LONGEST_LIST, collate, draw, drill, encode
from demo.muon import Muon
from demo.tokenizer import CHAT_TEMPLATE, CONTEXT


@pytest.mark.parametrize("task", TASKS)
def test_a_held_out_chat_is_a_function_of_task_size_and_seed(task: DemoTask) -> None:
    assert corpus.held_out(task, 12, 3) == corpus.held_out(task, 12, 3)
    chats = {corpus.held_out(task, 12, seed) for seed in range(20)}
    assert len(chats) > 3


def test_the_answer_of_a_retrieval_stands_in_its_list_once() -> None:
    for seed in range(50):
        (turn,) = corpus.held_out("retrieval", 40, seed).turns
        lines = turn.user.splitlines()
        assert lines.count(turn.answer) == 1
        key = turn.answer.split()[0]
        assert key in lines[-1], "the question names the key"
        assert sum(line.startswith(f"{key} ") for line in lines) == 1


def test_sums_and_counts_are_right() -> None:
    for seed in range(50):
        (turn,) = corpus.held_out("sums", 0, seed).turns
        a, b = (int(n) for n in re.findall(r"\d+", turn.user))
        assert turn.answer == f"{a} + {b} = {a + b}"
        (turn,) = corpus.held_out("counting", 0, seed).turns
        first, last = (int(n) for n in re.findall(r"\d+", turn.user))
        assert [int(n) for n in turn.answer.split()] == list(range(first, last + 1))


def test_a_copy_repeats_the_end_of_its_question() -> None:
    for seed in range(50):
        (turn,) = corpus.held_out("copying", 9, seed).turns
        assert turn.user.endswith(turn.answer) and len(turn.answer.split()) == 9


def test_the_template_shows_tools_and_plain_chats_are_those_of_the_training() -> None:
    """The file of the checkpoint is the template that a new training would write."""
    assert Path(MODEL, "chat_template.jinja").read_text() == CHAT_TEMPLATE
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chat = [{"role": "user", "content": "What is 3 + 4?"}]
    plain = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert plain == "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"left": 3}}}]}
    tools = [{"type": "function", "function": {"name": "add"}}]
    shown = tokenizer.apply_chat_template([*chat, call], tools=tools, tokenize=False)
    assert '{"type": "function", "function": {"name": "add"}}' in shown
    assert 'assistant\n<tool_call>\n{"name": "add", "arguments": {"left": 3}}\n</tool_call><|im_end|>' in shown


def test_held_out_lists_are_not_those_of_training() -> None:
    random = Random("train 1")
    trained = {turn.user for _ in range(200) for turn in corpus.retrieval(random, 20, 4).turns[:1]}
    assert not trained & {corpus.held_out("retrieval", 20, seed).turns[0].user for seed in range(200)}


def test_a_training_chat_asks_many_questions_about_one_list() -> None:
    chat: DemoChat = corpus.retrieval(Random(5), lines=30, questions=10)
    listed = set(chat.turns[0].user.splitlines())
    assert len(chat.turns) == 10 and all(turn.answer in listed for turn in chat.turns)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_the_checkpoint_is_at_most_ten_megabytes() -> None:
    assert sum(path.stat().st_size for path in Path(MODEL).iterdir()) <= 10_000_000


def test_it_has_what_the_server_needs_to_show(model: PreTrainedModel) -> None:
    config = model.config
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.num_key_value_heads >= 2 and config.max_position_embeddings >= 2048
    assert 3_000_000 <= sum(p.numel() for p in model.parameters()) <= 5_000_000


@given(text=st.text(max_size=60))
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_held_out_lists_are_looked_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    assert measure(by_transformers(model), tokenizer, "retrieval", 40, prompts=10).right >= 8


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
    for _ in range(10):
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
