"""How a trained language model goes on with a text, which it takes for the beginning of a document.

  xformer generate --workdir=runs/plays --prompt="ROMEO" --max_tokens=200 --temperature=0.8 --top_p=0.95

Each text is printed with what follows it. --prompt may be given several times; without one the model begins a document
itself. Without --temperature the likeliest token is taken each time; --num_beams=4 looks for the likeliest text. With
--stream the tokens of one text are printed as they come.
Exit codes: 0 finished; 2 wrong arguments; 1 anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xformer import loading
from xformer.commands import cli
from xformer.schema import ConfigError

MAX_TOKENS = 200


def command(argv: Sequence[str]) -> None:
    """Runs the command line; see the module docstring."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--workdir", help="folder of the trained run")
    parser.add_argument("--prompt", action="append", help="how a document begins; may be given several times")
    parser.add_argument("--max_tokens", type=int, help="tokens that are added at most (default 200, or half of what "
                        "the model reads)")  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: draws tokens (default 0)")
    parser.add_argument("--top_k", type=int, help="draws from the so many likeliest tokens only")
    parser.add_argument("--top_p", type=float, help="draws from the fewest that have this probability together")
    parser.add_argument("--num_beams", type=int, default=1, help="above 1: beam search (default 1)")
    parser.add_argument("--length_penalty", type=float, default=0.6, help="of beam search; 0: none (default 0.6)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    parser.add_argument("--stream", action="store_true", help="prints each token as it comes; of one prompt")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best")
    args, overrides = parser.parse(argv)
    workdir = parser.trained(args, overrides)
    run = loading.load(workdir, args.checkpoint)
    texts = args.prompt or [""]
    if args.max_tokens is None:
        args.max_tokens = min(MAX_TOKENS, max(run.preprocess.max_len // 2, 1))
    options = {
        name: getattr(args, name)
        for name in ("max_tokens", "temperature", "top_k", "top_p", "num_beams", "length_penalty", "seed")
    }
    try:
        if args.stream:
            print_stream(run, texts, options)
            return
        found = run.generate(texts, **options)
    except ValueError as error:
        raise ConfigError(f"--{error}") from error
    for text, more in zip(texts, found, strict=True):
        print(text + more, flush=True)


def print_stream(run: loading.Loaded, texts: Sequence[str], options: dict[str, Any]) -> None:
    """Prints a text and what follows it as it comes. Raises ValueError for what can't be printed so."""
    if len(texts) > 1:
        raise ValueError(f"stream prints one text: give one --prompt, got {len(texts)}")
    if (beams := options["num_beams"]) != 1:
        raise ValueError(f"stream takes num_beams 1, as a beam has no text before it ends, got {beams}")
    steps = run.stream(texts, **{name: x for name, x in options.items() if name not in ("num_beams", "length_penalty")})
    print(texts[0], end="", flush=True)
    for (piece,) in steps:
        print(piece, end="", flush=True)
    print(flush=True)
