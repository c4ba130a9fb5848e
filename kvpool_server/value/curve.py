"""Hit ratios against arena size: one miniature for each size, one for the tiers below, and what tenants hit in them.

A reference is a block that a lookup asked for. It hits if it and all blocks before it are held. The pool itself has
counted its hits at the present size, of all references; the miniatures count those of sampled ones. So the estimate
for another size has two strata (post-stratification): of the references that hit in the pool, which of them would hit
there, and of those that missed.

- Hit in the pool: h of r sampled references (each counts 1/R) hit in the miniature, N of all did in the pool. The
  sample has more or fewer references than expected, N - r, mostly because few blocks are referenced very often; these
  hit at every size. So h + (N - r) would hit: the correction of SHARDS_adj.
- Missed in the pool: h / r of them would hit.

At the present size the estimate is what the pool has counted, but for what the miniature does differently.

Sources: see `miniature`; W. G. Cochran, Sampling Techniques, 1977, for strata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvpool.value import SIZES, ValueCurve, ValueEstimate
from kvpool_server.cache.eviction import Policy
from kvpool_server.cache.steps import STEP_BLOCKS, Steps
from kvpool_server.value.miniature import Miniature
from kvpool_server.value.sample import Sampled, SampledRun, Sampler
from kvpool_server.value.tally import HITS, MISSES, Tally, groups_of
from kvpool_server.value.uncertainty import uncertainties

PRESENT = SIZES.index(1.0)
MAX_TENANTS = 32
"""Tenants with a curve of their own, those seen first; the rest share one."""
REST = "other"
"""In the place of a tenant: the rest."""


class _Tenant:
    """What a tenant asked for and hit: all references by stratum, in tokens, and tallies for each size."""

    def __init__(self) -> None:
        self.tokens = [0.0, 0.0]
        self.in_memory = [Tally() for _ in SIZES]
        self.with_tiers = [Tally() for _ in SIZES]

    def fade(self, keep: float) -> None:
        self.tokens = [keep * each for each in self.tokens]
        for tally in (*self.in_memory, *self.with_tiers):
            tally.fade(keep)


class _Lookup(NamedTuple):
    """A lookup of a sampled run.

    Args:
        parts: of the run.
        in_tier: for each part, the keys that the tiers' miniature holds.
        tenants: those in whose tallies the lookup counts.
        num_hits: leading blocks that the pool has hit.
        num_stored: leading blocks that are stored where a miniature lacks them.
    """

    run: SampledRun
    parts: Sequence[Sampled]
    in_tier: Sequence[frozenset[int]]
    tenants: Sequence[_Tenant]
    num_hits: int
    num_stored: int
    block_bytes: int
    block_tokens: int
    stores_all: bool


class CurveSimulation:
    """The miniatures of a pool and what tenants hit in them. Not thread-safe.

    Args:
        policy: makes the policy in use.
        arena_bytes: the present size.
        tier_bytes: of all tiers together; None: without bound; 0: there is no tier.
        max_entries: sampled blocks a size, about.
        sampler: chooses the blocks.

    Attributes:
        arena_bytes: as given.
        max_entries: sampled blocks a size now: as given, or fewer after `halve_rates`.
        wanted_entries: as given.
    """

    def __init__(
        self,
        policy: Callable[[], Policy],
        arena_bytes: int,
        tier_bytes: int | None = 0,
        max_entries: int = 2_048,
        sampler: Sampler | None = None,
    ):
        self.max_entries = self.wanted_entries = max_entries
        self._policy = policy
        self.arena_bytes = arena_bytes
        self._tier_bytes = tier_bytes
        self._sampler = sampler or Sampler()
        self._minis: list[Miniature] = []
        self._tier: Miniature | None = None
        self._tenants: dict[str, _Tenant] = {}
        self._all = _Tenant()
        self._rest = _Tenant()

    @property
    def num_entries(self) -> int:
        """Sampled blocks in all miniatures."""
        return sum(map(len, self._miniatures()))

    @property
    def rates(self) -> list[float]:
        return [mini.rate for mini in self._miniatures()]

    def _miniatures(self) -> list[Miniature]:
        return self._minis if self._tier is None else [*self._minis, self._tier]

    def _start(self, block_bytes: int) -> Steps[None]:
        if self._minis:
            return
        make, most = self._policy, self.max_entries
        minis = []
        for size in SIZES:
            minis.append(Miniature(make, int(size * self.arena_bytes), most, block_bytes))
            yield  # A policy's model takes milliseconds to make.
        if self._tier_bytes != 0:
            self._tier = Miniature(make, self._tier_bytes, most, block_bytes)
        self._minis = minis

    def lookup(
        self,
        tenant: str,
        salt: int,
        parent_hash: bytes,
        hashes: Sequence[bytes],
        num_hits: int,
        block_bytes: int,
        block_tokens: int,
        counts: bool = True,
        stores_all: bool = False,
    ) -> Steps[None]:
        """A lookup of a run, of which the pool has hit the first `num_hits` blocks.

        The blocks that hit are stored where a miniature lacks them: their engine would have computed and put them.

        Args:
            salt: see `Sampler.sample`.
            counts: False for the further groups of a lookup, whose blocks occupy memory, but are the same tokens.
            stores_all: also store blocks that missed; for traces, in which each prompt is stored when it is looked up.
        """
        yield from self._start(block_bytes)
        run = yield from self._sample(salt, parent_hash, hashes)
        yield from self._sampler.remember_end(salt, run, hashes, num_hits)
        yield from self._sampler.remember_end(salt, run, hashes, len(hashes))
        if len(hashes) > STEP_BLOCKS:
            yield
        tenants = (self._all, self._tenant(tenant)) if counts else ()
        for each in tenants:
            each.tokens[HITS] += block_tokens * num_hits
            each.tokens[MISSES] += block_tokens * (len(hashes) - num_hits)
        parts, tier = run.parts(), self._tier
        in_tier: list[frozenset[int]] = []
        for part in parts:
            in_tier.append(frozenset() if tier is None else tier.held(part))
            if len(parts) > 1:
                yield
        num_stored = len(hashes) if stores_all else num_hits
        lookup = _Lookup(run, parts, in_tier, tenants, num_hits, num_stored, block_bytes, block_tokens, stores_all)
        for nth, mini in enumerate(self._miniatures()):
            yield from self._look_up(nth, mini, lookup)

    def _look_up(self, nth: int, mini: Miniature, lookup: _Lookup) -> Steps[None]:
        """A lookup in one miniature, the `nth` one."""
        tier, tenants, num_hits = self._tier, () if mini is self._tier else lookup.tenants, lookup.num_hits
        are_held = are_counted_held = are_either_held = True  # All blocks before this part.
        last: tuple[int, int] | None = None
        fits = yield from _fits(mini, lookup.parts, lookup.num_stored, lookup.block_bytes)
        for part, in_tier in zip(lookup.parts, lookup.in_tier, strict=True):
            blocks = [block for block in part if block[1] < mini.threshold]
            leading, are_held = _leading(mini, blocks, are_held)
            if tenants:
                counted, found = blocks, leading
                if mini.counted < mini.threshold:
                    counted = [block for block in blocks if block[1] < mini.counted]
                    found, are_counted_held = _leading(mini, counted, are_counted_held)
                weight, groups = lookup.block_tokens / mini.counted_rate, groups_of(counted)
                for each in tenants:
                    each.in_memory[nth].count(counted, groups, found, num_hits, weight)
                if tier is not None:
                    if tier.counted < mini.counted:
                        counted = [block for block in counted if block[1] < tier.counted]
                        weight, groups = lookup.block_tokens / tier.counted_rate, groups_of(counted)
                    found, are_either_held = _leading(mini, counted, are_either_held, in_tier)
                    for each in tenants:
                        each.with_tiers[nth].count(counted, groups, found, num_hits, weight)
                if len(blocks) > STEP_BLOCKS:
                    yield
            if part is lookup.parts[0]:
                mini.pass_time(1 if (leading if blocks else num_hits) else 0)
            mini.use(blocks, leading)
            if part is lookup.parts[0]:
                mini.pass_time(lookup.stores_all)
            if fits and blocks and blocks[0][0] < lookup.num_stored and (lookup.stores_all or leading < len(blocks)):
                stored = blocks if lookup.stores_all else [each for each in blocks if each[0] < lookup.num_stored]
                yield from mini.store(lookup.run, stored, lookup.num_stored, lookup.block_bytes, last)
            if blocks:
                last = blocks[-1]
                yield

    def put(self, salt: int, parent_hash: bytes, hashes: Sequence[bytes], block_bytes: int) -> Steps[None]:
        """A put of a run's blocks, whether or not the pool had them."""
        yield from self._start(block_bytes)
        run = yield from self._sample(salt, parent_hash, hashes)
        yield from self._sampler.remember_end(salt, run, hashes, len(hashes))
        parts = run.parts()
        for mini in self._miniatures():
            mini.pass_time()
            if not (yield from _fits(mini, parts, len(hashes), block_bytes)):
                continue
            last: tuple[int, int] | None = None
            for part in parts:
                if blocks := [block for block in part if block[1] < mini.threshold]:
                    yield from mini.store(run, blocks, len(hashes), block_bytes, last)
                    last = blocks[-1]
                    yield

    def _sample(self, salt: int, parent_hash: bytes, hashes: Sequence[bytes]) -> Steps[SampledRun]:
        return self._sampler.sample(salt, parent_hash, hashes, max(mini.threshold for mini in self._miniatures()))

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= MAX_TENANTS:
                return self._rest
            tenant = self._tenants[name] = _Tenant()
        return tenant

    def fade(self, keep: float) -> None:
        """Has all that was counted so far weigh `keep` of what it did."""
        for tenant in (self._all, self._rest, *self._tenants.values()):
            tenant.fade(keep)

    def halve_rates(self) -> Steps[None]:
        """Halves the size of every sample: the simulation takes less time then."""
        self.max_entries //= 2
        for mini in self._miniatures():
            mini.max_entries = self.max_entries
            yield from mini.halve_rate()
            yield

    def double_rates(self) -> Steps[None]:
        """Doubles the samples that are smaller than they may be: after `halve_rates`, or because blocks got larger."""
        self.max_entries = min(2 * self.max_entries, self.wanted_entries)
        for mini in self._miniatures():
            mini.max_entries = self.max_entries
            mini.double_rate()
            yield

    def curves(self) -> Steps[list[ValueCurve]]:
        """That of all tenants, that of each tenant by name, and that of the rest."""
        curves = [self.total_curve()]
        for name, tenant in sorted(self._tenants.items()):
            yield
            curves.append(self._curve(tenant, tenant=name))
        if any(self._rest.tokens):
            curves.append(self._curve(self._rest, tenant=REST, is_rest=True))
        return curves

    def total_curve(self) -> ValueCurve:
        """That of all tenants."""
        return self._curve(self._all, tenant="", is_total=True)

    def curve_of(self, name: str) -> ValueCurve:
        """That of one tenant; without estimates if the tenant has none of its own."""
        return self._curve(self._tenants.get(name) or _Tenant(), tenant=name)

    def _curve(self, found: _Tenant, **names: Any) -> ValueCurve:
        total = sum(found.tokens)
        if not total:
            return ValueCurve(**names)
        tallies = found.in_memory if self._tier is None else found.with_tiers
        simulated = min(max(tallies[PRESENT].simulated_hit_tokens(total) / total, 0.0), 1.0)
        off = abs(simulated - found.tokens[HITS] / total)
        in_memory, may_be_off = self._ratios(found.in_memory, found.tokens, off)
        with_tiers = in_memory
        if self._tier is not None:
            with_tiers, tiers_may_be_off = self._ratios(found.with_tiers, found.tokens, off)
            may_be_off = [max(each) for each in zip(may_be_off, tiers_may_be_off, strict=True)]
        estimates = [
            ValueEstimate(size, memory, max(memory, either), uncertainty)
            for size, memory, either, uncertainty in zip(SIZES, in_memory, with_tiers, may_be_off, strict=True)
        ]
        return ValueCurve(
            lookup_tokens=total,
            hit_tokens=found.tokens[HITS],
            simulated_hit_ratio=simulated,
            estimates=tuple(estimates),
            **names,
        )

    def _ratios(self, tallies: Sequence[Tally], tokens: Sequence[float], off: float) -> tuple[list[float], list[float]]:
        """Hit ratios by size, and how far each may be off.

        Args:
            off: what the simulation is off at the present size.
        """
        total = sum(tokens)
        ratios = [tally.hit_tokens(tokens) / total for tally in tallies]
        errors = [tally.standard_error(tokens) / total for tally in tallies]
        tier_rate = 1.0 if self._tier is None else self._tier.counted_rate
        samples = [(min(mini.counted_rate, tier_rate), mini.num_counted) for mini in self._minis]
        return ratios, uncertainties(ratios, errors, samples, off)


def _leading(
    mini: Miniature, blocks: Sampled, are_held: bool, elsewhere: frozenset[int] = frozenset()
) -> tuple[int, bool]:
    """How many leading blocks of a part hit, and whether all blocks until the part's end are held.

    Args:
        are_held: whether all blocks before the part are.
    """
    count = mini.leading(blocks, elsewhere) if are_held else 0
    return count, are_held and count == len(blocks)


def _fits(mini: Miniature, parts: Sequence[Sampled], count: int, block_bytes: int) -> Steps[bool]:
    """Whether a miniature can hold the first `count` blocks of a run; a put of more than fits stores none."""
    if len(parts) == 1:
        return True  # `store` says it.
    sampled = 0
    for part in parts:
        sampled += sum(1 for position, key in part if key < mini.threshold and position < count)
        yield
    return mini.fits(sampled, block_bytes)
