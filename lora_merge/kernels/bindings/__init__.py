"""What Python and the compiled module agree on: the table's layout, and its functions."""
