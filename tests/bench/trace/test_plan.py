"""What `launch bench trace` is told."""

import shlex

import pytest

from bench.serve.plan import Load, Workload
from bench.trace.plan import DECIDED_BY_TRACE, TraceBench, check_load, load_bench
from common.errors import ConfigError
from common.flags import read_config, to_flags
from launch.main import build_parser, main


def test_the_command_can_be_repeated_and_the_load_lasts_as_long_as_the_trace() -> None:
    bench, workload = TraceBench(fleet="--decode 2 --model 'my model'", rate=3.0, seconds=20.0), Workload(random_input_len=64)
    assert bench.fleet_flags == ("--decode", "2", "--model", "my model")
    command = shlex.join(to_flags(bench, workload, Load(), without=DECIDED_BY_TRACE))
    flags = build_parser().parse_args(["bench", "trace", *shlex.split(command)])
    assert read_config(TraceBench, flags) == bench
    sent = load_bench(bench, read_config(Workload, flags), read_config(Load, flags), "http://h:1")
    assert (sent.workload.num_prompts, sent.load.request_rate, sent.target.url) == (60, 3.0, "http://h:1")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--seconds", "601"), "--seconds must be above 0 and at most 600"),
        (("--rate", "0"), "--rate must be above 0"),
        (("--out", "trace.json"), "--out must be a name that ends with .gz"),
        (("--fleet", "'"), "--fleet: the quotes"),
        (("--url", "host:1"), "--url must be http://host:port"),
        (("--url", "http://h:1", "--rate", "3"), "--rate has no effect with --url"),
        (("--insecure", "on"), "--insecure has no effect without --url"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "trace", *flags]) == 2
    assert says in capsys.readouterr().err


def test_flags_of_a_load_that_nobody_sends_are_refused() -> None:
    with pytest.raises(ConfigError, match="--random-input-len has no effect with --url"):
        check_load(TraceBench(url="http://h:1"), Workload(random_input_len=5), Load())
