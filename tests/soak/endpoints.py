"""python -m tests.soak.endpoints: a running fleet is asked for each endpoint and each field that vLLM and SGLang have.

Each endpoint is served, or refused with what to use in its place. Each field changes the answer, is refused by name, or is one of
those whose effect no single answer shows. Knows HTTP and both servers' names. Does not know what a request does.
"""

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.report import say
from demo.evaluate import MODEL
from tests.rig.pages import FleetPages, Json, Reply, running_fleet

PROMPT = "<|im_start|>user\nCount from 1 to 9.<|im_end|>\n<|im_start|>assistant\n"
CHAT: Json = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Count from 1 to 9."}],
    "temperature": 0,
    "max_tokens": 40,
}
TEXT: Json = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 40}
RESPONSE: Json = {"model": "demo", "input": "Count from 1 to 9.", "temperature": 0, "max_output_tokens": 40}
GENERATE: Json = {"text": PROMPT}
SAMPLING: Json = {"temperature": 0, "max_new_tokens": 40}
PAIR: Json = {"query": "sum", "documents": ["a", "b"]}
SCORE: Json = {"text_1": "sum", "text_2": "a"}
BODIES: Mapping[str, Json] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": RESPONSE,
    "/v1/responses/input_tokens": {"model": "demo", "input": "a"},
    "/v1/messages": {key: CHAT[key] for key in ("model", "messages", "max_tokens")},
    "/v1/messages/count_tokens": {key: CHAT[key] for key in ("model", "messages")},
    "/v1/embeddings": {"model": "demo", "input": "a"},
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), PAIR),
    **dict.fromkeys(("/score", "/v1/score"), SCORE),
    "/pooling": {"model": "demo", "input": "a"},
    "/encode": {"text": "a"},
    **{name: {"prompt": "a"} for name in ("/tokenize", "/v1/tokenize")},
    **{name: {"tokens": [40]} for name in ("/detokenize", "/v1/detokenize")},
    "/generate": GENERATE,
    "/abort_request": {"rid": "none"},
    "/invocations": CHAT,
    "/update_weights_from_disk": {"model_path": str(MODEL)},
    "/update_weight_version": {"new_version": "a"},
    "/get_weights_by_name": {"name": "model.norm.weight"},
}
"""What is sent; {} to all others."""
SERVED = """
POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/responses/input_tokens, /v1/messages, /v1/messages/count_tokens,
 /v1/embeddings, /v1/rerank, /v2/rerank, /rerank, /score, /v1/score, /pooling, /encode, /tokenize, /detokenize, /v1/tokenize,
 /v1/detokenize, /generate, /abort_request, /flush_cache, /invocations, /update_weight_version, /get_weights_by_name,
 /update_weights_from_disk, /pause_generation, /continue_generation, /sleep?level=0, /wake_up, /pause, /resume
GET /v1/models, /v1/models/demo, /tokenizer_info, /version, /load, /ping, /health, /metrics, /openapi.json, /docs, /ready,
 /cluster, /health_generate, /server_info, /get_server_info, /get_model_info, /model_info, /get_load, /v1/loads, /is_sleeping,
 /v1/files, /v1/batches, /requests/{id}, /v1/responses/{id}
DELETE /v1/responses/{id}
"""
"""A request of the right form gets an answer."""
NEEDING = """
POST /v1/responses/{id}/cancel, /load_lora_adapter, /unload_lora_adapter, /v1/load_lora_adapter, /v1/unload_lora_adapter,
 /update_weights_from_tensor, /update_weights_from_distributed, /init_weights_update_group, /v1/files, /v1/batches
"""
"""Served too, to whoever brings more than a row here has: adapters, a trainer, a file, a response in the background."""
REFUSED = """
POST /classify, /v1/classify, /release_memory_occupation, /resume_memory_occupation, /start_profile, /stop_profile,
 /configure_logging, /slow_down, /set_internal_state, /collective_rpc, /scale_elastic_ep, /start_expert_distribution_record,
 /stop_expert_distribution_record, /dump_expert_distribution_record, /open_session, /close_session, /parse_function_call,
 /separate_reasoning, /v1/audio/transcriptions, /v1/audio/translations, /v1/audio/speech, /v1/images/generations,
 /v1/images/edits, /v1/moderations, /vertex_generate, /inference/v1/generate, /v1/chat/completions/render,
 /v1/completions/render, /api/chat, /api/generate
GET /v1/realtime, /redoc, /health_scheduler, /api/tags
"""
NO_HINT = "/docs lists what there is"
BARE = f"Not Found: {NO_HINT}"

