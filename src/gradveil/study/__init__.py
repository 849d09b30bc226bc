"""What was asked and what came out, as values: settings, plans, results, and how they are read. Nothing here needs torch."""
