"""The corpus: deterministic, and every answer follows from its question."""

import re
from random import Random

import pytest

from demo import corpus
from demo.corpus import TASKS, Chat, Task


@pytest.mark.parametrize("task", TASKS)
def test_a_held_out_chat_is_a_function_of_task_size_and_seed(task: Task) -> None:
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


def test_held_out_lists_are_not_those_of_training() -> None:
    random = Random("train 1")
    trained = {turn.user for _ in range(200) for turn in corpus.retrieval(random, 20, 4).turns[:1]}
    assert not trained & {corpus.held_out("retrieval", 20, seed).turns[0].user for seed in range(200)}


def test_a_training_chat_asks_many_questions_about_one_list() -> None:
    chat: Chat = corpus.retrieval(Random(5), lines=30, questions=10)
    listed = set(chat.turns[0].user.splitlines())
    assert len(chat.turns) == 10 and all(turn.answer in listed for turn in chat.turns)
