"""Simple methods that people run on such telemetry, to stand beside the detector.

Each gets the same samples, once a minute: float32 [times, gpus, METRICS], a day to learn from
and a day to judge, and answers with a score [times, gpus], higher = stranger. Its threshold is
the lowest that gives at most one alert over the whole fleet's day of learning; an alert is a
score above it for `LASTS` minutes, as the detector's own rule has it. Rules have none to set.
"""

import numpy as np
from sklearn.ensemble import IsolationForest

METRICS = (
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_MEMORY_TEMP",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_MEM_CLOCK",
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_FB_USED",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "DCGM_FI_PROF_DRAM_ACTIVE",
    "DCGM_FI_PROF_NVLINK_TX_BYTES",
    "DCGM_FI_PROF_PCIE_RX_BYTES",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS",
    "DCGM_FI_DEV_XID_ERRORS",
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
)
GAUGES = 11  # the first so many are what the statistical methods look at
TEMP, REASONS, XID, DBE = 0, 11, 12, 13
TROUBLE = 0x8 | 0x20 | 0x40 | 0x80
LASTS = 2
AGAIN_S = 1800.0  # an alert that comes back within this is the same


class Recorder:
    """Keeps one sample a minute of METRICS from the blocks of a LabHistory."""

    def __init__(self, fleet_uuids, every_s=60.0):
        self.uuids = list(fleet_uuids)
        self.times_s, self.rows = [], []
        self._every_s, self._labels = every_s, None

    def __call__(self, block):
        if block.labels is not self._labels:
            self._labels = block.labels
            column = {uuid: place for place, uuid in enumerate(self.uuids)}
            metric = {name: place for place, name in enumerate(METRICS)}
            self._place = np.full((len(METRICS), len(self.uuids)), -1)
            for number, labels in enumerate(block.labels):
                if labels["__name__"] in metric and labels.get("GPU_I_ID", "1") == "1":
                    self._place[metric[labels["__name__"]], column[labels["UUID"]]] = number
        for t, at_s in enumerate(block.times_s):
            if self.times_s and at_s - self.times_s[-1] < self._every_s - 1e-6:
                continue
            taken = block.values[self._place, t].astype(np.float32)
            self.times_s.append(float(at_s))
            self.rows.append(np.where(self._place >= 0, taken, np.nan).T)

    def days(self, split_s):
        """(learning, judging, the times of the latter)."""
        times, rows = np.array(self.times_s), np.array(self.rows)
        before = times <= split_s
        return rows[before], rows[~before], times[~before]


def z_score(learn, judge, models):
    """The root mean square of each GPU's own standardised values."""
    x = learn[:, :, :GAUGES]
    known = np.isfinite(x)
    count = np.maximum(known.sum(axis=0), 1)
    mean = np.where(known, x, 0).sum(axis=0) / count
    spread = np.sqrt((np.where(known, x - mean, 0) ** 2).sum(axis=0) / count)
    spread = np.maximum(spread, 0.02 * np.abs(mean) + 1e-3)

    def score(day):
        return _rms((day[:, :, :GAUGES] - mean) / spread)

    return score(learn), score(judge)


def adaptive_band(learn, judge, models):
    """Moving mean and spread over about an hour; the metric furthest outside speaks."""
    both = np.concatenate([learn, judge])[:, :, :GAUGES]
    mean, square = both[0].copy(), both[0] ** 2
    out = np.zeros(both.shape[:2], np.float32)
    for t in range(1, len(both)):
        now = both[t]
        spread = np.sqrt(np.maximum(square - mean**2, 0.0))
        with np.errstate(all="ignore"):
            far = np.abs(now - mean) / np.maximum(spread, 0.1 * np.abs(mean) + 1e-3)
        out[t] = np.nan_to_num(far).max(axis=1)
        kept = np.where(np.isfinite(now), now, mean)
        mean = np.where(np.isfinite(mean), mean + (kept - mean) / 60, kept)
        square = np.where(np.isfinite(square), square + (kept**2 - square) / 60, kept**2)
    return out[: len(learn)], out[len(learn) :]


def k_means(learn, judge, models):
    """As Netdata does: two clusters of each metric's last six values, per GPU and metric; the
    score is the share of metrics further out than 99 % of what was learnt."""

    def windows(day):
        x = np.nan_to_num(day[:, :, :GAUGES])
        x = np.stack([np.roll(x, lag, axis=0) for lag in range(6)], axis=-1)
        x[:6] = x[6:7]
        return np.moveaxis(x, 0, 2).reshape(-1, len(day), 6)  # [gpus x metrics, times, lags]

    x = windows(learn)
    low, high = x[:, :, 0].argmin(axis=1), x[:, :, 0].argmax(axis=1)
    each = np.arange(len(x))
    centres = np.stack([x[each, low], x[each, high]], axis=1)
    for _ in range(6):
        d = _distances(x, centres)
        near = d.argmin(axis=2)
        for k in range(2):
            mine = (near == k)[:, :, None]
            count = mine.sum(axis=1)
            centres[:, k] = np.where(
                count, (x * mine).sum(axis=1) / np.maximum(count, 1), centres[:, k]
            )
    edge = np.quantile(_distances(x, centres).min(axis=2), 0.99, axis=1)[:, None]

    def score(day):
        out = _distances(windows(day), centres).min(axis=2) > 1.2 * edge + 1e-6
        share = out.reshape(-1, GAUGES, len(day)).mean(axis=1).T
        return np.stack([np.roll(share, lag, axis=0) for lag in range(5)]).mean(axis=0)

    return score(learn), score(judge)


