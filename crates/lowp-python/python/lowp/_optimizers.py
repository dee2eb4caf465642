"""The optimizers that ``lowp`` has: the rule of each, what it keeps of a parameter, and its hyperparameters."""

import torch

from ._errors import LowpError
from ._optim import Optimizer
from ._params import all_of, list_params, named, sharded_names, title


class AdamW(Optimizer):
    """AdamW over any mix of quantized and plain parameters, in one planned launch.

    Masters are those that ``quantize_model_`` kept, float32 copies of bfloat16 parameters, and float32 parameters themselves.
    A step updates masters and casts them to codes in the same pass. It leaves parameters without a gradient as they are, and counts the
    steps of each. Under FSDP2 each rank updates its rows, and the ranks agree on scales and on the norm. Every rank must make the
    optimizer; the ranks then compare parameters and recipes.

    ``max_norm`` clips the global norm of gradients on the device. With ``max_norm`` or ``skip_nonfinite``, all ranks skip the step if a gradient
    is not finite on any rank (``last_step()`` reports it). Without either only the update reads gradients, and there is no norm. With ``capturable``
    a step may be captured in a CUDA graph, after a step over the same gradients; the graph keeps the hyperparameters of that step.

    ``moments_dtype``, which a group may have of its own, may be ``torch.bfloat16`` or ``torch.float8_e4m3fn``: codes of a byte with a scale for each 32, of
    matrices whose width is a multiple of 32; other parameters have moments in float32 then. They are rounded stochastically by ``seed``, as masters in bfloat16
    are. All ranks must have the same seed, also replicas of ``DistributedDataParallel``, which do not compare it.

    With ``remainders`` masters of bfloat16 parameters are 16 bits beside them, not float32 copies: a parameter is the upper half of its master, which has
    the value that it has in float32.

    >>> opt = lowp.AdamW(model.parameters(), lr=3e-4, max_norm=1.0)
    >>> loss.backward(); opt.step(); opt.zero_grad()
    """

    rule, states = "adamw", ("exp_avg", "exp_avg_sq")

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, **options):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay), **options)

    @staticmethod
    def numbers(group):
        beta1, beta2 = group["betas"]
        return group["lr"], beta1, beta2, group["eps"], group["weight_decay"]


class Lion(Optimizer):
    """Lion: the sign of a momentum, with decoupled weight decay. All else is as of ``lowp.AdamW``.

    A step is as long as its rate in each element: start from a tenth to a third of the rate of AdamW, and from three to ten times its weight
    decay.
    """

    rule, states = "lion", ("exp_avg",)

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, **options):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay), **options)

    @staticmethod
    def numbers(group):
        beta1, beta2 = group["betas"]
        return group["lr"], beta1, beta2, 0.0, group["weight_decay"]


class SGD(Optimizer):
    """Stochastic gradient descent as ``torch.optim.SGD`` without dampening: weight decay is added to gradients. All else is as of
    ``lowp.AdamW``. Whether there is momentum, and whether it is that of Nesterov, is the same for all groups."""

    def __init__(self, params, lr=1e-3, momentum=0.0, weight_decay=0.0, nesterov=False, **options):
        self.rule = "sgd-nesterov" if nesterov else "sgd-momentum" if momentum else "sgd"
        self.states = () if self.rule == "sgd" else ("momentum_buffer",)
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay), **options)

    def numbers(self, group):
        momentum = group["momentum"]
        if momentum and self.rule == "sgd":
            raise ValueError(f"a group has momentum={momentum}, and this lowp.SGD keeps none; give lowp.SGD(.., momentum={momentum})")
        return group["lr"], momentum, 0.0, 0.0, group["weight_decay"]


class Muon(Optimizer):
    """Muon as ``torch.optim.Muon``: the momentum of a weight, which is Nesterov's, is made orthogonal by five Newton-Schulz steps and is the update,
    with decoupled weight decay. Parameters are matrices; give embeddings, heads, norms and biases another optimizer. All else is as of
    ``lowp.AdamW``.

    ``adjust_lr_fn`` is ``"original"``, which is the default, or ``"match_rms_adamw"``, whose updates are as long as those of AdamW. It is the same for all
    groups. One of the ranks that share a weight makes it orthogonal, and the others send it their rows: ranks train what one process trains, to the bit.

    >>> muon = lowp.Muon([p for p in model.blocks.parameters() if p.dim() == 2], lr=0.02)
    """

    states, moments_dtypes = ("momentum_buffer",), (torch.float32,)
    is_of_matrices = True

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, *, adjust_lr_fn=None, **options):
        self.rule = {None: "muon", "original": "muon", "match_rms_adamw": "moonlight"}.get(adjust_lr_fn)
        self._flaw = None
        if self.rule is None:
            self._flaw = f"adjust_lr_fn={adjust_lr_fn!r}; give 'original' or 'match_rms_adamw'"
        elif not nesterov:
            self._flaw = "nesterov=False; lowp.Muon has the momentum of Nesterov alone: leave nesterov out"
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum), **options)

    def add_param_group(self, param_group):
        if self._flaw is not None:
            raise LowpError(self._flaw)
        if list_params(param_group):
            names = sharded_names()
            for index, (name, param) in enumerate(named([param_group]), len(all_of(self.param_groups))):
                if isinstance(param, torch.Tensor) and param.dim() != 2:
                    raise LowpError(
                        f"{title(index, name or names.get(id(param)), param)} is no matrix; give lowp.Muon parameters of two axes, and others to an optimizer "
                        "such as lowp.AdamW"
                    )
        super().add_param_group(param_group)

    @staticmethod
    def numbers(group):
        return group["lr"], group["momentum"], 0.0, 0.0, group["weight_decay"]


__all__ = ["SGD", "AdamW", "Lion", "Muon"]
