"""Our variants beside other people's implementations of them: same weights, same inputs, outputs and gradients.

    python -m benchmarks.oracles                              # `make oracles` does it in an environment of its own
    python -m benchmarks.oracles --only=reformer,sinkhorn     # some variants

Writes benchmarks/results/oracles.json, keeping what is not measured anew. Exits with 1 where two implementations differ
that should agree, or agree where a difference is named.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import jax
import torch

from benchmarks.oracles import chosen_tokens, feature_maps, hugging_face, reformers, shortened, token_pairs
from benchmarks.oracles.comparison import Comparison
from xformer.bench import machine

OUT = Path(__file__).parents[1] / "results" / "oracles.json"
FAMILIES = (hugging_face, token_pairs, shortened, reformers, chosen_tokens, feature_maps)


def comparisons() -> list[Comparison]:
    return [comparison for family in FAMILIES for comparison in family.comparisons()]


def table(found: dict[str, Any]) -> str:
    """A comparison as text."""
    lines = [f"{found['variant']} beside {found['theirs']} ({found['package']} {found['version']})"]
    for run in found["runs"]:
        apart = run["largest_difference"]
        gradient = max((x for name, x in apart.items() if name != "output"), default=0.0)
        verdict = "agree" if run["agree"] else "differ"
        verdict += "" if run["as_expected"] else ", NOT AS EXPECTED"
        lines.append(f"  output {apart['output']:.1e}, gradients {gradient:.1e}: {verdict} - {run['what']}")
        lines += [f"    {one['right']}: {one['what']}" for one in run["differences"]]
    return "\n".join([*lines, *(f"  remark, {one['right']}: {one['what']}" for one in found["remarks"])])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", help="variants to compare, separated by commas; all by default")
    parser.add_argument("--out", type=Path, default=OUT, help="the JSON; comparisons that are not made anew stay")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    torch.set_default_dtype(torch.float64)
    every = comparisons()
    known = {comparison.variant for comparison in every}
    wanted = set(options.only.split(",")) if options.only else known
    if unknown := wanted - known:
        parser.error(f"--only: got {', '.join(sorted(unknown))}, takes {', '.join(sorted(known))}")
    results = json.loads(options.out.read_text()) if options.out.exists() else {"comparisons": {}}
    good = True
    for comparison in every:
        if comparison.variant not in wanted:
            continue
        found = comparison.measure()
        found["version"] = importlib.metadata.version(comparison.package)
        print(table(found), flush=True)
        results["comparisons"][f"{comparison.variant}, {comparison.theirs}"] = found
        good &= all(run["as_expected"] for run in found["runs"])
        results |= {"dtype": "float64", "machine": machine.describe()}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
