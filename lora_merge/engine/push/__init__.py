"""The trainer's side of a push; `pusher` says its order."""
