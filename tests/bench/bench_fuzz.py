"""Damaged models: does every one of them end as a graph or as one line of error, in bounded time and memory?

    python -m tests.bench.bench_fuzz --count 20000 --seed 0 --json build/fuzz.json
    python -m tests.bench.bench_fuzz --seed 0 --first 1234 --count 1 --keep build      (one input again, kept as a file)

Mutation number i of a seed is always the same, so a fault is found again by its number.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.bench.instances import table, write_json
from tests.graph.fuzz_mutators import make_mutation
from tests.graph.fuzz_seeds import load_seeds
from tests.graph.fuzzing import importer

COUNT = 20_000
PLANNED_EVERY = 5
"""One in so many inputs is also planned on two devices."""
MAX_FAULTS = 200
"""A campaign ends after so many: something is wrong with everything."""
PROGRESS_EVERY = 1000


def campaign(
    count: int, seed: int, *, first: int = 0, keep: Path | None = None, quiet: bool = False
) -> dict[str, list[dict[str, object]]]:
    """Run mutations ``first .. first + count``.

    Args:
        count: how many.
        seed: of the stream.
        first: number of the first.
        keep: folder for the inputs that show a fault (all inputs, where there is but one).
        quiet: no progress on stderr.
    """
    groups = load_seeds()
    outcomes: Counter[str] = Counter()
    guarded: Counter[str] = Counter()
    faults: list[dict[str, object]] = []
    slowest: list[tuple[float, int, str]] = []
    reached = nodes = peak = 0
    started = time.perf_counter()
    with importer() as child:
        for index in range(first, first + count):
            mutation = make_mutation(groups, seed, index)
            found = child.run(mutation.data, plan=index % PLANNED_EVERY == 0)
            outcomes[found.outcome] += 1
            if found.guarded:
                guarded[found.guarded] += 1
            reached += found.reached
            nodes += found.nodes
            peak = max(peak, found.peak_bytes)
            slowest = sorted([*slowest, (found.cpu_s, index, mutation.seed)], reverse=True)[:5]
            if found.fault:
                steps = " ".join(mutation.steps)
                faults.append({"index": index, "seed_model": mutation.seed, "steps": steps, "fault": found.fault})
            if keep is not None and (found.fault or count == 1):
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"fuzz_{seed}_{index}.onnx").write_bytes(mutation.data)
            if len(faults) >= MAX_FAULTS:
                print(f"{MAX_FAULTS} faults after {index - first + 1} inputs: ended", file=sys.stderr)
                break
            if not quiet and (index - first + 1) % PROGRESS_EVERY == 0:
                print(f"{index - first + 1} inputs, {len(faults)} faults", file=sys.stderr)
        starts = child.starts
    figures: list[dict[str, object]] = [
        {"figure": "mutations", "value": sum(outcomes.values())},
        {"figure": "seed models", "value": sum(len(items) for items in groups.values())},
        {"figure": "reached binding, percent", "value": round(100 * reached / sum(outcomes.values()), 1)},
        {"figure": "nodes bound", "value": nodes},
        {"figure": "caught by general guards", "value": guarded.total()},
        {"figure": "faults", "value": len(faults)},
        {"figure": "child processes", "value": starts},
        {"figure": "most resident memory, MiB", "value": peak >> 20},
        {"figure": "wall clock, s", "value": round(time.perf_counter() - started, 1)},
    ]
    return {
        "figures": figures,
        "outcomes": [{"outcome": name, "inputs": number} for name, number in outcomes.most_common()],
        "guards": [{"where": where, "inputs": number} for where, number in guarded.most_common(10)],
        "slowest": [{"cpu_s": seconds, "index": index, "seed_model": name} for seconds, index, name in slowest],
        "faults": faults,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, list[dict[str, object]]]:
    """Run, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT, help="number of mutations")
    parser.add_argument("--seed", type=int, default=0, help="of the stream of mutations")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--keep", type=Path, help="folder for inputs that show a fault")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    result = campaign(options.count, options.seed, first=options.first, keep=options.keep)
    print(*(table(result[part]) for part in ("figures", "outcomes", "guards", "slowest", "faults")), sep="\n\n")
    write_json(options.json, result)
    return result


def test_fuzz() -> None:
    """No input leads to a traceback, a hang, a memory blow-up, or a message that is not one line."""
    result = main([])
    assert not result["faults"]
    shares = {str(row["figure"]): row["value"] for row in result["figures"]}
    assert float(str(shares["reached binding, percent"])) >= 50


if __name__ == "__main__":
    main()
