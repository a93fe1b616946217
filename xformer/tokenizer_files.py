"""Files of a tokenizer as the content of one `tokenizer.json`, which the `tokenizers` library reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xformer import extras

tokenizers = extras.Lazy("tokenizers")  # optional, and slow to import

ONE_FILE = "tokenizer.json"
WORD_PIECES = ("vocab.txt",)
BYTE_PAIRS = ("vocab.json", "merges.txt")
SENTENCE_PIECES = ("spiece.model", "sentencepiece.bpe.model")
SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")  # of the same key the last one counts
BERT = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
ROBERTA = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
GPT2 = {"eos": "<|endoftext|>"}


def exists(folder: Path) -> bool:
    """Whether a folder holds a tokenizer that `read` knows, or would say something of."""
    known = (ONE_FILE, *WORD_PIECES, BYTE_PAIRS[0], *SENTENCE_PIECES)
    return any((folder / name).is_file() for name in known)


def read(path: str | Path) -> str:
    """The content of a `tokenizer.json`.

    Args:
      path: the file; the `vocabulary.json` of a run; or a folder with `tokenizer.json`, with BERT's `vocab.txt`
        (WordPiece), or with the `vocab.json` and `merges.txt` of GPT-2 and RoBERTa (byte-level BPE), of which
        `tokenizer_config.json` and `special_tokens_map.json` may say more.

    Raises:
      OSError: there is none, or it can't be read.
      ValueError: what it holds is none.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        return _of_file(path)
    settings = _settings(path)
    if (path / ONE_FILE).is_file():
        return _padded(_of_file(path / ONE_FILE), _tokens(settings, {}).get("pad"))
    if (path / WORD_PIECES[0]).is_file():
        made = _word_pieces(path, settings)
    elif all((path / name).is_file() for name in BYTE_PAIRS):
        made = _byte_pairs(path, settings)
    elif found := [name for name in SENTENCE_PIECES if (path / name).is_file()]:
        raise ValueError(
            f"{path} holds {found[0]}, which is not read; transformers makes {ONE_FILE} of it: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    else:
        raise FileNotFoundError(f"{path} holds no {ONE_FILE}, no {WORD_PIECES[0]}, and no {' with '.join(BYTE_PAIRS)}")
    return _padded(made, _tokens(settings, {}).get("pad"))


def tokens(path: str | Path) -> dict[int, str]:
    """The token of each id. Raises OSError and ValueError as `read`."""
    try:
        found = tokenizers.Tokenizer.from_str(read(path)).get_vocab(with_added_tokens=True)
    except Exception as error:
        if isinstance(error, OSError | ValueError | extras.MissingExtra):
            raise
        raise ValueError(f"{path}: no tokenizer: {' '.join(str(error).split())[:200]}") from error
    return {index: token for token, index in found.items()}


def config(content: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    """What a `tokenizer_config.json` says of a `tokenizer.json`'s content: to take it as it is, and its special tokens.

    Without it transformers makes a tokenizer of its own for the type of the model, with the vocabulary alone.
    """
    found = tokenizers.Tokenizer.from_str(json.dumps(content))
    special = {token["content"] for token in content.get("added_tokens", ()) if token.get("special")}
    roles = {role: token for known in (ROBERTA, BERT) for role, token in known.items() if token in special}
    roles["pad"] = found.id_to_token(pad_id)
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | {f"{role}_token": token for role, token in roles.items()}


def with_padding(content: Mapping[str, Any], pad_id: int, token: str = "[PAD]") -> dict[str, Any]:
    """The content of a `tokenizer.json` that says which id pads."""
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_type_id": 0}
    return {**content, "padding": {**padding, "pad_id": pad_id, "pad_token": token}}


def _of_file(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.name == ONE_FILE:
        return text
    content = _object(path)
    if content.get("kind") != "tokenizer":
        return text
    try:
        return json.dumps(with_padding(content["tokenizer"], content["pad_id"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from error


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}")
    return content


def _settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in SETTINGS:
        if (folder / name).is_file():
            found |= _object(folder / name)
    return found


def _flag(settings: Mapping[str, Any], key: str, default: bool | None) -> bool | None:
    value = settings.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{SETTINGS[1]}: {key} must be true or false, got {value!r:.80}")
    return default if value is None else value


def _tokens(settings: Mapping[str, Any], default: Mapping[str, str]) -> dict[str, str]:
    """The special tokens by their roles; in a file each is a string, or an object with `content`."""
    found = dict(default)
    for role in ("bos", "eos", *BERT):
        token = settings.get(f"{role}_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            found[role] = token
        elif token is not None:
            raise ValueError(f"{SETTINGS[1]}: {role}_token must be a string, got {token!r:.80}")
    return found


def _word_pieces(folder: Path, settings: Mapping[str, Any]) -> Any:
    """BERT's tokenizer (Devlin et al. 2019)."""
    tokens = _tokens(settings, BERT)
    made = tokenizers.Tokenizer(_model("WordPiece", folder, WORD_PIECES, unk_token=tokens["unk"]))
    made.normalizer = tokenizers.normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=_flag(settings, "tokenize_chinese_chars", True),
        strip_accents=_flag(settings, "strip_accents", None),
        lowercase=_flag(settings, "do_lower_case", True),
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece(prefix="##")
    _add(made, folder, settings, tokens)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{tokens['cls']} $A {tokens['sep']}",
        pair=f"{tokens['cls']} $A {tokens['sep']} $B:1 {tokens['sep']}:1",
        special_tokens=[(tokens[role], _id(made, folder, tokens[role])) for role in ("cls", "sep")],
    )
    return made


def _byte_pairs(folder: Path, settings: Mapping[str, Any]) -> Any:
    """The tokenizer of GPT-2 (Radford et al. 2019); of RoBERTa (Liu et al. 2019) where the vocabulary has its `<s>`."""
    made = tokenizers.Tokenizer(_model("BPE", folder, BYTE_PAIRS))
    prefix = _flag(settings, "add_prefix_space", False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = tokenizers.decoders.ByteLevel()
    tokens = _tokens(settings, ROBERTA)
    if any(made.token_to_id(tokens[role]) is None for role in ("cls", "sep")):
        if _flag(settings, "add_bos_token", False):
            raise ValueError(f"{SETTINGS[1]}: add_bos_token must be false: nothing is put in front of texts here")
        _add(made, folder, settings, _tokens(settings, GPT2))
        made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        return made
    _add(made, folder, settings, tokens)
    sep, cls = ((tokens[role], _id(made, folder, tokens[role])) for role in ("sep", "cls"))
    trim = _flag(settings, "trim_offsets", True)
    made.post_processor = tokenizers.processors.RobertaProcessing(sep, cls, trim, prefix)
    return made


def _model(kind: str, folder: Path, names: tuple[str, ...], **options: Any) -> Any:
    try:
        return getattr(tokenizers.models, kind).from_file(*(str(folder / name) for name in names), **options)
    except Exception as error:  # the library raises no class of its own
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder / names[0]} can't be read as {kind}: {reason}") from error


def _add(made: Any, folder: Path, settings: Mapping[str, Any], tokens: Mapping[str, str]) -> None:
    """Tokens that stand for themselves: the special ones, and those that were added, at the ids that they have."""
    added = _object(folder / "added_tokens.json") if (folder / "added_tokens.json").is_file() else {}
    for token, index in sorted(added.items(), key=lambda item: str(item[1]).zfill(12)):
        made.add_tokens([tokenizers.AddedToken(token, normalized=False)])
        if made.token_to_id(token) != index:
            raise ValueError(f"{folder / 'added_tokens.json'}: {token!r:.80} can't have id {index!r:.20}")
    for role, token in tokens.items():
        given = settings.get(f"{role}_token")
        strips = {side: given.get(side) is True for side in ("lstrip", "rstrip")} if isinstance(given, Mapping) else {}
        if made.token_to_id(token) is not None:
            made.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True, **strips)])


def _id(made: Any, folder: Path, token: str) -> int:
    index = made.token_to_id(token)
    if index is None:
        raise ValueError(f"{folder}: the vocabulary must have {token!r:.80}, which stands around each text")
    return int(index)


def _padded(content: Any, token: str | None) -> str:
    """With the id that pads, where `token` is known and the content does not say."""
    made = content
    if isinstance(content, str):
        try:
            made = tokenizers.Tokenizer.from_str(content)
        except Exception:  # said by those who read it
            return content
    index = None if token is None or made.padding else made.token_to_id(token)
    text: str = content if isinstance(content, str) else made.to_str()
    return text if index is None else json.dumps(with_padding(json.loads(text), index, str(token)))
