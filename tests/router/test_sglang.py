"""SGLang's /generate and /abort_request, as its own clients use them; and log probabilities in every answer that has them."""

import asyncio
import json
import re
import threading
from typing import Any

import httpx
import pytest

from common.ids import unpack_ids
from common.text.token_text import TokenText
from router.api import intake, logprobs, sglang
from router.api.logprobs import TextPlace
from router.api.sglang import GENERATE, PARAMETERS
from tests.common.text.tiny import sentencepiece_like_tokenizer, tiny_tokenizer
from tests.router.calls import assert_error, chat, completion, events, post, prompt, sent_to_fleet, until, usage
from tests.router.fakes import SPECIAL, CharTokenizer, EchoFleet, Site

pytestmark = pytest.mark.anyio


async def test_one_prompt_gets_one_answer_and_a_batch_gets_a_list(site: Site) -> None:
    one = (await post(site, "/generate", prompt(rid="mine"))).json()
    assert one == {
        "text": "hel",
        "output_ids": [104, 101, 108],
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "cached_tokens": 0,
            "weight_version": "",
            "weight_versions": [],
        },
    }
    batch = (await post(site, "/generate", prompt(["ab", "cd"], rid=["x", "y"]))).json()
    assert [(part["text"], part["meta_info"]["id"]) for part in batch] == [("aba", "x"), ("cdc", "y")]
    ids = {"input_ids": [[97], [98, 99]], "sampling_params": {"max_new_tokens": 2, "n": 2}}
    assert [part["text"] for part in (await post(site, "/generate", ids)).json()] == ["aa", "aa", "bc", "bc"]


async def test_the_cache_salt_has_sglangs_name_too(site: Site) -> None:
    assert (await post(site, "/generate", prompt(extra_key="tenant"))).status_code == 200
    assert [message.salt for message in sent_to_fleet(site)] == ["tenant"]
    differ = await post(site, "/generate", prompt(extra_key="tenant", cache_salt="other"))
    assert_error(differ, 400, "invalid_request_error", "extra_key")


async def test_each_rid_of_a_batch_stands_for_all_choices_of_its_prompt() -> None:
    async with Site(EchoFleet(stall_at=2)) as site:
        body = prompt(["abc", "def"], rid=["one", "two"]) | {"sampling_params": {"max_new_tokens": 5, "n": 2}}
        answer = asyncio.create_task(post(site, "/generate", body))
        await until(lambda: len(site.core.requests) == 4)
        for rid, ended in (("one", 2), ("two_1", 1), ("two", 1), ("one_0", 0)):
            assert (await post(site, "/abort_request", {"rid": rid})).json() == {"aborted": ended}
        assert [one["meta_info"]["id"] for one in (await answer).json()] == ["one_0", "one_1", "two_0", "two_1"]


async def test_each_event_of_a_stream_repeats_the_answer_so_far(site: Site) -> None:
    parts = events(await post(site, "/generate", prompt(stream=True)))
    assert [part["text"] for part in parts] == ["h", "he", "hel"]
    assert [part["output_ids"] for part in parts] == [[104], [104, 101], [104, 101, 108]]
    assert [part["meta_info"]["finish_reason"] for part in parts] == [None, None, {"type": "length", "length": 3}]
    batch = events(await post(site, "/generate", prompt(["ab", "cd"], stream=True)))
    assert {part["index"]: part["text"] for part in batch} == {0: "aba", 1: "cdc"}


async def test_sampling_parameters_reach_the_fleet_under_our_names(site: Site) -> None:
    given = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "temperature": 0,
        "top_k": 7,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": -1},
        "sampling_seed": 3,
        "stop": "lo",
        "stop_token_ids": [9],
    }
    answer = (await post(site, "/generate", {"input_ids": [104, 101, 108, 108, 111], "sampling_params": given})).json()
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == ("hel" + "l", {"type": "stop", "matched": "lo"})
    (sent,) = sent_to_fleet(site)
    sampling = sent.sampling
    assert unpack_ids(sent.prompt).tolist() == [104, 101, 108, 108, 111]
    assert (sampling.max_new_tokens, sampling.min_tokens, sampling.temperature, sampling.top_k, sampling.seed) == (9, 2, 0, 7, 3)
    assert (sampling.frequency_penalty, sampling.logit_bias, sampling.stop_token_ids) == (0.5, ((7, -1.0),), (9,))


