"""The click-prediction model of train_dlrm.py and its data sets."""
