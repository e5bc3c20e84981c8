"""Bundles: what is written is read back, and a damaged or foreign one is told apart."""

import json
import os

import numpy as np
import pytest

from sentinel.core.features import FEATURES
from sentinel.core.score import GPU_SPACE, Cohort, Density
from sentinel.core.verdict import Bundle
from sentinel.edges import bundle as bundles
from sentinel.errors import StateError
from sentinel.learn.thermal import fit_thermal


def made(seed=0, grid_s=60.0):
    rng = np.random.default_rng(seed)
    cores = rng.normal(size=(5, len(FEATURES)))
    density = Density(
        GPU_SPACE, cores, np.arange(5), np.ones(len(FEATURES)), radius=1.7, demand_radius=2.0
    )
    thermal = fit_thermal(
        ("GPU-a", "GPU-b"),
        np.array([0, 1] * 50),
        rng.uniform(80, 600, 100),
        rng.uniform(30, 70, (100, 2)),
        span_s=86_400.0,
    )
    cohorts = {"NVIDIA H100 80GB HBM3": Cohort("NVIDIA H100 80GB HBM3", density, thermal, 100)}
    name = bundles.bundle_id(cohorts, 1000.0 + seed)
    return Bundle(name, cohorts, grid_s, 0.0, 1000.0 + seed, {"cohorts": [{"radius": 1.7}]})


def test_what_is_written_is_read_back(tmp_path):
    bundle = made()
    loaded = bundles.load(bundles.save(tmp_path, bundle, created_s=1.0))
    assert (loaded.id, loaded.grid_s, loaded.evaluation) == (
        bundle.id,
        bundle.grid_s,
        bundle.evaluation,
    )
    for model, cohort in bundle.cohorts.items():
        other = loaded.cohorts[model]
        np.testing.assert_array_equal(other.density.cores, cohort.density.cores)
        np.testing.assert_array_equal(other.thermal.r_c_per_w, cohort.thermal.r_c_per_w)
        assert other.thermal.uuids == cohort.thermal.uuids
        assert other.density.radius == cohort.density.radius


def damage_arrays(path):
    raw = bytearray(path.with_suffix(".npz").read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.with_suffix(".npz").write_bytes(raw)


def cut_text(path):
    path.write_bytes(path.read_bytes()[:100])


def lose_arrays(path):
    path.with_suffix(".npz").unlink()


def change(**fields):
    def edit(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (damage_arrays, "damaged"),
        (cut_text, "cannot be read"),
        (lose_arrays, "cannot be read"),
        (change(schema=99), "schema 99"),
        (change(features=["other"]), "other features"),
        (change(cohorts=[{"model": "x"}]), "cannot be read"),
    ],
)
def test_a_harmed_bundle_is_refused_by_name(tmp_path, harm, says):
    path = bundles.save(tmp_path, made(), created_s=1.0)
    harm(path)
    with pytest.raises(StateError, match=says) as caught:
        bundles.load(path)
    assert str(path) in str(caught.value)


def test_the_newest_good_bundle_is_used_and_the_bad_one_named(tmp_path):
    good = bundles.save(tmp_path, made(1), created_s=1.0)
    bad = bundles.save(tmp_path, made(2), created_s=2.0)
    os.utime(good, (1000, 1000))
    damage_arrays(bad)
    found, problems = bundles.load_newest(tmp_path, grid_s=60.0)
    assert found is not None
    assert found.id == made(1).id
    assert len(problems) == 1
    assert str(bad) in problems[0]


def test_a_bundle_of_another_grid_does_not_fit(tmp_path):
    bundles.save(tmp_path, made(grid_s=60.0), created_s=1.0)
    found, problems = bundles.load_newest(tmp_path, grid_s=4.0)
    assert found is None
    assert "grid of 60 s" in problems[0]


def test_no_folder_is_no_bundle(tmp_path):
    assert bundles.load_newest(tmp_path / "none") == (None, [])


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot write the bundle"):
        bundles.save(tmp_path / "file" / "bundles", made(), created_s=1.0)


def test_prune_keeps_the_newest(tmp_path):
    for seed in range(4):
        path = bundles.save(tmp_path, made(seed), created_s=1.0)
        os.utime(path, (1000 + seed, 1000 + seed))
    bundles.prune(tmp_path, keep=2)
    assert sorted(p.stem for p in tmp_path.glob("*.npz")) == sorted([made(2).id, made(3).id])
