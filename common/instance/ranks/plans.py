"""Plans as they travel from the leader to its followers.

Owns the translation of `Plan`, in both directions. Knows no sockets.
"""

import zlib
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from common.executor import Chunk, Plan, RowStart
from common.ids import Int32Array, pack_ids, unpack_ids
from common.instance.ranks.line import RankLost
from common.messages.ranks import Launch, PromptChunk, RowBegins
from common.sampling_params import Grammar


def pack_plan(plan: Plan, number: int, grammar_id: Callable[[Grammar], int]) -> Launch:
    """number: of the message. grammar_id: of a grammar that the followers hold."""
    return Launch(
        number=number,
        step=plan.step,
        starts=tuple(_pack_start(start, grammar_id) for start in plan.starts),
        chunks=tuple(PromptChunk(chunk.row, chunk.start, pack_ids(chunk.token_ids), chunk.last) for chunk in plan.chunks),
        decode_rows=pack_ids(plan.decode_rows),
        grown_rows=pack_ids(plan.grown_rows),
        grown_pages=pack_ids(plan.grown_pages),
    )


def unpack_plan(message: Launch, grammars: Mapping[int, Grammar]) -> Plan:
    """grammars: those that this rank holds. Raises RankLost for a row with another one."""
    return Plan(
        step=message.step,
        starts=tuple(_unpack_start(start, grammars) for start in message.starts),
        chunks=tuple(Chunk(chunk.row, chunk.start, unpack_ids(chunk.token_ids), chunk.last) for chunk in message.chunks),
        decode_rows=unpack_ids(message.decode_rows),
        grown_rows=unpack_ids(message.grown_rows),
        grown_pages=unpack_ids(message.grown_pages),
    )


def digest_tokens(tokens: Int32Array) -> int:
    """CRC-32 of the tokens that a step sampled. tokens: [rows] int32."""
    return zlib.crc32(pack_ids(tokens))


def _pack_start(start: RowStart, grammar_id: Callable[[Grammar], int]) -> RowBegins:
    sampling, grammar = start.sampling, start.sampling.grammar
    return RowBegins(
        row=start.row,
        pages=pack_ids(start.pages),
        sampling=sampling if grammar is None else replace(sampling, grammar=None),
        length=start.length,
        last_token=start.last_token,
        token_ids=None if start.token_ids is None else pack_ids(start.token_ids),
        answer_tokens=start.answer_tokens,
        grammar_id=None if grammar is None else grammar_id(grammar),
    )


def _unpack_start(start: RowBegins, grammars: Mapping[int, Grammar]) -> RowStart:
    sampling = start.sampling
    if start.grammar_id is not None:
        grammar = grammars.get(start.grammar_id)
        if grammar is None:
            raise RankLost(f"row {start.row} is to begin with grammar {start.grammar_id}, which this rank does not hold")
        sampling = replace(sampling, grammar=grammar)
    return RowStart(
        row=start.row,
        pages=unpack_ids(start.pages),
        sampling=sampling,
        length=start.length,
        last_token=start.last_token,
        token_ids=None if start.token_ids is None else unpack_ids(start.token_ids),
        answer_tokens=start.answer_tokens,
    )
