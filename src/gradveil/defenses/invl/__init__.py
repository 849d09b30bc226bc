"""InvL: noise along the singular vectors of what a record gives away (Xu et al. 2025), on data, embeddings and gradients."""
