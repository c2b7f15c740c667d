"""`Engine`: a whole fleet as a Python object."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from common.errors import BadRequest
from common.model_path import resolve_model_path
from common.processes.local_fleet import FleetFailed
from common.processes.router_client import RequestFailed, RouterClient
from launch.engine import SHARED_MEMORY, Engine
from tests.rig.forks import forked

GREEDY = {"temperature": 0, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with forked():
        made = Engine(threads=1, pooling="mean", grammar="off", max_running=8)
    with made:
        yield made


def test_answers_come_in_the_order_of_their_prompts_and_alone_as_together(engine: Engine) -> None:
    prompts = [f"{number} + 30 =" for number in range(40)]
    answers = engine.generate(prompts, GREEDY)
    assert [answers[number] | {"meta_info": {}} for number in (0, 39)] == [
        engine.generate(prompts[number], GREEDY) | {"meta_info": {}} for number in (0, 39)
    ]
    assert all(answer["meta_info"]["completion_tokens"] <= 6 for answer in answers)
    lengths = engine.generate(["a", [60, 61]], [{"max_new_tokens": tokens, "ignore_eos": True} for tokens in (2, 5)])
    assert [len(answer["output_ids"]) for answer in lengths] == [2, 5]


def test_a_chat_is_answered_by_the_template_as_generate_answers_its_text(engine: Engine) -> None:
    chats = [[{"role": "user", "content": f"What is 3 + {number}?"}] for number in (4, 5)]
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("demo"))
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    expected = [answer["text"] for answer in engine.generate(ids, GREEDY | {"max_new_tokens": 12})]
    answers = engine.chat(chats, temperature=0, max_tokens=12)
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == expected == ["3 + 4 = 7", "3 + 5 = 8"]
    assert engine.chat(chats[1], temperature=0)["choices"][0]["message"]["content"] == expected[1]
    with pytest.raises(RequestFailed, match="role"):
        engine.chat([{"content": "no role"}])
    with pytest.raises(BadRequest, match="OpenAI's client"):
        engine.chat(chats[0], stream=True)


def embeddings(prompts: Sequence[list[int]]) -> list[torch.Tensor]:
    """What transformers computes, scaled to length 1."""
    model, found = AutoModel.from_pretrained(resolve_model_path("demo"), dtype=torch.float32), list[torch.Tensor]()
    for ids in prompts:
        with torch.inference_mode():
            mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
        found.append(mean / mean.norm())
    return found


def test_embeddings_are_those_of_transformers_scaled_to_length_1(engine: Engine) -> None:
    prompts = [[60, 61, 62], [70]]
    for ids, expected, answer in zip(prompts, embeddings(prompts), engine.encode(prompts), strict=True):
        assert answer["embedding"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert answer["meta_info"] == {"prompt_tokens": len(ids)}
    assert engine.encode("Hello") == engine.encode(["Hello"])[0]


def test_pairs_are_scored_by_the_cosine_of_their_embeddings_and_labels_are_scored_too(engine: Engine) -> None:
    tokenizer, router = AutoTokenizer.from_pretrained(resolve_model_path("demo")), RouterClient(engine.url)
    query, documents = "What is 3 + 4?", ["What is 3 + 5?", "Hello!", "Name a color.", "3 + 4 = 7"]
    of_query, *others = embeddings([tokenizer(text).input_ids for text in (query, *documents)])
    expected = [float(of_query @ other) for other in others]
    scored = router.post("/score", {"text_1": query, "text_2": documents})["data"]
    results = router.post("/rerank", {"query": query, "documents": documents})["results"]
    assert [one["score"] for one in scored] == pytest.approx(expected, abs=1e-4)
    assert [one["index"] for one in results] == sorted(range(4), key=lambda index: -expected[index])
    assert [one["relevance_score"] for one in results] == pytest.approx(sorted(expected, reverse=True), abs=1e-4)
    labels = router.post("/score", {"query": query, "items": documents, "label_token_ids": [60]})["scores"]
    assert len(labels) == 4, "a model that makes embeddings scores labels too"


def test_a_stream_grows_to_the_whole_answer(engine: Engine) -> None:
    whole = engine.generate("12 + 30 =", GREEDY)
    grown = [answer["text"] for answer in engine.generate("12 + 30 =", GREEDY, stream=True)]
    assert grown[-1] == whole["text"] and all(later.startswith(text) for text, later in pairwise(grown))


def test_a_loop_is_not_blocked_and_a_stream_may_be_left(engine: Engine) -> None:
    async def ask() -> list[str]:
        stream = await engine.async_generate("Hello", {"max_new_tokens": 200, "ignore_eos": True}, stream=True)
        assert not isinstance(stream, dict | list)
        async for first in stream:
            assert first["text"] is not None
            break
        answers = await engine.async_generate(["a", "b"], GREEDY)
        assert isinstance(answers, list)
        return [answer["text"] for answer in answers]

    assert asyncio.run(ask()) == [engine.generate(prompt, GREEDY)["text"] for prompt in ("a", "b")]


def test_weights_that_a_trainer_holds_are_computed_with_and_leave_no_shared_memory(engine: Engine) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model_path("demo"), dtype=torch.float32)
    weight = model.model.layers[0].mlp.down_proj.weight
    former, before = weight.detach().clone(), engine.generate("12 + 30 =", GREEDY)["text"]
    with torch.no_grad():
        weight.copy_(former.flip(0))
    engine.pause_generation("in_place")
    changed = engine.update_weights_from_tensor([("model.layers.0.mlp.down_proj.weight", weight)], weight_version="flipped")
    engine.continue_generation()
    answer = engine.generate([60, 61, 62], GREEDY | {"ignore_eos": True})
    with torch.inference_mode():
        expected = model.generate(torch.tensor([[60, 61, 62]]), do_sample=False, min_new_tokens=6, max_new_tokens=6)
    assert changed["success"] and answer["meta_info"]["weight_version"] == "flipped"
    assert answer["output_ids"] == expected[0, 3:].tolist()
    with pytest.raises(RequestFailed, match="no_such_weight"):
        engine.update_weights_from_tensor([("no_such_weight", former)])
    engine.update_weights_from_disk(str(resolve_model_path("demo")))
    assert engine.update_weight_version("as before")["new_version"] == "as before"
    assert not list(SHARED_MEMORY.glob("tandem-weights-*"))
    assert engine.flush_cache()["instances"] == 2 and engine.generate("12 + 30 =", GREEDY)["text"] == before


def test_what_the_router_refuses_is_raised_with_its_reason(engine: Engine) -> None:
    with pytest.raises(RequestFailed, match="nope"):
        engine.generate("a", {"nope": 1})
    with pytest.raises(BadRequest, match="sampling_params"):
        engine.generate(["a", "b"], [GREEDY])


def test_a_flag_that_is_not_known_is_told() -> None:
    with pytest.raises(FleetFailed, match="--no-such-flag"):
        Engine(no_such_flag=1)
