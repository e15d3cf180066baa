"""The history model of train_sequence.py and its data sets."""
