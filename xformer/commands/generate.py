"""How a trained language model goes on with a text, which it takes for the beginning of a document; or the target that
a model from one text to another makes of it, such as a translation.

  xformer generate --workdir=runs/plays --prompt="ROMEO" --max_tokens=200 --temperature=0.8 --top_p=0.95
  xformer generate --workdir=runs/translation --input=sentences.txt --out=translated.txt

A language model's text is printed with what follows it; of a source its target is. --prompt may be given several times;
without one a language model begins a document itself. --input is a file with a text a line; --out gets a line for each,
line breaks in it as spaces, and an empty line for an empty one. Without --temperature the likeliest token is taken each
time; --num_beams=4 looks for the likeliest text. With --stream the tokens of one text are printed as they come.
Exit codes: 0 finished; 2 wrong arguments; 1 anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xformer import loading
from xformer.commands import cli
from xformer.schema import ConfigError
from xformer.tasks import TargetTokens, reading
from xformer.train import workdir as folders

MAX_TOKENS = 200


def command(argv: Sequence[str]) -> None:
    """Runs the command line; see the module docstring."""
    parser = cli.Parser(__doc__)
    parser.add_argument("--workdir", help="folder of the trained run")
    parser.add_argument("--prompt", action="append", help="how a document begins; may be given several times")
    parser.add_argument("--input", help="a file with a text a line, instead of --prompt")
    parser.add_argument("--out", help="a file for what is generated, a line a text; printed where it is left out")
    parser.add_argument("--max_tokens", type=int, help="tokens that are added at most (default 200, or half of what "
                        "the model reads; of a target all that it can have)")  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: draws tokens (default 0)")
    parser.add_argument("--top_k", type=int, help="draws from the so many likeliest tokens only")
    parser.add_argument("--top_p", type=float, help="draws from the fewest that have this probability together")
    parser.add_argument("--num_beams", type=int, help="above 1: beam search (default 1, of a target as "
                        "the task says)")  # fmt: skip
    parser.add_argument("--length_penalty", type=float, help="of beam search; 0: none (default 0.6, of a target as "
                        "the task says)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    parser.add_argument("--stream", action="store_true", help="prints each token as it comes; of one prompt")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best")
    args, overrides = parser.parse(argv)
    workdir = parser.trained(args, overrides)
    run = loading.load(workdir, args.checkpoint)
    targets = isinstance(run.family, TargetTokens)
    texts = _texts(args, targets)
    if args.max_tokens is None:
        args.max_tokens = run.max_tokens if targets else min(MAX_TOKENS, max(run.preprocess.max_len // 2, 1))
    options = {
        name: getattr(args, name)
        for name in ("max_tokens", "temperature", "top_k", "top_p", "num_beams", "length_penalty", "seed")
    }
    try:
        if args.stream:
            print_stream(run, texts, options)
            return
        given = [text for text in texts if text.strip() or not targets]
        made = iter(run.generate(given, **options))
    except ValueError as error:
        raise ConfigError(f"--workdir: {error}" if str(error).startswith("task ") else f"--{error}") from error
    found = [next(made) if text.strip() or not targets else "" for text in texts]
    found = found if targets else [text + more for text, more in zip(texts, found, strict=True)]
    if args.out is None:
        for text in found:
            print(text, flush=True)
        return
    lines = "".join(" ".join(text.splitlines()) + "\n" for text in found)
    out = Path(args.out).expanduser()
    out.parent.mkdir(parents=True, exist_ok=True)
    folders.write_bytes(out, lines.encode())
    cli.say(f"{len(found)} texts in {args.out}")


def _texts(args: Any, targets: bool) -> list[str]:
    """What is gone on with, or translated. Raises ConfigError where there is none, or the file can't be read."""
    if args.prompt and args.input is not None:
        raise ConfigError("--input: goes without --prompt")
    if args.out is not None and args.stream:
        raise ConfigError("--out: goes without --stream, which prints")
    if args.out is not None and Path(args.out).expanduser().is_dir():
        raise ConfigError(f"--out: got {args.out!r}, which is a folder, takes a file")
    if args.input is None:
        if targets and not args.prompt:
            raise ConfigError("--input: missing; takes a file with a text a line, or give --prompt")
        return args.prompt or [""]
    path = Path(args.input).expanduser()
    if not path.is_file():
        raise ConfigError(f"--input: got {args.input!r}, takes a file that is there")
    if path.suffix.lower() in reading.TABLES:  # whose lines are more than a text
        raise ConfigError(f"--input: got {args.input!r}, a table, takes a file with a text a line and nothing else")
    if args.out is not None and Path(args.out).expanduser().resolve() == path.resolve():
        raise ConfigError(f"--out: got {args.out!r}, which is --input, takes another file")
    try:
        lines = reading.decode(path).removesuffix("\n").split("\n")
    except ValueError as error:
        raise ConfigError(f"--input: {error}") from error
    if not any(line.strip() for line in lines):
        raise ConfigError(f"--input: {args.input} has no line with a text")
    return [line.rstrip("\r") for line in lines]


def print_stream(run: loading.Loaded, texts: Sequence[str], options: dict[str, Any]) -> None:
    """Prints a text and what follows it as it comes. Raises ValueError for what can't be printed so."""
    if len(texts) > 1:
        raise ValueError(f"stream prints one text: give one --prompt, got {len(texts)}")
    if (beams := options["num_beams"]) not in (None, 1):
        raise ValueError(f"stream takes num_beams 1, as a beam has no text before it ends, got {beams}")
    steps = run.stream(texts, **{name: x for name, x in options.items() if name not in ("num_beams", "length_penalty")})
    if not isinstance(run.family, TargetTokens):
        print(texts[0], end="", flush=True)
    for (piece,) in steps:
        print(piece, end="", flush=True)
    print(flush=True)
