"""The detokenizer as a process: the router's child, which turns the tokens of every instance into text.

Owns the composition. Does not know tokens or text: `common.text` does.
"""

from common.config import LogConfig, ModelConfig, RouterConfig
from common.text.detokenizer_manager import DetokenizerManager
from launch import logs
from launch.addresses import bind_address, host_for_peers, reachable
from launch.child import ChildProcess, run_child
from launch.reports import MeetRouter, Order, Ready


def run(config: RouterConfig, model: ModelConfig, log: LogConfig) -> int:
    """Serve until told to stop; returns the exit status. It listens where the router does: instances on other hosts send here."""
    logs.configure(log, "detokenizer")

    def body(process: ChildProcess) -> None:
        manager = DetokenizerManager(f"tcp://{bind_address(config.host, '--host')}:0", model.model)

        def obey(order: Order) -> None:
            if isinstance(order, MeetRouter):
                manager.meet_router(order.address)

        process.on_order(obey)
        process.on_stop(manager.stop)
        process.report(Ready(addresses={"inbox": reachable(manager.address, host_for_peers())}))
        manager.run()

    return run_child("detokenizer", body)
