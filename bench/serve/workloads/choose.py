"""The sessions of a run: which source makes them, and how many.

Owns the choice. Each source is a file beside this one.
"""

from dataclasses import dataclass

from bench.serve.plan import PROMPTS, ServeBench, Workload
from bench.serve.workloads import files, generated, trace
from bench.serve.workloads.sessions import Session
from bench.serve.workloads.vocabulary import Vocabulary, vocabulary


@dataclass(frozen=True, slots=True)
class Asked:
    """warmups: sent before, and not measured. They are like the others, but no whole prompt that is made up is the same."""

    warmups: list[Session]
    sessions: list[Session]


def sessions_of(bench: ServeBench, model: str) -> Asked:
    """What is sent. model: the server's name of it, which is also its tokenizer unless another is given. Raises ConfigError."""
    plan, warmups = bench.workload, bench.load.num_warmups
    if plan.dataset_name == "custom" or (plan.dataset_name == "conversation" and plan.dataset_path):
        read = list(_from_file(bench))
        return Asked([read[i % len(read)] for i in range(warmups)], read)
    if plan.dataset_name == "trace":
        return _from_trace(plan, warmups, model)
    words = vocabulary(plan.tokenizer or model, plan.prompts)
    made = list(_made_up(bench, words, (plan.num_prompts or PROMPTS) + warmups))
    return Asked(made[len(made) - warmups :], made[: len(made) - warmups])


def _from_trace(plan: Workload, warmups: int, model: str) -> Asked:
    """Warm-ups have the lengths of the first lines, and blocks of their own."""
    lines = trace.trace_lines(plan)
    words = vocabulary(plan.tokenizer or model, plan.prompts)
    fresh = 1 + max(max(line.hash_ids, default=0) for line in lines)
    firsts = [lines[number % len(lines)] for number in range(warmups)]
    strangers = [
        trace.Line(0, line.input_length, line.output_length, [fresh + (number << 32) + block for block in line.hash_ids])
        for number, line in enumerate(firsts)
    ]
    return Asked(
        [trace.trace_session(plan, words, line, None) for line in strangers], list(trace.trace_sessions(plan, words, lines))
    )


def _from_file(bench: ServeBench) -> list[Session]:
    plan, is_chat = bench.workload, bench.target.backend == "openai-chat"
    if plan.dataset_name == "custom":
        return list(files.prompt_sessions(plan, is_chat, plan.num_prompts))
    return list(files.conversation_sessions(plan, plan.num_prompts))


def _made_up(bench: ServeBench, words: Vocabulary, count: int) -> list[Session]:
    plan = bench.workload
    match plan.dataset_name:
        case "prefix_repetition":
            return list(generated.prefix_sessions(plan, words, count))
        case "conversation":
            return list(generated.conversations(plan, words, count))
        case _:
            return list(generated.random_sessions(plan, words, count))
