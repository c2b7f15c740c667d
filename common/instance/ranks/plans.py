"""Plans as they travel from the leader to its followers.

Owns the translation of `Plan`, in both directions. Knows no sockets.
"""

import zlib

from common.engine.plan import Chunk, Plan, RowStart
from common.ids import Int32Array, pack_ids, unpack_ids
from common.messages.ranks import Launch, PromptChunk, RowBegins


def pack_plan(plan: Plan, number: int) -> Launch:
    """number: of the message."""
    return Launch(
        number=number,
        step=plan.step,
        starts=tuple(_pack_start(start) for start in plan.starts),
        chunks=tuple(PromptChunk(chunk.row, chunk.start, pack_ids(chunk.token_ids), chunk.last) for chunk in plan.chunks),
        decode_rows=pack_ids(plan.decode_rows),
        grown_rows=pack_ids(plan.grown_rows),
        grown_pages=pack_ids(plan.grown_pages),
    )


def unpack_plan(message: Launch) -> Plan:
    return Plan(
        step=message.step,
        starts=tuple(_unpack_start(start) for start in message.starts),
        chunks=tuple(Chunk(chunk.row, chunk.start, unpack_ids(chunk.token_ids), chunk.last) for chunk in message.chunks),
        decode_rows=unpack_ids(message.decode_rows),
        grown_rows=unpack_ids(message.grown_rows),
        grown_pages=unpack_ids(message.grown_pages),
    )


def digest_tokens(tokens: Int32Array) -> int:
    """CRC-32 of the tokens that a step sampled. tokens: [rows] int32."""
    return zlib.crc32(pack_ids(tokens))


def _pack_start(start: RowStart) -> RowBegins:
    return RowBegins(
        row=start.row,
        pages=pack_ids(start.pages),
        sampling=start.sampling,
        length=start.length,
        last_token=start.last_token,
        token_ids=None if start.token_ids is None else pack_ids(start.token_ids),
        answer_tokens=start.answer_tokens,
    )


def _unpack_start(start: RowBegins) -> RowStart:
    return RowStart(
        row=start.row,
        pages=unpack_ids(start.pages),
        sampling=start.sampling,
        length=start.length,
        last_token=start.last_token,
        token_ids=None if start.token_ids is None else unpack_ids(start.token_ids),
        answer_tokens=start.answer_tokens,
    )
