"""What PyTorch's caching allocator reserves on a card for the tensors of a step, and what else the card holds."""

from bisect import bisect_left, insort
from contextlib import suppress

import torch

from .. import machine
from ..measure import MiB

# What a card holds besides PyTorch's memory, at most, now that kernels are loaded when they are first used. Readings:
# about 300 and 400 MB (pytorch issues 107667 and 109888), 287 MB (pull request 86509); on an H100, of 132
# multiprocessors, 527 MiB at the start and 789 after a hundred steps of all kinds, 6 for each. 7.5 leave 200 MiB there
# for gaps that nobody predicted: in processes of their own the worst of 194 steps had 100, and in a process that did
# something before, 91 of 94 had less.
CONTEXT, CONTEXT_OF_ONE = 512 * MiB, 15 * MiB // 2
# cuBLAS allocates one for each thread that multiplies: the forward pass has one, the backward pass another.
# Source: CUBLAS_WORKSPACE_CONFIG :4096:2:16:8, from compute capability 9.0 on 32 MiB, in ATen's CublasHandlePool.cpp.
WORKSPACE, WORKSPACE_90 = 8_519_680, 32 * MiB


def add_card(prediction, tracker, gpu: machine.Gpu | None):
    """Fill in what the allocator uses and reserves, and what the card holds, for the steps that the tracker saw."""
    workspace = WORKSPACE_90 if gpu and gpu.capability and gpu.capability >= (9, 0) else WORKSPACE
    requests, allocator = list(two_steps(tracker, workspace)), None
    if gpu:
        with suppress(torch.OutOfMemoryError):
            allocator = Allocator(gpu.usable - context(gpu)).run(requests)
        prediction.fits = allocator is not None
    allocator = allocator or Allocator().run(requests)
    prediction.allocated, prediction.reserved = allocator.used_peak, allocator.reserved_peak
    prediction.card_bytes = allocator.reserved_peak + context(gpu)
    parts = {"cuBLAS workspaces": 2 * workspace, "CUDA context": context(gpu)}
    gaps = prediction.card_bytes - prediction.peak - sum(parts.values())
    prediction.card_parts = {"tensors": prediction.peak, "rounding and gaps": gaps, **parts}


def two_steps(tracker, workspace: int):
    """(key, bytes) to allocate and (key, None) to free, in order: the first step makes the optimizer's state."""
    cleared = {block for number, size, block in tracker.events if number == 0 and size < 0}  # gradients before it
    there = [block for number, _, block in tracker.events if number == 0 and block not in cleared]
    state = [(block, block.size) for block in there if block.role == "optimizer state"]
    there = [(block, block.size) for block in there if block.role != "optimizer state"]
    step = [(number, block, block.size if size > 0 else None) for number, size, block in tracker.events if number]
    lives = {block: size for _, block, size in step}  # None for those that die
    before = [*tracker.phases, "optimizer"].index("optimizer")  # operations that come before it
    products = dict(tracker.held.products)

    yield from there
    for number, block, size in step:
        for thread, product in list(products.items()):
            if (number, size is None) > (product, False):
                yield thread, workspace
                del products[thread]
        if number > before:
            yield from state
            state = []
        yield block, size
    yield from state
    yield from ((block, None) for _, block, size in step if size and lives[block])
    yield from ((block, size) for block, size in there if not lives.get(block, True))
    yield from ((block, size) for _, block, size in step)


def context(gpu: machine.Gpu | None) -> int:
    """Bytes of a card that no tensor can have, at most: the driver's own, more with more multiprocessors."""
    return max(CONTEXT, CONTEXT_OF_ONE * (gpu and gpu.multiprocessors or 0))


class Allocator:
    """PyTorch's caching allocator, with its default settings: what it reserves for a sequence of requests.

    Source: roundup_size, get_allocation_size, should_split and free_block in c10's CUDACachingAllocator.cpp.
    """

    def __init__(self, room: int | None = None):
        self.room = room  # the most that can be reserved, in bytes
        self.reserved = self.reserved_peak = self.used = self.used_peak = self.end = 0
        self.segments = {}  # address → size
        self.pools = {True: [], False: []}  # of small and of large blocks: the free ones, (size, address), sorted
        self.starts, self.ends = {}, {}  # of free blocks: address → size, address of the end → address
        self.held = {}  # key of a request → (size, address, small)

    def run(self, requests):
        for key, size in requests:
            if size is None and key in self.held:
                self.free(key)
            elif size:
                self.allocate(key, size)
        return self

    def allocate(self, key, size: int):
        """torch.OutOfMemoryError where there is no room."""
        size = -(-size // 512) * 512
        small = size <= MiB
        pool = self.pools[small]
        if not pool or pool[-1][0] < size:
            self._segment(size, small)
        have, address = pool.pop(bisect_left(pool, (size, 0)))  # the smallest that is large enough
        del self.starts[address], self.ends[address + have]
        if have - size >= (512 if small else MiB + 1):
            self._give(have - size, address + size, small)
            have = size
        self.held[key] = have, address, small
        self.used += have
        if self.used > self.used_peak:  # not max(), which is a tenth of the time
            self.used_peak = self.used

    def free(self, key):
        size, address, small = self.held.pop(key)
        self.used -= size
        before, after = self.ends.get(address), self.starts.get(address + size)
        if after is not None:
            self._take(after, address + size, small)
            size += after
        if before is not None:
            length = self.starts[before]
            self._take(length, before, small)
            size, address = size + length, before
        self._give(size, address, small)

    def _take(self, size, address, small):
        del self.pools[small][bisect_left(self.pools[small], (size, address))]
        del self.starts[address], self.ends[address + size]

    def _give(self, size, address, small):
        insort(self.pools[small], (size, address))
        self.starts[address], self.ends[address + size] = size, address

    def _segment(self, size, small):
        size = 2 * MiB if small else 20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB
        if self.room is not None and self.reserved + size > self.room:
            for address in [a for a, whole in self.segments.items() if self.starts.get(a) == whole]:
                whole = self.segments.pop(address)  # as the allocator does before it gives up: return what is free
                self._take(whole, address, (whole, address) in self.pools[True])
                self.reserved -= whole
            if self.reserved + size > self.room:
                raise torch.OutOfMemoryError(f"{self.reserved + size:,} bytes in a room of {self.room:,}")
        self.segments[self.end] = size
        self._give(size, self.end, small)
        self.end += size + 1  # a gap: blocks of two segments are never neighbours
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)
