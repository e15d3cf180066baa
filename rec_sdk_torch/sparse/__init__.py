"""KeyedJaggedTensors with timestamps of ids and click labels of samples."""
