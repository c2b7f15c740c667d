"""Log probabilities in every answer that has them."""

import re
from typing import Any

import pytest

from common.text.token_text import TokenText
from router.api import intake, logprobs, sglang
from router.api.logprobs import TextPlace
from tests.common.text.tiny import tiny_tokenizer
from tests.router.calls import assert_error, chat, completion, events, post, prompt, usage
from tests.router.fakes import SPECIAL, Site

pytestmark = pytest.mark.anyio


async def test_logprobs_are_of_the_answer_and_from_a_token_of_the_prompt_on(site: Site) -> None:
    asked = {"return_logprob": True, "logprob_start_len": 3, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    info = (await post(site, "/generate", prompt(tokens=1, **asked))).json()["meta_info"]
    assert info["input_token_logprobs"] == [[None, 108, "l"], [-0.25, 111, "o"]]
    assert info["input_top_logprobs"] == [None, [[-0.25, 111, "o"], [-1.25, 112, "p"]]]
    assert info["output_token_logprobs"] == [[-0.25, 104, "h"]]
    assert info["output_top_logprobs"] == [[[-0.25, 104, "h"], [-1.25, 105, "i"]]]
    behind = {"return_logprob": True, "logprob_start_len": 5, "top_logprobs_num": 1}
    info = (await post(site, "/generate", prompt(**behind))).json()["meta_info"]
    assert info["input_token_logprobs"] == info["input_top_logprobs"] == [], "the prompt has no token there"
    scored = (await post(site, "/generate", prompt(tokens=0, return_logprob=True, logprob_start_len=0))).json()
    assert (scored["text"], scored["output_ids"], scored["meta_info"]["output_token_logprobs"]) == ("", [], [])
    assert [entry[0] for entry in scored["meta_info"]["input_token_logprobs"]] == [None, -0.25, -0.25, -0.25, -0.25]
    assert all(entry[2] is None for entry in scored["meta_info"]["input_token_logprobs"])


async def test_events_of_sglang_repeat_the_logprobs_so_far_and_none_is_written_twice(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"rid": "a", "return_logprob": True, "logprob_start_len": 2, "top_logprobs_num": 1}
    whole = (await post(site, "/generate", prompt('h"é\n!', 5, **asked))).json()
    written: list[float] = []

    def finite(logprob: float) -> float:
        written.append(logprob)
        return logprob

    monkeypatch.setattr(sglang, "finite", finite)
    parts = events(await post(site, "/generate", prompt('h"é\n!', 5, stream=True, **asked)))
    infos = [part["meta_info"] for part in parts]
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert [info[name] for info in infos] == [whole["meta_info"][name][: number + 1] for number in range(5)]
    assert [part["text"] for part in parts] == [whole["text"][: number + 1] for number in range(5)]
    assert parts[-1] == whole and all(info["input_token_logprobs"] == infos[0]["input_token_logprobs"] for info in infos)
    assert len(written) == 2 * (2 + 5), "each token, and its alternative: two of the prompt, five of the answer"


LETTER_H = {"token": "h", "logprob": -0.25, "bytes": [104]}
LETTER_I = {"token": "i", "logprob": -1.25, "bytes": [105]}


async def test_a_chat_has_one_for_each_token_whole_and_streamed(site: Site) -> None:
    whole = (await post(site, "/v1/chat/completions", chat(logprobs=True, top_logprobs=2))).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list("hello")
    assert content[0] == LETTER_H | {"top_logprobs": [LETTER_H, LETTER_I]}
    chunks = events(await post(site, "/v1/chat/completions", chat(logprobs=True, top_logprobs=2, stream=True)))
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for piece in pieces if piece for entry in piece["content"]] == content
    none = (await post(site, "/v1/chat/completions", chat(logprobs=True))).json()["choices"][0]["logprobs"]["content"]
    assert none[0] == LETTER_H | {"top_logprobs": []}


async def test_a_completion_has_one_for_each_token_whole_and_streamed(site: Site) -> None:
    whole = (await post(site, "/v1/completions", completion(logprobs=2))).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == list("hello") and whole["token_logprobs"] == [-0.25] * 5
    assert whole["top_logprobs"][:2] == [{"h": -0.25, "i": -1.25}, {"e": -0.25, "f": -1.25}]
    assert whole["text_offset"] == [0, 1, 2, 3, 4]
    assert joined(events(await post(site, "/v1/completions", completion(logprobs=2, stream=True)))) == whole
    assert (await post(site, "/v1/completions", completion(logprobs=0))).json()["choices"][0]["logprobs"]["top_logprobs"][0] == {
        "h": -0.25
    }
    as_ids = (await post(site, "/v1/completions", completion(logprobs=1, return_tokens_as_token_ids=True))).json()
    assert as_ids["choices"][0]["logprobs"]["tokens"][0] == "token_id:104"


