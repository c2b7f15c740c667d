"""`Engine`: a fleet of this machine as a Python object, for offline work. As SGLang's `Engine`
(https://docs.sglang.io/basic_usage/offline_engine_api.html).

Owns the fleet, which is `launch local` in a child process: the same routers, prefill and decode instances that serve. Does not
know tokens: prompts and answers are those of POST /generate, chats those of POST /v1/chat/completions.

    with Engine(model="demo", prefill=1, decode=1) as engine:
        print(engine.chat([{"role": "user", "content": "Hello!"}], temperature=0)["choices"][0]["message"]["content"])
        for answer in engine.generate(["1 2 3", "3 + 4 ="], {"temperature": 0, "max_new_tokens": 16}):
            print(answer["text"])
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, overload

from common.errors import BadRequest, ConfigError
from common.processes.local_fleet import FleetFailed, LocalFleet
from common.processes.router_client import RouterClient

if TYPE_CHECKING:
    import torch

Prompt: TypeAlias = str | Sequence[int]
"""A text, or its token ids."""
Parameters: TypeAlias = Mapping[str, Any]
"""`sampling_params` of POST /generate: max_new_tokens, temperature, top_p, stop, json_schema and the others."""
Answer: TypeAlias = dict[str, Any]
"""The answer as POST /generate sends it (text, output_ids, meta_info), or as POST /v1/chat/completions sends that of a chat."""
Chat: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages, as OpenAI's: {"role": "user", "content": "Hello!"}."""

CONCURRENT = 256
"""How many whole answers the fleet makes at once. More prompts wait here; a stream does not wait."""
MAX_REQUESTS = 4096
SHARED_MEMORY = Path("/dev/shm")
"""Where Linux has what shm_open(3) makes."""


