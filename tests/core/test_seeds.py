"""Streams are named by (seed, purpose, client, round), and stay the same for ever."""

from __future__ import annotations

import torch

from fedkeep.core.seeds import generator, numpy_generator, stream


def test_streams_differ_by_every_part_of_the_name() -> None:
    names = [
        (0, "batches", "a", 0),
        (1, "batches", "a", 0),
        (0, "noise", "a", 0),
        (0, "batches", "b", 0),
        (0, "batches", "a", 1),
        (0, "batchesa", "", 0),
        (0, "batches", "a0", 0),
        (0, "batches", "", 0),
        (10, "batches", "", 0),
        (1, "0batches", "", 0),
    ]
    assert len({stream(*name) for name in names}) == len(names)
    assert len({int(generator(*name).initial_seed()) for name in names}) == len(names)
    assert len({int(numpy_generator(*name).integers(2**62)) for name in names}) == len(names)


def test_a_stream_is_fixed_for_ever() -> None:
    # Numbers of earlier versions: if they change, no earlier run can be resumed or repeated.
    assert stream(0, "cohort") == 3296607877585955954
    assert stream(7, "batches/0", "user-é", 12) == 231592194740252113
    assert 0 <= stream(0, "cohort") < 2**63


def test_a_generator_starts_anew_at_every_call() -> None:
    first = torch.randn(4, generator=generator(1, "x", "c", 2))
    assert torch.equal(first, torch.randn(4, generator=generator(1, "x", "c", 2)))
    assert list(numpy_generator(1, "x").permutation(9)) == list(numpy_generator(1, "x").permutation(9))


def test_drawing_leaves_the_global_generators_alone() -> None:
    before = torch.random.get_rng_state()
    torch.randn(3, generator=generator(0, "x"))
    assert torch.equal(before, torch.random.get_rng_state())
