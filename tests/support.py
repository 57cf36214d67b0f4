"""What is known to work, and what is refused, as docs/support.md shows it: made from the tests and the table of refusals.

``python tests/support.py`` writes the page; a test compares it.
"""

from __future__ import annotations

from pathlib import Path

from test_parity import BASIC, BETTER, NODE_CASES, ROWS

from ds_osdp.refused import NOT_ELEMENTWISE, REFUSED

PAGE = Path(__file__).resolve().parent.parent / "docs" / "support.md"

TITLE = """# What works, and what is refused

This page is made from the tests and from the table of refusals (`python tests/support.py`); a test keeps it current.

## Trained beside stock ZeRO-3

Each row is trained twice, stock and planned, from the same seed on the same data, on real engines (2 ranks; 4 where units are
spread inside nodes). Losses, gradient norms and final weights are equal: bit for bit where all units are at stage 2 or 3,
within the order of summation (1e-6 relative; two units in the last place of bf16) where some are at stage 0 or 1 or inside
nodes.
"""

REFUSED_TITLE = """
## Refused at start

By name, on every rank, before the model is touched.
"""

NOTES = """
`mpu` and `mesh_param` of `deepspeed.initialize`, and DeepSpeed's own MoE layers, are refused too: ranks hold different parts of
the model. fp16 runs the same code as bf16, with a loss scale; DeepSpeed refuses it on a CPU, so that its rows are marked `gpu`.
With `engine.compile()` DeepSpeed's hooks and what a plan waits for stay outside the compiled regions: torch breaks the graph
there and runs them eagerly.
"""


def page() -> str:
    """The whole page."""
    lines = [TITLE, "| trained | stages together in one model | inside nodes |", "| --- | --- | --- |"]
    for name in dict.fromkeys(name for _, name, _ in ROWS):
        plans = dict.fromkeys(plan for ranks, row, plan in ROWS if row == name and ranks == 2)
        nodes = name in NODE_CASES or name in BASIC[:2]
        lines.append(f"| {name} | {', '.join(STAGES[plan] for plan in plans)} | {'yes' if nodes else ''} |")
    better = ", ".join(f"{name!r}" for name in dict.fromkeys(name for _, name, _ in BETTER))
    lines.append(f"\nWhere stock ZeRO-3 loses a gradient and a plan does not, in any stage: {better} (a parameter used both")
    lines.append("inside and outside a reentrant checkpoint); compared with stock training without the checkpoint.")
    lines += [REFUSED_TITLE, "| setting | why |", "| --- | --- |"]
    lines += [f"| `{refusal.name}` | {refusal.reason} |" for refusal in REFUSED]
    names = ", ".join(NOT_ELEMENTWISE)
    lines.append(
        f"| optimizers: {names} | their update of an element depends on the whole tensor, of which ZeRO-3 gives pieces |"
    )
    return "\n".join(lines) + "\n" + NOTES


STAGES = {
    "none": "3", "all": "0", "some": "0 and 3", "one": "1", "two": "2", "mixed": "0 to 3", "adapters": "0, 2 and 3",
    "experts": "0 to 3",
}  # fmt: skip

if __name__ == "__main__":
    PAGE.write_text(page())
