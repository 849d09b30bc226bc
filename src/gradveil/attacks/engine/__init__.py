"""Parts that optimising attacks share: the loop, objectives, priors, optimisers, labels."""
