"""From a plan to a folder of results: jobs, worker processes, trainings, and what they will take."""
