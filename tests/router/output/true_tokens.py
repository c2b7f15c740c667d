"""Tokenizers that are like those of real models where it counts: in the tokens that they add, and which of those are special.

Owns the tables of these tokens, stand-ins that have them beside one token for each byte, and the way of an answer from its tokens
through the detokenizer to its parts. Detokenizers leave out special tokens, so a text that was never tokens may hold marks that
parsers never get to see.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.config import RouterConfig
from common.ids import ROUTER, AttemptId, RequestId, pack_ids
from common.messages import ExpectAnswer, Finished, TextDelta, TokenBatch, TokenDelta
from common.sampling_params import SamplingParams
from common.text.detokenizer import Detokenizer
from common.text.tokenizer_manager import TokenizerManager
from router.api.answers import Accepted
from router.api.chat import read_chat
from router.api.intake import ChatPlanner
from router.api.parsing.formats import new_reader_for
from router.api.parsing.parser import ParsedAnswer, parsed_answer
from router.requests import RequestSpec

KEY = AttemptId(RequestId("a"), 0, ROUTER)


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """The added tokens of a model's tokenizer.json, as far as answers may hold them, and the part of its chat template that shows
    how it writes."""

    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    end: str
    """The token that ends an answer."""


GPT_OSS = TokenTable(
    template="{{ tools }} <|start|>assistant<|channel|>analysis<|message|> {{ '<|channel|>commentary' }}",
    special=("<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>", "<|endofprompt|>"),
    end="<|return|>",
)
QWEN3 = TokenTable(
    template="{{ tools }} <tool_call> <think> {{ enable_thinking }}",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"),
    plain=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    end="<|im_end|>",
)
QWEN3_CODER = TokenTable(
    template="{{ tools }} <tool_call> <function= <parameter= <think>",
    special=QWEN3.special,
    plain=QWEN3.plain,
    end="<|im_end|>",
)
LLAMA31 = TokenTable(
    template="{{ tools }} <|python_tag|>",
    special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
    end="<|eot_id|>",
)
_DEEPSEEK = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
DEEPSEEK_V3 = TokenTable(
    template="{{ tools }} '<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n'",
    special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<|EOT|>"),
    plain=(*_DEEPSEEK, "<｜User｜>", "<｜Assistant｜>"),
    end="<｜end▁of▁sentence｜>",
)
DEEPSEEK_V31 = TokenTable(
    template="{{ tools }} {{ thinking }} '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments + '</think>'",
    special=DEEPSEEK_V3.special,
    plain=(*DEEPSEEK_V3.plain, "<think>", "</think>"),
    end="<｜end▁of▁sentence｜>",
)
MISTRAL = TokenTable(
    template="{{ tools }} [TOOL_CALLS] [ARGS] [THINK]",
    special=("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "</s>"),
    end="</s>",
)
KIMI_K2 = TokenTable(
    template="{{ tools }} <|tool_call_begin|> <think>",
    special=(
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        *("<|tool_call_argument_begin|>", "<|im_end|>"),
    ),
    plain=("<think>", "</think>"),
    end="<|im_end|>",
)
GEMMA4 = TokenTable(
    template="{{ tools }} '<|tool_call>call:' '<|channel>thought\\n'",
    special=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<turn|>"),
    end="<turn|>",
)


def stand_in(table: TokenTable) -> Tokenizer:
    """One token for each byte, and those of the table."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in table.special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in table.plain])
    return tokenizer


def write_stand_in(table: TokenTable, folder: Path) -> str:
    """Returns the folder, with the text files of a checkpoint in it."""
    stand_in(table).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": table.end, "chat_template": table.template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512, "max_position_embeddings": 4096}))
    return str(folder)


@dataclass(kw_only=True)
class Chat:
    """A chat with a model of which only the tokenizer is there. model: the folder of its files. fields: of the chat."""

    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    opened: str = ""
    """What the prompt ends with."""
    min_tokens: int = 0
    breaks: Collection[int] = ()
    """Behind so many tokens the answer is opened anew elsewhere."""

    @cached_property
    def tokenizer(self) -> TokenizerManager:
        return TokenizerManager(self.model)

    @cached_property
    def accepted(self) -> Accepted:
        """As the router accepts the chat, but for its prompt."""
        request = read_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **self.fields}).encode())
        prompt = pack_ids(self.ids("Hi" + self.opened))
        stop = request.fields.stop
        spec = RequestSpec(
            RequestId("a"),
            0,
            prompt,
            SamplingParams(max_new_tokens=4096, stop_token_ids=tuple(request.fields.stop_token_ids)),
            (stop,) if isinstance(stop, str) else tuple(stop),
            include_stop=request.fields.include_stop_str_in_output,
        )
        return ChatPlanner(self.tokenizer, "m", RouterConfig()).completed(request, Accepted((spec,), len(prompt)))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def deltas(self, token_ids: Sequence[int], cuts: Sequence[int] = ()) -> list[TextDelta]:
        """What the detokenizer makes of an answer of these tokens, which come in pieces that end at these places."""
        (spec,) = self.accepted.specs
        opened = ExpectAnswer(
            KEY,
            spec.stop,
            context=spec.prompt,
            shown=spec.shown,
            include_stop=spec.include_stop,
            min_tokens=self.min_tokens,
            parts=spec.parts,
            stop_token_ids=spec.stop_token_ids,
        )
        detokenizer = self.detokenizer()
        texts = detokenizer.receive(opened, 0.0)
        begin = 0
        for end in sorted({*cuts, len(token_ids)} - {0}):
            ending = Finished("stop", token_ids[-1]) if end == len(token_ids) else None
            texts += detokenizer.receive(TokenBatch((TokenDelta(KEY, begin, tuple(token_ids[begin:end]), ending),)), 0.0)
            begin = end
            if begin in self.breaks:  # the attempt fails, or the detokenizer starts again
                detokenizer = self.detokenizer()
                known = [token_id for text in texts for token_id in text.token_ids]
                told = "".join(text.text for text in texts)
                context = spec.prompt + pack_ids(known)
                if texts[-1].ending is None:
                    texts += detokenizer.receive(replace(opened, first=len(known), context=context, text=told), 0.0)
        return texts

    def detokenizer(self) -> Detokenizer:
        template = self.tokenizer.chat_template
        return Detokenizer(self.tokenizer.backend, new_reader=new_reader_for(template, "auto", "auto"))

    def whole(self, token_ids: Sequence[int]) -> ParsedAnswer:
        """The answer of these tokens, not streamed."""
        return self.accepted.reading.whole("".join(delta.text for delta in self.deltas(token_ids)))

    def streamed(self, token_ids: Sequence[int]) -> ParsedAnswer:
        """The answer of these tokens, token by token."""
        assert self.accepted.reading.new_parser is not None
        parser = self.accepted.reading.new_parser()
        texts = [delta.text for delta in self.deltas(token_ids, range(len(token_ids)))]
        return parsed_answer([*(part for text in texts for part in parser.push(text)), *parser.finish()])
