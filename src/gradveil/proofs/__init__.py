"""What can be proved, in numbers: privacy accounting and bounds. No model and no data."""
