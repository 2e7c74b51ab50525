"""The benchmark of kernels. Measured times are not checked."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from paged_bench import kernels
from paged_bench._attention import (
    CONTESTANTS,
    NO_SHARED_PREFIX,
    UNQUANTIZED,
    AttentionInputs,
    Cell,
    contestants,
    error,
    targets,
)
from paged_bench.kernels import LINES
from paged_client.cli import main
from paged_kernels.cpu import native
from tests.support.records import records_of

# --- attention --------------------------------------------------------------------------------------------------------


def test_wrong_attention_output_is_detected():
    cell = Cell("decode", 3, 70, 1, 6, 2, 16, torch.float32, torch.float32)
    prepared = AttentionInputs(cell, torch.device("cpu"), 1 << 20)
    assert error(prepared, CONTESTANTS["paged"](prepared)(0).roll(1, 0)) > 0.1


# --- attention contestants --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"mixed": True}, {"pool": torch.int8}, {"query": 9, "context": 40}])
def test_all_attention_contestants_agree(change):
    half = torch.float32
    cell = replace(Cell("decode", 3, 70, 1, 6, 2, 16, half, half), **change)
    prepared = AttentionInputs(cell, torch.device("cpu"), 1 << 20)
    tried = [CONTESTANTS[who] for who in ("paged", "SDPA, contiguous", "gather + SDPA")]
    for make in tried if cell.pool == cell.dtype else [tried[0], tried[2]]:
        assert error(prepared, make(prepared)(0)) < 1e-4


def test_every_attention_target_has_a_baseline():
    """Targets that compare cells of the GPU grid: KV dtype, shared prefix and long context."""
    cells = kernels.grid(torch.device("cuda"), quick=False)
    aimed = {who: value for cell in cells for who, value in targets(cell).items()}
    assert aimed.keys() <= CONTESTANTS.keys()
    assert aimed[UNQUANTIZED] == 1.8
    for cell in cells:
        who = contestants(cell, torch.device("cuda"))
        assert (UNQUANTIZED in who) == (cell.pool != cell.dtype)
        assert (NO_SHARED_PREFIX in who) == (cell.shared > 0)
    (one,) = (cell for cell in cells if cell.shared and cell.batch == 64)
    assert targets(one)[NO_SHARED_PREFIX] == pytest.approx(0.7 * 8.0)  # the formula's 8 for 64 rows of 2,048 + 256
    long = [cell for cell in cells if cell.batch == 1 and cell.context == 32768 and cell.kind == "decode"]
    assert long and all(targets(cell)["vLLM"] == 1.15 for cell in long)


class PagedWrapper:
    """Attention with the arguments of FlashInfer's wrappers, for pages in the layout HND."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_tensor_cores=False):
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "HND"

    def run(self, q, paged_kv_cache):
        rows = []
        for index, last in enumerate(self.last.tolist()):
            pages = self.indices[self.indptr[index] : self.indptr[index + 1]].long()
            keys, values = (
                pool[pages].transpose(1, 2).flatten(0, 1)[: (len(pages) - 1) * self.page_size + last]
                for pool in paged_kv_cache
            )
            query = q[self.starts[index] : self.starts[index + 1]]
            group = query.shape[1] // keys.shape[1]
            scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(group, 1)) * query.shape[2] ** -0.5
            hidden = torch.ones(scores.shape[1:]).triu(len(keys) - len(query) + 1).bool()
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            rows.append(torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1)))
        return torch.cat(rows)

    def _plan(self, starts, indptr, indices, last, num_qo_heads, num_kv_heads, head_dim, page_size):
        assert (num_qo_heads, num_kv_heads, head_dim) == (6, 2, 16)
        self.starts, self.indptr, self.indices, self.last, self.page_size = starts, indptr, indices, last, page_size


class Decode(PagedWrapper):
    def plan(self, indptr, indices, last_page_len, *sizes, q_data_type, kv_data_type):
        self._plan(torch.arange(len(indptr)), indptr, indices, last_page_len, *sizes)


class Prefill(PagedWrapper):
    def plan(self, qo_indptr, indptr, indices, last_page_len, *sizes, causal, q_data_type, kv_data_type):
        assert causal
        self._plan(qo_indptr, indptr, indices, last_page_len, *sizes)


@pytest.mark.parametrize("change", [{}, {"mixed": True}, {"query": 9, "context": 40}, {"context": 64}])
def test_flashinfer_gets_the_same_pages(change, monkeypatch):
    module = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithPagedKVCacheWrapper=Prefill)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    cell = replace(Cell("decode", 3, 70, 1, 6, 2, 16, torch.float32, torch.float32), **change)
    prepared = AttentionInputs(cell, torch.device("cpu"), 1 << 20)
    call = CONTESTANTS["FlashInfer"](prepared)
    assert error(prepared, call(0)) < 1e-4


# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_kernels_benchmark(tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert main(["bench", "kernels", "--quick", "--only", "decode", "--json", str(file)]) == 0
    records = records_of(file)
    errors = {name: record for name, record in records.items() if name.endswith(": error")}
    assert len(errors) >= 1
    for record in errors.values():
        assert all(value < record["limit"] for value in (record["value"], *record["peers"].values()))
        assert "SDPA, contiguous" in record["peers"]
        if native.levels() and not torch.cuda.is_available():
            lower = {*native.levels(), "PyTorch"} - {native.level(), "amx_emulated"}
            assert {f"paged, {one}" for one in lower} <= record["peers"].keys()
    assert all(records[f"{name}, 16 tokens"]["value"] > 0 for name in LINES)
    if not torch.cuda.is_available():
        (cell,) = (name for name in records if name.startswith("decode") and ":" not in name)
        assert records[f"{cell}: flex_attention, contiguous"]["unit"] == "not measured: no GPU"
        assert records[cell]["limit"] == records["memory bandwidth"]["value"]
    assert "gather + SDPA" in capsys.readouterr().out
