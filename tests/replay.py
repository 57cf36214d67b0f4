"""An independent account of a planned step: events on two resources, played one by one.

The prices module has a recursion and the solver's model inequalities; this has neither.  It knows only that one processor
computes, one channel communicates, each takes its work in a fixed order, and some work must wait for other work.
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
        total += _play(*_forward(chosen)) + _play(*_backward(chosen, problem.look_ahead, last))
    return total + sum(p.update_ns for p in chosen)


def _forward(chosen: Sequence[Price]) -> tuple[list[list[Task]], dict[Task, int], dict[Task, list[Task]]]:
    units = range(len(chosen))
    seconds = {("gather", u): chosen[u].gather_forward_ns for u in units}
    seconds |= {("compute", u): chosen[u].forward_ns for u in units}
    waits: dict[Task, list[Task]] = {("compute", u): [("gather", u)] for u in units}
    return [[("gather", u) for u in units], [("compute", u) for u in units]], seconds, waits


def _backward(
    chosen: Sequence[Price], look_ahead: int, last: bool
) -> tuple[list[list[Task]], dict[Task, int], dict[Task, list[Task]]]:
    order = list(reversed(range(len(chosen))))
    seconds = {("gather", u): chosen[u].gather_backward_ns for u in order}
    seconds |= {("compute", u): chosen[u].backward_ns for u in order}
    seconds |= {("reduce", u): chosen[u].last_reduce_ns if last else chosen[u].reduce_ns for u in order}
    waits: dict[Task, list[Task]] = {}
    for u in order:
        waits[("compute", u)] = [("gather", u)]
        waits[("reduce", u)] = [("compute", u)]
    # The channel has asked for the parameters of some units ahead before it sends a gradient.
    channel: list[Task] = [("gather", u) for u in order[:look_ahead]]
    for sent, ahead in enumerate(order[look_ahead:]):
        channel += [("gather", ahead), ("reduce", order[sent])]
    channel += [("reduce", u) for u in order[max(0, len(order) - look_ahead) :]]
    return [channel, [("compute", u) for u in order]], seconds, waits


def _play(queues: list[list[Task]], seconds: dict[Task, int], waits: dict[Task, list[Task]]) -> int:
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
            needs = waits.get(task, [])
            if all(need in ended for need in needs):
                start = max([free[i], *(ended[need] for need in needs)])
                free[i] = ended[task] = start + seconds[task]
                position[i] += 1
                moved = True
        assert moved, "the schedule waits for itself"
    return max(free)
