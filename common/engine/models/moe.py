"""A mixture of experts in place of a decoder layer's mlp: for each token the few mlps that a router chooses (Mixtral, Qwen3-MoE).

Owns the router, the weights of the experts, and the order in which pairs of a token and an expert are computed. Knows nothing of
attention, pages or files. The pairs are sorted by expert, so that those of one expert lie side by side:

    tokens                0        1        2
    chosen experts        3 1      0 3      1 3
    pairs, sorted         1:0 | 0:1 2:1 | | 0:3 1:3 2:3         token:expert; nobody chose expert 2
    ends                  1     3         3             6

Sources: Shazeer et al. 2017, Jiang et al. 2024 (Mixtral of Experts), Qwen3 technical report 2025.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.kernels.port import Kernels
from common.engine.models.decoder import Mlp, gated_mlp
from common.engine.models.shape import ExpertShape, ModelShape
from common.engine.models.weights import WeightSlots

Products = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of pairs [pairs, inputs], weights [experts, outputs, inputs] and ends [experts] int32: [pairs, outputs]."""

_ALIGNED_BYTES = 16
"""What the kernel of `grouped` wants each row of its operands to be a multiple of."""
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MIXTRAL_EXPERT = re.compile(r"(.+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(slots=True)
class MixtureOfExperts:
    """router: [experts, hidden]. gate_up: [experts, 2 * intermediate, hidden], the gate first. down: [experts, hidden,
    intermediate]. chosen: how many experts compute a token. normalised: whether their weights are scaled to a sum of 1."""

    router: Tensor
    gate_up: Tensor
    down: Tensor
    chosen: int
    normalised: bool
    products: Products
    kernels: Kernels

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        scores, experts = F.linear(x, self.router).softmax(-1, dtype=torch.float32).topk(self.chosen)
        if self.normalised:
            scores = scores / scores.sum(-1, keepdim=True)
        of_pair, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(of_pair, torch.arange(len(self.router), device=x.device), right=True, out_int32=True)
        inner = self.kernels.silu_and_mul(self.products(x[order // self.chosen], self.gate_up, ends))
        sorted_out = self.products(inner, self.down, ends)
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        return (out.view(len(x), self.chosen, -1) * scores[..., None]).sum(1).to(x.dtype)


def grouped(pairs: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """All experts in one kernel, which finds their pairs on the device. It waits for nothing."""
    return F.grouped_mm(pairs, weights.transpose(-2, -1), offs=ends)


def one_by_one(pairs: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """One product for each expert that somebody chose. It waits for the device, to know which."""
    outs, begin = [], 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            outs.append(F.linear(pairs[begin:end], weights[expert]))
        begin = end
    return torch.cat(outs)


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
    shape: ModelShape, experts: ExpertShape, slots: WeightSlots, kernels: Kernels, products: Products, number: int
) -> Mlp:
    """The mlp of layer `number`: a mixture, or a dense one where the shape says so. Names are those of `with_one_spelling`."""
    if number not in experts.layers:
        return gated_mlp(shape, slots, kernels, number)
    prefix, inner = f"model.layers.{number}.mlp.", experts.intermediate
    made = MixtureOfExperts(
        router=slots.tensor(prefix + "gate.weight", experts.experts, shape.hidden),
        gate_up=slots.empty(experts.experts, 2 * inner, shape.hidden),
        down=slots.empty(experts.experts, shape.hidden, inner),
        chosen=experts.chosen,
        normalised=experts.normalised,
        products=products,
        kernels=kernels,
    )
    for expert in range(experts.experts):
        name = f"{prefix}experts.{expert}."
        slots.expect(name + "gate_proj.weight", made.gate_up[expert, :inner])
        slots.expect(name + "up_proj.weight", made.gate_up[expert, inner:])
        slots.expect(name + "down_proj.weight", made.down[expert])
    return made


def with_one_spelling(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint with Qwen3-MoE's names, one by one: Mixtral has other names, and transformers 5 may write all
    experts of a layer as one tensor."""
    for name, tensor in weights:
        mixtral, fused = _MIXTRAL_EXPERT.fullmatch(name), _FUSED.fullmatch(name)
        if mixtral:
            layer, expert, part = mixtral.groups()
            yield f"{layer}.mlp.experts.{expert}.{_MIXTRAL[part]}.weight", tensor
        elif fused and fused[2] == "down_proj":
            yield from ((f"{fused[1]}.{expert}.down_proj.weight", one) for expert, one in enumerate(tensor))
        elif fused:
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                yield f"{fused[1]}.{expert}.gate_proj.weight", gate
                yield f"{fused[1]}.{expert}.up_proj.weight", up
        else:
            yield name.replace(".block_sparse_moe.gate.", ".mlp.gate."), tensor
