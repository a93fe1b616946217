"""How loss falls with parameters, tokens and compute: laws fitted to the runs of comparisons over sizes.

Kaplan et al. 2020; Hoffmann et al. 2022, whose second approach is `iso_flop` and whose third is `law`.
"""

from xformer.scaling.iso_flop import Parabola, optimum_exponent, parabola
from xformer.scaling.law import Law, bootstrap, fit
from xformer.scaling.observations import Observation, read

__all__ = ["Law", "Observation", "Parabola", "bootstrap", "fit", "optimum_exponent", "parabola", "read"]
