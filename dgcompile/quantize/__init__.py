"""From the weights of a checkpoint to those of a bundle: number formats, calibration, streaming conversion."""
