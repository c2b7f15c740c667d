"""The detokenizer as a process: a router's child, which turns tokens of every instance into text.

Owns the composition. Does not know tokens or text: `common.text` does.
"""

from common.addresses import bind_address, host_for_peers, reachable
from common.config import ModelConfig, RouterConfig
from common.ids import InstanceId
from common.processes.child import Ready
from common.text.detokenizer_manager import DetokenizerManager
from common.trust import Trust
from launch.child import ChildProcess, MeetRouter, Order


def serve(process: ChildProcess, config: RouterConfig, model: ModelConfig, router: InstanceId, shard: int, trust: Trust) -> None:
    """Serve until told to stop. It listens where the router does: instances on other hosts send here."""
    manager = DetokenizerManager(f"tcp://{bind_address(config.host, '--host')}:0", model.model, router, shard, trust)

    def obey(order: Order) -> None:
        if isinstance(order, MeetRouter):
            manager.meet_router(order.address)

    process.on_order(obey)
    process.on_stop(manager.stop)
    process.report(Ready(addresses={"inbox": reachable(manager.address, host_for_peers())}))
    manager.run()
