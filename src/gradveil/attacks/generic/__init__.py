"""Attackers who know a defense by running it, so that no author can switch them off."""
