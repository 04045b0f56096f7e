"""One of several ranks in a process of its own, with a group whose collectives send nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def one_of(count: int, rank: int) -> Iterator[dist.ProcessGroup]:
    """The group of a process that takes itself for `rank` of `count`. Nothing arrives, so results
    are meaningless, and contexts must be built with check=False."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
