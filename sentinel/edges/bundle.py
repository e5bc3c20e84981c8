"""Bundles on disk: what has been learnt, as one .npz of arrays and one .json beside it.

A bundle is immutable and named by its content. The .json is written last, so a bundle
without one is an unfinished write and is never loaded; it holds the digest of the arrays,
so a damaged file is recognised. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from sentinel.core.budget import UNCALIBRATED, Calibration
from sentinel.core.domain import from_plain, to_plain
from sentinel.core.features import NAMES
from sentinel.core.score import GPU_SPACE, Cohort, Density, Thermal
from sentinel.core.verdict import Bundle
from sentinel.errors import StateError

SCHEMA: Final = 2  # 2: how far a state of its own lies, and what regimes are called
_DENSITY: Final = ("cores", "clusters", "scale")
_THERMAL: Final = tuple(f.name for f in fields(Thermal) if f.name != "uuids")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A bundle that was learnt and compared badly with the one in use then."""

    id: str
    learnt_to_s: float
    reasons: tuple[str, ...]


def save(folder: Path, bundle: Bundle, *, created_s: float, refused: Sequence[str] = ()) -> Path:
    """Writes a bundle and returns its .json; with the reasons why it is `refused`, it is kept
    and never loaded by itself. Raises StateError when the folder is not writable; a
    half-written bundle is never visible."""
    arrays: dict[str, Any] = {}
    cohorts = []
    for i, (model, cohort) in enumerate(sorted(bundle.cohorts.items())):
        for name in _DENSITY:
            arrays[f"{i}/{name}"] = getattr(cohort.density, name)
        for name in _THERMAL:
            arrays[f"{i}/thermal_{name}"] = getattr(cohort.thermal, name)
        cohorts.append(
            {
                "model": model,
                "rows": cohort.rows,
                "radius": cohort.density.radius,
                "demand_radius": cohort.density.demand_radius,
                "reach": cohort.density.reach,
                "regimes": list(cohort.density.regimes),
                "uuids": list(cohort.thermal.uuids),
            }
        )
    raw = io.BytesIO()
    np.savez_compressed(raw, **arrays)
    digest = hashlib.sha256(raw.getvalue()).hexdigest()
    text = {
        "schema": SCHEMA,
        "id": bundle.id,
        "created_s": created_s,
        "learnt_from_s": bundle.learnt_from_s,
        "learnt_to_s": bundle.learnt_to_s,
        "grid_s": bundle.grid_s,
        "features": list(NAMES),
        "refused": list(refused),
        "cohorts": cohorts,
        "evaluation": bundle.evaluation,
        "calibration": to_plain(bundle.calibration),
        "sha256": digest,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"{bundle.id}.npz", raw.getvalue())
        _write(folder / f"{bundle.id}.json", json.dumps(text, indent=1).encode())
    except OSError as err:
        raise StateError(
            f"cannot write the bundle to {folder}: {err.strerror or err}; "
            "make state.dir writable for this user"
        ) from err
    return folder / f"{bundle.id}.json"


def load(path: Path) -> Bundle:
    """Reads one bundle by its .json. Raises StateError that names what is wrong with it."""
    try:
        text = json.loads(path.read_bytes())
        raw = path.with_suffix(".npz").read_bytes()
        if text["schema"] != SCHEMA:
            raise StateError(
                f"{path}: bundle schema {text['schema']}, this version reads {SCHEMA}; "
                "run `sentinel learn` again"
            )
        if hashlib.sha256(raw).hexdigest() != text["sha256"]:
            raise StateError(f"{path}: the arrays beside it are damaged (digest differs)")
        if text["features"] != list(NAMES):
            raise StateError(
                f"{path}: learnt with other features than this version computes; "
                "run `sentinel learn` again"
            )
        with np.load(io.BytesIO(raw), allow_pickle=False) as arrays:
            cohorts = {
                entry["model"]: _cohort(entry, i, arrays) for i, entry in enumerate(text["cohorts"])
            }
        return Bundle(
            str(text["id"]),
            cohorts,
            float(text["grid_s"]),
            float(text["learnt_from_s"]),
            float(text["learnt_to_s"]),
            dict(text["evaluation"]),
            # a bundle of an earlier version has none
            from_plain(Calibration, text["calibration"]) if "calibration" in text else UNCALIBRATED,
        )
    except StateError:
        raise
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as err:
        raise StateError(
            f"{path}: cannot be read as a bundle ({err}); delete it and run `sentinel learn`"
        ) from err


