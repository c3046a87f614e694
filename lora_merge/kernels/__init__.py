"""Run a table of segments on tensors; nothing here knows a model. `backend.pick` chooses who runs it."""