TEMPLATE = (
    "{{ tools }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""It shows the model its tools."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOL: Json = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
FIELDS: Mapping[str, Any] = {
    "temperature": 2.0,
    "top_p": 0.1,
    "top_k": 1,
    "min_p": 1.0,
    "seed": 6,
    "sampling_seed": 6,
    "stop": "3",
    "n": 2,
    "frequency_penalty": 2,
    "presence_penalty": 2,
    "repetition_penalty": 2,
    "logit_bias": {"24": 50},
    "bad_words": ["2"],
    "min_tokens": 40,
    "min_new_tokens": 40,
    "max_completion_tokens": 1,
    "stop_token_ids": list(range(256)),
    "ignore_eos": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "no_stop_trim": True,
    "logprobs": True,
    "top_logprobs": 3,
    "prompt_logprobs": 1,
    "echo": True,
    "include": ["message.output_text.logprobs"],
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
    "return_text_in_logprobs": True,
    "token_ids_logprob": [1],
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": True,
    "response_format": {"type": "json_object"},
    "guided_json": SCHEMA,
    "guided_regex": "z+",
    "guided_choice": ["zz"],
    "guided_grammar": 'root ::= "z"',
    "structured_outputs": {"regex": "z+"},
    "regex": "z+",
    "ebnf": 'root ::= "z"',
    "json_schema": json.dumps(SCHEMA),
    "text": {"format": {"type": "json_object"}},
    "guided_decoding_backend": "xgrammar",
    "guided_whitespace_pattern": " ",
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "cache_salt": "a",
    "extra_key": "a",
    "priority": 1,
    "timeout": 60,
    "best_of": 2,
    "use_beam_search": True,
    "length_penalty": 2,
    "suffix": "z",
    "logits_processors": ["a"],
    "allowed_token_ids": [1],
    "truncate_prompt_tokens": 1,
    "spaces_between_special_tokens": False,
    "request_id": "a",
    "vllm_xargs": {"a": 1},
    "kv_transfer_params": {"a": 1},
    "repetition_detection": {"a": 1},
    "thinking_token_budget": 1,
    "logprob_token_ids": [1],
    "add_special_tokens": False,
    "rid": "mine",
    "lora_path": "a",
    "session_params": {"id": "a"},
    "session_id": "a",
    "stop_regex": "z",
    "custom_logit_processor": "a",
    "custom_params": {"a": 1},
    "return_hidden_states": True,
    "return_routed_experts": True,
    "return_meta_info": True,
    "return_cached_tokens_details": True,
    "bootstrap_host": "a",
    "bootstrap_port": 1,
    "bootstrap_room": 1,
    "routed_dp_rank": 1,
    "custom_labels": {"a": "b"},
    "input_ids": [40],
    "task": "a",
    "chat_template": "a",
    "documents": [{"text": "a"}],
    "mm_processor_kwargs": {"a": 1},
    "functions": [{"name": "a"}],
    "prediction": {"type": "content", "content": "a"},
    "verbosity": "low",
    "modalities": ["audio"],
    "web_search_options": {"a": 1},
    "image_data": "a",
    "audio_data": "a",
    "input_embeds": [[1.0]],
    "chat_template_kwargs": {"messages": []},
    "reasoning_effort": "low",
    "reasoning": {"effort": "low"},
    "include_reasoning": False,
    "stream_reasoning": False,
    "separate_reasoning": False,
    "store": True,
    "service_tier": "flex",
    "background": True,
    "truncation": "auto",
    "previous_response_id": "resp_none",
    "conversation": "a",
    "prompt": {"id": "a"},
    "max_tool_calls": 1,
    "user": "a",
    "metadata": {"a": "b"},
    "safety_identifier": "a",
    "prompt_cache_key": "a",
    "no_such_field": 1,
}
"""Each with a value that asks for something."""
HOT = {"temperature": 2.0, "seed": 5}
BESIDE: Mapping[str, Json] = {
    **dict.fromkeys(("top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty"), HOT),
    "sampling_seed": {"temperature": 2.0, "sampling_seed": 5},
    **{name: {"stop": "3"} for name in ("include_stop_str_in_output", "no_stop_trim")},
    **{name: {"return_logprob": True} for name in ("logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")},
    **{name: {"logprobs": 1} for name in ("top_logprobs", "return_tokens_as_token_ids")},
    **{name: {"tools": [TOOL]} for name in ("tool_choice", "parallel_tool_calls")},
    "stream_options": {"stream": True},
    "skip_special_tokens": {"ignore_eos": True},
}
"""What each needs to have an effect. The answer with it is compared with one that has this alone."""
AS_CALLED: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"logprobs": True},
    "/v1/completions": {"logprobs": 1},
    "/v1/responses": {"logprobs": ["message.output_text.logprobs"], "tools": [{"type": "function", **TOOL["function"]}]},
    "/generate": {"seed": 5},
}
"""Values that differ from one endpoint to the next."""
OTHER_NAMES = {("/v1/responses", "logprobs"): "include", ("/generate", "seed"): "sampling_seed"}
UNSEEN = {
    "timeout": "a limit that is not reached",
    "priority": "an order among many",
    "cache_salt": "which caches are read",
    "extra_key": "which caches are read",
    "store": "GET finds it",
    "rid": "the answer's id is not compared",
    "parallel_tool_calls": "true is what holds without it",
    **dict.fromkeys(("user", "metadata", "safety_identifier", "prompt_cache_key"), "described as a label"),
    **dict.fromkeys(("spaces_between_special_tokens", "separate_reasoning"), "no difference with this model, as described"),
}
"""Served, and no single answer can show it."""
WAYS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses", "generate": "/generate"}
VOLATILE = re.compile(r'"(id|created\w*|completed_at|e2e_latency|request_id|item_id|call_id)": ?("[^"]*"|[0-9.]+)')


