"""Scripts that tests run in many processes."""
