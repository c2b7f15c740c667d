"""A mixture of experts in place of a decoder layer's mlp: for each token the few mlps that a router chooses (Mixtral, Qwen3-MoE).

Owns the router, the weights of the experts, and the order in which pairs of a token and an expert are computed. Knows nothing of
attention, pages or files. The pairs are sorted by expert, so that those of one expert lie side by side:

    tokens                0        1        2
    chosen experts        3 1      0 3      1 3
    pairs, sorted         1:0 | 0:1 2:1 | | 0:3 1:3 2:3         token:expert; nobody chose expert 2
    ends                  1     3         3             6

Each of several ranks has some of the experts, and computes their pairs. It sorts those of the others behind them, and does not
compute these. So shapes do not depend on what is chosen. On the second of two ranks:

    pairs, sorted         | 0:3 1:3 2:3 | 1:0 0:1 2:1
    ends                  0             3

Sources: Shazeer et al. 2017, Jiang et al. 2024 (Mixtral of Experts), Qwen3 technical report 2025.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import ConfigError
from engine.models.decoder import Mlp, gated_mlp
from engine.models.shape import ExpertShape, ModelShape, Share
from engine.models.weights import Cut, Stored, WeightSlots
from engine.torch_kernels import Kernels

Products = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The products of pairs [pairs, inputs], weights [experts, outputs, inputs] and ends [experts] int32: [pairs, outputs]. What is
behind the last end may be anything."""

_ALIGNED_BYTES = 16
"""What the kernel of `grouped` wants each row of its operands to be a multiple of."""
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MIXTRAL_EXPERT = re.compile(r"(.+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")
_FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(slots=True)
class MixtureOfExperts:
    """The experts of one layer that this rank has, and the router over all of them."""

    router: Tensor
    """[experts, hidden]."""
    gate_up: Tensor
    """[experts here, 2 * intermediate, hidden], the gate first."""
    down: Tensor
    """[experts here, hidden, intermediate]."""
    chosen: int
    """How many experts compute a token."""
    normalised: bool
    """Whether their weights are scaled to a sum of 1."""
    products: Products
    kernels: Kernels
    first: int = 0
    """Which expert is the first one here."""

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] → [tokens, hidden], of the experts here."""
        here = range(self.first, self.first + len(self.gate_up))
        routing = self.kernels.route(F.linear(x, self.router), self.chosen, here, normalised=self.normalised)
        inner = self.kernels.silu_and_mul(self.products(x[routing.tokens], self.gate_up, routing.ends))
        return self.kernels.combine(self.products(inner, self.down, routing.ends), routing)


def grouped(pairs: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """All experts in one kernel, which finds their pairs on the device. It waits for nothing."""
    return F.grouped_mm(pairs, weights.transpose(-2, -1), offs=ends)


def one_by_one(pairs: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """One product for each expert that somebody chose. It waits for the device, to know which."""
    out, begin = pairs.new_empty(len(pairs), weights.shape[1]), 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            out[begin:end] = F.linear(pairs[begin:end], weights[expert])
        begin = end
    return out


def why_not_grouped(shape: ModelShape, experts: ExpertShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `grouped` would wait for the host, or fail; None: it does neither.

    Its kernel is for bfloat16 on compute capability 9.x and 10.x (aten/src/ATen/native/cuda/GroupedBlas.cpp, torch 2.10 to 2.13);
    for all else torch reads the ends on the host.
    """
    if device.type != "cuda":
        return f"grouped products are for CUDA, not for {device}"
    if dtype != torch.bfloat16:
        return f"grouped products are for bfloat16, not for {dtype}"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (9, 10):
        return f"grouped products are for GPUs of compute capability 9.x and 10.x; {device} has {major}.{minor}"
    for size in (shape.hidden, experts.intermediate):
        if size * dtype.itemsize % _ALIGNED_BYTES:
            return (
                f"grouped products are for sizes that are multiples of {_ALIGNED_BYTES} bytes; one of this model is {size} items"
            )
    return None


