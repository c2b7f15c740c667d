"""What grammars cost a decode step of 64 rows: `python -m tests.engine.grammar.grammar_cost`.

Owns what is asked for, and vocabularies of two sizes: the demo model's, and one of 151,936 tokens, made of pairs of its tokens.
Random logits stand for the model. On a GPU the forward hides the host's part of it.
"""

import sys
import time

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast
from xgrammar import TokenizerInfo, apply_token_bitmask_inplace

from common.executor import RowStart
from common.model_path import resolve_model_path
from common.sampling_params import Grammar, SamplingParams
from engine.grammar.compiler import Compiler, GrammarVocabulary, vocabulary_of
from engine.grammar.masks import GrammarProcessor
from engine.ports import SampledRows

ROWS, STEPS, EOS, LARGE = 64, 12, 2, 151_936
PERSON = """{"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer","minimum":0,"maximum":150},
"mail":{"type":"string","format":"email"},"tags":{"type":"array","items":{"enum":["red","green","blue"]}},
"home":{"type":"object","properties":{"street":{"type":"string"},"number":{"type":"integer"}},"required":["street"]}},
"required":["name","age","home"]}"""
ASKED = {
    "any JSON object": Grammar("json_schema", '{"type":"object"}'),
    "a JSON schema of 7 fields": Grammar("json_schema", PERSON),
    "a regular expression": Grammar("regex", r"(\d{3}-)*\d{3}"),
    "one of 100 texts": Grammar("ebnf", "root ::= " + " | ".join(f'"text number {number} of many"' for number in range(100))),
}


def large_compiler() -> Compiler:
    """Tokens of the demo model, and pairs of these."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve_model_path("demo"), local_files_only=True)
    own = TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=[EOS]).decoded_vocab
    random = np.random.default_rng(1)
    pairs = (own[one] + own[other] for one, other in random.integers(300, len(own), (4 * LARGE, 2)))
    vocab = list(dict.fromkeys([*own, *pairs]))[:LARGE]
    return Compiler(GrammarVocabulary(TokenizerInfo(vocab, vocab_size=LARGE, stop_token_ids=[EOS]), ()))


def measured(compiler: Compiler, vocab_size: int, grammar: Grammar) -> tuple[float, np.ndarray]:
    """Processor seconds of the compilation with its trial, and of each step: reading the tokens before, masks, applying these."""
    began = time.process_time()
    compiled = compiler.compile(grammar)
    compiling_s = time.process_time() - began
    processor = GrammarProcessor(lambda _: compiled, ROWS, vocab_size, (EOS,), torch.device("cpu"))
    none = np.empty(0, dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=STEPS, grammar=grammar)
    processor.start([RowStart(row, none, sampling, token_ids=none) for row in range(ROWS)])
    host = np.arange(ROWS)
    rows, steps = SampledRows(host, torch.from_numpy(host), host, torch.from_numpy(host)), []
    for step in range(STEPS):
        logits = torch.randn(ROWS, vocab_size, generator=torch.Generator().manual_seed(step))
        logits[:, EOS] = -1e9  # answers go on as far as they can
        began = time.process_time()
        processor.apply(logits, rows)
        steps.append(time.process_time() - began)
        processor.sampled(rows, logits.argmax(dim=-1))
    return compiling_s, np.array(steps)


def applying(vocab_size: int) -> float:
    """Processor seconds of the masks' last part alone, which a GPU does instead of the host."""
    logits, masks = torch.randn(ROWS, vocab_size), torch.zeros(ROWS, (vocab_size + 31) // 32, dtype=torch.int32)
    began = time.process_time()
    apply_token_bitmask_inplace(logits, masks, vocab_size=vocab_size)
    return time.process_time() - began


def main() -> None:
    demo = Compiler(vocabulary_of(resolve_model_path("demo"), 2683, (EOS,)))
    large = large_compiler()
    for vocab_size, compiler in ((2683, demo), (LARGE, large)):
        sys.stdout.write(f"{vocab_size:>7} tokens, applying alone: {1e3 * applying(vocab_size):.2f} ms\n")
        for name, grammar in ASKED.items():
            compiling_s, steps = measured(compiler, vocab_size, grammar)
            median, worst = 1e3 * np.median(steps), 1e3 * steps.max()
            sys.stdout.write(
                f"{vocab_size:>7} tokens, {name}: compiled in {compiling_s:.3f} s, step {median:.2f} ms, slowest {worst:.2f} ms\n"
            )


if __name__ == "__main__":
    main()
