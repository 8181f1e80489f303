"""What an optimizer really does, step by step."""
