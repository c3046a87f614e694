"""What is sent in a push."""