def mlp_of_layer(
    shape: ModelShape,
    experts: ExpertShape,
    share: Share,
    slots: WeightSlots,
    kernels: Kernels,
    products: Products,
    number: int,
) -> Mlp:
    """The mlp of layer `number`: a mixture, or a dense one where the shape says so. Names are those of `with_one_spelling`."""
    if number not in experts.layers:
        return gated_mlp(shape, share, slots, number)
    prefix, inner, here = f"model.layers.{number}.mlp.", experts.intermediate, share.experts
    gates, downs = (
        [f"{prefix}experts.{expert}.{name}.weight" for expert in here for name in names]
        for names in (("gate_proj", "up_proj"), ("down_proj",))
    )
    made = MixtureOfExperts(
        router=slots.tensor(prefix + "gate.weight", experts.experts, shape.hidden),
        gate_up=slots.empty(len(here), 2 * inner, shape.hidden, names=gates),
        down=slots.empty(len(here), shape.hidden, inner, names=downs),
        chosen=experts.chosen,
        normalised=experts.normalised,
        products=products,
        kernels=kernels,
        first=here.start,
    )
    for expert in range(experts.experts):
        place = here.index(expert) if expert in here else 0
        gate_up, down = made.gate_up[place], made.down[place]
        for name, part in (("gate_proj", gate_up[:inner]), ("up_proj", gate_up[inner:]), ("down_proj", down)):
            weight = f"{prefix}experts.{expert}.{name}.weight"
            if expert in here:
                slots.expect(weight, part)
            else:
                slots.expect_elsewhere(weight, *part.shape)
    return (made,)


@dataclass(frozen=True, slots=True)
class _Inside:
    """Some rows of one expert, in a tensor of all experts: [experts, rows, inputs]. Implements `Stored`."""

    fused: Stored
    expert: int
    rows: slice

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.stop - self.rows.start, self.fused.shape[2]

    def __getitem__(self, cut: Cut) -> Tensor:
        return self.fused[slice(self.expert, self.expert + 1), self.rows][0][cut]


def spelling_of(name: str) -> tuple[str, str] | None:
    """Which weights of a layer's experts it is one of, and in which of three ways it is written. None: it is another weight."""
    if mixtral := _MIXTRAL_EXPERT.fullmatch(name):
        layer, _, part = mixtral.groups()
        return f"{layer}.mlp.experts.{'down' if part == 'w2' else 'gate_up'}", "mixtral"
    if fused := _FUSED.fullmatch(name):
        return f"{fused[1]}.{fused[2].removesuffix('_proj')}", "fused"
    if single := _EXPERT.fullmatch(name):
        return f"{single[1]}.{'down' if single[2] == 'down' else 'gate_up'}", "single"
    return None


def require_all_experts(weights: Mapping[str, Stored], experts: int) -> None:
    """Raises ConfigError for a tensor of all experts that lacks some."""
    for name, stored in weights.items():
        if _FUSED.fullmatch(name) and tuple(stored.shape[:1]) != (experts,):
            raise ConfigError(f"{name} has the shape {list(stored.shape)}, but by config.json there are {experts} experts")


def with_one_spelling(weights: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    """The weights of a checkpoint with Qwen3-MoE's names, one by one: Mixtral has other names, and transformers 5 may write all
    experts of a layer as one tensor."""
    for name, stored in weights:
        mixtral, fused = _MIXTRAL_EXPERT.fullmatch(name), _FUSED.fullmatch(name)
        if mixtral:
            layer, expert, part = mixtral.groups()
            yield f"{layer}.mlp.experts.{expert}.{_MIXTRAL[part]}.weight", stored
        elif fused and len(stored.shape) == 3:
            experts, rows, _ = stored.shape
            parts = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
            for part, held in parts.items() if fused[2] == "gate_up_proj" else [("down_proj", slice(0, rows))]:
                yield from ((f"{fused[1]}.{one}.{part}.weight", _Inside(stored, one, held)) for one in range(experts))
        else:
            yield name.replace(".block_sparse_moe.gate.", ".mlp.gate."), stored
