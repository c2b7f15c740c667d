"""What went over each link, in sums."""

import pytest

from common.ids import InstanceId, Ticket
from common.instance.ports import PushDone, PushFailed
from common.messages import LinkTraffic
from kv_transfer.handoff_source import PeerTraffic, traffic_of

A, B = InstanceId("a"), InstanceId("b")


def test_pushes_and_handoffs_add_up_for_each_peer_and_in_all() -> None:
    traffic = PeerTraffic()
    traffic.add(A, traffic_of(PushDone(Ticket(1), 100, 0.5, runs=3)))
    traffic.add(A, traffic_of(PushDone(Ticket(2), 20, 0.25, runs=1)))
    traffic.add(B, traffic_of(PushDone(Ticket(3), 7, 1.0, runs=2)))
    traffic.add(A, LinkTraffic(handoffs=1, exposed_seconds=0.125))
    to_a = LinkTraffic(pushes=2, runs=4, bytes_pushed=120, push_seconds=0.75, handoffs=1, exposed_seconds=0.125)
    assert traffic.to(A) == to_a
    assert traffic.total == LinkTraffic(pushes=3, runs=6, bytes_pushed=127, push_seconds=1.75, handoffs=1, exposed_seconds=0.125)


@pytest.mark.parametrize(
    ("begun", "quiescent", "counted"),
    [
        (False, True, LinkTraffic(pushes_refused=1)),
        (True, True, LinkTraffic(pushes_broken=1)),
        (True, False, LinkTraffic(pushes_unproven=1)),
    ],
)
def test_a_failure_is_counted_by_its_kind(begun: bool, quiescent: bool, counted: LinkTraffic) -> None:
    traffic = PeerTraffic()
    traffic.add(A, traffic_of(PushFailed(Ticket(1), "cable", quiescent=quiescent, begun=begun)))
    assert traffic.to(A) == counted and traffic.total.pushes_failed == 1


def test_a_peer_that_left_is_forgotten_but_for_what_it_adds_to_the_total() -> None:
    traffic = PeerTraffic()
    for peer in (A, B):
        traffic.add(peer, LinkTraffic(handoffs=1, exposed_seconds=1.0))
    traffic.keep([B])
    assert (traffic.to(A), traffic.to(B).handoffs, traffic.total.handoffs) == (LinkTraffic(), 1, 2)
