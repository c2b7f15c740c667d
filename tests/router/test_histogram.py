"""The router's histogram gives the same page as the client library's."""

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest

from router.metrics import Histogram

VALUES = (0.0, 0.004, 0.005, 0.0051, 1.0, 2.5, 1e9)


def test_a_page_reads_like_that_of_the_client_library() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    name, what, buckets = "tandem_seconds", "Of something.", (0.005, 1.0, 2.0)
    mine = Histogram(name, what, buckets, ours)
    reference = prometheus_client.Histogram(name, what, buckets=buckets, registry=theirs)
    for value in VALUES:
        mine.observe(value)
        reference.observe(value)
    expected = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == expected
