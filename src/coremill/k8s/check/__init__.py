"""`coremill k8s check`: what an API server, a controller or a bill would say of manifests, said offline.

`manifests.py` reads objects with their lines, `crds.py` and `core_kinds.py` find schemas, `structure.py`,
`defaulting.py`, `object_meta.py` and `rules.py` do as an API server does, `lints/` know what no API server knows,
`checking.py` joins them.
Needs the extra `k8s`; nothing here imports torch.
"""
