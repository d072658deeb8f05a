"""Speculative decoding: drafters guess tokens, the target draws its own and keeps what agrees."""