def load_newest(folder: Path, *, grid_s: float | None = None) -> tuple[Bundle | None, list[str]]:
    """The newest bundle that reads well, and what was wrong with newer ones. A bundle whose
    grid is not `grid_s` does not fit and is passed over, with its reason; one that was refused
    when it was learnt is passed over without a word."""
    problems: list[str] = []
    for path in _newest_first(folder, problems):
        if refusal(path) is not None:
            continue
        try:
            bundle = load(path)
        except StateError as err:
            problems.append(str(err))
            continue
        if grid_s is not None and bundle.grid_s != grid_s:
            problems.append(
                f"{path}: learnt on a grid of {bundle.grid_s:g} s, the configuration says "
                f"{grid_s:g} s; run `sentinel learn` again"
            )
            continue
        return bundle, problems
    return None, problems


def refusal(path: Path) -> Refusal | None:
    """Why the bundle of this .json is not to be used; None where it may be, or cannot be read."""
    try:
        text = json.loads(path.read_bytes())
        if not text.get("refused"):
            return None
        reasons = tuple(str(reason) for reason in text["refused"])
        return Refusal(str(text["id"]), float(text["learnt_to_s"]), reasons)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def newest_refusal(folder: Path) -> Refusal | None:
    """The newest bundle, if that was refused."""
    for path in _newest_first(folder, []):
        return refusal(path)
    return None


def _newest_first(folder: Path, problems: list[str]) -> list[Path]:
    stamped = []
    for path in folder.glob("*.json") if folder.is_dir() else ():
        try:
            stamped.append((path.stat().st_mtime, path))
        except OSError as err:
            problems.append(f"{path}: {err.strerror or err}")
    return [path for _, path in sorted(stamped, reverse=True)]


def prune(folder: Path, *, keep: int) -> None:
    """Deletes all but the newest `keep` bundles and the newest `keep` refused ones: however
    many are refused, the one in use stays. What cannot be deleted stays too."""
    ordered = _newest_first(folder, [])
    refused = [path for path in ordered if refusal(path) is not None]
    adopted = [path for path in ordered if path not in refused]
    for path in (*adopted[keep:], *refused[keep:]):
        path.unlink(missing_ok=True)
        path.with_suffix(".npz").unlink(missing_ok=True)


def bundle_id(cohorts: dict[str, Cohort], to_s: float) -> str:
    """A name from the content: equal learning gives an equal name."""
    digest = hashlib.sha256(f"{to_s:.3f}".encode())
    for model, cohort in sorted(cohorts.items()):
        digest.update(model.encode())
        digest.update(np.ascontiguousarray(cohort.density.cores).tobytes())
        digest.update(np.ascontiguousarray(cohort.thermal.t0_c).tobytes())
    return f"bundle-{digest.hexdigest()[:12]}"


def _cohort(entry: dict[str, Any], i: int, arrays: Any) -> Cohort:
    density = Density(
        GPU_SPACE,
        arrays[f"{i}/cores"],
        arrays[f"{i}/clusters"],
        arrays[f"{i}/scale"],
        float(entry["radius"]),
        float(entry["demand_radius"]),
        float(entry["reach"]),
        tuple(str(name) for name in entry["regimes"]),
    )
    width = len(GPU_SPACE.names)
    if density.cores.ndim != 2 or density.cores.shape[1] != width or not len(density.cores):
        raise ValueError(f"cores of {entry['model']} have shape {density.cores.shape}")
    thermal = Thermal(
        tuple(entry["uuids"]), **{name: arrays[f"{i}/thermal_{name}"] for name in _THERMAL}
    )
    if thermal.t0_c.shape != (2, len(thermal.uuids)):
        raise ValueError(f"thermal table of {entry['model']} has shape {thermal.t0_c.shape}")
    return Cohort(entry["model"], density, thermal, int(entry["rows"]))


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing: a temporary file, synced, then renamed over."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".bundle-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
