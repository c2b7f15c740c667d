"""Configuration of a fleet's processes: frozen slices, validated on construction.

Owns names, defaults, help and limits. Reads no files, flags or environment. What a slice is made of is in `common/options.py`.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Literal

from common.addresses import check_address, check_leader
from common.drafting import Drafting, parse_drafting
from common.extras import install_command
from common.options import (
    Switch,
    option,
    parse_bytes,
    parse_memory,
    refuse_without_effect,
    require,
    require_above_0,
    require_at_least,
    require_between,
    require_choices,
)
from common.ranges import MOST_SECONDS
from common.step_cost import STEP_COST, StepCost

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
Quantization = Literal["none", "fp8", "int8"]
KVDtypeName = Literal["auto", "float32", "bfloat16", "fp8_e4m3"]
AttentionName = Literal["auto", "torch", "native", "flashinfer"]
ExecutorName = Literal["torch", "timed"]
AllReduceName = Literal["auto", "nccl"]
TransportName = Literal["nixl", "mooncake", "torch", "cma"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Dispatch = Literal["auto", "colocated", "conditional"]
PolicyName = Literal["round_robin", "least_loaded", "power_of_two", "session", "cache_aware"]
Graphs = Literal["auto", "on", "off"]
_JsonCalls = Literal["hermes", "qwen", "qwen25", "llama3", "llama3_json", "llama4_json", "mistral", "openai", "gpt-oss"]
_MarkedCalls = Literal["kimi_k2", "deepseek_v3", "deepseekv3", "deepseek_v31", "deepseekv31", "qwen3_coder", "qwen3_xml"]
_TypedCalls = Literal["glm45", "glm47", "glm", "pythonic", "llama4_pythonic", "functiongemma", "gemma4"]
ToolParserName = Literal["auto", "none", _JsonCalls, _MarkedCalls, _TypedCalls]
PoolingName = Literal["auto", "none", "last", "mean", "cls"]
_ThinkTags = Literal["think", "qwen3", "qwen3-thinking", "glm45", "glm47", "kimi_k2", "deepseek_v3", "deepseek-v3"]
_OtherThoughts = Literal["deepseek_r1", "deepseek-r1", "openai_gptoss", "gpt-oss", "mistral", "gemma4"]
ReasoningParserName = Literal["auto", "none", _ThinkTags, _OtherThoughts]
MetricAliasNames = Literal["none", "vllm", "sglang", "both"]
DEMO_MODEL = "demo"
DAY_S = 86_400.0
SHARED_STEP_S = 0.05
"""Where instances share a GPU, a decode step beside a chunk waits for its kernels. With 20 tokens a second an answer comes faster
than people read."""
MOST_PORT = 65_535
MOST_RANKS = 64
MOST_LORAS, MOST_LORA_RANK, LORAS_PER_BATCH = 1024, 256, 8
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_OTLP_URL = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d{1,5})?")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model that an instance serves."""

    model: str = option(DEMO_MODEL, "the checkpoint: a folder, a Hugging Face name, or 'demo' (the model that comes with Tandem)")
    served_name: str = option("", "the model's name in the API; default: the checkpoint's name")

    def __post_init__(self) -> None:
        require(self.model != "", "model", "a folder, a Hugging Face name or demo", self.model)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Device, memory and batch of one instance."""

    executor: ExecutorName = option(
        "torch",
        "what computes steps; timed: nothing does, steps take --step-cost and answers are made-up words, to load everything but "
        "the model",
    )
    step_cost: str = option(
        "",
        "with --executor timed: seconds of a step, and what each prompt token, each decode row and, as a fourth number that may "
        f"be left out, each token of KV that the rows hold adds; default: {STEP_COST}",
    )
    dtype: Dtype = option("auto", "data type of weights and KV; auto: float32 on CPU, bfloat16 on CUDA")
    load_format: LoadFormat = option(
        "auto", "where weights come from; auto: safetensors files; dummy: random numbers, only config and tokenizer are needed"
    )
    quantization: Quantization = option(
        "none", "quantise linear layers while loading, and tokens in each step; fp8: needs bfloat16; int8: CPU, output head too"
    )
    kv_dtype: KVDtypeName = option(
        "auto",
        "data type of KV pages; auto: that of the weights, but bfloat16 for float32 in int8; float32: with float32 or int8 "
        "weights on CPU; bfloat16: half the memory of that, and read faster; fp8_e4m3: half the memory of bfloat16, less exact",
    )
    attention: AttentionName = option(
        "auto",
        "implementation of attention; auto: flashinfer on CUDA, where an instance does not start without it; native (in C) on "
        "CPU, or torch without a compiler",
    )
    device: str = option("auto", "where to compute: auto, cpu, cuda or cuda:N; auto: CUDA if there is a GPU")
    page_size: int = option(16, "tokens per KV page")
    kv_memory: str = option(
        "auto",
        "memory for KV pages: an amount such as 40GiB, or a share of the device's whole memory such as 40%; auto: what is left "
        "beside the model in this instance's part of the memory, and the log says why",
    )
    sharers: int = option(
        0,
        "instances that share the device's memory: --kv-memory auto takes this part of it; launch local counts them; 0: one on a "
        "GPU; on CPU two, or as many as have such --threads",
    )
    context_tokens: int = option(
        0, "most tokens of prompt and answer together; 0: the model's own limit, capped to what the KV memory holds"
    )
    max_running: int = option(0, "most requests computed at once (rows of the batch); 0: 64 on CPU, 256 on CUDA")
    chunk_tokens: int = option(
        0,
        "most prompt tokens computed in one forward, over all requests; 0: 512 on CPU, 8192 on CUDA",
    )
    layer_groups: int = option(
        2, "push the last chunk of a prompt in this many groups of layers while it computes; 0: push it afterwards"
    )
    graphs: Graphs = option(
        "auto",
        "replay decode steps, on CUDA as graphs and on CPU as one call of C; auto: where the model and attention allow it, but "
        "on CUDA not in an instance that starts as prefill: give on to one that may take another role",
    )
    graph_sizes: str = option(
        "auto",
        "batch sizes of the CUDA graphs, such as 1,2,4,8; larger batches run without one; auto: a ladder up to the largest batch",
    )
    grammar: Switch = option(
        "on",
        "on: answers can be held to grammars (JSON schemas, regular expressions, required tool calls); their compiler, a process "
        "of 270 MB, is there before the instance serves; off: such requests are refused; the same in the whole fleet",
    )
    lora: str = option(
        "",
        "LoRA adapters in PEFT's format that an instance loads at its start, such as name=folder,other=folder",
    )
    max_loaded_loras: int = option(
        0,
        "most LoRA adapters that an instance holds in the host's memory, of which as much is kept free as they take with rank "
        "--max-lora-rank; 0: those of --lora",
    )
    max_loras_per_batch: int = option(
        LORAS_PER_BATCH,
        "most different LoRA adapters that are computed at once, each in the device's memory for rank --max-lora-rank; others "
        "of --max-loaded-loras wait for their turn",
    )
    max_lora_rank: int = option(64, "highest rank of a LoRA adapter; others are refused")
    threads: int = option(0, "CPU threads of this instance; 0: all cores of the host (launch local shares them out)")
    lent_cores: str = option("", "file by which instances of a host lend each other idle cores; launch local makes it")
    memory_part: int = option(
        0,
        "bytes of the host's memory that each rank has on CPU for weights, steps and pages, with --kv-memory auto; launch local "
        "decides it for all; 0: the part that --sharers says",
    )

    def __post_init__(self) -> None:
        require_between(self, 1, 1024, "page_size")
        require(0 <= self.max_running <= 4096, "max-running", "between 1 and 4096, or 0", self.max_running)
        require(self.chunk_tokens >= 0, "chunk-tokens", "at least 1, or 0", self.chunk_tokens)
        require_between(self, 0, 4096, "threads", "sharers")
        require_at_least(self, layer_groups=0, context_tokens=0, memory_part=0)
        if self.kv_memory != "auto":
            refuse_without_effect(self, ("memory_part",), "without --kv-memory auto")
        if self.device.startswith("cuda"):
            refuse_without_effect(self, ("memory_part", "lent_cores"), "on a GPU")
        parse_memory(self.kv_memory, "kv-memory", total_bytes=2**40)
        require(_DEVICE.fullmatch(self.device) is not None, "device", "auto, cpu, cuda or cuda:N", self.device)
        require_choices(self)
        self._check_loras()
        if self.executor == "timed":
            StepCost.parse(self.step_cost)
            require(not self.device.startswith("cuda"), "device", "auto or cpu with --executor timed", self.device)
            of_models = ("load_format", "quantization", "attention", "graphs", "graph_sizes", "layer_groups", "lent_cores")
            refuse_without_effect(self, (*of_models, "max_lora_rank"), "with --executor timed, which loads no model")
        else:
            refuse_without_effect(self, ("step_cost",), "without --executor timed")

    @property
    def loras(self) -> dict[str, str]:
        """The folder of each adapter that is loaded at the start, by its name."""
        pairs = (pair.partition("=") for pair in self.lora.split(",") if self.lora)
        return {name.strip(): path.strip() for name, _, path in pairs}

    @property
    def lora_slots(self) -> int:
        """How many different adapters the rows of a batch can have."""
        return min(self.max_loras_per_batch, self.lora_places)

    @property
    def lora_places(self) -> int:
        """How many adapters the instance holds at most."""
        return self.max_loaded_loras or len(self.loras)

    def _check_loras(self) -> None:
        require_between(self, 0, MOST_LORAS, "max_loaded_loras")
        require_between(self, 1, MOST_LORA_RANK, "max_lora_rank")
        if not self.lora_places:
            without = "without --max-loaded-loras or --lora"
            refuse_without_effect(self, ("max_lora_rank", "max_loras_per_batch"), without)
        require_between(self, 1, max(self.lora_places, LORAS_PER_BATCH), "max_loras_per_batch")
        named = self.loras
        is_whole = all(named) and all(named.values()) and len(named) == self.lora.count(",") + 1
        require(not self.lora or is_whole, "lora", "name=folder pairs with commas between them, each name once", self.lora)
        fitting = f"at most --max-loaded-loras {self.max_loaded_loras} adapters"
        require(len(named) <= self.lora_places, "lora", fitting, self.lora)
        is_float = self.quantization != "fp8" or not self.lora_places
        require(is_float, "quantization", "none or int8 with LoRA adapters", self.quantization)


@dataclass(frozen=True, kw_only=True)
class InstanceConfig:
    """An instance as a member of a fleet."""

    router: str = option("tcp://127.0.0.1:8001", "control address of the router; of several, with commas between them")
    host: str = option("127.0.0.1", "address of this host, as peers reach it")
    inbox_port: int = option(0, "port of this instance's inbox; 0: pick a free one and print it")
    name: str = option("", "instance id; default: the role and a random suffix")
    transport: TransportName = option(
        "nixl", "how KV pages move; the same in the whole fleet (cma: one host and CPU memory only)"
    )
    tp: int = option(
        1, "tensor-parallel ranks of the instance: processes that share out its model and KV, each with a device of its own"
    )
    all_reduce: AllReduceName = option(
        "auto",
        "what adds the parts of ranks on GPUs; auto: for small sums one kernel that reads them from the memory of all ranks, "
        "where their GPUs reach it, and NCCL for others; nccl: NCCL alone",
    )
    rank: str = option("", "which of those ranks this command starts, such as 2 or 0-3; default: all of them")
    leader: str = option(
        "",
        "where rank 0 listens for ranks that other commands start, the same for all: tcp://host:port; default, for rank 0: "
        "pick a free port and print it",
    )
    max_waiting: int = option(1024, "most requests that wait in this instance; more are refused")
    step_limit_s: float = option(
        0.0,
        "seconds that a step with prompt tokens may take: as the measured cost of steps says, it has fewer than --chunk-tokens, "
        f"but at least 256; 0: {SHARED_STEP_S} where --sharers says that others are on the GPU, else no limit",
    )
    max_request_timeout_s: float = option(
        DAY_S, "most seconds that a request may take in this instance, whatever the router says"
    )
    startup_timeout_s: float = option(
        1200.0, "seconds that loading, compiling kernels at a first start, and joining the fleet may take"
    )
    drain_timeout_s: float = option(
        30.0, "seconds after which a draining instance lets other instances resume what still runs, and exits"
    )
    prefix_cache: Switch = option(
        "on", "on: keep the KV of prompts and answers while memory is left, for later requests that begin alike; off: never"
    )
    speculative_config: str = option(
        "",
        "speculative decoding by the decode role, as in vLLM: a JSON object such as "
        '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2} or '
        '{"method": "draft_model", "model": "folder", "num_speculative_tokens": 8}, or with "eagle3" and a head; default: none',
    )
    speculative_algorithm: Literal["none", "NGRAM", "STANDALONE", "EAGLE3"] = option("none", "the same method by SGLang's name")
    speculative_draft_model_path: str = option(
        "", "with --speculative-algorithm STANDALONE or EAGLE3: the draft model or head, as --model, with the same tokenizer"
    )
    speculative_num_draft_tokens: int = option(
        0, "with --speculative-algorithm: most drafted tokens of a request in a step; 0: 8"
    )
    verify_pages: Switch = option(
        "off", "on: compare a checksum of each KV page at both ends of a transfer; the same in the whole fleet, off with --tp"
    )

    @property
    def routers(self) -> tuple[str, ...]:
        """The control address of each router."""
        return tuple(address.strip() for address in self.router.split(","))

    @property
    def drafting(self) -> Drafting | None:
        """How tokens are drafted; None: they are not. Raises ConfigError."""
        return parse_drafting(
            self.speculative_config,
            self.speculative_algorithm,
            self.speculative_num_draft_tokens,
            self.speculative_draft_model_path,
        )

    @property
    def ranks(self) -> range:
        """Those that this command starts."""
        return parse_ranks(self.rank, self.tp)

    def __post_init__(self) -> None:
        self._check_ranks()
        _ = self.drafting
        for address in self.routers:
            check_address(address)
        require(len(set(self.routers)) == len(self.routers), "router", "addresses that differ", self.router)
        require_between(self, 0, MOST_PORT, "inbox_port")
        require_at_least(self, max_waiting=1, drain_timeout_s=0, step_limit_s=0)
        require_between(self, 0.001, MOST_SECONDS, "max_request_timeout_s")
        require_above_0(self, "startup_timeout_s")
        require_choices(self)

    def _check_ranks(self) -> None:
        require_between(self, 1, MOST_RANKS, "tp")
        if self.tp == 1:
            refuse_without_effect(self, ("all_reduce",), "without --tp")
        require(self.tp == 1 or self.verify_pages == "off", "verify-pages", "off with --tp above 1", self.verify_pages)
        if len(self.ranks) == self.tp:
            refuse_without_effect(self, ("leader",), "where one command starts all ranks")
        if self.ranks[0] > 0:
            refuse_without_effect(self, ("inbox_port",), "without rank 0")
            where = f"the address where rank 0 listens, because --rank {self.rank} starts other ranks"
            require(self.leader != "", "leader", where, self.leader)
        if self.leader:
            check_leader(self.leader, self.host)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The router: its HTTP side and the control port where the fleet meets."""

    host: str = option("127.0.0.1", "address to listen on, for HTTP and control")
    port: int = option(8000, "HTTP port; 0: pick a free one and print it")
    control_port: int = option(8001, "port where instances register; 0: pick a free one and print it")
    share_port: Switch = option(
        "off", "on: several routers of this host share --port: the kernel deals out connections; each also has an --own-port"
    )
    own_port: int = option(
        0, "with --share-port: HTTP port of this router alone, to scrape its /metrics; 0: pick a free one and print it"
    )
    grpc_port: str = option(
        "",
        f"port for gRPC beside HTTP: SGLang's scheduler service (needs {install_command('grpc')}); 0: pick a free one and "
        "print it; without it: no gRPC",
        metavar="PORT",
    )
    max_requests: int = option(1024, "most requests in the system at once; more get status 429")
    default_max_tokens: int = option(0, "most answer tokens of a chat request that sets no limit; 0: what the context leaves")
    max_body: str = option("16MiB", "largest HTTP request body")
    heartbeat_s: float = option(
        0.5, "seconds between an instance's reports to the router; a router of more than 1,000 reports a second asks for fewer"
    )
    dead_after_s: float = option(3.0, "seconds of silence after which an instance counts as dead")
    request_timeout_s: float = option(
        1800.0, "seconds that a request may take when it does not ask for less or more with `timeout`"
    )
    max_request_timeout_s: float = option(DAY_S, "most seconds that a request may ask for")
    drain_timeout_s: float = option(30.0, "seconds that open requests may go on when the router is told to stop")
    max_attempts: int = option(16, "most attempts for one request when instances fail; preemption for memory does not count")
    keep_alive_s: float = option(
        15.0, "seconds of silence after which an event stream gets a comment line, so that no proxy closes it; 0: never"
    )
    resume_wait_s: float = option(5.0, "seconds that a started request waits for an instance when none is left")
    detokenizers: int = option(1, "detokenizer processes, which share the answers; one takes 55,000 to 110,000 tokens/s")
    peers_per_instance: int = option(
        64, "decode instances that a prefill instance links to, where there are more; 0: to all of them"
    )
    chat_template: str = option("", "jinja file of the chat template, or the template itself; without it: the model's own")
    tool_parser: ToolParserName = option(
        "auto",
        "how the model writes tool calls, by the names of vLLM and SGLang; auto: what the chat template shows; none: tools are "
        "refused",
    )
    reasoning_parser: ReasoningParserName = option(
        "auto",
        "what the model writes between certain marks is sent as reasoning: think, or a name of vLLM's or SGLang's; auto: the "
        "marks that the chat template has; none: it is content",
    )
    pooling: PoolingName = option(
        "auto",
        "what /v1/embeddings makes of the hidden states of a prompt: last: its last token's; mean: the mean of all; cls: its "
        "first token's; auto: what the checkpoint's sentence-transformers files (modules.json) say, otherwise none: it is "
        "refused. Embeddings are scaled to length 1, unless these files leave that out",
    )
    dispatch: Dispatch = option(
        "auto",
        "auto: use prefill and decode instances; colocated: decode instances do both; conditional: a decode instance does both "
        "where that costs less time, for it or for others, which it mostly does when it has most of the prompt in its cache",
    )
    prefill_policy: PolicyName = option(
        "least_loaded",
        "which prefill instance gets a request; round_robin: each in turn; least_loaded: of eight random ones; power_of_two: "
        "the same of two; session: always the same one for the requests of a session, the least loaded for those without one; "
        "cache_aware: where it takes the least time, with what is queued and what is in whose prefix cache",
    )
    decode_policy: PolicyName = option("least_loaded", "which decode instance gets a request: see --prefill-policy")
    session_header: str = option("X-Session-Id", "HTTP header by which the policy session knows the requests of a session")
    store: str = option(
        "",
        "file in which responses (`store`, `background`), files and batches are kept, made if it is not there; routers of one "
        "host may share it; without it: nothing is kept, and what needs it is refused",
    )
    store_bytes: str = option(
        "1GiB", "size limit of the store; when it is full, the oldest idle object of the key that uses most is deleted"
    )
    store_age_s: float = option(30 * DAY_S, "seconds after which an object in the store is deleted")
    batch_requests: int = option(16, "most lines of batches that the router has open at once, which keys share")
    early_rejection: Switch = option(
        "on",
        "on: a request whose first token is predicted to come after its time limit gets status 429 at once, and Retry-After says "
        "when it would fit; off: it waits until its time is over",
    )
    metric_aliases: MetricAliasNames = option(
        "none", "whose names figures of /metrics have beside their own, so that dashboards for vLLM or SGLang show this fleet"
    )
    access_log: Switch = option("off", "on: a line of the log for each HTTP request and gRPC call, whatever --log-level is")
    otlp_endpoint: str = option(
        "",
        "URL of an OpenTelemetry collector, such as http://127.0.0.1:4318, which gets spans of each request by OTLP over HTTP "
        f"(needs {install_command('otlp')}); the SDK's OTEL_* variables apply too; without it: no spans",
    )

    def __post_init__(self) -> None:
        require_between(self, 0, MOST_PORT, "port", "control_port", "own_port")
        require(self.share_port == "on" or self.own_port == 0, "own-port", "0 without --share-port", self.own_port)
        is_port = self.grpc_port.isdecimal() and int(self.grpc_port) <= MOST_PORT
        require(not self.grpc_port or is_port, "grpc-port", f"between 0 and {MOST_PORT}", self.grpc_port)
        require_at_least(self, max_requests=1, default_max_tokens=0, max_attempts=1, peers_per_instance=0)
        require_at_least(self, drain_timeout_s=0, keep_alive_s=0, resume_wait_s=0)
        require_between(self, 1, 64, "detokenizers")
        require_between(self, 0.001, MOST_SECONDS, "heartbeat_s", "dead_after_s", "max_request_timeout_s")
        require(self.dead_after_s > 2 * self.heartbeat_s, "dead-after-s", "more than two heartbeats", self.dead_after_s)
        limit_s = self.max_request_timeout_s
        rule = f"above 0 and at most --max-request-timeout-s ({limit_s:g})"
        require(0 < self.request_timeout_s <= limit_s, "request-timeout-s", rule, self.request_timeout_s)
        require(parse_bytes(self.max_body, "max-body") is not None, "max-body", "an amount such as 16MiB", self.max_body)
        require_choices(self)
        name = "the name of an HTTP header, such as X-Session-Id"
        require(_HEADER_NAME.fullmatch(self.session_header) is not None, "session-header", name, self.session_header)
        require(
            parse_bytes(self.store_bytes, "store-bytes") is not None, "store-bytes", "an amount such as 1GiB", self.store_bytes
        )
        require_at_least(self, batch_requests=1)
        require_above_0(self, "store_age_s")
        if not self.store:
            refuse_without_effect(self, ("store_bytes", "store_age_s", "batch_requests"), "without --store")
        if not self.uses("session"):
            refuse_without_effect(self, ("session_header",), "without a policy `session`")
        is_url = _OTLP_URL.fullmatch(self.otlp_endpoint) is not None
        require(not self.otlp_endpoint or is_url, "otlp-endpoint", "http://host:port or https://host:port", self.otlp_endpoint)
        if self.dispatch == "colocated":
            refuse_without_effect(self, ("prefill_policy",), "with --dispatch colocated: no prefill instance is asked")

    def uses(self, policy: PolicyName) -> bool:
        """Whether one of the roles is chosen by this policy."""
        return policy in (self.prefill_policy, self.decode_policy)

    @property
    def needs_caches(self) -> bool:
        """Whether requests go where their prompts are cached, so that instances must tell of their prefix caches."""
        return self.uses("cache_aware") or self.dispatch == "conditional"

    @property
    def sessions_by(self) -> str:
        """The HTTP header that names a request's session; "": no policy asks for it."""
        return self.session_header if self.uses("session") else ""