class Engine:
    """Starts a fleet, and returns when it can serve. Raises FleetFailed with what the fleet said.

    model: a folder, a Hugging Face name, or "demo". prefill, decode: how many instances. flags: any other flag of `launch local`,
    with underscores: kv_memory="4GiB", dtype="float32"; ConfigError for those that would keep the Engine itself out. Use it as a
    context manager, or call `shutdown`. Several threads may use it at once.
    """

    def __init__(self, model: str = "demo", *, prefill: int = 1, decode: int = 1, **flags: str | int | float) -> None:
        for name in ("api_keys", "tls_cert"):
            if name in flags:
                raise ConfigError(f"{name}: an Engine asks its own router without a key and without TLS: leave it out")
        given = {"model": model, "prefill": prefill, "decode": decode, "max_requests": MAX_REQUESTS} | flags
        self._fleet = LocalFleet(*(f"--{name.replace('_', '-')}={value}" for name, value in given.items()))
        self._pool = ThreadPoolExecutor(max_workers=CONCURRENT, thread_name_prefix="engine")
        try:
            self._fleet.start()
        except BaseException:
            with contextlib.suppress(FleetFailed):
                self._fleet.stop()
            raise
        self._client = RouterClient(self._fleet.url)

    @property
    def url(self) -> str:
        """The URL of the fleet's router: its whole HTTP API is there too."""
        return self._fleet.url

    @overload
    def generate(
        self, prompt: Prompt, sampling_params: Parameters | None = None, *, stream: Literal[False] = False, **fields: Any
    ) -> Answer: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        sampling_params: Parameters | Sequence[Parameters] | None = None,
        *,
        stream: Literal[False] = False,
        **fields: Any,
    ) -> list[Answer]: ...

    @overload
    def generate(
        self, prompt: Prompt, sampling_params: Parameters | None = None, *, stream: Literal[True], **fields: Any
    ) -> Iterator[Answer]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: Parameters | Sequence[Parameters] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Answer | list[Answer] | Iterator[Answer]:
        """The answer to a prompt, or to each of a list of prompts, in their order. sampling_params: one for all, or one for each.

        stream: of a single prompt; an iterator of the answer so far, each time it grows. fields: others of POST /generate, such
        as return_logprob. Raises RequestFailed for the first request that fails, BadRequest for arguments that do not fit.
        """
        bodies = _bodies(prompt, sampling_params, fields, "generate" if stream else "")
        if stream:
            return self._client.stream("/generate", bodies[0])
        return list(self._pool.map(self._one, bodies)) if _is_list(prompt) else self._one(bodies[0])

    async def async_generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: Parameters | Sequence[Parameters] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Answer | list[Answer] | AsyncIterator[Answer]:
        """As `generate`, without blocking the loop. With stream, await it for an asynchronous iterator."""
        bodies = _bodies(prompt, sampling_params, fields, "async_generate" if stream else "")
        if stream:
            return self._stream(bodies[0])
        loop = asyncio.get_running_loop()
        answers = list(await asyncio.gather(*(loop.run_in_executor(self._pool, self._one, body) for body in bodies)))
        return answers if _is_list(prompt) else answers[0]

    @overload
    def chat(self, messages: Chat, **fields: Any) -> Answer: ...

    @overload
    def chat(self, messages: Sequence[Chat], **fields: Any) -> list[Answer]: ...

    def chat(self, messages: Chat | Sequence[Chat], **fields: Any) -> Answer | list[Answer]:
        """The model's answer to a conversation, or to each of a list of them, in their order, by its chat template; `generate`
        continues a text without one. fields: others of POST /v1/chat/completions, such as temperature, max_tokens or tools.
        Raises RequestFailed, BadRequest."""
        if fields.get("stream"):
            raise BadRequest("stream is not of chat: ask the router at `url` with OpenAI's client", field="stream")
        fields = {"model": self._client.get("/v1/models")["data"][0]["id"]} | fields
        several = bool(messages) and not isinstance(messages[0], Mapping)
        bodies = [{"messages": list(each), **fields} for each in (messages if several else [messages])]
        answers: list[Answer] = list(self._pool.map(lambda body: self._client.post("/v1/chat/completions", body), bodies))
        return answers if several else answers[0]

    @overload
    def encode(self, prompt: Prompt) -> Answer: ...  # type: ignore[overload-overlap]  # a str is a sequence of str too

    @overload
    def encode(self, prompt: Sequence[Prompt]) -> list[Answer]: ...

    def encode(self, prompt: Prompt | Sequence[Prompt]) -> Answer | list[Answer]:
        """The embedding of a prompt, or of each of a list of prompts, in their order: `embedding` and `meta_info`, with its
        `prompt_tokens`, as in SGLang. The model must be served for embeddings (`pooling="last"`, say). Raises RequestFailed."""
        return list(self._pool.map(self._encoded, prompt)) if _is_list(prompt) else self._encoded(prompt)

    # --- weights and adapters: the router's endpoints of these names, whose answers they return. They raise RequestFailed -----

    def update_weights_from_disk(self, model_path: str, **fields: Any) -> Answer:
        """Change to the checkpoint in a folder. fields: weight_version, mode, keep_pause and others of the endpoint."""
        return self._post("/update_weights_from_disk", model_path=model_path, **fields)

    def update_weights_from_tensor(self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", **fields: Any) -> Answer:
        """Change these weights, named as in the checkpoint, and leave the others as they are. They pass through shared memory of
        this host, as a safetensors file, of which nothing is left afterwards. Raises OSError when there is no room for it."""
        from safetensors.torch import save_file  # it loads torch, which an Engine that only answers does without

        segment = SHARED_MEMORY / f"tandem-weights-{uuid.uuid4().hex}"
        try:
            save_file({name: each.detach().to("cpu", copy=True).contiguous() for name, each in named_tensors}, segment)
            return self.update_weights_from_shared_memory([segment.name], **fields)
        finally:
            segment.unlink(missing_ok=True)

    def update_weights_from_shared_memory(self, names: Sequence[str], **fields: Any) -> Answer:
        """The same with what is in shared memory under these names: safetensors files, whose writer removes them."""
        return self._post("/update_weights_from_tensor", shared_memory=list(names), **fields)

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> Answer:
        """Have every rank of the fleet join a group of torch.distributed. Returns when it has met: call it from a thread, and
        join as rank 0 meanwhile."""
        where = {"master_address": master_address, "master_port": master_port, "backend": backend}
        ranks = {"rank_offset": rank_offset, "world_size": world_size, "group_name": group_name}
        return self._post("/init_weights_update_group", **where, **ranks)

    def update_weights_from_distributed(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], **fields: Any
    ) -> Answer:
        """Change the weights that rank 0 of the group broadcasts meanwhile, in this order. fields: group_name and others."""
        sizes = [list(shape) for shape in shapes]
        return self._post("/update_weights_from_distributed", names=list(names), dtypes=list(dtypes), shapes=sizes, **fields)

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> Answer:
        """Have every rank leave the group."""
        return self._post("/destroy_weights_update_group", group_name=group_name)

    def update_weight_version(self, new_version: str) -> Answer:
        """Give the present weights another name."""
        return self._post("/update_weight_version", new_version=new_version)

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        """The first rows of a weight, as numbers."""
        return self._client.post("/get_weights_by_name", {"name": name, "truncate_size": truncate_size})

    def pause_generation(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> Answer:
        """Dispatch no request until `continue_generation`."""
        return self._post("/pause_generation", mode=mode)

    def continue_generation(self) -> Answer:
        """End a pause."""
        return self._post("/continue_generation")

    def flush_cache(self) -> Answer:
        """Forget the prefix caches."""
        return self._post("/flush_cache")

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False, **fields: Any) -> Answer:
        """Load an adapter on every instance; requests have it by `lora_path=lora_name`. fields: load_inplace, mode."""
        return self._post("/load_lora_adapter", lora_name=lora_name, lora_path=lora_path, pinned=pinned, **fields)

    def unload_lora_adapter(self, lora_name: str) -> Answer:
        """Unload an adapter. Returns when no request has it any more."""
        return self._post("/unload_lora_adapter", lora_name=lora_name)

    def shutdown(self) -> None:
        """Stop the fleet in order. Answers that are not complete end with RequestFailed. Idempotent. Raises FleetFailed when the
        fleet does not end in order."""
        self._client.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._fleet.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    # --- inside --------------------------------------------------------------------------------------------------------

    def _one(self, body: Mapping[str, Any]) -> Answer:
        return self._post("/generate", **body)

    def _post(self, path: str, **fields: Any) -> Answer:
        answer: Answer = self._client.post(path, fields)
        return answer

    def _encoded(self, prompt: Any) -> Answer:
        given = prompt if isinstance(prompt, str) else list(prompt)
        answer = self._client.post("/v1/embeddings", {"input": given})
        usage = {"prompt_tokens": answer["usage"]["prompt_tokens"]}
        return {"embedding": answer["data"][0]["embedding"], "meta_info": usage}

    async def _stream(self, body: Mapping[str, Any]) -> AsyncIterator[Answer]:
        """The events. Each is read when it is asked for, on a thread of the stream. An iteration that is left early ends the
        request."""
        loop, events = asyncio.get_running_loop(), self._client.stream("/generate", body)
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-stream")
        try:
            while (event := await loop.run_in_executor(thread, next, events, None)) is not None:
                yield event
        finally:
            events.close()
            thread.shutdown(wait=False)


def _is_list(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether it is several prompts. Token ids are one."""
    return not isinstance(prompt, str) and not (len(prompt) > 0 and isinstance(prompt[0], int))


def _bodies(prompt: Any, parameters: Any, fields: Mapping[str, Any], streams: str) -> list[dict[str, Any]]:
    """The body for each prompt. streams: the method that is to stream the answer; "": none. Raises BadRequest when there are not
    as many parameters as prompts, or several prompts to stream."""
    several = _is_list(prompt)
    if streams and several:
        raise BadRequest(f"stream is for a single prompt: call {streams} for each", field="stream")
    prompts = prompt if several else [prompt]
    if parameters is None or isinstance(parameters, Mapping) or not several:
        parameters = [parameters] * len(prompts)
    if len(parameters) != len(prompts):
        message = f"sampling_params holds {len(parameters)} for {len(prompts)} prompts: send one for all, or one for each"
        raise BadRequest(message, field="sampling_params")
    bodies = []
    for each, chosen in zip(prompts, parameters, strict=True):
        given = {"text": each} if isinstance(each, str) else {"input_ids": list(each)}
        bodies.append({**given, "sampling_params": dict(chosen or {}), **fields, **({"stream": True} if streams else {})})
    return bodies
