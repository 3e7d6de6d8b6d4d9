"""``speed.md`` from the rows of ``speed.json``."""

from __future__ import annotations

from typing import Any

from benchmarks import claims

Row = dict[str, Any]

HEAD = """# Speed of a round

Made by `python -m benchmarks.speed` from [{name}]({name}). A ratio says how many times faster than the
plain PyTorch loop a contender is: the median over turns of (seconds of the plain loop / seconds of the contender,
same turn, same cohort), with the least and the greatest beside it. Every contender runs in a process of its own, one at
a time, from the same initial values, on the same mini-batches.
[benchmarks/workloads.py](../benchmarks/workloads.py) says what W1 to W4 are.

- *Peak memory*: each process of the contender at its own peak during measured rounds, pages shared between its
  processes once.
- *CPU*: processor seconds a round, all processes together.
- *Of peak*: operations that the result needs at least ([benchmarks/operations.py](../benchmarks/operations.py)) per
  second, as a fraction of what multiply-adds alone reach on all cores; in brackets with every step's input
  multiplied, as `torch.nn` does it.
- *State error*: ‖a − b‖ / ‖b‖ of the server's state against the plain loop's after one round of few clients; for
  fedkeep also with both in double precision; last, of the result in single precision against the plain loop's in
  double precision. Adam and max-pooling amplify the last bit, so W3's is a round of 3 steps: after 150 steps the plain
  loop with one thread and the plain loop with two are 2e-3 apart in single precision.
"""


THREADS = """
The plain loop runs with one thread and with one per core where both are near each other, and ratios are taken over the
one that is faster in the race.
"""
GPU = """
On a GPU the plain loop runs PyTorch's layers as PyTorch sets them: LSTM and GRU of cuDNN, convolutions in TF32. fedkeep
computes in full single precision there. W3's state errors, 3e-4, miss the claimed 1e-6. They are as large as TF32's;
that it is the cause was not shown.
"""


def page(rows: list[Row], name: str = "speed.json") -> str:
    """Return the page made from rows; ``name`` is their file's."""
    machines = sorted({r["machine"] for r in rows})
    commits = sorted({str(r["commit"]) for r in rows})
    head = HEAD.format(name=name) + (GPU if any(map(claims.on_gpu, rows)) else THREADS)
    parts = [head, f"Machine: {'; '.join(machines)}. Commit: {', '.join(commits)}.\n", wanted(rows)]
    cases = dict.fromkeys((r["workload"], r["cohort"]) for r in rows)
    parts += [table(*case, [r for r in rows if (r["workload"], r["cohort"]) == case]) for case in cases]
    return "\n".join(parts)


def wanted(rows: list[Row]) -> str:
    """Return the table of what was wanted and what was reached."""
    lines = [
        "## Wanted and reached",
        "",
        "| workload | cohort | over | wanted | reached |",
        "|---|---|---|---|---|",
    ]
    for claim in claims.of(rows):
        reached = claim.reached(rows)
        if claims.best(rows, claim.workload, claim.cohort) is not None:
            missed = "" if reached is None or reached >= claim.wanted else " (missed)"
            found = "not measured" if reached is None else f"{reached:.2f}{missed}"
            lines.append(f"| {claim.workload} | {claim.cohort} | {claim.over} | {claim.wanted:g} | {found} |")
    for name, cohort in claims.OF_PEAK:
        row = claims.best(rows, name, cohort)
        if row is not None and row.get("fraction_of_peak"):
            reached, wanted = row["fraction_of_peak"], claims.OF_PEAK_WANTED
            missed = (
                ""
                if reached >= wanted
                else f" (missed; {row['fraction_of_peak_dense']:.0%} in brackets below)"
            )
            lines.append(f"| {name} | {cohort} | of the peak | {wanted:.0%} | {reached:.0%}{missed} |")
    return "\n".join(lines) + "\n" if len(lines) > 4 else ""


def table(name: str, cohort: int, rows: list[Row]) -> str:
    """Return the table of one workload."""
    turns = next((r["turns"] for r in rows if "turns" in r), 0)
    head = ("contender", "seconds", "× plain", "low – high", "CPU s", "peak MB", "of peak", "state error")
    lines = [
        f"## {name}, cohort {cohort} ({turns} turns)",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    lines += [f"| {' | '.join(cells(r))} |" for r in rows]
    return "\n".join(lines) + "\n"


def cells(row: Row) -> list[str]:
    """Return the cells of a contender's line."""
    name = row["contender"] + (
        f" ({row['engine']})" if row["contender"] == "fedkeep_auto" and "engine" in row else ""
    )
    if "not_measured" in row:
        return [name, f"not measured: {row['not_measured']}", *[""] * 6]
    peak = row["fraction_of_peak"]
    error = f"{row['state_error']:.0e}" if "state_error" in row else ""
    if "state_error_double" in row:
        error += f", {row['state_error_double']:.0e} in double"
    if "state_error_to_double" in row:
        error += f"{', ' if error else ''}{row['state_error_to_double']:.0e} to double"
    return [
        name,
        f"{row['seconds']:.3f}",
        f"{row['ratio_to_plain']:.2f}",
        f"{row['low']:.2f} – {row['high']:.2f}",
        f"{row['cpu_seconds']:.2f}",
        f"{row['peak_mb']:.0f}",
        "" if peak is None else f"{peak:.0%} ({row['fraction_of_peak_dense']:.0%})",
        error,
    ]
