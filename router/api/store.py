"""The store: what outlives its HTTP request, in one SQLite file. Off without --store.

Owns the file, its bounds, whose each object is, and who works on it. An object is a JSON body with numbered parts: the events of
a response, the content of a file. Does not know HTTP, nor what a body says.

    holder   ""       nobody needs it: it goes when it is too old, or when room is needed
             WAITING  it waits for any router to work on it
             IN_USE   an object that somebody works on needs it
             a life   the router of this name works on it

Routers of one host share a file. A life holds a lock on a file beside it, which the kernel gives back however the process ends.
So a router that is only slow is never taken for dead, and what a dead one held is found at once.
"""

import asyncio
import fcntl
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from common.errors import BadRequest, ConfigError, Conflict, NotFound, TandemError
from router.api.threads import SharedThreads
from router.requests import Places

WAITING, IN_USE = "waiting", "in use"
OBJECT_BYTES = 512
"""What each object counts beside its body and its parts."""
KEY_SHARE = 0.8
"""How much of the store one key may have: what its work needs cannot go, and others need room."""
MOST_CALLS = 256
"""Calls of clients that may wait for the store at once: more get 429."""
BUSY_S = 30.0
"""How long another router may write."""
STALLED_S = 2 * BUSY_S
"""A store that gets nothing done for so long while calls wait is stalled. One call may wait for
another router, and one for the disk."""
FORMAT = 2
SCHEMA = f"""
PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON; BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT, kind TEXT, id TEXT, created_s REAL, holder TEXT, needs TEXT,
    is_cancelled INTEGER, body BLOB, bytes INTEGER, UNIQUE (owner, id)
);
CREATE INDEX IF NOT EXISTS held ON objects (holder, kind, owner);
CREATE INDEX IF NOT EXISTS oldest ON objects (owner, holder);
CREATE INDEX IF NOT EXISTS kinds ON objects (owner, kind);
CREATE INDEX IF NOT EXISTS needed ON objects (owner, needs);
CREATE INDEX IF NOT EXISTS ages ON objects (created_s);
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, bytes INTEGER);
CREATE TRIGGER IF NOT EXISTS made AFTER INSERT ON objects BEGIN
    INSERT INTO owners VALUES (new.owner, new.bytes) ON CONFLICT (owner) DO UPDATE SET bytes = bytes + new.bytes; END;
CREATE TRIGGER IF NOT EXISTS sized AFTER UPDATE OF bytes ON objects BEGIN
    UPDATE owners SET bytes = bytes + new.bytes - old.bytes WHERE owner = new.owner; END;
CREATE TRIGGER IF NOT EXISTS gone AFTER DELETE ON objects BEGIN
    UPDATE owners SET bytes = bytes - old.bytes WHERE owner = old.owner; END;
CREATE TABLE IF NOT EXISTS parts (
    object INTEGER REFERENCES objects ON DELETE CASCADE, number INTEGER, data BLOB, PRIMARY KEY (object, number)
);
PRAGMA user_version = {FORMAT}; COMMIT;
"""
_USERS = "SELECT 1 FROM objects AS users WHERE users.owner = objects.owner AND users.needs = objects.id AND users.holder > ''"
FREE = f"holder = '' AND NOT EXISTS ({_USERS})"
"""What may go: nobody works on it, nor on what needs it."""

_log = logging.getLogger(__name__)
R = TypeVar("R")


