"""The life of a request, top to bottom: read this first.

A whole fleet runs in this process on a clock that the test turns by hand (`tests/life/fleet.py`): the real router core, prefill
and decode schedulers, handoff protocol and detokenizer. The model is a toy whose next token is a digest of every byte of its KV,
so one byte in the wrong place changes the answer.
"""

from common.ids import DETOKENIZER
from common.messages import Finished
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet
from tests.life.ranks import transport_of

PROMPT = [100 + n for n in range(19)]  # with pages of 4 tokens: 4 full pages and one of 3; with chunks of 8: 8 + 8 + 3


def test_one_request_travels_the_ring_once() -> None:
    fleet = ToyFleet(prefill=1, decode=1)
    prefill, decode = fleet.instances["prefill-0"], fleet.instances["decode-0"]

    # The router picks both instances, opens the answer at the detokenizer, and sends the request to the prefill instance only.
    client = fleet.submit("r", PROMPT, max_tokens=5)
    assert fleet.network.log == [("router", "ExpectAnswer", DETOKENIZER), ("router", "Generate", "prefill-0")]

    # The prefill scheduler admits it to its first chunk and only now asks for a reservation. It computes on without the answer.
    fleet.turn_until(lambda: ("prefill-0", "Reserve", "decode-0") in fleet.network.log)
    assert prefill.pool.leased_pages == 5, "pages for the whole prompt"
    assert decode.pool.leased_pages == 0, "nothing is held while the request queues"

    # The decode scheduler leases pages for prompt and answer, 19 + 4 tokens of KV, and tells where to write.
    fleet.turn_until(lambda: ("decode-0", "Grant", "prefill-0") in fleet.network.log)
    assert decode.pool.leased_pages == 6
    assert decode.scheduler.report().load.reservations == 1

    # Chunk by chunk, complete pages are pushed. The first token goes to the client as soon as it is sampled.
    fleet.turn_until(lambda: ("prefill-0", "TokenBatch", DETOKENIZER) in fleet.network.log)
    assert ("prefill-0", "Handoff", "decode-0") not in fleet.network.log, "the transfer is not on the way to the first token"

    # When the last write has completed, the decode instance may go on, and the prefill instance's pages come home.
    fleet.turn_until(lambda: ("prefill-0", "Handoff", "decode-0") in fleet.network.log)
    assert prefill.pool.leased_pages == 0 and prefill.pool.cached_pages == 4, "whole pages stay in the prefix cache"

    # Every later token comes from the decode instance.
    fleet.run(client)
    assert client.token_ids == undisturbed(PROMPT, 5)
    assert client.text.split() == [str(token) for token in client.token_ids]
    assert client.endings == [Finished(reason="length")]
    assert fleet.observer.endings == [Finished(reason="length")], "exactly one ending"

    # The counters prove that it was disaggregated, and everything has come home.
    sent, received = prefill.scheduler.report().counters, decode.scheduler.report().counters
    assert (sent.prompt_tokens_computed, received.prompt_tokens_computed) == (19, 0)
    assert sent.pages_pushed == received.pages_received == 5
    assert sent.bytes_pushed == received.bytes_received
    assert (sent.tokens_generated, received.tokens_generated) == (1, 4)
    assert fleet.is_home()


def test_a_client_that_leaves_during_the_push_leaves_nothing_behind() -> None:
    fleet = ToyFleet()
    fleet.memory.hold = True  # pushes stay in flight
    client = fleet.submit("r", PROMPT, max_tokens=50)
    fleet.turn_until(lambda: ("prefill-0", "TokenBatch", DETOKENIZER) in fleet.network.log)
    fleet.leave("r")
    for _ in range(20):
        fleet.clock.turn()
    assert not fleet.is_home(), "pages under a push stay where they are"
    fleet.memory.hold = False
    transport_of(fleet.instances["prefill-0"]).release()
    fleet.run(client)
    assert ("prefill-0", "Withdraw", "decode-0") in fleet.network.log


def test_colocated_serving_is_a_routing_decision() -> None:
    fleet = ToyFleet(prefill=0, decode=1)
    client = fleet.submit("r", PROMPT, max_tokens=5)
    fleet.run(client)
    assert client.token_ids == undisturbed(PROMPT, 5)
    assert fleet.instances["decode-0"].scheduler.report().counters.prompt_tokens_computed == 19


def test_an_answer_of_one_token_never_meets_a_decode_instance() -> None:
    fleet = ToyFleet()
    client = fleet.submit("r", PROMPT, max_tokens=1)
    fleet.run(client)
    assert client.token_ids == undisturbed(PROMPT, 1)
    assert all("decode-0" not in (sender, to) for sender, _, to in fleet.network.log)