def rows_in(table: str) -> Iterator[tuple[str, str]]:
    """Method and path."""
    for method, paths in re.findall(r"(POST|GET|DELETE) ([^A-Z]+?)(?=\n[A-Z]|\n*$)", table):
        yield from ((method, path.strip()) for path in paths.split(","))


def ask(fleet: FleetPages, method: str, path: str) -> Reply:
    body = BODIES.get(path.partition("?")[0], {})
    return fleet.post(path, body) if method == "POST" else fleet.get(path) if method == "GET" else fleet.delete(path)


def kind_of(reply: Reply) -> str:
    """served, needs (a body that names a field as missing), refused (with a hint), bare."""
    if reply.status < 400:
        return "served"
    error = json.loads(reply.text).get("error", {})
    if error.get("code") == "unsupported_endpoint":
        return "refused"
    if ": Not Found" in error.get("message", ""):
        return "bare" if error["message"].endswith(BARE) else "refused"
    return "needs"


def answer(fleet: FleetPages, path: str, fields: Json) -> Reply:
    """The answer to the usual prompt with these fields; SGLang's sampling parameters are in an object of their own."""
    if path != "/generate":
        return fleet.post(path, BODIES[path] | fields)
    outer = {"stream", "rid", "text", "input_ids", "extra_key", "cache_salt", "priority", "return_logprob", "logprob_start_len"}
    outer |= {"top_logprobs_num", "return_text_in_logprobs", "token_ids_logprob", "lora_path", "session_params", "session_id"}
    outer |= {"custom_logit_processor", "return_hidden_states", "return_routed_experts", "image_data", "audio_data"}
    outer |= {"input_embeds", "bootstrap_host", "bootstrap_port", "bootstrap_room", "modalities", "background"}
    inner = {name: value for name, value in fields.items() if name not in outer}
    body = GENERATE | {name: value for name, value in fields.items() if name in outer}
    return fleet.post(path, body | {"sampling_params": SAMPLING | inner})


def fate(fleet: FleetPages, path: str, name: str) -> str:
    """What becomes of a field: effect, refused, unseen (see UNSEEN), or a problem."""
    own = AS_CALLED[path]
    beside = {OTHER_NAMES.get((path, key), key): own.get(key, value) for key, value in BESIDE.get(name, {}).items()}
    without = answer(fleet, path, beside)
    if without.status >= 400:  # what it needs is not there either
        beside, without = {}, answer(fleet, path, {})
    with_it = answer(fleet, path, {**beside, name: own.get(name, FIELDS[name])})
    if with_it.status >= 400:
        error = json.loads(with_it.text)["error"]
        return "refused" if name in f"{error['param']}" or name in error["message"] else f"PROBLEM: {with_it.text[:200]}"
    seen = [VOLATILE.sub("", reply.text) for reply in (with_it, without)]
    return "effect" if seen[0] != seen[1] else "unseen" if name in UNSEEN else "PROBLEM: no effect"


def main() -> int:
    problems = 0
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            "--store",
            str(Path(folder) / "store"),
            "--pooling",
            "last",
            "--chat-template",
            TEMPLATE,
            "--tool-parser",
            "hermes",
            "--dtype",
            "float32",
        )
        with running_fleet(*flags) as fleet:
            stored = json.loads(fleet.post("/v1/responses", RESPONSE).text)["id"]
            for table, kind in ((SERVED, "served"), (NEEDING, "needs"), (REFUSED, "refused")):
                counted: Counter[str] = Counter()
                for method, path in rows_in(table):
                    own = path.replace("{id}", stored if "responses" in path else stored.removeprefix("resp_"))
                    reply = ask(fleet, method, own)
                    found = kind_of(reply)
                    counted[found] += 1
                    if found != kind:
                        problems += 1
                        say(f"{method} {path}: {found}, not {kind}: {reply.status} {reply.text[:300]}")
                say(f"{kind}: {dict(counted)}")
            for way, path in WAYS.items():
                fates = {name: fate(fleet, path, name) for name in FIELDS}
                say(f"{way}: {dict(Counter(each.partition(':')[0] for each in fates.values()))}")
                for each in ("effect", "unseen"):
                    say(f"  {each}: {', '.join(name for name, one in fates.items() if one == each)}")
                for name, each in fates.items():
                    if each.startswith("PROBLEM"):
                        problems += 1
                        say(f"  {name}: {each}")
            fleet.wait_until_home()
    say(f"{problems} problems; nothing is left open")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
