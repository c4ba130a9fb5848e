"""The cheapest memory, disk and GPUs for some traffic: what each choice costs a month, given hit ratios by size.

The model is small on purpose, and `ASSUMPTIONS` says all of it:
- A hit in memory saves the prefill of its tokens, a hit on disk `disk_hit_value` of it.
- Prefill runs on whole GPUs, of which there are enough for `peak` times the average load.
- A disk of some size hits what an arena of that size would.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path

from kvpool.errors import InvalidRequestError

GIB = 1 << 30
HOUR_S = 3_600.0
DAY_S = 86_400.0
HOURS_A_MONTH = 730.0
MAX_PRICE = 1e9
SAVED_SHARE = 0.001
"""GPU time saved that differs by less than this share counts as equal."""
TIE_SHARE = 0.01
"""Costs that differ by less than this share count as equal."""
MAX_PRICES_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Prices:
    """What things cost. The defaults are round figures of rented hardware, and nobody's offer.

    Args:
        dram_gib_month, disk_gib_month: a GiB for a month.
        gpu_hour: a GPU for an hour.
        prefill_tokens_per_s: tokens that one GPU prefills a second.
        peak: the load for which there are GPUs, as a multiple of the average.
        disk_hit_value: what a hit on disk saves, as a share of what a hit in memory saves.
    """

    dram_gib_month: float = 3.0
    disk_gib_month: float = 0.1
    gpu_hour: float = 2.5
    prefill_tokens_per_s: float = 8_000.0
    peak: float = 2.0
    disk_hit_value: float = 0.5

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            least, most = _BOUNDS.get(name, (0.0, MAX_PRICE))
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise InvalidRequestError(f"price {name} = {value!r:.40} is not a number from {least:g} to {most:g}")


_BOUNDS = {"prefill_tokens_per_s": (1.0, MAX_PRICE), "peak": (1.0, 100.0), "disk_hit_value": (0.0, 1.0)}


def load_prices(path: Path) -> Prices:
    """Reads a TOML file with any of the fields of `Prices`. Raises InvalidRequestError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_PRICES_BYTES + 1)
        if len(content) > MAX_PRICES_BYTES:
            raise ValueError(f"the file has more than {MAX_PRICES_BYTES >> 10} KiB")
        given = tomllib.loads(content.decode())
    except (OSError, ValueError, RecursionError) as error:  # Errors of TOML and of its text are ValueErrors.
        raise InvalidRequestError(f"cannot read the prices {path}: {error}; give a TOML file") from None
    known = [field.name for field in dataclasses.fields(Prices)]
    for name in given:
        if name not in known:
            raise InvalidRequestError(f"prices {path}: unknown key {name!r:.60}; choose {', '.join(known)}")
    return Prices(**given)


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """Traffic, and what sizes would hit of it.

    Args:
        tokens_per_s: looked up, on average.
        hit_ratios: (bytes, share of tokens hit), ascending by bytes.
        uncertainty: how far hit ratios may be off.
        seconds: span of the traffic.
        now: what the server has, and hits; None of a trace.
    """

    tokens_per_s: float
    hit_ratios: Sequence[tuple[int, float]]
    uncertainty: float
    seconds: float = 0.0
    now: Present | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Present:
    """Memory and disk that a server has.

    Args:
        in_memory, hit_ratio: share of tokens hit in memory, and in memory or on disk.
    """

    memory_bytes: int
    disk_bytes: int
    in_memory: float
    hit_ratio: float


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """A choice of memory and disk, and what follows.

    Args:
        hit_ratio: in memory or on disk.
        gpus: that prefill what is not hit.
        month_cost: of memory, disk and these GPUs.
        saved_month: less than the GPUs without a pool cost; negative: the pool costs more than it saves.
        saved_gpu_s_day: GPU-seconds of prefill saved a day.
    """

    memory_bytes: int
    disk_bytes: int
    hit_ratio: float
    gpus: int
    month_cost: float
    saved_month: float
    saved_gpu_s_day: float


