"""A double of FlashInfer's wrappers: what their documentation says, in plain torch on any device, and a record of every call.

Owns the checks of what the real ones require and mostly do not check: where index pointers lie, dtypes, strides, and the rules of
CUDA graphs. In graph mode `run` reads nothing but the persistent buffers and has static shapes, so a recording can replay it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Views = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of `owner.name`, its first argument left out where that is the wrapper."""

    owner: str
    name: str
    args: tuple[object, ...]
    kwargs: dict[str, object]


def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def recording(self: "_Wrapper", *args: Any, **kwargs: Any) -> Any:
        self.calls.append(Call(type(self).__name__, method.__name__, args, kwargs))
        return method(self, *args, **kwargs)

    return recording


class FlashInferDouble:
    """Stands in for the module `flashinfer`. dtypes: of queries. The real one lacks float32, in which tests compare tokens."""

    def __init__(self, dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)) -> None:
        self.calls: list[Call] = []
        self._dtypes = dtypes

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> "_Wrapper":
        return self._made(BatchPrefillWithPagedKVCacheWrapper, args, kwargs)

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> "_Wrapper":
        return self._made(BatchDecodeWithPagedKVCacheWrapper, args, kwargs)

    def fast_decode_plan(self, wrapper: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append(Call("", "fast_decode_plan", (wrapper, *args), kwargs))
        wrapper.fast_plan(*args, **kwargs)

    def _made(self, kind: "Callable[..., _Wrapper]", args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Wrapper":
        self.calls.append(Call(kind.__name__, "__init__", args, kwargs))
        return kind(self.calls, self._dtypes, *args, **kwargs)


class _Wrapper:
    """What both wrappers have in common. indptr, last_page_len, indices: the lists on the device, as kernels read them."""

    indptr: Tensor
    last_page_len: Tensor
    indices: Tensor

    def __init__(self, calls: list[Call], dtypes: tuple[torch.dtype, ...], workspace: Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8 and workspace.ndim == 1 and not workspace[:4096].any(), "it begins zeroed"
        assert kv_layout == "HND"
        self.calls, self.query_dtypes, self.device, self.planned = calls, dtypes, workspace.device, False
        self.is_graph, self.causal = False, False
        self.backend = "fa2"
        self.schedule = torch.zeros(1, dtype=torch.uint8, device=self.device)
        self._mark = len(calls) % 255 + 1

    def _lists(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int, seq_lens: Tensor | None = None
    ) -> None:
        """The lists of pages, on the host where `plan` reads them and on the device where kernels do. seq_lens: what they say."""
        for on_host in (indptr, last_page_len):
            assert on_host.device.type == "cpu" and on_host.dtype == torch.int32, "plan would wait for the device"
        assert indices.device == self.device and indices.dtype == torch.int32 and indices.is_contiguous()
        assert len(indptr) == len(last_page_len) + 1 and indptr[0] == 0
        assert bool((indptr[1:] > indptr[:-1]).all()), "each row has pages"
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        assert len(indices) == int(indptr[-1])
        if seq_lens is not None:
            assert seq_lens.device.type == "cpu" and seq_lens.dtype == torch.int32
            assert seq_lens.tolist() == ((indptr.diff() - 1) * page_size + last_page_len).tolist()

    def _settings(
        self, heads: int, kv_heads: int, dim: int, page_size: int, window_left: int, softcap: float | None, scale: float | None
    ) -> None:
        assert heads % kv_heads == 0 and dim in (64, 128, 256)
        assert window_left >= -1 and (softcap is None or softcap > 0)
        self.shape = (heads, kv_heads, dim, page_size)
        self.window_left, self.softcap = window_left, softcap
        self.scale = dim**-0.5 if scale is None else scale
        self.planned = True
        self.schedule[:1].fill_(self._mark)

    def _dtypes(self, query: torch.dtype | str | None, kv: torch.dtype | None) -> None:
        assert query in self.query_dtypes, "there are no kernels for others"
        assert kv == query or (kv == torch.float8_e4m3fn and self.backend == "fa2"), "FA3 reads pages of the queries' dtype only"
        self.dtypes = (query, kv)

    def _run(self, query: Tensor, views: Views, out: Tensor | None, queries: Tensor) -> Tensor:
        """queries: [rows + 1], where each row's queries begin."""
        assert self.planned
        heads, kv_heads, dim, page_size = self.shape
        keys, values = views
        assert query.shape[1:] == (heads, dim) and query.stride(-1) == 1
        assert (query.dtype, keys.dtype) == self.dtypes and values.dtype == keys.dtype
        assert keys.shape == values.shape == (len(keys), kv_heads, page_size, dim)
        assert keys.stride() == values.stride() and keys.stride(-1) == 1
        assert out is not None and out.shape == query.shape and out.dtype == query.dtype and out.is_contiguous()
        lists = (queries, self.indptr, self.indices, self.last_page_len)
        out.copy_(attended(query, keys, values, *lists, self.causal, self.window_left, self.softcap, self.scale))
        return out.masked_fill_(self.schedule[:1] != self._mark, torch.nan)  # it would follow another wrapper's schedule


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        calls: list[Call],
        dtypes: tuple[torch.dtype, ...],
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(calls, dtypes, float_workspace_buffer, kv_layout)
        assert backend in ("fa2", "fa3"), "what auto takes changes from version to version"
        self.backend = backend

    @recorded
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        assert qo_indptr.device.type == "cpu" and qo_indptr.dtype == torch.int32 and len(qo_indptr) == len(paged_kv_indptr)
        self._lists(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, seq_lens)
        self._settings(num_qo_heads, num_kv_heads, head_dim_qk, page_size, window_left, logits_soft_cap, sm_scale)
        self._dtypes(q_data_type, kv_data_type)
        self.causal = causal
        self.queries, self.indices = qo_indptr.to(self.device), paged_kv_indices
        self.indptr, self.last_page_len = paged_kv_indptr.to(self.device), paged_kv_last_page_len.to(self.device)

    @recorded
    def run(self, q: Tensor, paged_kv_cache: Views, *, out: Tensor | None = None) -> Tensor:
        assert len(q) == int(self.queries[-1])
        return self._run(q, paged_kv_cache, out, self.queries)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        calls: list[Call],
        dtypes: tuple[torch.dtype, ...],
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(calls, dtypes, float_workspace_buffer, kv_layout)
        self.use_tensor_cores, self.is_graph = use_tensor_cores, use_cuda_graph
        assert backend == "fa2", "what auto takes changes from version to version"
        if use_cuda_graph:
            buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            given = [buffer for buffer in buffers if buffer is not None]
            assert all(b.dtype == torch.int32 and b.device == self.device and b.is_contiguous() for b in given)
            self.indptr_buffer, self.indices_buffer, self.last_buffer = given
            assert len(self.indptr_buffer) == len(self.last_buffer) + 1

    @recorded
    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        assert int_workspace_buffer.dtype == torch.uint8 and int_workspace_buffer.device == self.device
        self.schedule = int_workspace_buffer

    @recorded
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        self._lists(indptr, indices, last_page_len, page_size, seq_lens)
        self._settings(num_qo_heads, num_kv_heads, head_dim, page_size, window_left, logits_soft_cap, sm_scale)
        self._dtypes(q_data_type, kv_data_type)
        if not self.use_tensor_cores:
            assert num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8), "the kernel is compiled for these"
        if self.is_graph:
            self._fits(indices, last_page_len)
            self.indptr_buffer.copy_(indptr)
            self.last_buffer.copy_(last_page_len)
            self.indices_buffer[: len(indices)].copy_(indices)
            self.indptr, self.last_page_len, self.indices = self.indptr_buffer, self.last_buffer, self.indices_buffer
        else:
            self.indptr, self.last_page_len, self.indices = indptr.to(self.device), last_page_len.to(self.device), indices
        self.queries = torch.arange(len(indptr), dtype=torch.int32, device=self.device)

    def fast_plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        *shape: int,
        global_override_indptr_cpu: Tensor,
        **named: Any,
    ) -> None:
        """Copies none of the lists: in graph mode they must be in the buffers."""
        assert self.planned and self.is_graph, "it uses the kernels that plan has loaded"
        self._lists(global_override_indptr_cpu, indices, last_page_len, shape[3])
        self._fits(indices, last_page_len)
        assert indptr.data_ptr() == self.indptr_buffer.data_ptr() and torch.equal(indptr.cpu(), global_override_indptr_cpu)
        assert torch.equal(self.last_buffer.cpu(), last_page_len)
        assert indices.data_ptr() == self.indices_buffer.data_ptr()
        self._dtypes(named["q_data_type"], named["kv_data_type"])
        assert shape == self.shape and named["window_left"] == self.window_left and named["logits_soft_cap"] == self.softcap
        self.schedule[:1].fill_(self._mark)

    def _fits(self, indices: Tensor, last_page_len: Tensor) -> None:
        assert len(last_page_len) == len(self.last_buffer), "the batch size is constant"
        assert len(indices) <= len(self.indices_buffer)

    @recorded
    def run(self, q: Tensor, paged_kv_cache: Views, *, out: Tensor | None = None) -> Tensor:
        assert len(q) == len(self.last_page_len)
        return self._run(q, paged_kv_cache, out, self.queries)


def attended(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    queries: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    causal: bool,
    window_left: int,
    softcap: float | None,
    scale: float,
) -> Tensor:
    """From the definition in float64, over every slot of every listed page at once; each query sees those of its row.

    query: [tokens, heads, dim]. keys, values: [pages, kv_heads, page_size, dim]. queries: [rows + 1], where each row's queries
    begin. indptr: [rows + 1], indices, last_page_len: [rows], the lists of pages. Returns the shape of query in float64.
    """
    heads, kv_heads, page_size = query.shape[1], keys.shape[1], keys.shape[2]
    rows, device = len(last_page_len), query.device
    entry = torch.arange(len(indices), device=device)
    owner = torch.searchsorted(indptr[1:].contiguous(), entry, right=True)
    row = owner.clamp(max=rows - 1)
    lengths = (indptr[1:] - indptr[:-1] - 1) * page_size + last_page_len
    position = ((entry - indptr[row]) * page_size)[:, None] + torch.arange(page_size, device=device)
    is_kv = ((owner < rows)[:, None] & (position < lengths[row][:, None])).flatten()
    at = torch.arange(len(query), device=device)
    query_row = torch.searchsorted(queries[1:].contiguous(), at, right=True)
    own = lengths[query_row] - (queries[query_row + 1] - at)  # a row's queries are its last tokens
    sees = is_kv & (owner[:, None].expand(-1, page_size).flatten() == query_row[:, None])
    if causal:
        sees &= position.flatten() <= own[:, None]
    if window_left >= 0:
        sees &= position.flatten() >= own[:, None] - window_left
    head = torch.arange(heads, device=device) // (heads // kv_heads)
    key, value = (torch.where(is_kv[:, None, None], _slots(view, indices), 0.0)[:, head] for view in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    is_nan = value.isnan().flatten(1).any(1)  # a row that reads one spoils itself only
    out = torch.einsum("hqk,khd->qhd", weights, value.masked_fill(is_nan[:, None, None], 0.0))
    return out.masked_fill_((sees & is_nan).any(1)[:, None, None], torch.nan)


def _slots(view: Tensor, indices: Tensor) -> Tensor:
    """[slots of all listed pages, kv_heads, dim] float64."""
    picked = view.view(torch.uint8) if view.itemsize == 1 else view
    return picked[indices.long()].transpose(1, 2).flatten(0, 1).view(view.dtype).double()
