"""coremill: train and fine-tune Hugging Face models on CPUs."""

__version__ = "0.2.0"
