"""The parts of the training run `examples/train_lm.py`: corpus, model, checkpoints, picture."""
