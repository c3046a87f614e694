"""The engine's side of a push, in each of its workers; `rpc` is the way in."""
