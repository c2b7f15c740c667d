"""What to suggest for a word that no command knows: the name that it has here, when it is a flag of vLLM, SGLang or Dynamo, and
otherwise the nearest word that is known.

Owns the table of the others' names. Knows no command and no parser.
"""

import difflib
from collections.abc import Iterable

SAME_MEANING = {
    "--tensor-parallel-size": "--tp",
    "--tp-size": "--tp",
    "--max-model-len": "--context-tokens",
    "--context-length": "--context-tokens",
    "--max-num-seqs": "--max-running",
    "--max-running-requests": "--max-running",
    "--max-num-batched-tokens": "--chunk-tokens",
    "--chunked-prefill-size": "--chunk-tokens",
    "--max-queued-requests": "--max-waiting",
    "--kv-cache-dtype": "--kv-dtype",
    "--block-size": "--page-size",
    "--served-model-name": "--served-name",
    "--model-path": "--model",
    "--model-name": "--served-name",
    "--attention-backend": "--attention",
    "--lora-modules": "--lora",
    "--lora-paths": "--lora",
    "--max-loras": "--max-loras-per-batch",
    "--tool-call-parser": "--tool-parser",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--http-port": "--port",
}
"""Flags of vLLM, SGLang and Dynamo, and the flag of `launch local` that does the same."""
OTHER_MEANING = {
    "--gpu-memory-utilization": "use --kv-memory, such as --kv-memory 80%, which counts the KV pages alone, without the weights",
    "--mem-fraction-static": "use --kv-memory, such as --kv-memory 80%, which counts the KV pages alone, without the weights",
    "--enforce-eager": "use --graphs off",
    "--disable-cuda-graph": "use --graphs off",
    "--no-enable-prefix-caching": "use --prefix-cache off",
    "--disable-radix-cache": "use --prefix-cache off",
    "--enable-prefix-caching": "leave it out: --prefix-cache is on by default",
    "--enable-chunked-prefill": "leave it out: prompts are always computed in chunks, of --chunk-tokens tokens",
    "--enable-lora": "leave it out: --lora and --max-loaded-loras are enough",
    "--enable-auto-tool-choice": "leave it out: tool calls need no flag that enables them, and --tool-parser has the format",
    "--api-key": "use --api-keys, which takes a file with a name and a key in each line",
    "--data-parallel-size": "use --prefill and --decode, which say how many instances there are of each role",
    "--dp-size": "use --prefill and --decode, which say how many instances there are of each role",
    "--kv-transfer-config": "leave it out: --prefill and --decode start both roles, and KV goes between them without a setting",
    "--disaggregation-mode": "leave it out: --prefill and --decode start both roles, and KV goes between them without a setting",
    "--pipeline-parallel-size": "Tandem has no pipeline parallelism, only tensor parallelism (--tp)",
    "--pp-size": "Tandem has no pipeline parallelism, only tensor parallelism (--tp)",
    "--trust-remote-code": "Tandem runs no code that a checkpoint brings: --model takes the architectures that it knows",
}
"""Flags of theirs that no flag here equals, and the sentence that helps."""
COMMANDS_OF_OTHERS = {
    "serve": "local --model MODEL",
    "launch_server": "local --model MODEL",
    "launch-server": "local --model MODEL",
    "frontend": "router",
    "worker": "prefill or launch decode",
    "planner": "autoscale",
}
"""Commands of theirs, and what `launch` calls them."""


def suggest(word: str, known: Iterable[str]) -> str:
    """The end of a message about a word that is none of the known ones, which may be flags, variables, keys or commands."""
    known = [*known]
    word = word.partition("=")[0]
    spelled = f"--{word.removeprefix('TANDEM_').strip('-').replace('_', '-').lower()}"
    if same := SAME_MEANING.get(spelled):
        field = same.strip("-").replace("-", "_")
        is_known = any(each.lower().removeprefix("tandem_").strip("-").replace("-", "_") == field for each in known)
        return f"; its name here is {same}" if is_known else f"; its name here is {same}, a flag of launch local"
    if sentence := OTHER_MEANING.get(spelled):
        return f"; {sentence}"
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
