"""The simulated mail: who is woken by what arrives, and when what wakes nobody is read."""

from common.ids import InstanceId
from common.messages import Drain, InstanceInbox, Welcome
from simulation.clock import Clock
from simulation.network import DELAY_S, PATIENCE_S, Calm, Network, Post

WELCOME = Welcome(router=InstanceId("router"), heartbeat_s=1.0, dead_after_s=4.0, detokenizers=())


def test_a_letter_that_only_prolongs_something_waits_for_the_next_turn_but_not_for_ever() -> None:
    clock = Clock()
    network = Network(clock, Calm())
    woken_s: list[float] = []
    mailbox = network.open("a", InstanceId("a"), woken_s.append, "decode")
    mail: Post[InstanceInbox] = Post(InstanceId("a"), InstanceInbox, network, mailbox)

    def post(message: Welcome | Drain) -> None:
        network.post(InstanceId("router"), InstanceId("a"), "a", message, "router")

    post(WELCOME)
    assert woken_s.pop() == mail.next_deadline() == DELAY_S, "where nothing is skipped it is as any other"
    clock.now = DELAY_S
    assert mail.receive() == [("router", WELCOME)]
    network.is_patient = True
    post(WELCOME)
    assert woken_s.pop() == mail.next_deadline() == 2 * DELAY_S + PATIENCE_S
    assert mail.receive() == [], "it has not arrived"
    clock.now += DELAY_S / 2
    post(Drain())
    assert woken_s.pop() == mail.next_deadline() == 2.5 * DELAY_S
    clock.now += DELAY_S
    assert mail.receive() == [("router", WELCOME), ("router", Drain())], "with the next, in the order of arrival"
    post(WELCOME)
    clock.now = mail.next_deadline()
    assert mail.receive() == [("router", WELCOME)] and mail.next_deadline() > clock.now
