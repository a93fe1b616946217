"""How the loss of language models falls with size, data and compute: laws fitted to the runs of comparisons.

  for budget in 4e11 1.6e12 6.4e12; do
    xformer compare --config=scaling:$budget --workdir=runs/scaling/$budget
  done
  xformer scaling --workdir=runs/scaling --held_out=runs/scaling_larger --out=runs/scaling

Prints for each attention the law L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022) with 95 % bootstrap
intervals, the best size at each budget, and what the law says of the held-out runs, which it was not fitted to. Runs
whose attention sections differ, in positions or any hyperparameter, have laws of their own. Writes scaling.json and
scaling.png. Exit codes: 0 finished; 2 wrong arguments; 1 anything else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from xformer import scaling
from xformer.commands import cli
from xformer.report import formatting
from xformer.scaling import figure, iso_flop
from xformer.scaling.observations import Observation, by_attention, labels
from xformer.scaling.study import Study, study
from xformer.schema import ConfigError
from xformer.train import workdir as folders

NAMES = {
    "alpha": "alpha (parameters)",
    "beta": "beta (tokens)",
    "floor": "E (nats a token)",
    "params_exponent": "best parameters grow as compute to the",
    "tokens_exponent": "and tokens as compute to the",
}


def command(argv: Sequence[str]) -> None:
    """Runs the command line; see the module docstring."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--workdir", help="folder of a comparison over sizes, or of several")
    parser.add_argument("--held_out", help="the same, of runs that the laws are not fitted to but held against")
    parser.add_argument("--out", help="folder that scaling.json and scaling.png are written into (default: workdir)")
    parser.add_argument("--samples", type=int, default=1000, help="draws of the bootstrap (default 1000)")
    args, overrides = parser.parse(argv)
    if overrides:
        raise ConfigError(f"--config.{overrides[0]}: the runs are there already, and keep their configs")
    if args.samples < 1:
        raise ConfigError(f"--samples: got {args.samples}, takes an integer from 1")
    workdir = parser.workdir(args)
    out = parser.folder("--out", args.out) if args.out is not None else workdir
    fitted = _read("--workdir", workdir)
    held_out = _read("--held_out", Path(args.held_out)) if args.held_out is not None else {}
    fitted_to, held = (set(itertools.chain.from_iterable(runs.values())) for runs in (fitted, held_out))
    if both := fitted_to & held:
        raise ConfigError(
            f"--held_out: got {args.held_out!r}, of whose runs {len(both)} are in --workdir too; takes runs that the "
            "laws are not fitted to"
        )
    names = labels([*fitted, *(attention for attention in held_out if attention not in fitted)])
    if unknown := [names[attention] for attention in held_out if attention not in fitted]:
        known = ", ".join(names[attention] for attention in fitted)
        raise ConfigError(f"--held_out: got runs of {', '.join(unknown)}, takes those of {known}")
    studies = []
    for attention, runs in fitted.items():
        try:
            studies.append(study(names[attention], runs, held_out.get(attention, ()), samples=args.samples))
        except ValueError as error:
            raise ConfigError(f"--workdir: {names[attention]}: {error}") from error
        print(text(studies[-1]))
        print()
    out.mkdir(parents=True, exist_ok=True)
    folders.write_json(out / "scaling.json", {found.attention: found.as_json() for found in studies})
    folders.write_bytes(out / "scaling.png", figure.draw(studies))
    print(f"written: {out / 'scaling.json'}, {out / 'scaling.png'}")


def _read(flag: str, folder: Path) -> dict[str, list[Observation]]:
    try:
        return by_attention(scaling.read(folder))
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from error


def text(found: Study) -> str:
    """What was found for one attention op, in a few lines."""
    law, runs = found.law, found.observations
    sizes = formatting.si(min(o.params for o in runs)), formatting.si(max(o.params for o in runs))
    lines = [
        f"{found.attention}: {len(runs)} runs, {sizes[0]} to {sizes[1]} parameters",
        f"  L(N, D) = {law.floor:.2f} + {law.a:.3g} / N^{law.alpha:.3g} + {law.b:.3g} / D^{law.beta:.3g}",
    ]
    for name, label in NAMES.items():
        low, high = found.interval(name)
        spelled = "{:.2f} (95 %: {:.2f} to {:.2f})" if name == "floor" else "{:.3g} (95 %: {:.3g} to {:.3g})"
        verdict = ", not told from 0" if name == "floor" and low < 0.005 else ""
        lines.append(f"  {label} {spelled.format(getattr(law, name), low, high)}{verdict}")
    for budget, curve in found.curves.items():
        if curve is None:
            best = f"fewer than {iso_flop.FEWEST} sizes"
        elif curve.inside:
            best = f"best at {formatting.si(curve.params)} parameters, {curve.loss:.3f} nats"
        else:
            best = "the best size is outside those that were trained"
        lines.append(f"  at {formatting.si(budget, 'FLOP')} of training: {best}")
    lines.append(f"  measured over law: at most {100 * max(abs(found.residuals)):.2g} % off")
    for run in found.held_out:
        value, low, high = found.foretold(run)
        inside = "within" if low <= run.loss <= high else "outside"
        lines.append(
            f"  held out, {formatting.si(run.params)} parameters, {formatting.si(run.flops, 'FLOP')}: foretold "
            f"{value:.3f} (95 %: {low:.3f} to {high:.3f}), measured {run.loss:.3f}, {inside}"
        )
    return "\n".join(lines)
