"""What merging asks of a live model, and what its adapters add to it; a folder for each trainer's kind of model."""