def isolation_forest(learn, judge, models):
    """One forest per GPU model on single moments."""

    def fit(rows):
        forest = IsolationForest(n_estimators=100, max_samples=256, random_state=0).fit(rows)
        return lambda x: -forest.score_samples(x)

    return _per_model(learn, judge, models, fit)


def k_nearest(learn, judge, models):
    """Distance to the fifth nearest of 2,000 moments of this model's learning day."""

    def fit(rows):
        mean, spread = rows.mean(axis=0), rows.std(axis=0) + 1e-6
        known = (rows - mean) / spread
        square = (known**2).sum(axis=1)

        def score(x):
            out = np.empty(len(x), np.float32)
            for start in range(0, len(x), 8192):
                part = (x[start : start + 8192] - mean) / spread
                d2 = (part**2).sum(axis=1)[:, None] + square - 2 * part @ known.T
                out[start : start + 8192] = np.partition(d2, 4, axis=1)[:, 4]
            return out

        return score

    return _per_model(learn, judge, models, fit, most=2000)


def rules(learn, judge, models):
    """Hotter than 85 °C, or throttled by heat or hardware. Score 1 where it holds."""

    def score(day):
        reasons = np.nan_to_num(day[:, :, REASONS]).astype(np.int64)
        return ((day[:, :, TEMP] > 85) | ((reasons & TROUBLE) > 0)).astype(np.float32)

    return score(learn), score(judge)


def rules_and_xids(learn, judge, models):
    """The same, or any new Xid, or an uncorrectable memory error."""
    before, after = rules(learn, judge, models)

    def news(day):
        moved = np.zeros(day.shape[:2], bool)
        for metric in (XID, DBE):
            now, was = np.nan_to_num(day[1:, :, metric]), np.nan_to_num(day[:-1, :, metric])
            moved[1:] |= (now != was) & (now > 0)
        return np.maximum(moved, np.roll(moved, 1, axis=0))  # seen for long enough to alert

    return np.maximum(before, news(learn)), np.maximum(after, news(judge))


METHODS = {
    "z-score": z_score,
    "rules": rules,
    "rules and any Xid": rules_and_xids,
    "adaptive band": adaptive_band,
    "k-means (Netdata)": k_means,
    "IsolationForest": isolation_forest,
    "kNN": k_nearest,
}


def report_of(name, recorder, gpus, split_s):
    """What a backtest would report, had this method been the detector."""
    learn, judge, times = recorder.days(split_s)
    models = np.array([gpu.model for gpu in gpus])
    before, after = METHODS[name](learn, judge, models)
    threshold = 0.5 if name.startswith("rules") else _threshold(before)
    incidents = []
    for column, gpu in enumerate(gpus):
        for start, stop in _runs(after[:, column] > threshold):
            row = _row(name, gpu, float(times[start]), float(times[stop]))
            last = incidents[-1] if incidents else None
            if last and last["gpu_uuid"] == gpu.uuid and row["from"] - last["to"] < AGAIN_S:
                last["to"] = row["to"]
            else:
                incidents.append(row)
    days = len(times) * len(gpus) / 1440.0
    return {
        "incidents": incidents,
        "written_down": [],
        "coverage": {"gpu_days": days, "blind_gpu_days": 0.0},
    }


def _row(name, gpu, from_s, to_s):
    stamp = np.datetime_as_string(np.datetime64(int(from_s * 1000), "ms"), timezone="UTC")
    return {
        "id": f"{gpu.uuid} {from_s:.0f}",
        "subject": {"kind": "gpu", "id": gpu.uuid},
        "gpu_uuid": gpu.uuid,
        "host": gpu.node,
        "confirmed_at": str(stamp),
        "resolved_at": None,
        "from": from_s,
        "to": to_s,
        "severity": "warning",
        "kind": "deviant",
        "pattern": name,
        "score": 0.0,
        "would_migrate": False,
        "evidence": [],
    }


def _threshold(score):
    """The lowest of a ladder that leaves at most one alert in the day of learning."""
    ladder = np.unique(np.quantile(score, 1 - np.geomspace(3e-2, 1e-7, 60)))
    for at in ladder:
        count = sum(len(_runs(column > at)) for column in score.T)
        if count <= 1:
            return at
    return ladder[-1] + 1e-6


def _runs(above):
    """(first moment at which it had lasted, last) of each stretch of at least LASTS."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], above, [False]]).astype(np.int8)))
    return [(a + LASTS - 1, b - 1) for a, b in edges.reshape(-1, 2) if b - a >= LASTS]


def _rms(z):
    z = np.clip(np.nan_to_num(z), -30, 30)
    return np.sqrt((z**2).mean(axis=2))


def _distances(x, centres):
    return np.stack([((x - c[:, None, :]) ** 2).sum(axis=2) for c in centres.swapaxes(0, 1)], -1)


def _per_model(learn, judge, models, fit, most=20_000):
    out = [np.zeros(day.shape[:2], np.float32) for day in (learn, judge)]
    rng = np.random.default_rng(0)
    for model in np.unique(models):
        mine = np.flatnonzero(models == model)
        rows = np.nan_to_num(learn[:, mine, :GAUGES].reshape(-1, GAUGES))
        score = fit(rows[rng.permutation(len(rows))[:most]].astype(np.float64))
        for day, into in zip((learn, judge), out, strict=True):
            x = np.nan_to_num(day[:, mine, :GAUGES].reshape(-1, GAUGES)).astype(np.float64)
            into[:, mine] = score(x).reshape(len(day), len(mine))
    return out
