"""What users can measure, and how: the flags of `launch bench serve`, `compare`, `offline` and `trace`, and their limits.

Owns names, defaults and limits. Imports nothing heavy, because `launch --help` needs it, and starts nothing. The flags of a load
are named as in `vllm bench serve`. A flag that would change nothing is refused.
"""

import importlib.util
import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, Literal
from urllib.parse import urlsplit

from common.config import MOST_PORT
from common.errors import ConfigError
from common.extras import install_command
from common.options import (
    Switch,
    option,
    parse_numbers,
    refuse_without_effect,
    require,
    require_above_0,
    require_at_least,
    require_between,
)

Backend = Literal["openai", "openai-chat"]
Dataset = Literal["random", "prefix_repetition", "custom", "conversation", "trace"]
RampUp = Literal["none", "linear", "exponential"]

ENDPOINTS: dict[Backend, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
METRICS = ("ttft", "tpot", "itl", "e2el")
PROMPTS = 1000
_RANDOM_LENGTHS = ("random_input_len", "random_output_len", "random_range_ratio")
_PREFIXES = tuple(f"prefix_repetition_{what}" for what in ("prefix_len", "suffix_len", "num_prefixes", "output_len"))
_TRACE = ("trace_speed", "trace_length_scale", "trace_block_tokens", "trace_duration_s")
FLAGS_OF_DATASETS: dict[Dataset, tuple[str, ...]] = {
    "random": ("prompts", "tokenizer", *_RANDOM_LENGTHS, "random_prefix_len"),
    "prefix_repetition": ("prompts", "tokenizer", *_PREFIXES),
    "custom": ("dataset_path", "custom_output_len"),
    "conversation": ("tokenizer", *_RANDOM_LENGTHS, "random_prefix_len", "conversation_turns"),
    "trace": ("prompts", "tokenizer", "dataset_path", *_TRACE),
}
"""The flags that mean something for each data set."""
FLAGS_OF_CONVERSATION_FILES = ("dataset_path", "custom_output_len")


def _require_url(url: str, flag: str) -> None:
    parts = urlsplit(url)
    require(parts.scheme in ("http", "https") and bool(parts.hostname), flag, "http://host:port", url)


def _range(text: str, flag: str) -> tuple[int, int]:
    numbers = parse_numbers(text, flag, int)
    require(len(numbers) == 2, flag, "two numbers with a comma between them", text)
    fewest, most = numbers
    require(1 <= fewest <= most, flag, "at least 1, and the first number not above the second", text)
    return fewest, most


def _split_flags(text: str, where: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{where}: the quotes of {text!r} do not match: {error}") from None


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The server."""

    backend: Backend = option("openai", "the API: openai is /v1/completions, openai-chat is /v1/chat/completions")
    base_url: str = option("", "URL of the server, http or https; default: http://HOST:PORT")
    host: str = option("127.0.0.1", "the server's host, where --base-url is not given")
    port: int = option(8000, "the server's port, where --base-url is not given")
    endpoint: str = option("", "path below the URL; default: that of the backend")
    model: str = option("", "the model's name in requests; default: the first one that the server lists")
    header: tuple[str, ...] = option((), "KEY=VALUE headers of each request")
    api_key_file: str = option("", "file with the API key; default: the environment variable OPENAI_API_KEY, if it is set")
    insecure: Switch = option("off", "do not verify the certificate of an https server")
    request_timeout_s: float = option(3600.0, "an answer that is not over so long after its request was sent has failed")

    def __post_init__(self) -> None:
        if self.base_url:
            refuse_without_effect(self, ("host", "port"), "with --base-url")
        _require_url(self.url, "base-url")
        require(self.endpoint == "" or self.endpoint.startswith("/"), "endpoint", "a path that begins with /", self.endpoint)
        require_between(self, 1, MOST_PORT, "port")
        require_above_0(self, "request_timeout_s")
        for name, value in self.headers.items():
            fits = name.isascii() and name.isprintable() and " " not in name and name != "" and value.isprintable()
            require(fits, "header", "KEY=VALUE of printable characters", f"{name}={value}")
        if self.insecure == "on" and urlsplit(self.url).scheme != "https":
            raise ConfigError("--insecure has no effect on http: leave it out")

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return self.base_url.rstrip("/") or f"http://{self.host}:{self.port}"

    @property
    def path(self) -> str:
        """What requests ask for, with the path of the URL before it."""
        return urlsplit(self.url).path + (self.endpoint or ENDPOINTS[self.backend])

    @property
    def headers(self) -> dict[str, str]:
        pairs = [item.partition("=") for item in self.header]
        return {name.strip(): value.strip() for name, _, value in pairs}


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """What is asked."""

    dataset_name: Dataset = option(
        "random",
        "random: every prompt is another; prefix_repetition: groups of prompts share a prefix; custom: a JSONL file with a "
        "prompt in each line; conversation: turns that each hold the answers so far; trace: a JSONL file with times and lengths",
    )
    dataset_path: str = option("", "the file of custom, trace, or conversation; without one, conversations are made up")
    num_prompts: int = option(
        0,
        f"requests, or conversations; 0: all of the file, or {PROMPTS}. A file with fewer, if no trace, is sent again and again",
    )
    seed: int = option(0, "the same seed makes the same prompts, lengths and arrivals")
    tokenizer: str = option("", "folder or Hugging Face name of the tokenizer that makes prompts; default: the model")
    prompts: Literal["text", "ids"] = option("text", "made-up prompts are sent as words, or as token ids (openai only)")
    random_input_len: int = option(1024, "tokens of a prompt, or of one turn's message, after --random-prefix-len")
    random_output_len: int = option(128, "tokens of an answer")
    random_range_ratio: float = option(0.0, "lengths are spread evenly from (1 - X) to (1 + X) times these")
    random_prefix_len: int = option(0, "tokens at the beginning of a prompt that all prompts have in common")
    prefix_repetition_prefix_len: int = option(256, "tokens that the prompts of a group have in common")
    prefix_repetition_suffix_len: int = option(256, "tokens of each prompt after them")
    prefix_repetition_num_prefixes: int = option(10, "groups")
    prefix_repetition_output_len: int = option(128, "tokens of an answer")
    custom_output_len: int = option(256, "tokens of an answer, for lines of the file without output_tokens")
    conversation_turns: int = option(4, "turns of a made-up conversation")
    trace_speed: float = option(1.0, "how many times faster than it was recorded the trace is sent")
    trace_length_scale: float = option(1.0, "the trace's lengths, and the blocks of its hash_ids, are multiplied by this")
    trace_block_tokens: int = option(512, "tokens of a block of hash_ids, before scaling")
    trace_duration_s: float = option(0.0, "only so much of the trace, in its own time; 0: all of it")

    def __post_init__(self) -> None:
        known = FLAGS_OF_DATASETS[self.dataset_name]
        where = f"with --dataset-name {self.dataset_name}"
        if self.dataset_name == "conversation" and self.dataset_path:
            known, where = FLAGS_OF_CONVERSATION_FILES, "with conversations from a file"
        others = {name for names in FLAGS_OF_DATASETS.values() for name in names} - {*known, "dataset_path"}
        if self.dataset_name in ("random", "prefix_repetition"):
            others.add("dataset_path")
        refuse_without_effect(self, sorted(others), where)
        if self.dataset_name in ("custom", "trace"):
            require(self.dataset_path != "", "dataset-path", f"a file {where}", self.dataset_path)
        require_at_least(self, num_prompts=0, random_prefix_len=0, prefix_repetition_prefix_len=0, trace_duration_s=0, seed=0)
        counts = ("random_input_len", "random_output_len", "custom_output_len", "conversation_turns", "trace_block_tokens")
        require_at_least(self, **dict.fromkeys((*counts, *_PREFIXES[1:]), 1))
        require_above_0(self, "trace_speed", "trace_length_scale")
        require(0 <= self.random_range_ratio < 1, "random-range-ratio", "from 0 to below 1", self.random_range_ratio)

    @property
    def is_from_file(self) -> bool:
        """Whether the prompts are somebody's. Those of a trace are made up, with its lengths."""
        return self.dataset_path != "" and self.dataset_name != "trace"


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """When requests are sent, and with which parameters."""

    request_rate: float = option(
        math.inf, "requests a second; inf: all at once, or as --max-concurrency lets them. Not for traces"
    )
    burstiness: float = option(
        1.0, "shape of the gamma distribution of the gaps: 1 is Poisson, less comes in bursts, inf is even"
    )
    ramp_up_strategy: RampUp = option("none", "how the rate grows from one request to the next, in place of --request-rate")
    ramp_up_start_rps: float = option(0.0, "requests a second at the beginning of the ramp")
    ramp_up_end_rps: float = option(0.0, "requests a second at its end")
    max_concurrency: int = option(0, "most requests, or conversations, that are open at once; 0: no limit")
    num_warmups: int = option(1, "requests before the measurement; the first shows which kinds of usage the server can report")
    ignore_eos: Literal["auto", "off", "on"] = option(
        "auto", "send ignore_eos: answers are as long as was asked for; auto: on for prompts that are made up"
    )
    temperature: float = option(0.0, "sent with each request")
    extra_body: str = option("", "a JSON object whose fields are added to each request, over those that are there")

    def __post_init__(self) -> None:
        require_above_0(self, "request_rate", "burstiness")
        require_at_least(self, max_concurrency=0, num_warmups=1, temperature=0)
        if self.ramp_up_strategy == "none":
            refuse_without_effect(self, ("ramp_up_start_rps", "ramp_up_end_rps"), "without --ramp-up-strategy")
            if math.isinf(self.request_rate):
                refuse_without_effect(self, ("burstiness",), "without --request-rate or a ramp")
        else:
            refuse_without_effect(self, ("request_rate",), "with --ramp-up-strategy")
            for name in ("ramp_up_start_rps", "ramp_up_end_rps"):
                require(0 < vars(self)[name] < math.inf, name.replace("_", "-"), "above 0 with a ramp", vars(self)[name])
        _ = self.extra

    @property
    def is_open(self) -> bool:
        """Whether requests are due at times of their own, whatever becomes of the others."""
        return self.ramp_up_strategy != "none" or not math.isinf(self.request_rate)

    @property
    def extra(self) -> dict[str, Any]:
        try:
            read = json.loads(self.extra_body or "{}")
        except ValueError:
            read = None
        require(isinstance(read, dict), "extra-body", "a JSON object", self.extra_body)
        return dict(read)


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """What is reported."""

    goodput: tuple[str, ...] = option(
        (),
        "METRIC:MILLISECONDS, such as ttft:500 itl:50 (or ttft:500,itl:50): count requests that keep all of these limits; ttft, "
        "tpot, e2el, and itl for 99 % of the gaps of a request",
    )
    percentile_metrics: str = option(",".join(METRICS), "the times that are reported")
    metric_percentiles: str = option("50,90,99", "their percentiles")
    json: str = option("", "write the figures to this file, with the keys of `vllm bench serve`")
    save_detailed: Switch = option("off", "write every request's times, errors and text to the JSON file too")
    csv: str = option("", "write a line for each request to this file")
    disable_tqdm: Switch = option("off", "no progress bar; there is none either where stderr is no terminal")

    def __post_init__(self) -> None:
        for name in self.metrics:
            require(name in METRICS, "percentile-metrics", f"some of {','.join(METRICS)}", self.percentile_metrics)
        require(
            all(0 <= each <= 100 for each in self.percentiles), "metric-percentiles", "from 0 to 100", self.metric_percentiles
        )
        _ = self.limits_ms
        if not self.json:
            refuse_without_effect(self, ("save_detailed",), "without --json")

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(self.percentile_metrics.split(","))

    @property
    def percentiles(self) -> tuple[float, ...]:
        return parse_numbers(self.metric_percentiles, "metric-percentiles", float)

    @property
    def limits_ms(self) -> dict[str, float]:
        """What a good request keeps."""
        limits: dict[str, float] = {}
        for item in ",".join(self.goodput).split(",") if self.goodput else ():
            name, _, text = item.strip().partition(":")
            try:
                limits[name] = float(text)
            except ValueError:
                limits[name] = -1.0
            require(name in METRICS and limits[name] >= 0, "goodput", "METRIC:MILLISECONDS, such as ttft:500", item)
        return limits


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """All of `launch bench serve`."""

    target: TargetOptions = TargetOptions()
    workload: WorkloadOptions = WorkloadOptions()
    load: LoadOptions = LoadOptions()
    results: ResultOptions = ResultOptions()

    def __post_init__(self) -> None:
        if self.workload.dataset_name == "trace":
            refuse_without_effect(
                self.load, ("request_rate", "burstiness", "ramp_up_strategy"), "with a trace, which has its own times"
            )
        if self.workload.prompts == "ids" and self.target.backend != "openai":
            raise ConfigError("--prompts ids is for --backend openai only: a chat takes text")

    @property
    def is_open(self) -> bool:
        """Whether requests are due at times of their own. Then TTFT and E2E count from these times."""
        return self.load.is_open or self.workload.dataset_name == "trace"

    @property
    def without_secrets(self) -> tuple[TargetOptions, WorkloadOptions, LoadOptions, ResultOptions]:
        """Its parts as they may be shown: the values of headers may be secret."""
        target = replace(self.target, header=tuple(f"{name}=..." for name in self.target.headers))
        return target, self.workload, self.load, self.results

    @property
    def ignores_eos(self) -> bool:
        if self.load.ignore_eos != "auto":
            return self.load.ignore_eos == "on"
        return not self.workload.is_from_file


DECIDED_BY_COMPARE = (
    *("base_url", "host", "port", "num_prompts", "request_rate"),
    *("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"),
    *("percentile_metrics", "metric_percentiles", "json", "save_detailed", "csv", "disable_tqdm"),
)
"""Flags of `launch bench serve` that this benchmark has not: it sets them itself."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One of the layouts that are compared, as charts and the file of figures name it."""

    name: str
    text: str
    """Flags of `launch local`, or the URL of a server that runs already."""

    @classmethod
    def parse(cls, given: str) -> "Layout":
        """Read NAME=FLAGS or NAME=URL. Raises ConfigError."""
        name, _, text = (part.strip() for part in given.partition("="))
        if not name or not text:
            raise ConfigError(f"--layout must be NAME=FLAGS or NAME=URL, is {given!r}")
        layout = cls(name, text)
        return layout if layout.url else cls(name, shlex.join(_split_flags(text, f"--layout {name}")))

    @property
    def url(self) -> str:
        """Empty for a fleet."""
        return self.text if "://" in self.text and not self.text.startswith("-") else ""

    @property
    def flags(self) -> tuple[str, ...]:
        return () if self.url else tuple(shlex.split(self.text))


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What is compared, and for how long."""

    layout: tuple[str, ...] = option(
        (),
        "NAME=FLAGS of `launch local`, in quotes, such as '1P1D=--prefill 1 --decode 1 --threads 1', or NAME=URL of a "
        "server that runs; the others are compared with the first",
    )
    rates: str = option("1,2,4,8", "requests a second, one rate after the other")
    seconds: float = option(30.0, "how long requests are sent at each rate")
    rounds: int = option(3, "how often each layout has its turn: A B C, A B C and so on")
    output: str = option("compare", "the folder that gets page.html, the charts as PNG files, and figures.json")

    def __post_init__(self) -> None:
        if not self.layouts:
            raise ConfigError("--layout is missing: give NAME=FLAGS of `launch local` or NAME=URL for each layout")
        if len({each.name for each in self.layouts}) < len(self.layouts):
            raise ConfigError("--layout must have another name for each layout")
        require(all(0 < rate < math.inf for rate in self.ladder), "rates", "above 0 each", self.rates)
        require_above_0(self, "seconds")
        require_at_least(self, rounds=1)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(Layout.parse(text) for text in self.layout)

    @property
    def ladder(self) -> tuple[float, ...]:
        """Each rate once, rising."""
        return tuple(sorted(set(parse_numbers(self.rates, "rates", float))))

    def turns(self) -> Iterator[tuple[int, Layout]]:
        """The rounds, A B C, A B C: what changes slowly about the machine meets every layout."""
        return product(range(self.rounds), self.layouts)

    def load_on(self, url: str, common: ServeOptions, rate: float, round_number: int) -> ServeOptions:
        """What one run asks of the server at this URL. All layouts get the same requests at the same times; each rate of each
        round has others, so that no server has seen them."""
        number = round_number * len(self.ladder) + self.ladder.index(rate)
        prompts = max(1, round(rate * self.seconds))
        workload = replace(common.workload, num_prompts=prompts, seed=common.workload.seed + number)
        target, load = replace(common.target, base_url=url), replace(common.load, request_rate=rate)
        return replace(common, target=target, workload=workload, load=load)


def check_comparable(common: ServeOptions) -> None:
    """Raises ConfigError, before anything is measured, for a load that cannot be compared, or without what draws the charts."""
    if common.workload.dataset_name == "trace":
        raise ConfigError("--dataset-name trace has its own times, which no rate changes: choose another")
    if not common.results.goodput:
        raise ConfigError("--goodput is missing: say what a good answer keeps, such as --goodput ttft:500 itl:50")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"matplotlib, which draws the charts, is not installed: {install_command('bench')}")


DECIDED_BY_TRACE = ("num_prompts", "request_rate", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
"""Flags of `launch bench serve` that this one has not: it sets them itself."""
MOST_TRACED_S = 600.0


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Which fleet is recorded, and for how long."""

    url: str = option("", "URL of a router of a running fleet, which gets no load; default: a fleet is started, and sent one")
    control_key: str = option("", "the file with the control key of that router, if it has one")
    insecure: Switch = option("off", "do not verify the certificate of an https router")
    fleet: str = option("--prefill 1 --decode 1", "FLAGS of `launch local`, in quotes: the fleet to start")
    rate: float = option(2.0, "requests a second that it is sent")
    seconds: float = option(60.0, "how long to record, at most ten minutes")
    out: str = option("trace.json.gz", "the file that https://ui.perfetto.dev opens")

    def __post_init__(self) -> None:
        require(0 < self.seconds <= MOST_TRACED_S, "seconds", f"above 0 and at most {MOST_TRACED_S:g}", self.seconds)
        require(0 < self.rate < math.inf, "rate", "above 0", self.rate)
        require(self.out.endswith(".gz"), "out", "a name that ends with .gz, because the file is compressed", self.out)
        if self.url:
            refuse_without_effect(self, ("fleet", "rate"), "with --url")
            _require_url(self.url, "url")
        else:
            refuse_without_effect(self, ("control_key", "insecure"), "without --url")
        _ = self.fleet_flags

    @property
    def fleet_flags(self) -> tuple[str, ...]:
        return _split_flags(self.fleet, "--fleet")

    def load_on(self, url: str, workload: WorkloadOptions, load: LoadOptions) -> ServeOptions:
        """The load on the fleet at this URL."""
        if workload.dataset_name != "trace":
            workload = replace(workload, num_prompts=max(1, round(self.rate * self.seconds)))
            load = replace(load, request_rate=self.rate)
        return ServeOptions(target=TargetOptions(base_url=url), workload=workload, load=load)

    def check_load(self, workload: WorkloadOptions, load: LoadOptions) -> None:
        """Raises ConfigError for flags that do not go together, such as those of a load that nobody sends."""
        if not self.url:
            self.load_on("http://here", workload, load)
        for config in (workload, load) if self.url else ():
            names = [field.name for field in fields(config) if field.name not in DECIDED_BY_TRACE]
            refuse_without_effect(config, names, "with --url: a running fleet gets no load")


@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    """The sequences, and how often they run."""

    num_prompts: int = option(256, "sequences that are there at once, at the start")
    prompt_tokens: str = option("100,1024", "fewest and most tokens of a prompt")
    answer_tokens: str = option("100,1024", "fewest and most tokens of an answer")
    largest_id: int = option(10_000, "prompts are drawn of the token ids from 0 to this one; lengths are drawn behind them")
    temperature: float = option(0.6, "of all sequences; 0: greedy")
    seed: int = option(0, "of lengths and token ids: equal seeds give equal sequences")
    repeat: int = option(1, "how often all sequences run, one time after the other")
    json: str = option("", "write the figures to this file")

    def __post_init__(self) -> None:
        require_at_least(self, num_prompts=1, repeat=1, temperature=0, largest_id=1)
        _ = self.prompt_range, self.answer_range

    @property
    def prompt_range(self) -> tuple[int, int]:
        return _range(self.prompt_tokens, "prompt-tokens")

    @property
    def answer_range(self) -> tuple[int, int]:
        return _range(self.answer_tokens, "answer-tokens")


QUICK_OFFLINE: dict[str, Any] = {"num_prompts": 8, "prompt_tokens": "5,40", "answer_tokens": "5,20"}
QUICK_ENGINE: dict[str, Any] = {"max_running": 4, "chunk_tokens": 32, "kv_memory": "4MiB"}
"""What `--quick` measures."""
