"""Variables of the service's environment that functions of the level `process` get.

An allow-list: what the service itself needs (tokens, Redis' URL, keys of other programs that were
set where it was started) is not for the code of jobs. `TROUPE_REWARD_ENVIRONMENT` names what
functions need besides, a judge's key for example.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

# Names, separated by commas; "*" stands for any characters.
ALLOWED: Final = "TROUPE_REWARD_ENVIRONMENT"

_PASSED: Final = (
    # The user and the language.
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "LC_*", "TZ"),
    *("TMPDIR", "XDG_*"),
    # How programs and Python find what they load.
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX"),
    # Threads, memory and devices.
    *("*_NUM_THREADS", "OMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "RAYON_*", "MALLOC_*"),
    *("TOKENIZERS_PARALLELISM", "ATEN_CPU_CAPABILITY", "ONEDNN_*", "DNNL_*", "TROUPE_THREADS"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "ROCR_*", "HIP_*", "TORCH_*", "PYTORCH_*", "TRITON_*"),
    "TROUPE_REWARD_CORES",
    # Where models and data sets are kept.
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE"),
    *("TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE"),
    # The way to the network.
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("NO_PROXY", "no_proxy"),
)
# These too, unless there is a password in them.
_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy"})


def environment_of_functions(
    imports: Sequence[str], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Variables of `environment` (the service's own) that functions see, with `imports` as their
    import path."""
    whole = os.environ if environment is None else environment
    named = [name.strip() for name in whole.get(ALLOWED, "").split(",")]
    patterns = [*_PASSED, *(name for name in named if name)]
    passed = {
        name: value
        for name, value in whole.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
        or (name.lower() in _PROXIES and "@" not in value)
    }
    return {**passed, "PYTHONPATH": os.pathsep.join(imports)}