def options(demand: Demand, prices: Prices) -> list[Option]:
    """Every choice of memory, alone or with a larger disk; the cheapest first, of equal ones that with more hits."""
    found = [
        _option(demand, prices, Present(memory, disk, in_memory, max(ratio, in_memory)))
        for nth, (memory, in_memory) in enumerate(demand.hit_ratios)
        for disk, ratio in [(0, in_memory), *demand.hit_ratios[nth + 1 :]]
    ]
    return sorted(found, key=lambda option: (option.month_cost, -option.hit_ratio))


def present_option(demand: Demand, prices: Prices) -> Option | None:
    """What the server has now, as an option; None of a trace."""
    return None if demand.now is None else _option(demand, prices, demand.now)


def _option(demand: Demand, prices: Prices, has: Present) -> Option:
    without = _gpus(demand.tokens_per_s, 0.0, prices) * prices.gpu_hour * HOURS_A_MONTH
    saved = has.in_memory + prices.disk_hit_value * (has.hit_ratio - has.in_memory)
    gpus = _gpus(demand.tokens_per_s, saved, prices)
    cost = (has.memory_bytes * prices.dram_gib_month + has.disk_bytes * prices.disk_gib_month) / GIB
    cost += gpus * prices.gpu_hour * HOURS_A_MONTH
    saved_gpu_s = saved * demand.tokens_per_s / prices.prefill_tokens_per_s * DAY_S
    return Option(has.memory_bytes, has.disk_bytes, has.hit_ratio, gpus, cost, without - cost, saved_gpu_s)


def _gpus(tokens_per_s: float, saved: float, prices: Prices) -> int:
    load = tokens_per_s * (1 - saved) / prices.prefill_tokens_per_s
    return max(1, math.ceil(prices.peak * load))


def choose(
    found: Sequence[Option],
    target_hit_ratio: float | None = None,
    target_saved_gpu_s: float | None = None,
    margin: float = 0.0,
) -> Option:
    """The cheapest option that reaches the targets; of those that cost as much, the one that saves most GPU time.

    Args:
        found: the cheapest first.
        margin: costs a month that differ by no more count as equal, as those do that differ by `TIE_SHARE`.
        target_saved_gpu_s: GPU-seconds a day.

    Raises InvalidRequestError, which says what can be reached, if none does.
    """
    if not found:
        raise InvalidRequestError("there was no traffic, and no size can be recommended; try again later")
    reaching = [
        option
        for option in found
        if (target_hit_ratio is None or option.hit_ratio >= target_hit_ratio)
        and (target_saved_gpu_s is None or option.saved_gpu_s_day >= target_saved_gpu_s)
    ]
    if reaching:
        most = reaching[0].month_cost + max(margin, TIE_SHARE * reaching[0].month_cost)
        tied = [option for option in reaching if option.month_cost <= most]
        enough = (1 - SAVED_SHARE) * max(option.saved_gpu_s_day for option in tied)
        return next(option for option in tied if option.saved_gpu_s_day >= enough)
    ratio, saved = max(each.hit_ratio for each in found), max(each.saved_gpu_s_day for each in found)
    raise InvalidRequestError(
        f"no size reaches the target: at most {ratio:.1%} of tokens hit, which saves up to {saved:,.0f} GPU-seconds a "
        "day; the other tokens are new, or come again too late for the largest size that was simulated"
    )


def uncertainty_month(demand: Demand, prices: Prices) -> float:
    """What the uncertainty of the hit ratio is in GPU cost a month, were GPUs divisible."""
    load = demand.uncertainty * demand.tokens_per_s / prices.prefill_tokens_per_s
    return prices.peak * load * prices.gpu_hour * HOURS_A_MONTH


def assumptions(prices: Prices) -> list[str]:
    """What the advice takes for granted, a sentence each."""
    return [
        f"DRAM {prices.dram_gib_month:g} and disk {prices.disk_gib_month:g} a GiB-month, a GPU {prices.gpu_hour:g} an "
        f"hour; a GPU prefills {prices.prefill_tokens_per_s:,.0f} tokens a second.",
        f"GPUs are whole, and enough for {prices.peak:g} times the average prefill load; those that decode are extra.",
        f"A hit on disk saves {prices.disk_hit_value:.0%} of what a hit in memory saves.",
        "The traffic goes on as it was, and all engines share one pool.",
    ]