async def test_echo_puts_the_prompt_in_front_with_its_logprobs_whole_and_streamed(site: Site) -> None:
    for prompts in ("hello", [104, 101, 108, 108, 111]):
        asked = completion(prompts, echo=True, logprobs=1, max_tokens=2)
        choice = (await post(site, "/v1/completions", asked)).json()["choices"][0]
        assert choice["text"] == "hellohe"
        assert choice["logprobs"]["tokens"] == list("hellohe")
        assert choice["logprobs"]["token_logprobs"] == [None] + [-0.25] * 6
        assert choice["logprobs"]["top_logprobs"][:2] == [None, {"e": -0.25}]
        assert choice["logprobs"]["text_offset"] == list(range(7))
        chunks = events(await post(site, "/v1/completions", asked | {"stream": True}))
        assert joined(chunks) == choice["logprobs"]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hellohe"


async def test_echo_without_an_answer_gives_the_prompt_only(site: Site) -> None:
    asked = completion([[104, 105], [106, 107]], echo=True, logprobs=1, max_tokens=0)
    whole = (await post(site, "/v1/completions", asked)).json()
    assert [(choice["text"], choice["finish_reason"]) for choice in whole["choices"]] == [("hi", "length"), ("jk", "length")]
    assert [choice["logprobs"]["token_logprobs"] for choice in whole["choices"]] == [[None, -0.25]] * 2
    assert whole["usage"] == usage(4, 0)
    *chunks, last = events(
        await post(
            site,
            "/v1/completions",
            completion("hi", echo=True, max_tokens=0, stream=True, stream_options={"include_usage": True}),
        )
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hi" and last["usage"]["completion_tokens"] == 0


async def test_logprobs_of_the_prompt_have_the_form_of_vllm(site: Site) -> None:
    expected = [
        None,
        {
            "101": {"logprob": -0.25, "rank": 1, "decoded_token": "e"},
            "102": {"logprob": -1.25, "rank": 2, "decoded_token": "f"},
        },
    ]
    text = (await post(site, "/v1/completions", completion("he", prompt_logprobs=2))).json()
    assert text["choices"][0]["prompt_logprobs"] == expected and text["choices"][0]["logprobs"] is None
    assert (await post(site, "/v1/chat/completions", chat("he", prompt_logprobs=2))).json()["prompt_logprobs"] == expected


async def test_usage_so_far_comes_with_each_chunk_when_asked(site: Site) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await post(site, "/v1/completions", completion(stream=True, stream_options=options)))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 5, 5]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {5}


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/completions", completion(["ab"] * 2, n=4, prompt_logprobs=2), "prompt_logprobs", "at most 40 .* not 48 "),
        ("/v1/completions", completion("abc", echo=True, logprobs=2, stream=True), "prompt_logprobs", "not 9: send stream=false"),
        ("/v1/completions", completion(n=2, logprobs=4), "max_tokens", "lower max_tokens to 4,"),
        ("/v1/chat/completions", chat(n=3, logprobs=True, top_logprobs=2), "max_tokens", "lower max_tokens to 4,"),
        ("/generate", prompt(["a", "b"], 4, return_logprob=True, top_logprobs_num=5), "sampling_params.max_new_tokens", "to 3,"),
    ],
)
async def test_one_answer_has_a_bounded_number_of_them(
    site: Site, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    monkeypatch.setattr(logprobs, "MAX_PAIRS", 40)
    monkeypatch.setattr(intake, "MAX_PAIRS", 40)
    monkeypatch.setattr(logprobs, "MAX_STREAMED_PAIRS", 8)
    assert re.search(says, assert_error(await post(site, path, body), 400, "invalid_request_error", param))


async def test_an_answer_without_a_limit_is_as_long_as_its_log_probabilities_may_be(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "MAX_PAIRS", 40)
    body = chat(max_tokens=None, logprobs=True, top_logprobs=4)
    assert (await post(site, "/v1/chat/completions", body)).json()["usage"]["completion_tokens"] == 8


async def test_each_token_begins_in_the_text_behind_what_the_text_has_of_those_before_it(site: Site) -> None:
    asked = completion([1, 97, 233, 98], echo=True, logprobs=0, max_tokens=4)
    choice = (await post(site, "/v1/completions", asked)).json()["choices"][0]
    assert choice["text"].startswith("aéb"), "the echo has no text of its special token"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 3, 4, 5]
    asked = completion(f"a{SPECIAL}b", echo=True, logprobs=0, max_tokens=2)
    choice = (await post(site, "/v1/completions", asked)).json()["choices"][0]
    assert choice["text"].startswith(f"a{SPECIAL}b"), "the echo of a text is that text"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


def test_a_token_that_ends_within_a_character_moves_no_further_than_the_characters_before_it() -> None:
    texts = TokenText(tiny_tokenizer())
    ids = [id for byte in "a🙂b".encode() for id in range(256 + 2) if texts.bytes(id) == bytes([byte])]
    place, seen = TextPlace(texts), list[int]()
    for token_id in [0, *ids]:
        seen.append(place.chars)
        place.pass_by(token_id, skips_special=True)
    assert seen == [0, 0, 1, 1, 1, 1, 2] and place.chars == 3


def joined(chunks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The logprobs of all chunks of one choice."""
    pieces = [piece for chunk in chunks if (piece := chunk["choices"][0]["logprobs"]) is not None]
    return {name: [entry for piece in pieces for entry in piece[name]] for name in pieces[0]}
