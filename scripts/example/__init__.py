"""Building blocks of the small 6x6 sudoku example checkpoint: puzzles, tokenizer, checkpoint layout and training."""
