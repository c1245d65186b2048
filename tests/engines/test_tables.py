import numpy as np

from kvmosaic.engines.tables import ids_at, kept_columns
from tests.engines.geometries import hybrid


def test_each_kind_keeps_its_own_columns() -> None:
    geometry = hybrid()
    full, window, state = geometry.object_groups

    assert kept_columns(geometry, full, 0, 1, 3).tolist() == [[2, 3], [4, 5]]
    assert kept_columns(geometry, window, 0, 1, 3).tolist() == [[6, 7], [10, 11]]
    assert kept_columns(geometry, state, 0, 1, 3).tolist() == [[1], [2]]


def test_a_column_beyond_the_table_is_the_null_block() -> None:
    assert ids_at([5, 6], np.array([[1, 2]])).tolist() == [[6, 0]]
    assert ids_at([5, 6, 7, 8], np.array([[1, 2]])).tolist() == [[6, 7]]
