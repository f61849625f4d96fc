"""What several tests share; the folder tests/ is on their path."""
