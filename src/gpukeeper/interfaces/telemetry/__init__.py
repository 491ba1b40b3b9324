"""What Prometheus is told, and the ways to tell it: a page over HTTP, or a file. For daemon, operator and verbs."""

from importlib.util import find_spec

from gpukeeper.model.errors import UsageError

if find_spec("prometheus_client") is None:
    raise UsageError(
        "Metrics need an extra. In a clone of gpukeeper: pip install '.[metrics]' (operator: '.[kubernetes,operator]')"
    )
