"""`launch bench trace`: has a fleet record what its processes do, and writes it as a file for Perfetto.

Owns the order: the fleet, the load, the recording, the file, the table. `bench.serve` sends the load.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence

from bench.hardware import this_hardware
from bench.serve.plan import Load, Workload
from bench.serve.run import ServerRefuses, measure
from bench.tables import machine_line, markdown_table, say, text_table
from bench.trace.chrome import ROLES, write
from bench.trace.plan import TraceBench, load_bench
from bench.trace.record import Recording, Status, TraceFailed
from bench.trace.slices import Slice, slices_of
from common.errors import ConfigError
from common.processes.local_fleet import FleetFailed, local_fleet

HEAD = ("process", "busy with steps", "steps", "chunks", "chunk tokens", "pushes", "MB pushed", "spans", "dropped")
LOAD_ENDS_S = 600.0


def run(bench: TraceBench, workload: Workload, load: Load, command: str, markdown: bool, control_key: str) -> int:
    """Record, write the file and print the table. Returns the exit status: 1 if there is no trace. Raises ConfigError."""
    hardware = this_hardware()
    try:
        with _fleet(bench) as url:
            status, slices = _record(bench, workload, load, url, control_key)
    except (FleetFailed, TraceFailed, ServerRefuses) as error:
        say(f"there is no trace: {error}")
        return 1
    try:
        size_bytes = write(bench.out, status, slices)
    except OSError as error:
        raise ConfigError(f"--out {bench.out} cannot be written: {error.strerror}") from error
    settings = f"{status.seconds:g} s, {len(slices):,} spans, {size_bytes / 1e6:.2f} MB"
    lines = table(status, slices)
    if markdown:
        print("\n\n".join([f"```sh\n{command}\n```", machine_line(hardware, settings), markdown_table(lines)]))
    else:
        print("\n".join([machine_line(hardware, settings), text_table(lines)]))
    refused = status.spans_refused
    if refused:
        say(f"the router had no room for {refused:,} spans: record for a shorter time")
    say(f"wrote {bench.out}: open it at https://ui.perfetto.dev")
    return 0


def table(status: Status, slices: Sequence[Slice]) -> list[tuple[str, ...]]:
    """What each process did, in the order of `ROLES`."""
    of: defaultdict[tuple[int, str], list[Slice]] = defaultdict(list)
    for each in slices:
        of[each.process, each.track].append(each)
    lines: list[tuple[str, ...]] = [HEAD]
    for place, process in sorted(enumerate(status.processes), key=lambda pair: (ROLES.index(pair[1].role), pair[0])):
        steps, chunks, pushes = of[place, "steps"], of[place, "chunks"], of[place, "pushes"]
        computes = process.role in ("prefill", "decode")
        busy_us = sum(each.end_us - each.begin_us for each in steps)
        pushed_mb = sum(int(each.args.get("bytes", 0)) for each in pushes) / 1e6
        work = (
            f"{busy_us / (status.seconds * 1e6):.1%}",
            f"{len(steps):,}",
            f"{len(chunks):,}",
            f"{sum(int(each.args['tokens']) for each in chunks):,}",
            *((f"{len(pushes):,}", f"{pushed_mb:,.2f}") if process.role == "prefill" else ("", "")),
        )
        lines.append((process.id, *(work if computes else ("",) * len(work)), f"{process.spans:,}", f"{process.dropped:,}"))
    return lines


@contextlib.contextmanager
def _fleet(bench: TraceBench) -> Iterator[str]:
    """The URL of a fleet that runs already, or of one that is stopped at the end. Raises FleetFailed."""
    if bench.url:
        yield bench.url
        return
    say("starting the fleet")
    with local_fleet(*bench.fleet_flags) as fleet:
        yield fleet.url


def _record(bench: TraceBench, workload: Workload, load: Load, url: str, control_key: str) -> tuple[Status, list[Slice]]:
    """Raises TraceFailed, ServerRefuses."""
    with contextlib.closing(Recording(url, control_key, verify=bench.insecure == "off")) as recording:
        say(f"recording {url} for {bench.seconds:g} s")
        recording.begin(bench.seconds)
        try:
            sending = None if bench.url else _Sending(bench, workload, load, url)
            status, lines = recording.spans()
            slices = slices_of(lines, status.began_s)
        finally:
            recording.forget()
    if sending is not None:
        sending.join()
    return status, slices


class _Sending:
    """The load, in a thread of its own."""

    def __init__(self, bench: TraceBench, workload: Workload, load: Load, url: str) -> None:
        self._failure: ServerRefuses | None = None
        self._thread = threading.Thread(target=self._send, args=(bench, workload, load, url), daemon=True)
        self._thread.start()

    def _send(self, bench: TraceBench, workload: Workload, load: Load, url: str) -> None:
        try:
            measured = measure(load_bench(bench, workload, load, url))
            say(f"{measured.figures['completed']:,} requests were answered, {measured.figures['failed']:,} failed")
        except ServerRefuses as error:
            self._failure = error

    def join(self) -> None:
        """Wait for its end. Raises ServerRefuses."""
        self._thread.join(LOAD_ENDS_S)
        if self._failure is not None:
            raise self._failure
