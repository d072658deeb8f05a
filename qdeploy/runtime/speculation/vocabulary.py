"""Whether two models speak of the same tokens: compared by content, not by size or name."""

from __future__ import annotations

from qdeploy.errors import UsageError
from qdeploy.runtime.tokenizer import Tokenizer


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, draft_name: str) -> None:
    """UsageError that names the first token in which the two differ.

    Tokens count, not rows of embeddings: those may be padded.
    """
    ours, theirs = _by_id(target), _by_id(draft)
    differing = [i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)]
    if differing:
        first = min(differing)
        raise UsageError(
            f"token {first} is {_named(theirs.get(first))} in the draft model {draft_name} and "
            f"{_named(ours.get(first))} in the model; choose a draft with the same tokenizer",
            param="speculative_model",
        )


def _by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {i: token for token, i in tokenizer.core.get_vocab(with_added_tokens=True).items()}


def _named(token: str | None) -> str:
    return "nothing" if token is None else repr(token)
