python -m intel_extension_for_pytorch.cpu.launch \
    --distributed \
    --nnodes=4 \
    --node_rank=0 \
    --master_addr="10.0.1.100" \
    --nproc_per_node=1 \
    train.py
