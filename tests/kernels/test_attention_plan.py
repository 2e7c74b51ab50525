"""Launch shapes and splits of the attention kernels."""

from itertools import product

import pytest

from paged_kernels import attention_plan, launch_table
from paged_kernels.attention_plan import count_splits, launch_shape, prefix_tile
from paged_kernels.launch_table import Tile, TuningKey

LLAMA = dict(head_dim=128, itemsize=2, group=4, quantized=False, num_kv_heads=8, multiprocessors=132)


def shape_of(chip="sm_90", **changes):
    properties = {**LLAMA, "num_tokens": 64, "max_query_len": 1, **changes}
    return launch_shape(chip=chip, **properties)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("group", [1, 3, 8, 16, 48, 71])
def test_tiles_hold_the_rows_of_their_launch_shape(group, itemsize):
    for max_query_len in (1, 2, 5, 512):
        shape = shape_of(group=group, itemsize=itemsize, max_query_len=max_query_len, num_tokens=4096)
        assert 1 <= shape.heads <= min(group, shape.small.block_m)
        assert shape.large is None or shape.large.block_m in (16, 64, 128)
        assert shape.large or max_query_len * shape.heads <= shape.small.block_m
        assert max_query_len > 1 or shape.large is None


def test_large_tiles_are_used_for_long_chunks():
    assert shape_of(max_query_len=2048, num_tokens=4096).large.block_m == 128
    assert (
        shape_of(max_query_len=256, num_tokens=256).large.block_m == 64
    )  # 64 programs of 128 rows would idle half of 132
    assert shape_of(max_query_len=2048, num_tokens=4096).small.block_m == 16  # for the decode rows beside the chunk


@pytest.mark.parametrize("multiprocessors", [108, 132, 148, 304])
def test_number_of_splits_fills_the_device(multiprocessors):
    for rows in (1, 4, 16, 17, 64, 256):
        for length in (1, 200, 512, 4096, 32768, 131072):
            splits = count_splits(rows * 8, length, multiprocessors)
            shortest = attention_plan.min_split_of(rows * 8, multiprocessors)
            most = max(1, min(attention_plan.MAX_SPLITS, launch_table.power_of_two(length) // shortest))
            assert 1 <= splits <= most

            def occupancy(s, rows=rows):
                return rows * 8 * s / (multiprocessors * -(-rows * 8 * s // multiprocessors))

            assert occupancy(splits) >= 0.9 * max(occupancy(s) for s in range(1, most + 1))
    assert count_splits(256 * 8, 8192, multiprocessors) == 1


def test_few_programs_get_short_splits():
    assert count_splits(8, 384, 132) == 8
    assert count_splits(16 * 8, 384, 132) == 1


def test_slightly_more_programs_than_multiprocessors_are_split():
    splits = count_splits(136, 8192, 132)
    assert 136 * splits / (132 * -(-136 * splits // 132)) > 0.85


def test_lengths_of_one_bucket_have_the_same_number_of_splits():
    assert len({count_splits(8, length, 132) for length in range(4097, 8193, 64)}) == 1


def test_prefix_tiles_fit_the_number_of_rows():
    properties = dict(chip="sm_90", head_dim=128, itemsize=2, group=4, quantized=False)
    assert prefix_tile(**properties, num_seqs=8).block_m == 64
    assert prefix_tile(**properties, num_seqs=64).block_m == 128
    assert prefix_tile(**{**properties, "group": 71, "itemsize": 4}, num_seqs=64).block_m == 16


def test_table_in_use_determines_the_launch_shape(tables):
    chunk = dict(max_query_len=2048, num_tokens=4096)
    small = shape_of("sm_91")
    key = TuningKey(128, 2, 16, False, 8192)
    launch_table.use_table(launch_table.Table("sm_91", {key: Tile(64, 128, 2, 5)}))
    shape = shape_of("sm_91", **chunk)
    assert shape.large == Tile(64, 128, 2, 5)
    assert shape.small == small.small
    assert shape_of("sm_91") == small  # decode rows alone


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_decode_tiles_are_the_same_on_all_nvidia_chips(chip):
    """They were measured on an H100 (sm_90), where they differ from the best by 0.1% for contexts of 8,192. On the
    other chips they are an assumption."""
    small = shape_of(chip).small
    assert small[:3] == (16, 64, 4)
    assert small.num_stages in (3, 4)


def test_decode_tiles_fit_into_the_shared_memory_of_small_chips():
    """A stage holds keys and values. Compiled code needs more, which the tests of `aot` measure."""
    for group, head_dim, quantized, itemsize in product((1, 4, 32, 64), (16, 64, 128, 256), (False, True), (2, 4)):
        small = shape_of(group=group, head_dim=head_dim, quantized=quantized, itemsize=itemsize).small
        step = 2 * small.block_n * head_dim * (1 if quantized else itemsize)
        assert small.num_stages * step <= 99 * 1024, (group, head_dim, quantized, itemsize)
