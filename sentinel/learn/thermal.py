"""How hot a healthy GPU is at a power: T = T0 + R * P of each, learnt from history.

Ridge regression, shrunk towards the common slope of the model, itself shrunk towards a
physical prior. Says how far each slope is to be trusted; never what is too hot.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sentinel.core.domain import Floats
from sentinel.core.score import Thermal

_R_PRIOR: Final = 0.06  # °C per W: data-centre GPUs with air cooling lie between 0.04 and 0.09
_R_PRIOR_SD: Final = 0.03
_R_SPREAD: Final = 0.2  # how far one GPU's slope may lie from its model's, as a share
_TEMP_NOISE_C: Final = 2.0
# what moves a temperature beside the power, slowly and for a whole host: inlet air, fans, the heat
# that soaks in. Seen over a narrow range of powers it looks like a slope, so a slope is known no
# better than this over the range of powers seen.
_SLOW_C: Final = 2.0
_AIR_SD_C: Final = 4.0  # by which the air of one GPU differs from that of another
_LINE_GPUS: Final = 8  # through fewer no line is drawn
_INDEPENDENT_S: Final = 180.0  # rows closer in time than this say the same thing of a heat sink
_SLOW_FOR_S: Final = 1800.0  # and of the air around it, once there are more than a few of them
_FEW: Final = 8.0


def fit_thermal(
    uuids: tuple[str, ...],
    gpu: npt.NDArray[np.int64],
    power_w: Floats,
    temp_c: Floats,
    *,
    span_s: float,
    at_s: Floats | None = None,
    spacing_s: float = 60.0,
) -> Thermal:
    """Thermal model of each GPU from rows: `gpu` [n] indexes `uuids`, `power_w` [n] is the
    remembered power, `temp_c` [n, 2] GPU and memory temperature (NaN where unknown), taken
    over `span_s` seconds.

    With `at_s` [n], when each was seen, slopes come from the means of stretches of ten rows
    `spacing_s` apart. Between two scrapes a minute apart power comes and goes unseen; what was
    seen of it then explains little of the temperature, and row by row the slope would come out
    at a fraction (errors in variables: what the means still err by is taken off)."""
    independent = max(1.0, min(span_s / _INDEPENDENT_S, _FEW), span_s / _SLOW_FOR_S)
    stretch_s = min(max(_INDEPENDENT_S, 10.0 * spacing_s), max(span_s / 8.0, spacing_s))
    own = np.full((4, 2, len(uuids)), np.nan)  # T0, R, mean power, doubt of R
    model = np.full((5, 2), np.nan)  # the same, and the doubt of T0
    for kind in range(2):
        known = np.isfinite(power_w) & np.isfinite(temp_c[:, kind])
        if not known.any():
            continue
        seen, p, t = gpu[known], power_w[known], temp_c[known, kind]
        err = np.zeros(len(p))
        if at_s is not None:
            seen, p, t, err = _stretches(seen, p, t, np.floor(at_s[known] / stretch_s))
        own[:, kind], model[:, kind] = _lines(seen, p, t, err, len(uuids), independent)
    return Thermal(uuids, *own, *model)


def _lines(
    own: npt.NDArray[np.int64], p: Floats, t: Floats, err: Floats, g: int, independent: float
) -> tuple[Floats, Floats]:
    """(T0, R, mean power, doubt of R) [4, g] of each GPU, NaN where it was never seen, and
    (T0, R, mean power, doubt of R, doubt of T0) of one that nobody knows. `err` is the variance
    of each power, `independent` how many rows of a GPU say something of their own."""
    count = np.bincount(own, minlength=g).astype(np.float64)
    has, safe = count > 0, np.maximum(count, 1.0)
    p_mean, t_mean = np.bincount(own, p, g) / safe, np.bincount(own, t, g) / safe
    dp, dt = p - p_mean[own], t - t_mean[own]
    weight = np.minimum(1.0, independent / safe)
    spp = np.bincount(own, dp * dp, g).astype(np.float64) * weight
    spt = np.bincount(own, dp * dt, g).astype(np.float64) * weight
    unreal = np.bincount(own, err, g) * weight / np.maximum(spp, 1e-9)
    share = np.clip(1.0 - unreal, 0.0, 1.0)
    spt, spp = spt * share, spp * share**2  # slope: over what is real; worth: less what errs

    # common slope: within GPUs, and between those that work hard and those that hardly do
    lam = (_TEMP_NOISE_C / _R_PRIOR_SD) ** 2
    between, slope = _between(p_mean[has], t_mean[has])
    within = _less_the_slow(spp.sum(), p.max() - p.min())
    known_as = within + between
    spt_all = spt.sum() * within / max(spp.sum(), 1e-9) + slope * between
    common = float(np.clip((spt_all + lam * _R_PRIOR) / (known_as + lam), 0.0, 0.3))
    common_sd = _TEMP_NOISE_C / np.sqrt(known_as + lam)

    lam_own = (_TEMP_NOISE_C / max(_R_SPREAD * common, 0.005)) ** 2
    high, low = np.full(g, -np.inf), np.full(g, np.inf)
    np.maximum.at(high, own, p)
    np.minimum.at(low, own, p)
    mine = _less_the_slow(spp, np.where(has, high - low, 0.0))
    spt = spt * mine / np.maximum(spp, 1e-9)
    r = np.maximum((spt + lam_own * common) / (mine + lam_own), 0.0)
    # the common slope itself is only known as well as the powers seen allow, and one that lies
    # further from it than others do may have been drawn by the air of a few hours
    far = np.maximum(np.abs(r - common) - _R_SPREAD * common, 0.0)
    r_sd = np.hypot(np.hypot(_TEMP_NOISE_C / np.sqrt(mine + lam_own), common_sd), far)
    each = np.stack([t_mean - r * p_mean, r, p_mean, r_sd])
    each[:, ~has] = np.nan
    level = (t_mean - common * p_mean)[has]
    level_sd = max(3.0, float(level.std())) if has.sum() >= 4 else 6.0
    doubt = np.hypot(_R_SPREAD * common, common_sd)
    return each, np.array([np.median(level), common, p_mean[has].mean(), doubt, level_sd])


def _stretches(
    own: npt.NDArray[np.int64], p: Floats, t: Floats, stretch: Floats
) -> tuple[npt.NDArray[np.int64], Floats, Floats, Floats]:
    """GPU, mean power, mean temperature of each stretch of each GPU, and the variance of that
    mean power that the scatter within the stretch leaves."""
    pairs = np.stack([own, stretch.astype(np.int64)], axis=1)
    found, place = np.unique(pairs, axis=0, return_inverse=True)
    place = place.reshape(-1)
    n = np.bincount(place).astype(np.float64)
    mean_p, mean_t = np.bincount(place, p) / n, np.bincount(place, t) / n
    scatter = np.bincount(place, (p - mean_p[place]) ** 2)
    return found[:, 0], mean_p, mean_t, scatter / np.maximum(n - 1.0, 1.0) / n


def _between(p_mean: Floats, t_mean: Floats) -> tuple[float, float]:
    """(what it is worth, slope in °C per W) of the line through the means of many GPUs. Each
    stands in air of its own, and what runs hot by its place may run hard by it too."""
    if len(p_mean) < _LINE_GPUS:
        return 0.0, 0.0
    dp = p_mean - p_mean.mean()
    spp = float(dp @ dp)
    worth = spp * (_TEMP_NOISE_C / _AIR_SD_C) ** 2
    limit = _AIR_SD_C / _TEMP_NOISE_C / max(float(np.ptp(p_mean)), 1e-3)
    return 1.0 / (1.0 / max(worth, 1e-9) + limit**2), float(dp @ t_mean) / max(spp, 1e-9)


def _less_the_slow(spp: Any, range_w: Any) -> Any:
    """The sum of squared powers that is as good for a slope as `spp` is, with what moves the
    temperature slowly taken for a second error of the slope, `_SLOW_C` over the range."""
    slow = (_SLOW_C / _TEMP_NOISE_C / np.maximum(range_w, 1e-3)) ** 2
    return 1.0 / (1.0 / np.maximum(spp, 1e-9) + slow)
