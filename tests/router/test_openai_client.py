"""The API through the `openai` client, as most clients will use it."""

import openai
import pytest

from router.api.fields import MAX_CHOICES_PER_PROMPT
from tests.router.calls import openai_client
from tests.router.fakes import MODEL, EchoFleet

pytestmark = pytest.mark.anyio


async def test_a_chat_whole_and_streamed() -> None:
    async with openai_client() as client:
        whole = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], max_completion_tokens=5, temperature=0, n=2
        )
        assert [choice.message.content for choice in whole.choices] == ["hello", "hello"]
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None and whole.usage.total_tokens == 15
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5


async def test_logprobs_of_chats_and_completions_are_the_clients_own_types() -> None:
    async with openai_client() as client:
        chat = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=2, logprobs=True, top_logprobs=2
        )
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert [(entry.token, entry.logprob, entry.bytes) for entry in logprobs.content] == [
            ("h", -0.25, [104]),
            ("i", -0.25, [105]),
        ]
        assert [top.token for top in logprobs.content[0].top_logprobs] == ["h", "i"]
        text = await client.completions.create(model=MODEL, prompt="hi", max_tokens=2, logprobs=2)
        of_text = text.choices[0].logprobs
        assert of_text is not None and of_text.top_logprobs is not None
        assert (of_text.tokens, of_text.token_logprobs) == (["h", "i"], [-0.25, -0.25])
        assert of_text.top_logprobs[0] == {"h": -0.25, "i": -1.25}


async def test_models_are_listed() -> None:
    async with openai_client() as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "tandem"


async def test_errors_are_the_clients_own_classes_and_name_the_field() -> None:
    async with openai_client() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=MODEL, prompt="x", n=MAX_CHOICES_PER_PROMPT + 1)
        assert bad.value.param == "n"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="gpt-9", prompt="x")
        assert unknown.value.code == "model_not_found"


async def test_a_failure_in_mid_stream_is_raised_by_the_client_after_the_text_before_it() -> None:
    async with openai_client(EchoFleet(fail_at=2)) as client:
        stream = await client.completions.create(model=MODEL, prompt="hello", max_tokens=5, stream=True)
        text = ""
        with pytest.raises(openai.APIError, match="the step failed"):
            async for chunk in stream:
                text += chunk.choices[0].text
    assert text == "he"
