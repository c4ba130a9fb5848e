"""The prefixes that routers may promise: blocks from which an engine can resume, each with its tokens.

Routers that index blocks by tokens take the longest run of stored blocks from a prompt's start for a hit. So a block is
published only while it is usable by itself:
- every block before it is there, and is published;
- every KV-cache group has what a hit needs that ends with it (`GroupSpec.hit_blocks`): the blocks of a window before
  it, or its state;
- its tokens are known, since an engine has announced them.

A published block has the tokens of the namespace's alignment: a whole block of every group. It is named by the hash
of its last block.

A view publishes one namespace of those with its model and tenant: routers cannot tell blocks of the same tokens apart.
A namespace that is new takes the place of the one before as soon as an engine has announced a beginning there, for
example with new weights. It is not new any more then, even if it is pushed out of the followed ones and comes back.
Any other one takes it back with an announcement of its own once the published one has had none for `SILENT_S`, or has
nothing to publish: so a short visit of an engine with other settings leaves no router without the blocks of all others.

Pipeline stages have namespaces of their own, of which none alone can be promised: their blocks are not published. Nor
are blocks whose names a key hides.

How blocks follow each other is what engines announce, beside the tokens. A block of several blocks of the main group
has the name of the last of them, so that the chain of the main group leads to the blocks of all groups.

Not thread-safe: the pool's event loop owns the view.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from kvpool.name_key import FIELD
from kvpool.namespace import NamespaceSpec
from kvpool.types import BlockRun
from kvpool_server.cache.entry import Entry, Group, Observer
from kvpool_server.events.ledger import Ledger
from kvpool_server.events.promises import Promises, main_group

MAX_BLOCK_TOKENS = 4_096
"""In a block of the main group; namespaces with larger ones are not followed."""
MAX_HIT_BLOCKS = 4_096
"""That a hit needs of a group; namespaces with larger windows are not followed. All of them change with one block."""
MAX_ALIGNMENT = 1 << 16
"""Tokens in a published block; namespaces with larger ones are not followed."""
STEP_BLOCKS = 2_048
"""Most that are judged in one turn of the loop."""
SILENT_S = 60.0
"""Without an announcement: after it the published namespace gives way to others."""
MAX_NAMESPACES = 64
"""That are followed. The one that has been silent longest gives way to a further one."""
MAX_PASSED = 4_096
"""Other namespaces that are remembered, so that their specifications are not looked at again."""
MAX_BEGUN = 4_096
"""Namespaces that are remembered not to be new: those that were announced last."""


class PrefixView(Observer):
    """See the module.

    Args:
        model, tenant: of the namespaces.
        ledger: gets the changes of what is published.
        spec_of: the specification of an open namespace; None: it is not open.
        defer: schedules a function for the next turn of the pool's loop.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        model: str,
        tenant: str,
        ledger: Ledger,
        spec_of: Callable[[bytes], NamespaceSpec | None],
        defer: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.model = model
        self.tenant = tenant
        self._ledger = ledger
        self._spec_of = spec_of
        self._defer = defer
        self._clock = clock
        self._is_deferred = False
        self._passed: set[bytes] = set()  # Namespaces that are not followed.
        self._followed: dict[bytes, Promises] = {}  # By namespace, the one that has been silent longest first.
        self._begun: dict[bytes, None] = {}  # Not new any more, the one that has been silent longest first.
        self._published: Promises | None = None
        self._announced_at = -math.inf  # Of the published namespace.

    def follows(self, spec: NamespaceSpec) -> bool:
        """Whether blocks of a namespace may be published, so that their tokens are wanted."""
        if (spec.model, spec.tenant) != (self.model, self.tenant) or spec.num_pipeline_stages > 1:
            return False
        return (
            (main := main_group(spec)) is not None
            and spec.groups[main].block_tokens <= MAX_BLOCK_TOKENS
            and FIELD not in dict(spec.extra)
            and all(group.block_tokens % spec.groups[main].block_tokens == 0 for group in spec.groups)
            and all(group.hit_blocks <= MAX_HIT_BLOCKS for group in spec.groups)
            and math.lcm(*(group.block_tokens for group in spec.groups)) <= MAX_ALIGNMENT
        )

    def stored(self, entry: Entry) -> None:
        if (promises := self._of(entry.group)) is not None:
            promises.stored(entry)
            self._publish()

    def removed(self, entry: Entry) -> None:
        if (promises := self._followed.get(entry.group.fingerprint)) is not None:
            promises.removed(entry)
            self._publish()

    def announced(self, fingerprint: bytes, run: BlockRun, tokens: Sequence[int]) -> None:
        """An engine has told which tokens blocks stand for: `block_tokens` of the group each."""
        promises = self._followed.get(fingerprint)
        if promises is None or run.group_idx != promises.main_idx:
            return
        promises.announced(run, tokens)
        self._followed[fingerprint] = self._followed.pop(fingerprint)
        now = self._clock()
        if promises.has_beginning:
            if fingerprint not in self._begun or self._gives_way(now):
                self._turn_to(promises)
            self._begun.pop(fingerprint, None)
            self._begun[fingerprint] = None
            if len(self._begun) > MAX_BEGUN:
                del self._begun[next(iter(self._begun))]
        if promises is self._published:
            self._announced_at = now
            self._publish()

    def _of(self, group: Group) -> Promises | None:
        """The namespace of a group, if it is followed; begins to follow one that can be."""
        fingerprint = group.fingerprint
        if (promises := self._followed.get(fingerprint)) is not None:
            return promises
        if fingerprint in self._passed or (spec := self._spec_of(fingerprint)) is None:
            return None
        if not self.follows(spec):
            if len(self._passed) == MAX_PASSED:
                self._passed.clear()
            self._passed.add(fingerprint)
            return None
        if len(self._followed) == MAX_NAMESPACES:
            silent = next(each for each, promises in self._followed.items() if promises is not self._published)
            del self._followed[silent]
        self._followed[fingerprint] = promises = Promises(spec, group)
        if self._published is None:
            self._turn_to(promises)
        return promises

    def _gives_way(self, now: float) -> bool:
        """Whether the published namespace gives way to any other."""
        assert self._published is not None, "a view publishes the first namespace that it follows"
        return self._published.is_empty or now - self._announced_at >= SILENT_S

    def _turn_to(self, promises: Promises) -> None:
        """Publishes a namespace from now on."""
        if promises is self._published:
            return
        if self._published is not None:
            self._published.rest()
            self._ledger.clear()
        self._published = promises
        promises.wake()

    def _publish(self) -> None:
        """Judges blocks, and tells what comes of it; the rest in later turns."""
        if self._is_deferred or self._published is None:
            return
        for change in self._published.judge(STEP_BLOCKS):
            self._ledger.note(change)
        if self._published.is_behind:
            self._is_deferred = True
            self._defer(self._go_on)

    def _go_on(self) -> None:
        self._is_deferred = False
        self._publish()
