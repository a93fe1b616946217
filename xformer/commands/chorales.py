"""How a trained model goes on with Bach's chorales: MIDI files, and piano rolls with what Bach wrote beside them.

  xformer chorales --workdir=runs/chorales --out=runs/chorales/music --pieces=4 --temperature=1 --top_p=0.95

The model is given the beginnings of pieces of the test split. For each piece the folder gets piece_N.mid, the beginning
and what the model added, piece_N_bach.mid and piece_N.png. Exit codes: 0 finished; 2 wrong arguments; 1 anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer import extras, loading, music, tasks
from xformer.commands import cli
from xformer.schema import ConfigError
from xformer.tasks import chorale_tokens
from xformer.tasks.chorale_scores import VOICES


def command(argv: Sequence[str]) -> None:
    """Runs the command line; see the module docstring."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--workdir", help="folder of the trained run")
    parser.add_argument("--out", required=True, help="folder that the files are written into")
    parser.add_argument("--data_dir", help="folder of prepared data (default: $XFORMER_DATA or ~/.cache/xformer)")
    parser.add_argument("--pieces", type=int, default=4, help="how many test pieces are continued (default 4)")
    parser.add_argument("--given", type=int, default=64, help="sixteenths that the model is given (default 64)")
    parser.add_argument("--added", type=int, default=64, help="sixteenths that it adds at most (default 64)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the likeliest token each time (default 1)")
    parser.add_argument("--top_p", type=float, help="draws from the fewest tokens with this probability together")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    args, overrides = parser.parse(argv)
    for flag in ("pieces", "given", "added"):
        if getattr(args, flag) < 1:
            raise ConfigError(f"--{flag}: got {getattr(args, flag)}, takes an integer from 1")
    workdir, out = parser.trained(args, overrides), parser.folder("--out", args.out)
    extras.check("music")
    run = loading.load(workdir)
    if run.config.task.name != tasks.Chorales.name:
        raise ConfigError(f"--workdir: {workdir} holds a run of task {run.config.task.name}, takes one of chorales")
    if (args.given + args.added) * VOICES > run.preprocess.max_len:
        most = run.preprocess.max_len // VOICES
        raise ConfigError(f"--added: got {args.given} + {args.added} sixteenths, the model reads {most}")
    out.mkdir(parents=True, exist_ok=True)
    pieces = test_pieces(run, args.data_dir, args.pieces, args.given)
    texts = [run.preprocess.vocabulary.decode(chorale_tokens.encode(score[: args.given])) for score in pieces]
    options: dict[str, Any] = {"temperature": args.temperature, "top_p": args.top_p, "seed": args.seed}
    try:
        found = run.generate(texts, max_tokens=args.added * VOICES, **options)
    except ValueError as error:
        raise ConfigError(f"--{error}") from error
    for number, (score, text) in enumerate(zip(pieces, found, strict=True)):
        added = chorale_tokens.decode(run.preprocess.vocabulary.encode(text))
        continued = np.concatenate([score[: args.given], added])
        truth = score[: args.given + args.added]
        music.write_midi(out / f"piece_{number}.mid", continued)
        music.write_midi(out / f"piece_{number}_bach.mid", truth)
        title = f"test piece {number}, given {args.given} sixteenths"
        image = music.picture({"Bach": truth, run.config.name: continued}, given_steps=args.given, title=title)
        (out / f"piece_{number}.png").write_bytes(image)
        print(f"{out / f'piece_{number}.mid'}: {len(added)} sixteenths after {args.given}", flush=True)


def test_pieces(run: loading.Loaded, data_dir: str | None, count: int, given: int) -> list[np.ndarray]:
    """Scores int64 [sixteenths, 4] of the first test pieces that are longer than what is given."""
    data = tasks.build(run.config.task.to_dict()).open(data_dir).examples("test")
    scores = (chorale_tokens.decode(data[index]) for index in range(len(data)))
    longer = [score for score in scores if len(score) > given]
    if not longer:
        raise ConfigError(f"--given: got {given}, but no test piece has more sixteenths")
    return longer[:count]
