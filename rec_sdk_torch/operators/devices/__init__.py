"""The devices a cache can live on, one file each, and the launcher of the emulated NPU."""
