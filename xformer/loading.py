"""A finished run back in Python: the trained model and its preprocessing, for predictions on one's own input."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from xformer import experiment, tasks
from xformer.checks import check_integer
from xformer.generate import generate, pieces, stream
from xformer.tasks import predictions
from xformer.tasks.dataset import VOCABULARY, Text
from xformer.tasks.pipeline import bucket_lengths
from xformer.train import DataChanged, WorkdirMismatch, data_record, restoring
from xformer.train import workdir as folders

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A trained model with its preprocessing.

    Attributes:
      model: the trained NNX module; `model(**preprocess(texts))` gives its outputs, such as logits.
      preprocess: texts -> `{"inputs": int32 [texts, max_len], "mask": bool [texts, max_len]}`, as in training.
      class_names: of classes or labels, in the order of the outputs.
      step: training steps that the parameters have seen.
      config: the complete config of the run.
      family: the kind of target, which decides what `predict` gives.
    """

    model: nnx.Module
    preprocess: tasks.Preprocessing
    class_names: list[str]
    step: int
    config: ConfigDict
    family: tasks.Family

    def predict(
        self,
        texts: Sequence[Text],
        batch_size: int = 32,
        *,
        threshold: float | Mapping[str, float] | None = None,
    ) -> Any:  # one of predictions.AnyPredictions: the task decides which
        """What the model says of texts, `batch_size` at a time, each padded to `max_len`, or as in training where that
        had batches of several lengths.

        Texts longer than `max_len` tokens are cut; the result says which, and a warning how many.

        Args:
          texts: strings; pairs of strings where the model compares two documents; of a model of images paths of files,
            or uint8 arrays `[height, width, channels]` of the size that it was trained on.
          threshold: the probability from which on a label is given, one for all (0.5 by default) or by label; for
            models with several labels a text.

        Returns:
          `Predictions`, `LabelPredictions`, `NumberPredictions` or `TokenPredictions`, as the task has classes, labels,
          numbers or a class a token.

        Raises:
          ValueError: not a list of strings (or pairs), an empty text, one that the vocabulary can't read, a wrong
            threshold, or a batch size below 1.
        """
        check_integer("batch_size", batch_size)
        if isinstance(self.family, tasks.NextTokens):
            self.family.predict(None)  # says that it has none
        features, truncated = self.preprocess.encode(texts)
        if truncated.any():
            logger.warning(
                "%d of %d texts are longer than max_len %d tokens and were cut; the first is text %d",
                truncated.sum(), len(texts), self.preprocess.max_len, truncated.argmax(),
            )  # fmt: skip
        # Without texts a row of padding serves, for the shape of the outputs.
        count = max(len(texts), 1)
        features = {name: _lengthened(array, count) for name, array in features.items()}
        parts = [
            (rows, self._outputs(features, rows, length, batch_size)) for length, rows in self._by_length(features)
        ]
        values = np.concatenate([found for _, found in parts])[np.argsort(np.concatenate([rows for rows, _ in parts]))]
        values = values[: len(texts)]
        mask = features.get("mask", values)[: len(texts)]  # of tokens, where a class is one token's
        return predictions.present(self.family, values, mask, truncated, self.preprocess, threshold)

    def _by_length(self, features: Mapping[str, np.ndarray]) -> Iterator[tuple[int | None, np.ndarray]]:
        """(what examples are padded to, which): all as they are, None, but where training had several lengths."""
        buckets, first = self.config.train.get("length_buckets", 1), next(iter(features.values()))
        if buckets == 1:
            yield None, np.arange(len(first))
            return
        lengths = np.maximum.reduce([x.sum(axis=1) for name, x in features.items() if name.startswith("mask")])
        padded = np.asarray(bucket_lengths(self.preprocess.max_len, buckets))
        fits = np.searchsorted(padded, lengths)
        for index, length in enumerate(padded.tolist()):
            if len(rows := np.flatnonzero(fits == index)):
                yield length, rows

    def _outputs(
        self, features: Mapping[str, np.ndarray], rows: np.ndarray, length: int | None, batch_size: int
    ) -> np.ndarray:
        """What `family.predict` gives for some examples cut to `length`, in batches; of tokens for `max_len`."""
        found = []
        for start in range(0, len(rows), batch_size):
            chosen = rows[start : start + batch_size]
            # One shape, one compilation.
            size = batch_size if len(rows) > batch_size else len(rows)
            chunk = {name: x[chosen] if length is None else x[chosen, :length] for name, x in features.items()}
            padded = {name: _lengthened(x, size) for name, x in chunk.items()}
            found.append(np.asarray(_predict(self.model, self.family, padded))[: len(chosen)])
        values = np.concatenate(found)
        if length is None or not isinstance(self.family, tasks.TokenClassification):
            return values
        more = [(0, 0)] * values.ndim
        more[1] = (0, self.preprocess.max_len - length)
        return np.pad(values, more)

    def generate(
        self,
        texts: Sequence[str],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        seed: int = 0,
        batch_size: int = 32,
    ) -> list[str]:
        """How the model goes on with texts, which are beginnings of documents; "" lets it begin one itself. Of a model
        from one text to another (translation): the target of each.

        Of a text that leaves no room for `max_tokens` more within `max_len`, the last tokens are read; of a source the
        first `max_len`. A warning says of how many. See `xformer.generate.generate` for how tokens are chosen.

        Args:
          texts: strings.
          max_tokens: tokens that are added to each at most; a text ends before that where the model ends it.
          temperature, top_k, top_p, seed: see `xformer.generate.generate`.
          num_beams, length_penalty: likewise; None: as the run's task judges its test split (`task.num_beams` and
            `task.length_penalty` of a translation), and 1 and 0.6 where it says nothing. Drawing takes 1 beam.
          batch_size: texts that are computed at a time.

        Returns:
          What follows each text, without it. Bytes that are no UTF-8 become U+FFFD.

        Raises:
          ValueError: the model does not generate, texts that are no list of strings, an argument out of range, or
            `max_tokens` above the model's `max_len`, or of targets its `target_max_len`; an empty source.
        """
        check_integer("batch_size", batch_size)
        prompts, end_id = self._prompts(texts, max_tokens)
        if num_beams is None:
            num_beams = 1 if temperature > 0 else self.config.task.get("num_beams", 1)
        if length_penalty is None:
            length_penalty = self.config.task.get("length_penalty", 0.6)
        longest = max(map(len, prompts), default=0)
        found: list[str] = []
        for start in range(0, len(prompts), batch_size):
            some = prompts[start : start + batch_size]
            some += [some[0]] * (batch_size - len(some) if len(prompts) > batch_size else 0)  # one shape
            out = generate(
                self.model,
                *_padded(some, longest),
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                num_beams=num_beams,
                length_penalty=length_penalty,
                end_id=end_id,
                seed=seed if start == 0 else int(np.random.SeedSequence([seed, start]).generate_state(1)[0]),
            )
            found += [self.preprocess.vocabulary.decode(row) for row in np.asarray(out)]
        return found[: len(texts)]

    def stream(
        self,
        texts: Sequence[str],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> Iterator[list[str]]:
        """What `generate` gives, as it comes: after each token what it adds to every text, "" to one that has ended.

        All texts are one batch: where tokens are drawn, texts after the first `batch_size` of `generate` are continued
        otherwise than there. The step is compiled once, as that of `generate` is. Bytes that are no UTF-8 yet are
        held back until they are.

        Args:
          texts, max_tokens, temperature, top_k, top_p, seed: see `generate`.

        Raises:
          ValueError: as `generate`, when called.
        """
        prompts, end_id = self._prompts(texts, max_tokens)
        if not prompts:
            return iter(())
        steps = stream(
            self.model,
            *_padded(prompts, max(map(len, prompts))),
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            end_id=end_id,
            seed=seed,
        )
        return pieces(steps, self.preprocess.vocabulary.decode)

    def _prompts(self, texts: Sequence[str], max_tokens: int) -> tuple[list[list[int]], int]:
        """The tokens of texts, the last of those that are too long, and the end of a text. Raises as `generate`."""
        family, reads = self.family, isinstance(self.family, tasks.TargetTokens)
        if not isinstance(family, tasks.NextTokens) or not hasattr(self.model, "init_caches"):
            raise ValueError(
                f"task {self.config.task.name} does not generate: a language_model's or a translation's does"
            )
        check_integer("max_tokens", max_tokens, at_most=self.max_tokens)
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"texts must be a list of strings, got {texts!r:.60}")
        prompts, room = family.prompts(self.preprocess.vocabulary, texts), self.preprocess.max_len - max_tokens + 1
        if reads:
            return self._sources(texts, prompts), family.end_id
        if long := sum(len(prompt) > room for prompt in prompts):
            logger.warning(
                "%d of %d texts leave no room for %d tokens within max_len %d: their last %d tokens are read",
                long, len(texts), max_tokens, self.preprocess.max_len, room,
            )  # fmt: skip
        return [prompt[-room:] for prompt in prompts], family.end_id

    @property
    def max_tokens(self) -> int:
        """Tokens that can be generated for a text at most."""
        return int(getattr(self.model, "target_max_len", self.preprocess.max_len))

    def _sources(self, texts: Sequence[str], sources: list[list[int]]) -> list[list[int]]:
        """The first tokens of sources that are too long, with a warning. Raises ValueError for an empty one."""
        if (empty := next((index for index, text in enumerate(texts) if not text.strip()), None)) is not None:
            raise ValueError(
                f"texts must not be empty, as there is nothing to translate, got {texts[empty]!r} at {empty}"
            )
        most = self.preprocess.max_len
        if long := sum(len(source) > most for source in sources):
            logger.warning(
                "%d of %d texts are longer than max_len %d tokens: their first %d are read",
                long,
                len(texts),
                most,
                most,
            )
        return [source[:most] for source in sources]


