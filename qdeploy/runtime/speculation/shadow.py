"""A drafter's own copy of a request: its tokens, and the guesses after them."""

from __future__ import annotations

from dataclasses import replace

from qdeploy.runtime.request import Request


class Shadow:
    """Samples as the request does: same parameters and noise, penalties for the same tokens. Only a
    grammar is left out: its state is the request's own. Nobody asks for a guess's logprobs.

    request: the copy; num_known: its tokens that are the request's own, the rest are guesses.
    """

    def __init__(self, original: Request) -> None:
        self.request = Request(
            request_id=original.request_id,
            index=original.index,
            order=original.order,
            prompt_token_ids=original.prompt_token_ids,
            params=replace(original.params, logprobs=None),
            max_tokens=original.max_tokens,
            seed=original.seed,
            cache_salt=original.cache_salt,
            bad_words=original.bad_words,
        )
        self.request.token_ids[:] = original.token_ids
        self.num_known = self.request.num_tokens

    def follow(self, original: Request) -> int:
        """Take over the request's tokens; returns how many of the old ones were right."""
        mine, theirs, same = self.request.token_ids, original.token_ids, self.num_known
        while same < min(len(mine), len(theirs)) and mine[same] == theirs[same]:
            same += 1
        mine[same:] = theirs[same:]
        self.num_known = len(theirs)
        return same
