"""From the weights of a checkpoint to those of a bundle: number formats and streaming conversion. Needs torch."""
