"""Parts that several defenses share."""