@dataclass(frozen=True, kw_only=True)
class SecurityConfig:
    """Who may talk to the processes of a fleet."""

    cluster_key: str = option(
        "", "file with the fleet's key, made by `launch key FILE`; without one, only loopback addresses are used"
    )
    insecure: Switch = option(
        "off",
        "on: use other addresses without keys too, so that whoever reaches a port can use it: HTTP without --api-keys, "
        "control without --cluster-key",
    )

    def __post_init__(self) -> None:
        require_choices(self)


@dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """Who may use the router's HTTP API."""

    api_keys: str = option(
        "",
        "file with the API keys: in each line a name, a space and a key; without it, only loopback is served, to everybody",
    )
    control_key: str = option(
        "", "file with the key for /cluster, made by `launch key FILE`; required with --api-keys; without it, /cluster is open"
    )
    tls_cert: str = option("", "file with the certificate (and its chain) for HTTPS, as PEM; without it: plain HTTP")
    tls_key: str = option("", "file with the certificate's private key, as PEM")
    allow_origin: tuple[str, ...] = option(
        (),
        "where web pages that use the API are from, such as https://chat.example.com; * with --api-keys: from anywhere; without "
        "it: from this router only",
    )

    def __post_init__(self) -> None:
        for origin in self.allow_origin:
            rule = "scheme://host or scheme://host:port in small letters, such as https://chat.example.com"
            require(origin == "*" or _ORIGIN.fullmatch(origin) is not None, "allow-origin", rule, origin)
        some = "origins by name without --api-keys, because any page could use the fleet"
        require(self.api_keys != "" or "*" not in self.allow_origin, "allow-origin", some, "*")
        made = "given with --api-keys: make one with `launch key FILE`"
        require(not self.api_keys or self.control_key != "", "control-key", made, self.control_key)
        require(not self.tls_cert or self.tls_key != "", "tls-key", "given with --tls-cert", self.tls_key)
        require(not self.tls_key or self.tls_cert != "", "tls-cert", "given with --tls-key", self.tls_cert)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a process logs."""

    log_level: LogLevel = option("info", "lowest level that is logged, to stderr")
    log_format: LogFormat = option("text", "how lines of the log are written; json: each is one JSON object")

    def __post_init__(self) -> None:
        require_choices(self)


def parse_ranks(text: str, ranks: int) -> range:
    """The ranks of "2" or "0-3"; "": all. ranks: of the instance. Raises ConfigError."""
    first, _, last = text.partition("-") if text else ("0", "-", str(ranks - 1))
    valid = first.isdecimal() and (last or first).isdecimal() and int(first) <= int(last or first) < ranks
    require(valid, "rank", f"one rank or a range such as 0-1, all below --tp {ranks}", text)
    return range(int(first), int(last or first) + 1)


CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}
"""A GPU needs thousands of tokens in a forward to be busy; on a CPU, shorter chunks overlap better with pushes."""


MAX_RUNNING = {"cpu": 64, "cuda": 256}


def with_step_size(engine: EngineConfig, kind: Literal["cpu", "cuda"]) -> EngineConfig:
    """The config with numbers where it says 0. kind: of the device."""
    return dataclasses.replace(
        engine,
        chunk_tokens=engine.chunk_tokens or CHUNK_TOKENS[kind],
        max_running=engine.max_running or MAX_RUNNING[kind],
    )


def shares_gpu(engine: EngineConfig, kind: str) -> bool:
    """Whether other instances are on its GPU, as --sharers says. kind: of the device."""
    return kind == "cuda" and engine.sharers > 1


def step_limit_of(instance: InstanceConfig, engine: EngineConfig, kind: str) -> float:
    """Seconds that a step may take that computes prompts; math.inf: there is no limit. kind: of the device."""
    return instance.step_limit_s or (SHARED_STEP_S if shares_gpu(engine, kind) else math.inf)
