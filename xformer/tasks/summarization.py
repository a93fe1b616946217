"""Summarisation: a short text that says what a long one is about."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from xformer.tasks import manual_pages, papers, summary_scores, trivial_summaries
from xformer.tasks.dataset import TaskData
from xformer.tasks.location import data_root, debian_command
from xformer.tasks.origin import Origin
from xformer.tasks.outputs import Scores
from xformer.tasks.pair_data import PairData
from xformer.tasks.parallel_texts import FILES, ParallelTexts
from xformer.tasks.text import Source

logger = logging.getLogger(__name__)

SourceName = Literal["manpages", "papers", "files"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summarization(ParallelTexts):
    """A summary of each text, judged by ROUGE (`rouge-score`) and perplexity.

    Left out, and counted in the data's info: pairs that were there before, and targets that are nearly their sources
    (unless `keep_copies`).

    source: "manpages", manual pages and the line that describes each, from Debian packages that are extracted, not
    installed, or any folder of pages; "papers", papers of the ACL Anthology and their abstracts, from the PyPI package
    aclsum; "files", the user's own. With a `path` it is "files" unless another is given. What stands in a page or paper
    as it stands in its summary is left out of the source, paragraph by paragraph, and counted.

    path and what follows: see `ParallelTexts`.
    """

    name: ClassVar[str] = "summarization"
    SOURCES: ClassVar[tuple[str, ...]] = get_args(SourceName)

    source: SourceName | None = None
    max_len: int = 512
    target_max_len: int | None = 64
    validation_share: float = 0.1
    test_share: float = 0.15

    @classmethod
    def origins(cls) -> tuple[Origin, ...]:
        fetch = debian_command(manual_pages.PACKAGES, "{data_dir}/summarization")
        pages = "Debian's manual pages and what each is, in a line"
        return (
            Origin(pages, "several free ones, as the packages say", "1,099 pages", {"source": "manpages"}, fetch=fetch),
            Origin(
                "papers of the ACL Anthology and their abstracts, of the package aclsum",
                papers.LICENCE,
                "250 papers",
                {"source": "papers"},
                fetch=papers.INSTALL,
            ),
            Origin("your own texts and their summaries", "yours", "as many as you have", given={"path": "FILE"}),
        )

    def score(self, predictions: Sequence[str], references: Sequence[str]) -> Scores:
        """`rouge1`, `rouge2` and `rougeL`, see `summary_scores.scores`; a warning where most letters of the references
        are none that rouge-score reads, so that a right summary scores next to nothing.
        """
        if (share := summary_scores.unread(references)) > 0.5:
            logger.warning(
                "%s: %.0f %% of the letters of the references are not ASCII, and rouge-score reads no others: what it "
                "says means little here; test_outputs.jsonl has the texts for other scores", self.name, 100 * share,
            )  # fmt: skip
        return summary_scores.scores(predictions, references)

    def baseline(self, data: TaskData) -> dict[str, Any]:
        """That of the tokens, and among `others` two summaries that need no model, see `trivial_summaries`."""
        assert isinstance(data, PairData)
        return {**super().baseline(data), "others": trivial_summaries.others(data)}

    def _source(self, data_dir: str | Path | None) -> Source:
        if self.chosen == FILES:
            return self._files()
        if self.chosen == "papers":
            return papers.source(self.path, self.shares, self.keep_copies)
        given = Path(self.path).expanduser() if self.path else data_root(data_dir) / self.name
        return manual_pages.source(given, self.shares, self.keep_copies)
