"""A rehearsal: the rendered objects, carried out on one machine as a cluster's controllers would.

- `written.py`: the objects with the file and line of every field: what is wrong is named there
- `controllers.py`: TrainJob to JobSet to Job (pure)
- `job_controller.py`: a pod has ended: replaced, counted, or the end of the job (pure)
- `pods.py`: the pod of an index: environment, mounts, user, limits (pure)
- `policy.py`: what NetworkPolicies let through, as a packet filter (pure)
- `disruptions.py`: --reclaim and --kill, and when a machine that goes tells its pods (pure)
- `provisions.py`, `images.py`: models, data and caches that pods find here; an unpacked image
- `machine.py`: what this machine gives: namespaces, network, memory groups; nothing of it stays
- `pod_init.py`: the first process of a pod
- `rehearsal.py`: the loop that keeps all of them going
- `judging.py`: was it enough: steps, restarts, lost work, and the lines that are wrong
"""
