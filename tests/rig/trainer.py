"""A trainer in a process of its own, which makes a group with a fleet and broadcasts weights, as trainers that use SGLang do.

Owns the process and what it is told.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from tests.rig.forks import module_process

GROUP, HOST = "weight_update_group", "127.0.0.1"


def free_port() -> int:
    with socket.socket() as held:
        held.bind((HOST, 0))
        port: int = held.getsockname()[1]
        return port


def init_custom_process_group(init: dict[str, Any]) -> Any:
    """Rank 0's side of a group with a fleet. init: the body of POST /init_weights_update_group. It is the recipe that SGLang,
    slime and verl share: a rendezvous of torch, a prefix with the group's name, and torch's own helper. Blocks until all have
    met."""
    from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world

    timeout, world_size, name = timedelta(seconds=init["timeout_s"]), init["world_size"], init["group_name"]
    where = f"tcp://{init['master_address']}:{init['master_port']}"
    store, rank, world_size = next(rendezvous(where, 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    store = PrefixStore(name, store)
    group, _ = _new_process_group_helper(world_size, rank, [], init["backend"], store, group_name=name, timeout=timeout)
    _world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return group


class Trainer:
    """init: the body of POST /init_weights_update_group."""

    def __init__(self, world_size: int, timeout_s: float, group: str) -> None:
        self.init: dict[str, Any] = {
            "master_address": HOST,
            "master_port": free_port(),
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": group,
            "backend": "gloo",
        }
        words = ["tests.rig.trainer", json.dumps({**self.init, "timeout_s": timeout_s})]
        orders, ours = os.pipe()
        heard, says = os.pipe()
        self._process = module_process(words, dict(os.environ), (orders, says, 2))
        for theirs in (orders, says):
            os.close(theirs)
        self._orders, self._heard = os.fdopen(ours, "w"), os.fdopen(heard)

    def tell(self, file: Path, names: Sequence[str], dies_after: int | None = None) -> None:
        """Have it broadcast these weights of a safetensors file. dies_after: so many; None: it lives on."""
        order = {"file": str(file), "names": list(names), "dies_after": dies_after}
        print(json.dumps(order), file=self._orders, flush=True)

    def hear(self) -> str:
        """What it says next: that all have met, or what came of what it was told. "" when it has ended."""
        return self._heard.readline().strip()

    def close(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._orders.close()
        self._heard.close()


@contextmanager
def trainer(world_size: int, timeout_s: float = 60.0, group: str = GROUP) -> Iterator[Trainer]:
    made = Trainer(world_size, timeout_s, group)
    try:
        yield made
    finally:
        made.close()


def _say(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def _train(init: dict[str, Any], orders: TextIO) -> None:
    import torch.distributed
    from safetensors import safe_open

    group = init_custom_process_group(init)
    _say("met")
    for line in orders:
        order, sent = json.loads(line), []
        with safe_open(order["file"], "pt") as opened:
            for number, name in enumerate(order["names"]):
                if number == order["dies_after"]:
                    os._exit(1)
                sent.append(opened.get_tensor(name))
                try:
                    torch.distributed.broadcast(sent[-1], 0, group=group)
                except RuntimeError as error:
                    _say(f"failed: {str(error).splitlines()[0]}")
                    break
            else:
                _say(f"sent {len(sent)}")


if __name__ == "__main__":
    _train(json.loads(sys.argv[1]), sys.stdin)
