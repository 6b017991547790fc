"""DeepSeek-V3 (arXiv 2412.19437) and Moonlight (arXiv 2502.16982): latent attention and experts.

Experts are those of GLM-4.5, which may be divided into groups.
"""

from megatron_rl.models.latent import LATENT_ATTENTION, QUERY_LATENT
from megatron_rl.models.traits import Traits
from megatron_rl.models.weights import (
    DENSE_MLP,
    EMBEDDING,
    EXPERT_BIAS,
    FINAL_NORM,
    MIXTURE_OF_EXPERTS,
    OUTPUT_LAYER,
    SHARED_EXPERTS,
    Architecture,
)

ARCHITECTURE = Architecture(
    "DeepseekV3ForCausalLM",
    (
        EMBEDDING,
        *LATENT_ATTENTION,
        *DENSE_MLP,
        *MIXTURE_OF_EXPERTS,
        EXPERT_BIAS,
        *SHARED_EXPERTS,
        FINAL_NORM,
        OUTPUT_LAYER,
    ),
    scoring="sigmoid",
    latent_attention=True,
    options=(QUERY_LATENT,),
    traits=Traits(local_only="latent attention"),
)
