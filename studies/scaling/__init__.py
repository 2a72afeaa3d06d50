"""Why 1/sqrt(d_k): what the factor does to scores, to the softmax, to gradients and to training."""
