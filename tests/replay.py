"""An independent account of a planned step: events on three resources, played one by one.

The step module has sums and running maxima, the solver's model inequalities; this has neither.  It knows only that gathers,
computation and reductions each take their work in a fixed order, that some work must wait for other work, and that what
gathers and reductions send goes over one channel.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_osdp.prices import Price
from ds_osdp.step import Instance

Task = tuple[str, int]


def replay_step_ns(problem: Instance, choice: Sequence[int]) -> int:
    """Nanoseconds of one optimizer step of the chosen options."""
    chosen = problem.chosen(choice)
    total = 0
    for micro_step in range(problem.accumulation):
        last = micro_step == problem.accumulation - 1
        total += _forward(chosen, first=micro_step == 0) + _backward(chosen, last)
    return total + sum(p.update_ns for p in chosen)


def _forward(chosen: Sequence[Price], first: bool) -> int:
    order = range(len(chosen))
    takes = {("gather", u): chosen[u].gather_first_ns if first else chosen[u].gather_forward_ns for u in order}
    takes |= {("compute", u): chosen[u].forward_ns for u in order}
    queues: list[list[Task]] = [[("gather", u) for u in order], [("compute", u) for u in order]]
    return _play(queues, takes, {("compute", u): ("gather", u) for u in order})


def _backward(chosen: Sequence[Price], last: bool) -> int:
    order = list(reversed(range(len(chosen))))
    takes = {("gather", u): chosen[u].gather_backward_ns for u in order}
    takes |= {("wait", u): chosen[u].waited_ns for u in order}
    takes |= {("compute", u): chosen[u].last_backward_ns if last else chosen[u].backward_ns for u in order}
    takes |= {("reduce", u): chosen[u].last_reduce_ns if last else chosen[u].reduce_ns for u in order}
    # The gather of a unit shares the channel with what the units before it have waited for.
    channel: list[Task] = [task for u in order for task in (("gather", u), ("wait", u))]
    queues: list[list[Task]] = [channel, *([(what, u) for u in order] for what in ("compute", "reduce"))]
    waits: dict[Task, Task] = {("compute", u): ("gather", u) for u in order}
    waits |= {("reduce", u): ("compute", u) for u in order}
    sent = sum(takes[task] for task in takes if task[0] != "compute")
    return max(_play(queues, takes, waits), sent)


def _play(queues: list[list[Task]], takes: dict[Task, int], waits: dict[Task, Task]) -> int:
    """Run every queue in its own order; a task starts when its queue is free and what it waits for has ended."""
    ended: dict[Task, int] = {}
    free = [0] * len(queues)
    position = [0] * len(queues)
    while any(at < len(queue) for at, queue in zip(position, queues, strict=True)):
        moved = False
        for i, queue in enumerate(queues):
            if position[i] == len(queue):
                continue
            task = queue[position[i]]
            if task in waits and waits[task] not in ended:
                continue
            start = max(free[i], ended[waits[task]]) if task in waits else free[i]
            free[i] = ended[task] = start + takes[task]
            position[i] += 1
            moved = True
        assert moved, "the schedule waits for itself"
    return max(free)
