"""How an engine is told what to do: handles, side by side, over HTTP."""
