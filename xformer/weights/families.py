"""The table of families, and which one a config is of."""

from __future__ import annotations

from collections.abc import Sequence

from xformer.checks import did_you_mean
from xformer.weights.bert import BERT
from xformer.weights.big_bird import BIG_BIRD
from xformer.weights.errors import WeightsError
from xformer.weights.family import Family
from xformer.weights.gpt2 import GPT2
from xformer.weights.keys import Keys
from xformer.weights.longformer import LONGFORMER
from xformer.weights.nystromformer import NYSTROMFORMER
from xformer.weights.roberta import ROBERTA
from xformer.weights.t5 import T5

FAMILIES: Sequence[Family] = (BERT, ROBERTA, GPT2, BIG_BIRD, LONGFORMER, NYSTROMFORMER, T5)

BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.names}
"""Model type in a `config.json` -> its family."""


def find(keys: Keys) -> tuple[str, Family]:
    """The model type of a config, and its family. WeightsError for one that is not known here."""
    model_type = keys.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in BY_TYPE:
        raise WeightsError(
            f"{keys.path}: model_type must be one of {', '.join(BY_TYPE)}, got {model_type!r:.80}"
            f"{did_you_mean(model_type, BY_TYPE)}"
        )
    return model_type, BY_TYPE[model_type]


def model_of(keys: Keys, model_type: str, family: Family) -> str | None:
    """Our model that a folder's class is; None for a trunk alone, or one with another head."""
    names = keys.config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    own = {family.class_name(model_type, model): model for model in family.models}
    if first == f"{family.names[model_type]}ForPreTraining" and "masked_lm" in family.models:
        return "masked_lm"  # and a head that tells whether sentences follow, which is left
    return own.get(first) if isinstance(first, str) else None


def check_model(keys: Keys, family: Family, model: str | None) -> str:
    """The model to make. WeightsError where none is said, or the family has no such head."""
    if model is not None and model in family.models:
        return model
    if model is None:
        raise WeightsError(
            f"{keys.path}: architectures is {keys.config.get('architectures')!r:.120}, which has no head known here; "
            f"give model=, one of {', '.join(family.models)}, whose head is then drawn freshly"
        )
    raise WeightsError(
        f"model must be one of {', '.join(family.models)} for {keys.config['model_type']}, got {model!r}"
        f"{did_you_mean(model, family.models)}"
    )
