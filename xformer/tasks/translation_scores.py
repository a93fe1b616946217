"""BLEU and chrF of translations, by the package sacrebleu."""

from __future__ import annotations

from collections.abc import Sequence

from xformer import extras
from xformer.tasks.outputs import Scores

sacrebleu = extras.Lazy("sacrebleu")  # optional, and slow to import


def scores(predictions: Sequence[str], references: Sequence[str]) -> Scores:
    """`bleu` (Papineni et al. 2002) and `chrf` (Popović 2015) of all texts together, from 0 to 100, with their
    signatures (Post 2018), which say what was computed by which version.

    Raises MissingExtra where sacrebleu is not installed.
    """
    found, signatures = {}, {}
    for name, metric in (("bleu", sacrebleu.BLEU()), ("chrf", sacrebleu.CHRF())):
        score = metric.corpus_score(list(predictions), [list(references)])
        found[name], signatures[name] = float(score.score), str(metric.get_signature())
    return Scores(found, {"signatures": signatures})