class StoreFailed(TandemError):
    """The store's file cannot be used, or all that it holds is in use."""

    status = 507
    kind = "store_error"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object, without its parts."""

    number: int
    owner: str
    kind: str
    id: str
    created_s: float
    holder: str
    needs: str
    """The id of the object that it needs while somebody works on it."""
    is_cancelled: bool
    """Somebody wants that the work on it ends."""
    body: bytes
    bytes: int
    """All that it counts."""


class Store:
    """path: of the file. most_bytes, age_s: what it may hold, and for how long. life: the name of this life of the router. All
    methods but `do` and `close` run within `do`. Raises ConfigError when the file cannot be used."""

    def __init__(self, path: str, most_bytes: int, age_s: float, life: str) -> None:
        self._path, self._most_bytes, self.age_s, self.life = path, most_bytes, age_s, life
        self._places = Places(MOST_CALLS, "calls of the store")
        self._calls: dict[asyncio.Task[Any], float] = {}
        """Since when each call waits, the oldest first."""
        self._stalled_since_s = -math.inf
        """Since when it was stalled when a call last ended for that."""
        self._moved_s = time.monotonic()
        """When the store last got something done."""
        try:
            self._alive = self._hold_lock()
            Path(path).touch(mode=0o600)
            self._file = self._file_now()
            self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            folder = os.open(Path(path).parent, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)  # SQLite does not wait where two begin to write ahead at once
                if self._db.execute("PRAGMA user_version").fetchone() not in ((0,), (FORMAT,)):
                    raise ConfigError(f"--store: {path} was written by another release: give another file")
                self._db.executescript(SCHEMA)
            finally:
                os.close(folder)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"--store: cannot use {path}: {error}") from error
        for alive in Path(path).parent.glob(f"{Path(path).name}.*.alive"):
            self._is_dead(alive.name.split(".")[-2])  # its file goes
        self._threads = SharedThreads(1, "store")

    async def do(self, work: Callable[[], R], owner: str | None = None) -> R:
        """Do this on the store's thread, all of it or nothing. owner: the key of the client that waits for it; keys take turns;
        None: no client waits. Raises Overloaded for a client, StoreFailed, and what the work raises."""
        with nullcontext() if owner is None else self._places.held(owner, 1):
            working = asyncio.create_task(self._threads.run(owner or "", partial(self._transact, work)))
            self._calls[working] = time.monotonic()
            try:
                while not working.done():
                    left_s = STALLED_S - self.stalled_s()
                    await asyncio.wait({working}, timeout=max(0.0, left_s))  # a loop that stood still hears of it here
                    if left_s <= 0 and not working.done():
                        self._stalled_since_s = time.monotonic() - self.stalled_s()
                        raise StoreFailed(f"{self.trouble()}, and may do this all the same: try again later, or without it")
                return working.result()
            finally:
                del self._calls[working]
                if not working.cancel() and not working.cancelled():
                    working.exception()  # nobody else asks for it when the caller is cancelled

    def trouble(self) -> str | None:
        """What is wrong with it, for operators."""
        stalled_s = self.stalled_s()
        return f"the store {self._path} has got nothing done for {stalled_s:.0f} s" if stalled_s >= STALLED_S else None

    def stalled_s(self) -> float:
        """How long calls have waited since the store last got something done; 0: none waits."""
        moved_s = self._moved_s
        since_s = max(moved_s, next(iter(self._calls.values()), math.inf))
        if self._stalled_since_s >= moved_s:
            since_s = min(since_s, self._stalled_since_s)
        return max(0.0, time.monotonic() - since_s)

    async def close(self, within_s: float) -> None:
        """What this life still holds is free for others. A store that is stalled is left as it is."""
        closing = asyncio.create_task(self._threads.run("", self._db.close))
        await asyncio.wait({closing}, timeout=within_s)
        self._threads.close()
        if not closing.done():
            closing.cancel()
            _log.error("the store %s was not free within %g s: the router ends without closing it", self._path, within_s)
            return
        self._alive_path(self.life).unlink(missing_ok=True)
        os.close(self._alive)

    # --- objects ---------------------------------------------------------------------------------------------------------

    def add(
        self,
        owner: str,
        kind: str,
        id: str,
        body: bytes,
        parts: Iterable[tuple[int, bytes]] = (),
        holder: str = "",
        needs: str = "",
    ) -> StoredObject:
        """Raises Conflict when this owner has one of that id, and StoreFailed when there is no room."""
        values = owner, kind, id, time.time(), holder, needs, False, body, OBJECT_BYTES + len(body)
        try:
            number = self._db.execute(f"INSERT INTO objects VALUES (NULL{', ?' * len(values)})", values).lastrowid or 0
        except sqlite3.IntegrityError as error:
            raise Conflict(f"{id} is stored already: send the request with another X-Request-Id") from error
        self.append(number, list(parts))
        return self.now(number)

    def append(self, number: int, parts: Collection[tuple[int, bytes]], *, may_exceed: bool = False) -> None:
        """Give an object more parts. may_exceed: also where the store is full, for the little that
        says how something ended. Raises StoreFailed when there is no room."""
        self._db.executemany("INSERT INTO parts VALUES (?, ?, ?)", [(number, *part) for part in parts])
        self._db.execute("UPDATE objects SET bytes = bytes + ? WHERE number = ?", (sum(len(data) for _, data in parts), number))
        if may_exceed:
            return
        totals = dict(self._db.execute("SELECT owner, bytes FROM owners ORDER BY bytes DESC").fetchall())
        owner = self.now(number).owner
        most = int(KEY_SHARE * self._most_bytes) if owner else self._most_bytes
        freed = self._make_room([owner], totals[owner] - most, number)
        if totals[owner] - freed > most:
            raise StoreFailed(f"your key may have {most} bytes of the store (--store-bytes), and all of them are in use")
        excess = sum(totals.values()) - freed - self._most_bytes
        if self._make_room(totals, excess, number) < excess:
            raise StoreFailed(f"the store is full: its {self._most_bytes} bytes (--store-bytes) are in use")

    def _make_room(self, owners: Iterable[str], excess: int, but: int) -> int:
        """Remove the oldest free objects of these owners, all but one, until so many bytes are free. Returns how many are."""
        freed = 0
        for owner in owners:
            while freed < excess and (
                oldest := self._objects(f"owner = ? AND number != ? AND {FREE} ORDER BY number LIMIT 1", owner, but)
            ):
                self._db.execute("DELETE FROM objects WHERE number = ?", (oldest[0].number,))
                freed += oldest[0].bytes
        return freed

    def find(self, owner: str, kind: str, id: str) -> StoredObject | None:
        return next(iter(self._objects("owner = ? AND kind = ? AND id = ?", owner, kind, id)), None)

    def now(self, number: int) -> StoredObject:
        """An object that is held, or was until a moment ago, as it is now. Raises NotFound."""
        for one in self._objects("number = ?", number):
            return one
        raise NotFound("it was deleted meanwhile")

    def page(self, owner: str, kind: str, after: str, most: int, is_ascending: bool) -> list[StoredObject]:
        """Some objects behind the one of this id, if there is an id. Files that are being written are not shown."""
        begin, sign, order = (0, ">", "ASC") if is_ascending else (2**62, "<", "DESC")
        if after:
            cursor = self.find(owner, kind, after)
            if cursor is None:
                raise BadRequest(f"after: no {kind} of this id is stored for your key", field="after")
            begin = cursor.number
        where = f"owner = ? AND kind = ? AND holder != ? AND number {sign} ? ORDER BY number {order} LIMIT ?"
        return self._objects(where, owner, kind, IN_USE, begin, most)

    def change(self, one: StoredObject, body: bytes, holder: str | None = None) -> None:
        """Give it another body, and another holder if one is named, unless somebody has changed its holder."""
        query = "UPDATE objects SET bytes = bytes + ? - length(body), body = ?, holder = ? WHERE number = ? AND holder = ?"
        self._db.execute(query, (len(body), body, one.holder if holder is None else holder, one.number, one.holder))

    def remove(self, number: int) -> bool:
        """Remove it if it is free. Returns whether it was."""
        return self._db.execute(f"DELETE FROM objects WHERE number = ? AND {FREE}", (number,)).rowcount > 0

    def parts(self, number: int, after: int = -1, most: int = -1) -> list[tuple[int, bytes]]:
        """Its parts behind the one of this number, in their order. most: -1 for all."""
        query = "SELECT number, data FROM parts WHERE object = ? AND number > ? ORDER BY number LIMIT ?"
        return self._db.execute(query, (number, after, most)).fetchall()

    def part_numbers(self, number: int) -> set[int]:
        return {part for (part,) in self._db.execute("SELECT number FROM parts WHERE object = ?", (number,))}

    # --- work ------------------------------------------------------------------------------------------------------------

    def cancel(self, number: int) -> None:
        self._db.execute("UPDATE objects SET is_cancelled = 1 WHERE number = ?", (number,))

    def claim(self, kind: str, but: Collection[str]) -> StoredObject | None:
        """Take the oldest one that waits, of an owner who is not among these."""
        where = f"holder = ? AND kind = ? AND owner NOT IN ({', '.join('?' * len(but))}) ORDER BY number LIMIT 1"
        for one in self._objects(where, WAITING, kind, *but):
            self.change(one, one.body, self.life)
            return self.now(one.number)
        return None

    def work(self, kind: str) -> list[StoredObject]:
        """What this life holds, and what dead lives do."""
        lives = self._db.execute(
            "SELECT DISTINCT holder FROM objects WHERE holder > '' AND holder NOT IN (?, ?)", (WAITING, IN_USE)
        ).fetchall()
        ours = [life for (life,) in lives if life == self.life or self._is_dead(life)]
        return [one for life in ours for one in self._objects("holder = ? AND kind = ?", life, kind)]

    def sweep(self) -> None:
        """What is too old goes."""
        self._db.execute(f"DELETE FROM objects INDEXED BY ages WHERE created_s < ? AND {FREE}", (time.time() - self.age_s,))

    # --- inside ----------------------------------------------------------------------------------------------------------

    def _objects(self, where: str, *values: object) -> list[StoredObject]:
        return [StoredObject(*row) for row in self._db.execute(f"SELECT * FROM objects WHERE {where}", values)]

    def _file_now(self) -> tuple[int, int]:
        """Which file has the store's name. Raises OSError."""
        found = os.stat(self._path)
        return found.st_dev, found.st_ino

    def _transact(self, work: Callable[[], R]) -> R:
        try:
            self._require_file()
            self._db.execute("BEGIN IMMEDIATE")
            with self._db:
                return work()
        except sqlite3.Error as error:
            raise StoreFailed(f"the store cannot be used: {error}") from error
        finally:
            self._moved_s = time.monotonic()

    def _require_file(self) -> None:
        try:
            if self._file_now() != self._file:
                raise FileNotFoundError(f"{self._path} is another file than when this router started")
        except OSError as error:  # SQLite would go on with a file that has no name, and that nobody finds after a restart
            raise StoreFailed(f"the store's file was removed or replaced, so start the router again: {error}") from error

    def _alive_path(self, life: str) -> Path:
        return Path(f"{self._path}.{life}.alive")

    def _hold_lock(self) -> int:
        """Returns the file that this process has locked. It gets its name when it is locked, so nobody finds it unlocked."""
        new = self._alive_path(self.life).with_suffix(".new")
        file = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        new.rename(self._alive_path(self.life))
        return file

    def _is_dead(self, life: str) -> bool:
        try:
            with self._alive_path(life).open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._alive_path(life).unlink(missing_ok=True)
        except BlockingIOError:
            return False
        except FileNotFoundError:
            pass
        return True
