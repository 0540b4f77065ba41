torchrun --nproc_per_node=1 samples/cpu-amx/cpu-llama3.py
