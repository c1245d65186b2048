import numpy as np

from kvmosaic.layout.objects import compose
from kvmosaic.testing.fake_engine import MODELS, compute_pages, declare, digest_of


def test_pages_follow_from_digest_group_and_rank_and_from_nothing_else() -> None:
    digest, shape = digest_of(1, 0), (4, 64)
    pages = compute_pages(digest, 0, 0, shape)
    assert np.array_equal(pages, compute_pages(digest, 0, 0, shape))
    for other in (
        compute_pages(digest_of(1, 1), 0, 0, shape),
        compute_pages(digest_of(2, 0), 0, 0, shape),
        compute_pages(digest, 1, 0, shape),
        compute_pages(digest, 0, 1, shape),
    ):
        assert not np.array_equal(pages, other)


def test_every_model_composes_with_any_number_of_ranks() -> None:
    for model in MODELS:
        for world in (1, 2, 4):
            geometry = compose([declare(model, rank, world, 4096) for rank in range(world)], None, True)
            assert geometry.world == world
            assert geometry.chunk_tokens == 256