async def test_fields_of_sglang_that_ask_for_nothing_are_accepted_and_others_refused_by_name(site: Site) -> None:
    nothing = {name: next(iter(values), None) for name, values in GENERATE.values.items()}
    parameters = {name: next(iter(values), None) for name, values in PARAMETERS.values.items()}
    body = prompt() | nothing | {"sampling_params": {"max_new_tokens": 3} | parameters}
    assert (await post(site, "/generate", body)).json()["text"] == "hel"
    for name in GENERATE.values:
        assert_error(await post(site, "/generate", prompt() | {name: "something"}), 400, "invalid_request_error", name)


async def test_an_aborted_request_ends_with_what_it_has_got() -> None:
    async with Site(EchoFleet(stall_at=2)) as site:
        whole = asyncio.create_task(post(site, "/generate", prompt(rid="a")))
        stream = asyncio.create_task(post(site, "/generate", prompt(["ab", "cd"], rid=["b", "c"], stream=True)))
        other = asyncio.create_task(named(site, "other"))
        await until(lambda: sum(len(record.token_ids) for record in site.core.requests.records()) == 8)
        assert (await post(site, "/abort_request", {"rid": "a"})).json() == {"aborted": 1}
        aborted = (await whole).json()
        assert (aborted["text"], aborted["meta_info"]["finish_reason"]["type"]) == ("he", "abort")
        assert (await post(site, "/abort_request", {"rid": "c"})).json() == {"aborted": 1}
        assert len(site.core.requests) == 2 and not stream.done()
        assert (await post(site, "/abort_request", {"rid": "other"})).json() == {"aborted": 1}
        assert (await other).json()["choices"][0]["finish_reason"] == "abort"
        assert (await post(site, "/abort_request", {"abort_all": True})).json() == {"aborted": 1}
        parts = [json.loads(part.removeprefix("data: ")) for part in (await stream).text.split("\n\n")[:-2]]
        assert {
            part["index"]: part["meta_info"]["finish_reason"]["type"] for part in parts if part["meta_info"]["finish_reason"]
        } == {0: "abort", 1: "abort"}
        assert (await post(site, "/abort_request", {"rid": "a"})).json() == {"aborted": 0}
        assert len(site.core.requests) == len(site.core.requests.clients) == 0
        assert_error(await post(site, "/abort_request", {}), 400, "invalid_request_error", "rid")


async def test_one_of_a_batch_is_aborted_while_its_prompt_is_tokenized(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "SHORT_CHARS", 0)
    encoding, go = threading.Event(), threading.Event()

    def encode(_: CharTokenizer, text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        encoding.set()
        go.wait(60)
        return list(map(ord, text))

    monkeypatch.setattr(CharTokenizer, "encode", encode)
    answer = asyncio.create_task(post(site, "/generate", prompt(["xy", "xy"], rid=["a", "b"])))
    await until(encoding.is_set)
    assert [(await post(site, "/abort_request", {"rid": rid})).json()["aborted"] for rid in ("other", "b", "b")] == [0, 1, 0]
    go.set()
    assert [one["meta_info"]["finish_reason"]["type"] for one in (await answer).json()] == ["length", "abort"]
    assert len(site.core.requests) == len(site.core.requests.clients) == 0


async def named(site: Site, request_id: str) -> httpx.Response:
    async with site.client() as client:
        body = {"model": "echo", "prompt": "xy", "max_tokens": 5}
        return await client.post("/v1/completions", json=body, headers={"x-request-id": request_id})


# --- log probabilities ----------------------------------------------------------------------------------------------------------


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
        {"101": {"logprob": -0.25, "rank": 1, "decoded_token": "e"}, "102": {"logprob": -1.25, "rank": 2, "decoded_token": "f"}},
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
    place, seen = TextPlace(texts, begins=True), list[int]()
    for token_id in [0, *ids]:
        seen.append(place.chars)
        place.pass_by(token_id, skips_special=True)
    assert seen == [0, 0, 1, 1, 1, 1, 2] and place.chars == 3


@pytest.mark.parametrize("begins", [True, False])
def test_offsets_are_those_of_a_decoder_that_takes_off_the_space_at_the_beginning_of_a_text(begins: bool) -> None:
    tokenizer = sentencepiece_like_tokenizer()
    vocabulary = tokenizer.get_vocab()
    ids = [vocabulary[token] for token in ("<s>", "▁", "a", "▁hello", "▁world", "b")]
    place, before = TextPlace(TokenText(tokenizer), begins=begins), [] if begins else [vocabulary["b"]]
    for number, token_id in enumerate(ids):
        text = tokenizer.decode(before + ids[:number])
        assert place.pass_by(token_id, skips_special=True) == len(text) - len(before)


def joined(chunks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The logprobs of all chunks of one choice."""
    pieces = [piece for chunk in chunks if (piece := chunk["choices"][0]["logprobs"]) is not None]
    return {name: [entry for piece in pieces for entry in piece[name]] for name in pieces[0]}
