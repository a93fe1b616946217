"""What a classifier scores that knows only which words a text holds: TF-IDF and logistic regression."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from xformer import extras
from xformer.tasks import baseline
from xformer.tasks.dataset import TaskData
from xformer.tasks.multi_label import MultiLabel

linear_model = extras.Lazy("sklearn.linear_model")
multiclass = extras.Lazy("sklearn.multiclass")
text = extras.Lazy("sklearn.feature_extraction.text")

logger = logging.getLogger(__name__)

MAX_TEXTS, MAX_TOKENS, MAX_WORDS = 20_000, 20_000_000, 20_000  # seconds, at most minutes, whatever the size of the data
REGULARISATIONS = (1.0, 10.0, 100.0)  # scikit-learn's C
MAX_ITERATIONS = 50
_BATCH = 1024
_CACHE: dict[tuple[str, str], dict[str, Any]] = {}  # the runs of a comparison have their data in common
_MAX_CACHED = 8


def scores(task: Any, data: TaskData) -> dict[str, Any]:
    """`title`, `name` (what the classifier does) and `scores` (split -> metric -> value), by the task's own metrics.

    The texts are what a model sees of them: the tokens of each, cut at `max_len`, as text again. Words are runs of
    letters and digits in lower case, the 20,000 commonest of the training split, weighted 1 + log of their count times
    their inverse document frequency (scikit-learn's `TfidfVectorizer`, `sublinear_tf`). On them a logistic regression
    is trained, for several labels one a label; of two texts it sees the products and the absolute differences of their
    weights, and ten times their cosine. Of three regularisations, C = 1, 10 and 100, the one with the best validation
    score is kept, by the metric that runs select by. It is trained on at most 20,000 texts and 20 million tokens,
    evenly spaced in the training split; `name` says where these are not all.

    Without scikit-learn there are no scores but `missing`, the line that says how to get it, which is logged too; and
    likewise where the texts hold no word, or the training texts one class only.
    """
    key = repr(task), str(data.fingerprint["digest"])
    if key not in _CACHE:
        try:
            found = _scores(task, data)
        except extras.MissingExtra as error:
            logger.warning("no TF-IDF baseline: %s", error)
            found = {**_words("answers by the words of a text"), "missing": str(error)}
            return found  # may be installed the next time
        if len(_CACHE) >= _MAX_CACHED:
            _CACHE.pop(next(iter(_CACHE)))
        _CACHE[key] = found
    return _CACHE[key]


def _words(name: str) -> dict[str, Any]:
    return {"title": "TF-IDF", "name": name, "scores": {}}


def _scores(task: Any, data: TaskData) -> dict[str, Any]:
    vectorizer = text.TfidfVectorizer(
        sublinear_tf=True, token_pattern=r"(?u)\b\w+\b", max_features=MAX_WORDS, dtype=np.float32
    )
    chosen = _chosen(data)
    labels = data.labels("train")[chosen]
    count = len(labels) and data.num_examples("train")
    some = "" if len(chosen) == count else f", {len(chosen):,} of {count:,} training texts"
    found = _words(f"sees the words of a text (TF-IDF, logistic regression{some})")
    texts = list(_texts(data, "train", chosen))
    try:
        vectorizer.fit(part for parts in texts for part in parts)
    except ValueError:  # scikit-learn's own words for it speak of stop words
        return {**found, "missing": "the training texts hold no word"}
    several = isinstance(task.family, MultiLabel)
    if not several and len(np.unique(labels)) < 2:
        return {**found, "missing": "the training texts have one class"}
    features = {"train": _features(vectorizer, texts)}
    for split in baseline.SPLITS:
        if split in data.splits and data.num_examples(split):
            read = _texts(data, split, np.arange(data.num_examples(split)))
            features[split] = _features(vectorizer, list(read))
    tried = []
    for regularisation in REGULARISATIONS if "validation" in features else REGULARISATIONS[:1]:
        model = linear_model.LogisticRegression(C=regularisation, max_iter=MAX_ITERATIONS)
        model = multiclass.OneVsRestClassifier(model) if several else model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # not converged, or a label that no text or every text has
            model.fit(features["train"], labels)
        tried.append({split: _judge(task, data, split, features[split], model, several)
                      for split in baseline.SPLITS if split in features})  # fmt: skip
    metric, direction = next(iter(task.better.items()))
    sign = 1 if direction == "max" else -1
    found["scores"] = max(tried, key=lambda scores: sign * scores.get("validation", {}).get(metric, 0.0))
    return found


def _chosen(data: TaskData) -> np.ndarray:
    """Indices of the training texts that are read, evenly spaced where they are not all."""
    examples = data.examples("train")
    tokens = np.minimum(examples.lengths, data.max_len).mean() * (1 if examples.tokens2 is None else 2)
    most = max(int(min(MAX_TEXTS, MAX_TOKENS / max(tokens, 1))), 1)
    return np.linspace(0, len(examples) - 1, min(len(examples), most)).round().astype(np.int64)


def _texts(data: TaskData, split: str, chosen: np.ndarray) -> Iterator[tuple[str, ...]]:
    """The text of each chosen example, or both of them, as far as the model sees it."""
    examples = data.examples(split)
    for start in range(0, len(chosen), _BATCH):
        some = chosen[start : start + _BATCH]
        parts = [examples.pad(some, len(some), data.max_len, data.preprocess.cut)]
        if examples.tokens2 is not None:
            parts.append(examples.pad_second(some, len(some), data.max_len, data.preprocess.cut))
        for rows in zip(*parts, strict=True):
            yield tuple(data.vocabulary.decode(row) for row in rows)


def _features(vectorizer: Any, texts: list[tuple[str, ...]]) -> Any:
    first, *second = (vectorizer.transform(part) for part in zip(*texts, strict=True))
    if not second:
        return first
    sparse, products = extras.load("scipy.sparse"), first.multiply(second[0])
    # Among thousands of features: a penalty on its weight must not hide it.
    cosine = 10 * sparse.csr_matrix(products.sum(axis=1))
    return sparse.hstack([products, abs(first - second[0]), cosine], format="csr")


def _judge(task: Any, data: TaskData, split: str, features: Any, model: Any, several: bool) -> dict[str, float]:
    totals: dict[str, Any] = {}
    start = 0
    for batch in data.targets(split, _BATCH):
        size = len(batch["weights"])
        shares = np.clip(model.predict_proba(features[start : start + size]).astype(np.float32), 1e-7, 1 - 1e-7)
        start += size
        if several:
            outputs = np.log(shares / (1 - shares))
        else:  # classes that no training text has
            outputs = np.full((size, data.num_classes), np.log(1e-7), np.float32)
            outputs[:, model.classes_] = np.log(shares)
        metrics = task.metrics(jnp.asarray(outputs), {key: jnp.asarray(values) for key, values in batch.items()})
        for name, entry in metrics.items():
            totals[name] = baseline.add(totals.get(name), entry)
    return {name: round(float(value), 6) for name, value in task.finish(totals).items()}