def _padded(prompts: Sequence[Sequence[int]], longest: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 `[batch, longest]` tokens, zeros after each prompt, and int `[batch]` how many each has."""
    tokens = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.array([len(prompt) for prompt in prompts])


def _lengthened(array: np.ndarray, rows: int) -> np.ndarray:
    """With rows of zeros at the end."""
    return np.pad(array, [(0, rows - len(array)), *[(0, 0)] * (array.ndim - 1)])


@nnx.jit(static_argnums=1)
def _predict(model: Any, family: tasks.Family, features: Mapping[str, Any]) -> jax.Array:
    return family.predict(model(**features, deterministic=True))


def load(workdir: str | Path, which: str = "best") -> Loaded:
    """The model that a run trained, from its best checkpoint.

    Args:
      workdir: the run's folder.
      which: "best", by the metric that the run selects by, or "last": the newest intact one, whatever its step. Where
        that stands in for a damaged one, a warning says so.

    Raises:
      FileNotFoundError: the folder holds no run.
      CheckpointError: the checkpoint that is asked for is missing or damaged.
      WorkdirMismatch: `config.json`, `preprocessing.json` or `vocabulary.json` is damaged or missing.
      DataChanged: the vocabulary or class names stored with the run are no longer those it was trained with.
    """
    workdir = Path(workdir)
    path = workdir / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{workdir} holds no run: there is no {path.name}")
    config = folders.read_object(path) or {}
    if "variants" in config:
        raise FileNotFoundError(f"{workdir} holds a comparison; load one of its runs, {workdir / 'runs'}/VARIANT-SEED")
    preprocess = _preprocessing(workdir)
    built = experiment.build(_with_own_tokenizer(config, workdir), quiet=True)
    if (named := config.get("task", {}).get("tokenizer")) is not None:
        built.config.task.tokenizer = named
    make = built.model_fn(**built.task.sizes(preprocess))
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))  # no arrays yet: all come from the checkpoint
    step = restoring.restore_model(workdir, model, which)
    return Loaded(model, preprocess, list(preprocess.class_names), step, built.config, built.task.family)


def _with_own_tokenizer(config: Mapping[str, Any], workdir: Path) -> Mapping[str, Any]:
    """The config with the tokenizer that the run stored: the files that it was made from may have moved since."""
    task = config.get("task")
    if not isinstance(task, Mapping) or task.get("tokenizer") is None:
        return config
    return {**config, "task": {**task, "tokenizer": str(workdir / VOCABULARY)}}


def _preprocessing(workdir: Path) -> tasks.Preprocessing:
    """The preprocessing that the run stored. Raises DataChanged if it is not what the run was trained with."""
    try:
        preprocess = tasks.load_preprocessing(workdir)
    except FileNotFoundError as error:
        raise WorkdirMismatch(f"{error.filename} is missing, and the run can't be read without") from error
    except ValueError as error:
        raise WorkdirMismatch(str(error)) from error
    recorded = folders.read_object(workdir / data_record.FILE)
    if recorded is None:
        return preprocess  # a run of an older version
    now = preprocess.fingerprint
    if changes := data_record.differences({part: recorded.get(part) for part in now}, now):
        raise DataChanged(f"{workdir}: what was stored with the run has changed since: {', '.join(changes)}")
    return preprocess
