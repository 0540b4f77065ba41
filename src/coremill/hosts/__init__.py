"""Other machines: ssh, a look before the start, an agent on each, torchrun and mpirun."""
