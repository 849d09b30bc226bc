"""Files that survive a kill: whole files, run folders, partial work, training folders. Nothing here needs torch."""
